"""`torch._scaled_mm`: cuBLAS and CUTLASS in 8-bit floats, by the way scales are shared. Whether it is used
for a linear is decided when that is loaded (`scaled_mm_choice.py`).

    tensor   one scale for all rows, one for all weights
    rows     a scale for each row and each output
    blocks   a scale for each row and 128 inputs, one for 128 x 128 weights: with cuBLAS 12.9, on compute
             capability 9.0 alone

What each asks for is checked in PyTorch's aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from typing import Literal

import torch
from torch import Tensor

from .gemm_w8a8 import BLOCK
from .quantize_activations import Rows8

Sharing = Literal["tensor", "rows", "blocks"]


def fits(sharing: Sharing, outputs: int, inputs: int) -> bool:
    """Blocks: without padding of scales, which cuBLAS wants in fours along the inputs. Where it is missing,
    versions that do not check that give wrong results.
    """
    if sharing == "blocks":
        return outputs % BLOCK == 0 and inputs % (4 * BLOCK) == 0
    return outputs % 16 == 0 and inputs % 16 == 0


def by_tensor(rows: Rows8, weight_OI: Tensor, given_1: Tensor, scale_1: Tensor, dtype: torch.dtype) -> Tensor:
    """`given_1`: what all rows are to be multiplied with, whatever their own scales."""
    return torch._scaled_mm(  # noqa: SLF001 - torch's only door to them
        rows.numbers,
        weight_OI.t(),
        scale_a=given_1,
        scale_b=scale_1,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def by_rows(rows: Rows8, weight_OI: Tensor, scales_O1: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(  # noqa: SLF001
        rows.numbers,
        weight_OI.t(),
        scale_a=rows.scales,
        scale_b=scales_O1.t(),
        out_dtype=dtype,
        use_fast_accum=True,
    )


def by_blocks(rows: Rows8, weight_OI: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`scales` [O / 128, I / 128]. Rows that only fill up memory are multiplied too, and left out."""
    whole = rows.whole()
    out = torch._scaled_mm(  # noqa: SLF001
        whole.numbers,
        weight_OI.t(),
        scale_a=whole.scales,
        scale_b=scales.t(),
        out_dtype=dtype,
    )
    return out[: len(rows.numbers)]
