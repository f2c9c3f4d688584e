"""Triton kernels of matrix products: wide, int8, int4 and mixtures of experts."""
