"""A CUDA device or the host: streams, events, uploads."""
