"""Replay of recorded scheduling, and what its steps cost."""
