"""Rows of activations as 8-bit numbers with one float32 scale a row, or a row and group of inputs."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import LARGEST
from .tiles import power_of_two, warps_for

BLOCK = 1024
"""Inputs of a program where their groups are smaller."""


class RowFormat(NamedTuple):
    """`group`: inputs that share a scale, a power of two; None: all of a row."""

    dtype: torch.dtype
    group: int | None


class Rows8(NamedTuple):
    """x is about numbers_TI * scales_T1, or scales_TG of groups of inputs."""

    numbers: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, inputs: int, row_format: RowFormat, device: torch.device) -> "Rows8":
        """The last group of a row may be short."""
        dtype, group = row_format
        groups = 1 if group is None else triton.cdiv(inputs, group)
        numbers = torch.empty((rows, inputs), dtype=dtype, device=device)
        return cls(numbers, torch.empty((rows, groups), dtype=torch.float32, device=device))


def quantise_rows(x_TI: Tensor, row_format: RowFormat) -> Rows8:
    rows, inputs = x_TI.shape
    eight = Rows8.empty(rows, inputs, row_format, x_TI.device)
    block = power_of_two(inputs)
    if row_format.group is not None:
        block = min(block, max(BLOCK, row_format.group))
    if rows:
        quantise_kernel[(rows, triton.cdiv(inputs, block))](
            *eight,
            x_TI,
            x_TI.stride(0),
            WIDTH=inputs,
            BLOCK=block,
            GROUP=group_in(block, row_format),
            LARGEST=LARGEST[row_format.dtype],
            num_warps=warps_for(block),
        )
    return eight


def group_in(block: int, row_format: RowFormat | None) -> int:
    """The constant GROUP of kernels whose programs have `block` columns; 0 where nothing is quantised."""
    if row_format is None:
        return 0
    group = row_format.group
    assert group is None or group == power_of_two(group)
    return block if group is None else min(group, block)


@triton.jit
def quantise_kernel(
    numbers: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + column, mask=column < WIDTH, other=0.0)
    store_eight_bits(numbers, scales, values, row, first, WIDTH, BLOCK, GROUP, LARGEST)


@triton.jit
def store_eight_bits(
    numbers: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """BLOCK values of a row from column `first` on, those beyond WIDTH zeros. Scales do not depend on who had
    the values in hand: one largest number and one division a group.
    """
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    HERE: tl.constexpr = BLOCK // GROUP
    grouped = tl.reshape(values.to(tl.float32), (HERE, GROUP))
    most = tl.max(magnitude(grouped), 1)
    rounded = tl.reshape(eight_bits(grouped, most[:, None], LARGEST), (BLOCK,))
    column = first + tl.arange(0, BLOCK)
    place = numbers + row * WIDTH + column
    tl.store(place, rounded.to(numbers.dtype.element_ty), mask=column < WIDTH)
    group = first // GROUP + tl.arange(0, HERE)
    tl.store(scales + row * GROUPS + group, row_scale(most, LARGEST), mask=group < GROUPS)


@triton.jit
def magnitude(values: tl.tensor) -> tl.tensor:
    """|x|, and infinity for NaN, which a maximum would pass over."""
    return tl.where(values == values, tl.abs(values), float("inf"))  # noqa: PLR0124 - false for NaN


@triton.jit
def row_scale(most: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """NaN for a row that is not finite, so that it stays one whatever is stored."""
    return tl.where(
        most == float("inf"), float("nan"), tl.div_rn(most, tl.full(most.shape, LARGEST, tl.float32))
    )


@triton.jit
def eight_bits(values: tl.tensor, most: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """LARGEST / most times values: bit by bit as `kernels/reference/eight_bits.py` where all is finite.

    Integers are rounded to nearest even: adding 1.5 * 2^23 leaves no bits for a fraction.
    """
    inverse = tl.div_rn(tl.full(most.shape, LARGEST, tl.float32), most)
    scaled = values * tl.where(inverse < float("inf"), inverse, 0.0)  # zeros, and all too small to divide by
    scaled = tl.where(tl.abs(scaled) <= LARGEST, scaled, tl.where(scaled > 0, LARGEST, -LARGEST))
    if LARGEST == 127.0:
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled
