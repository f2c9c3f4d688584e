"""Dynamic and static quantization of activations to 8 bits: one float32 scale a row, or a row and group of
inputs, or one static scale of a checkpoint for all rows of a linear.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.kv_cache import LARGEST
from .tile_config import power_of_two, warps_for

BLOCK = 1024
"""Inputs of one program where groups are smaller."""
ROWS = 16
"""Rows are allocated in multiples of this: the scales of each group then begin at multiples of 64 bytes, as
`torch._scaled_mm` requires.
"""


class RowFormat(NamedTuple):
    """Format of 8-bit rows. `group`: inputs that share a scale, a power of two; None: all of a row.

    `given`: static scale of all rows, float32 [1], without groups; larger numbers saturate.
    """

    dtype: torch.dtype
    group: int | None
    given: Tensor | None = None

    def matches(self, other: "RowFormat | None") -> bool:
        """Return whether rows of this format are rows of `other`. Static scales must be the same tensor."""
        return other is not None and self[:2] == other[:2] and self.given is other.given


class Rows8(NamedTuple):
    """Quantized rows: x is about numbers_TI * scales_T1, or * scales_TG of groups. Scales of a group are
    contiguous.
    """

    numbers: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, inputs: int, row_format: RowFormat, device: torch.device) -> "Rows8":
        """Allocate rows. The last group of a row may be short."""
        group, room = row_format.group, whole_rows(rows)
        groups = 1 if group is None else triton.cdiv(inputs, group)
        numbers = torch.empty((room, inputs), dtype=row_format.dtype, device=device)
        scales = torch.empty((groups, room), dtype=torch.float32, device=device)
        return cls(numbers[:rows], (scales.t() if groups > 1 else scales.view(room, 1))[:rows])

    def whole(self) -> "Rows8":
        """Return these rows with the padding that `empty` allocated; its content is undefined."""
        (rows, inputs), groups = self.numbers.shape, self.scales.shape[1]
        room = whole_rows(rows)
        return Rows8(
            self.numbers.as_strided((room, inputs), (inputs, 1)),
            self.scales.as_strided((room, groups), (1, self.scales.stride(1))),
        )


def whole_rows(rows: int) -> int:
    return triton.cdiv(rows, ROWS) * ROWS  # type: ignore[no-any-return] # Triton has no types


def quantize_rows(x_TI: Tensor, row_format: RowFormat) -> Rows8:
    rows, inputs = x_TI.shape
    eight = Rows8.empty(rows, inputs, row_format, x_TI.device)
    block = power_of_two(inputs)
    if row_format.group is not None:
        block = min(block, max(BLOCK, row_format.group))
    if rows:
        quantize_kernel[(rows, triton.cdiv(inputs, block))](
            *eight,
            eight.scales.stride(1),
            given_to(row_format, eight.scales),
            x_TI,
            x_TI.stride(0),
            WIDTH=inputs,
            BLOCK=block,
            GROUP=group_in(block, row_format),
            LARGEST=LARGEST[row_format.dtype],
            GIVEN=row_format.given is not None,
            num_warps=warps_for(block),
        )
    return eight


def left_arguments(
    eight: Rows8 | None, row_format: RowFormat | None, other: Tensor
) -> tuple[Tensor, Tensor, int, Tensor]:
    """Return the arguments numbers, scales, step and given of kernels with fused quantization.

    `other` is passed as an unused pointer where nothing is quantized.
    """
    if eight is None:
        return other, other, 0, other
    return *eight, eight.scales.stride(1), given_to(row_format, eight.scales)


def left_constants(block: int, row_format: RowFormat | None) -> dict[str, Any]:
    """Return the constants of kernels with fused quantization, for programs of `block` columns."""
    return {
        "GROUP": group_in(block, row_format),
        "LARGEST": 1.0 if row_format is None else LARGEST[row_format.dtype],
        "GIVEN": row_format is not None and row_format.given is not None,
    }


def given_to(row_format: RowFormat | None, other: Tensor) -> Tensor:
    """Return the argument `given` of kernels; `other` is passed as an unused pointer where there is no static
    scale.
    """
    return other if row_format is None or row_format.given is None else row_format.given


def group_in(block: int, row_format: RowFormat | None) -> int:
    """Return the constant GROUP of kernels whose programs have `block` columns; 0 where nothing is
    quantized.
    """
    if row_format is None:
        return 0
    group = row_format.group
    assert group is None or (group == power_of_two(group) and row_format.given is None)
    return block if group is None else min(group, block)


@triton.jit(do_not_specialize=["step"])
def quantize_kernel(
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Quantize one tile of a row: code = x * LARGEST / max|x| and scale = max|x| / LARGEST, float32.

    Reference: `quantize_dynamic` in `kernels/reference/kv_cache.py`.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + column, mask=column < WIDTH, other=0.0)
    store_eight_bits(numbers, scales, step, given, values, row, first, WIDTH, BLOCK, GROUP, LARGEST, GIVEN)


@triton.jit
def store_eight_bits(
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    values: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Quantize and store BLOCK values of a row from column `first` on; those beyond WIDTH must be zero.

    Scales do not depend on the calling kernel: one maximum and one division a group. Scales of two groups are
    `step` apart.
    """
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    HERE: tl.constexpr = BLOCK // GROUP
    grouped = tl.reshape(values.to(tl.float32), (HERE, GROUP))
    most = tl.max(magnitude(grouped), 1)
    if GIVEN:
        scale = tl.load(given) + tl.zeros(most.shape, tl.float32)
        scale = tl.where(most == float("inf"), float("nan"), scale)
        rounded = tl.reshape(eight_bits_given(grouped, scale[:, None], LARGEST), (BLOCK,))
    else:
        scale = row_scale(most, LARGEST)
        rounded = tl.reshape(eight_bits(grouped, most[:, None], LARGEST), (BLOCK,))
    column = first + tl.arange(0, BLOCK)
    place = numbers + row * WIDTH + column
    tl.store(place, rounded.to(numbers.dtype.element_ty), mask=column < WIDTH)
    group = first // GROUP + tl.arange(0, HERE)
    tl.store(scales + group * step + row, scale, mask=group < GROUPS)


