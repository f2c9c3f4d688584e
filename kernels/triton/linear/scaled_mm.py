"""FP8 GEMM by `torch._scaled_mm` (cuBLAS and CUTLASS), in three layouts of scales.

    tensor   one scale for all rows, one for all weights
    rows     a scale for each row and each output
    blocks   a scale for each row and 128 inputs, one for 128 x 128 weights: with cuBLAS 12.9, on compute
             capability 9.0 alone

`scaled_mm_choice.py` decides at load whether a linear uses it. PyTorch checks the requirements of each layout
in aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from typing import Literal

import torch
from torch import Tensor

from .gemm_w8a8 import BLOCK
from .quantize_activations import Rows8

Sharing = Literal["tensor", "rows", "blocks"]


def fits(sharing: Sharing, outputs: int, inputs: int) -> bool:
    """Return whether a linear of this shape can be multiplied with scales in this layout.

    Block scales must not need padding, as cuBLAS wants them in fours along the inputs. Versions of PyTorch
    that do not check this give wrong results.
    """
    if sharing == "blocks":
        return outputs % BLOCK == 0 and inputs % (4 * BLOCK) == 0
    return outputs % 16 == 0 and inputs % 16 == 0


def by_tensor(rows: Rows8, weight_OI: Tensor, given_1: Tensor, scale_1: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with one scale for all rows, `given_1`, and one for all weights."""
    return torch._scaled_mm(  # noqa: SLF001 - torch's only door to them
        rows.numbers,
        weight_OI.t(),
        scale_a=given_1,
        scale_b=scale_1,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def by_rows(rows: Rows8, weight_OI: Tensor, scales_O1: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with one scale a row and one an output."""
    return torch._scaled_mm(  # noqa: SLF001
        rows.numbers,
        weight_OI.t(),
        scale_a=rows.scales,
        scale_b=scales_O1.t(),
        out_dtype=dtype,
        use_fast_accum=True,
    )


def by_blocks(rows: Rows8, weight_OI: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply with block scales [O / 128, I / 128]. Padding rows are multiplied too and cut off."""
    whole = rows.whole()
    out = torch._scaled_mm(  # noqa: SLF001
        whole.numbers,
        weight_OI.t(),
        scale_a=whole.scales,
        scale_b=scales.t(),
        out_dtype=dtype,
    )
    return out[: len(rows.numbers)]
