"""Offline quantization of checkpoints."""
