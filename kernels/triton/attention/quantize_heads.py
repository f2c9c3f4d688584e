"""Fused quantization of attention outputs to 8 bits, for the output projection.

A program of attention has heads of a row, never the whole row. This works for formats whose scales need no
more: one for each 128 inputs where a head is a multiple of that, or one static scale.

R rows of a tile, each one head of one row of the step; D head dim.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..linear.quantize_activations import (
    RowFormat,
    Rows8,
    eight_bits,
    eight_bits_given,
    left_arguments,
    left_constants,
    magnitude,
    row_scale,
)
from ..linear.tile_config import power_of_two


def fits_heads(row_format: RowFormat, head_dim: int) -> bool:
    """Return whether the format's scales need no more of a row than one head."""
    if row_format.given is not None:
        return True
    whole = row_format.group is not None and head_dim % row_format.group == 0
    return whole and head_dim == power_of_two(head_dim)


@dataclass(frozen=True, slots=True)
class Result:
    """Output tensors of an attention kernel."""

    out: Tensor
    """Attention output [T, H, D], or float32 partial sums of it."""
    eight: Rows8 | None = None
    row_format: RowFormat | None = None

    @property
    def arguments(self) -> tuple[Tensor, Tensor, int, Tensor]:
        return left_arguments(self.eight, self.row_format, self.out)

    def constants(self, head_dim: int) -> dict[str, Any]:
        found = left_constants(head_dim, self.row_format if self.eight is not None else None)
        return {"EIGHT": found.pop("GROUP"), **found}


@triton.jit
def store_eight_heads(
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    heads: tl.tensor,
    real: tl.tensor,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    EIGHT: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Quantize and store `values` [R, D_PAD] where `real`: bit for bit as `store_eight_bits` where all is
    finite.

    EIGHT inputs share a scale, float32. A number that is not finite makes its group NaN, or with a static
    scale its head: either makes the row's products NaN.
    """
    d = tl.arange(0, D_PAD)
    wide = values.to(tl.float32)
    if GIVEN:
        most = tl.max(magnitude(wide), 1)
        one = tl.load(given)
        scale = tl.where(most == float("inf"), float("nan"), one + tl.zeros(most.shape, tl.float32))
        rounded = eight_bits_given(wide, scale[:, None], LARGEST)
        tl.store(scales + row, one + tl.zeros(most.shape, tl.float32), mask=real & (head == 0))
    else:
        GROUPS: tl.constexpr = D // EIGHT
        grouped = tl.reshape(wide, (ROWS * GROUPS, EIGHT))
        most = tl.max(magnitude(grouped), 1)
        rounded = tl.reshape(eight_bits(grouped, most[:, None], LARGEST), (ROWS, D_PAD))
        scale_RG = tl.reshape(row_scale(most, LARGEST), (ROWS, GROUPS))
        group = head[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        tl.store(scales + group * step + row[:, None], scale_RG, mask=real[:, None])
    place = (row * heads + head)[:, None] * D + d[None, :]
    stored = real[:, None] & (d < D)[None, :]
    tl.store(numbers + place, rounded.to(numbers.dtype.element_ty), mask=stored)
