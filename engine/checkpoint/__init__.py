"""Checkpoints on disk: safetensors headers, the index, quantized layouts, tensor I/O."""
