"""Triton backend: one operation a file, for NVIDIA GPUs; on a CPU only Triton's interpreter runs them.

Importing needs the `triton` package: see `kernels/dispatch.py`.
"""
