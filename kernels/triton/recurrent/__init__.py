"""Triton kernels of recurrent layers."""

from ...recurrent import RecurrentOps
from .gates import gated_norm, mul_add, sigmoid_mul, silu_mul
from .scan import scan
from .short_conv import short_conv

RECURRENT = RecurrentOps(short_conv, scan, gated_norm, sigmoid_mul, silu_mul, mul_add)
