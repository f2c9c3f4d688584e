"""Triton kernels that draw a token: penalties, top-k/top-p search, draws over ranks."""
