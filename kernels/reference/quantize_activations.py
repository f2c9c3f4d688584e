"""Numbers of 8 bits and the float32 scale that the last dim shares, by its largest size."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127, FP8: 448}


def to_eight_bits(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes like `rows`, scales without the last dim. NaN or infinity in a row: codes 0 and the scale NaN."""
    rows, largest = rows.float(), LARGEST[dtype]
    most = rows.abs().amax(-1)
    # torch divides a Python number by a tensor with two roundings.
    inverse = torch.where(most > 0, torch.full_like(most, largest) / most, 0)
    scales = torch.where(most.isfinite(), most / largest, torch.nan)
    codes = (rows * inverse.unsqueeze(-1)).nan_to_num(0, 0, 0)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


def in_given_scale(rows: Tensor, given: Tensor) -> Tensor:
    """What is left of E4M3 numbers times `given`, float32 [1]; larger ones become the largest. A row that is
    not finite is NaN.
    """
    rows = rows.float()
    codes = (rows * (1 / given)).clamp(-LARGEST[FP8], LARGEST[FP8]).to(FP8)
    return torch.where(rows.isfinite().all(-1, keepdim=True), codes.float() * given, torch.nan)


def in_eight_bits(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What is left of them after rounding; float32."""
    codes, scales = to_eight_bits(rows, dtype)
    return codes.float() * scales.unsqueeze(-1)
