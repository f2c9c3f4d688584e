"""Rows of activations as 8-bit numbers with one float32 scale a row, or a row and group of inputs."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import LARGEST
from .tiles import power_of_two


class Rows8(NamedTuple):
    """x is about numbers_TI * scales_T1, or scales_TG of groups of inputs."""

    numbers: Tensor
    scales: Tensor


def quantise_rows(x_TI: Tensor, dtype: torch.dtype, group: int | None = None) -> Rows8:
    """`group` None: one scale a row. The last group of a row may be short."""
    rows, inputs = x_TI.shape
    groups = 1 if group is None else -(-inputs // group)
    numbers = torch.empty((rows, inputs), dtype=dtype, device=x_TI.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x_TI.device)
    if rows:
        quantise_kernel[(rows, groups)](
            numbers,
            scales,
            x_TI,
            x_TI.stride(0),
            INPUTS=inputs,
            GROUP=group or inputs,
            BLOCK=power_of_two(group or inputs),
            LARGEST=LARGEST[dtype],
            num_warps=1 if (group or inputs) <= 512 else 8,
        )
    return Rows8(numbers, scales)


@triton.jit
def quantise_kernel(
    numbers: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = tl.arange(0, BLOCK)
    column = group * GROUP + offset
    inside = (offset < GROUP) & (column < INPUTS)
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    rounded, scale = to_eight_bits(values, LARGEST)
    tl.store(numbers + row * INPUTS + column, rounded.to(numbers.dtype.element_ty), mask=inside)
    tl.store(scales + row * tl.num_programs(1) + group, scale)


@triton.jit
def to_eight_bits(values: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Float32 numbers of one row -> what to store, and the scale."""
    scale = row_scale(tl.max(magnitude(values), 0), LARGEST)
    return eight_bits(values, scale, LARGEST), scale


@triton.jit
def magnitude(values: tl.tensor) -> tl.tensor:
    """|x|, and infinity for NaN, which a maximum would pass over."""
    return tl.where(values == values, tl.abs(values), float("inf"))  # noqa: PLR0124 - false for NaN


@triton.jit
def row_scale(most: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """NaN for a row that is not finite, so that it stays one whatever is stored."""
    return tl.where(most == float("inf"), float("nan"), most / LARGEST)


@triton.jit
def eight_bits(values: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Integers are rounded to nearest even: adding 1.5 * 2^23 leaves no bits for a fraction."""
    scaled = values * tl.where(scale > 0, 1.0 / scale, 0.0)
    scaled = tl.where(tl.abs(scaled) <= LARGEST, scaled, tl.where(scaled > 0, LARGEST, -LARGEST))
    if LARGEST == 127.0:
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled
