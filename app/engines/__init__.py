"""Loaded models: engine processes kept alive, and open requests kept through an engine's death."""
