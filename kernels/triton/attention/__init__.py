"""Triton kernels of paged attention and of writing its KV cache."""