@triton.jit
def magnitude(values: tl.tensor) -> tl.tensor:
    """Return |x|, and infinity for NaN, which a maximum would ignore."""
    return tl.where(values == values, tl.abs(values), float("inf"))  # noqa: PLR0124 - false for NaN


@triton.jit
def row_scale(most: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return the scale most / LARGEST, float32; NaN for a row that is not finite, so that it stays one."""
    return tl.where(
        most == float("inf"), float("nan"), tl.div_rn(most, tl.full(most.shape, LARGEST, tl.float32))
    )


@triton.jit
def eight_bits(values: tl.tensor, most: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return values * LARGEST / most, float32: bit for bit as `quantize_dynamic` of
    `kernels/reference/kv_cache.py` where all is finite.

    Integers are rounded to nearest even: adding 1.5 * 2^23 leaves no bits for a fraction.
    """
    inverse = tl.div_rn(tl.full(most.shape, LARGEST, tl.float32), most)
    scaled = values * tl.where(inverse < float("inf"), inverse, 0.0)  # infinite for zeros and tiny maxima
    scaled = tl.where(tl.abs(scaled) <= LARGEST, scaled, tl.where(scaled > 0, LARGEST, -LARGEST))
    if LARGEST == 127.0:
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled


@triton.jit
def eight_bits_given(values: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Return values * (1 / scale), float32, saturated; NaN where the scale is, as products without row scales
    need it.
    """
    scaled = values * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    scaled = tl.where(tl.abs(scaled) > LARGEST, tl.where(scaled > 0, LARGEST, -LARGEST), scaled)
    return tl.where(scale == scale, scaled, float("nan"))  # noqa: PLR0124 - false for NaN
