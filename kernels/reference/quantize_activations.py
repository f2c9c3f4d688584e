"""Dynamic 8-bit quantization: codes and one float32 scale for the last dim, from its largest magnitude."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127, FP8: 448}


def quantize_dynamic(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize to codes shaped like `rows` and scales without the last dim.

    A row with NaN or infinity has codes 0 and the scale NaN.
    """
    rows, largest = rows.float(), LARGEST[dtype]
    most = rows.abs().amax(-1)
    # torch divides a Python number by a tensor with two roundings.
    inverse = torch.where(most > 0, torch.full_like(most, largest) / most, 0)
    scales = torch.where(most.isfinite(), most / largest, torch.nan)
    codes = (rows * inverse.unsqueeze(-1)).nan_to_num(0, 0, 0)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


def fake_quantize_static(rows: Tensor, given: Tensor) -> Tensor:
    """Quantize to E4M3 with the static scale `given`, float32 [1], and dequantize to float32.

    Larger numbers saturate. A row that is not finite becomes NaN.
    """
    rows = rows.float()
    codes = (rows * (1 / given)).clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)
    return torch.where(rows.isfinite().all(-1, keepdim=True), codes.float() * given, torch.nan)


def fake_quantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize dynamically and dequantize to float32."""
    codes, scales = quantize_dynamic(rows, dtype)
    return codes.float() * scales.unsqueeze(-1)
