"""Split-K reduction of attention: combine the partial results of several programs over one context, with
fused quantization to 8 bits for the output projection.

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
from .attention_inner import add_sink, fold


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


MOST_SPLITS = 64
FEW_SPLITS = 8
"""Splits that one program reads at once. A program for 64 holds registers for 64, so a multiprocessor runs
only four of them; a step of 256 sequences has 8,192 programs with two splits each.
"""


def reduce_splits(
    result: Result,
    partial_NHSD: Tensor,
    sums_NHS2: Tensor,
    sinks_H: Tensor | None,
    *,
    fixed: bool,
) -> None:
    """Write the first N rows of the result from the splits. `fixed` combines them in order, as one program
    would.
    """
    sequences, heads, splits, head_dim = partial_NHSD.shape
    reduce_kernel[(heads, sequences)](
        result.out,
        *result.arguments,
        partial_NHSD,
        sums_NHS2,
        sums_NHS2 if sinks_H is None else sinks_H,
        splits,
        D=head_dim,
        D_PAD=power_of_two(head_dim),
        SPLITS=FEW_SPLITS if splits <= FEW_SPLITS and not fixed else MOST_SPLITS,
        FIXED=fixed,
        SINKS=sinks_H is not None,
        **result.constants(head_dim),
        num_warps=max(4, power_of_two(head_dim) // 64),
        enable_fp_fusion=not fixed,
    )


@triton.jit(do_not_specialize=["step", "splits"])
def reduce_kernel(
    out: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    sinks: tl.tensor,
    splits: tl.tensor,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    FIXED: tl.constexpr,
    SINKS: tl.constexpr,
    EIGHT: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Combine the splits of one row and head: sum of exp2(max_s - max) acc_s over sum of exp2(max_s - max)
    total_s.

    Arithmetic is float32. With EIGHT the 8-bit codes and scales are stored too. Reference: `attention` in
    `kernels/reference/attention.py`.
    """
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = sequence * tl.num_programs(0) + head
    d = tl.arange(0, D_PAD)
    if FIXED:
        acc = tl.zeros((1, D_PAD), tl.float32)
        top = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        one = tl.arange(0, 1)
        for split in range(splits):
            piece = place * splits + split
            acc_b = tl.load(partial + piece * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            top_b = tl.load(sums + piece * 2 + one)
            total_b = tl.load(sums + piece * 2 + 1 + one)
            acc, top, total = fold(acc, top, total, acc_b, top_b, total_b)
        if SINKS:
            total = add_sink(total, top, tl.load(sinks + head))
        result = tl.sum(acc / tl.where(total > 0, total, 1.0)[:, None], 0)
    else:
        split = tl.arange(0, SPLITS)
        piece = place * splits + split
        top_S = tl.load(sums + piece * 2, mask=split < splits, other=float("-inf"))
        used = top_S > float("-inf")  # pieces past the context hold no keys: they are not read
        total_S = tl.load(sums + piece * 2 + 1, mask=used, other=0.0)
        top = tl.max(top_S, 0)
        weight = tl.where(used, tl.exp2(top_S - top), 0.0)
        acc_SD = tl.load(
            partial + piece[:, None] * D + d[None, :], mask=used[:, None] & (d < D)[None, :], other=0.0
        )
        total = tl.sum(total_S * weight, 0)
        if SINKS:
            total = add_sink(total, top, tl.load(sinks + head))
        result = tl.sum(acc_SD * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + place * D + d, rounded, mask=d < D)
    if EIGHT:
        one = tl.arange(0, 1)
        store_eight_heads(
            numbers, scales, step, given, tl.reshape(rounded, (1, D_PAD)), sequence + one, head + one,
            tl.num_programs(0), one == 0, 1, D, D_PAD, EIGHT, LARGEST, GIVEN,
        )  # fmt: skip
