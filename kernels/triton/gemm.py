"""Linears of few rows, and of any number in an order that does not depend on it: x_TI @ weight.T + bias.

Weights are plain [O, I], or integers in groups of inputs: [I / group, O, group], scales [I / group, O], so
that a tile of a group is one run of memory. 4-bit groups hold inputs i and i + group / 2 in one byte. A group
is a product of its own, scaled as it is added: integers are exact in every float dtype. With steps, 4 bits
become the integers of 8 in registers (`numbers_of`).

Few rows leave most multiprocessors idle, so the inputs are split too, and the parts summed in order.

From WIDE_FROM rows on, scaling every product costs more than scaling the weights of a tile: those are made
wide where they are, in registers, and summed as wide ones.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .tiles import Tile, power_of_two

PLAIN_BLOCK = 64
"""Inputs of a step through plain weights."""
STEP = 128
"""Inputs of a step through grouped weights, several groups if those are smaller."""
WIDE_FROM = 129
MOST_SPLITS = 16
FIXED_ROWS = 1024
"""Rows of one launch where the order is fixed: bounds the partial sums."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integer weights. `bits` 8: int8; 4: uint8 of two, each 8 too large, or with `steps` the n of those."""

    weight: Tensor
    scales: Tensor
    bits: int
    inputs: int
    steps: Tensor | None = None
    """uint8 [I / group, O, group / 16] (`kernels/steps.py`)."""

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]

    @property
    def group(self) -> int:
        return self.weight.shape[2] * 8 // self.bits


def product(
    x_TI: Tensor,
    weight: Tensor | Grouped,
    bias_O: Tensor | None,
    *,
    fixed: bool = False,
) -> Tensor:
    """[T, O] in x's dtype. With `fixed` a row's bits do not depend on the number of rows."""
    outputs = weight.outputs if isinstance(weight, Grouped) else weight.shape[0]
    out_TO = torch.empty((len(x_TI), outputs), dtype=x_TI.dtype, device=x_TI.device)
    step = FIXED_ROWS if fixed else max(1, len(x_TI))
    for first in range(0, len(x_TI), step):
        run(out_TO[first : first + step], x_TI[first : first + step], weight, bias_O, fixed=fixed)
    return out_TO


def tile_for(device: torch.device, rows: int, itemsize: int, *, fixed: bool) -> Tile:
    hopper = tiles.capability(device)[0] == 9
    if itemsize == 4:
        return Tile(16, 64, 4, 2)
    if not fixed and rows >= WIDE_FROM and hopper:
        return Tile(128, 128, 8, 3)
    if fixed or rows > 32:
        return Tile(64, 64, 4, 4 if hopper else 3)
    return Tile(16 if rows <= 16 else 32, 64, 4, 5 if hopper else 3)


def num_splits(device: torch.device, programs: int, steps: int) -> int:
    """About two programs a multiprocessor, each of four steps or more."""
    return max(1, min(2 * tiles.multiprocessors(device) // programs, steps // 4, MOST_SPLITS))


def run(
    out_TO: Tensor, x_TI: Tensor, weight: Tensor | Grouped, bias_O: Tensor | None, *, fixed: bool
) -> None:
    rows, inputs = x_TI.shape
    outputs = out_TO.shape[1]
    assert x_TI.stride(1) == 1
    tile = tile_for(x_TI.device, rows, x_TI.element_size(), fixed=fixed)
    grouped = weight if isinstance(weight, Grouped) else None
    data = weight.weight if isinstance(weight, Grouped) else weight
    columns = triton.cdiv(outputs, tile.columns)
    row_tiles = triton.cdiv(rows, tile.rows)
    steps = triton.cdiv(inputs, STEP if grouped else PLAIN_BLOCK)
    splits = num_splits(x_TI.device, columns if fixed else columns * row_tiles, steps)
    target = out_TO
    if splits > 1:
        target = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x_TI.device)
    group = grouped.group if grouped else PLAIN_BLOCK
    product_kernel[(row_tiles, columns, splits)](
        target,
        x_TI,
        data,
        grouped.scales if grouped else data,
        data if grouped is None or grouped.steps is None else grouped.steps,
        out_TO if bias_O is None else bias_O,
        rows,
        outputs,
        inputs,
        x_TI.stride(0),
        triton.cdiv(steps, splits),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=group,
        UNROLL=max(1, STEP // group) if grouped else 1,
        BITS=grouped.bits if grouped else 0,
        STEPS=grouped is not None and grouped.steps is not None,
        WIDE=grouped is not None and not fixed and rows >= WIDE_FROM,
        BIAS=bias_O is not None and splits == 1,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        add_splits(out_TO, target, bias_O)


@triton.jit(do_not_specialize=["rows", "steps"])
def product_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    steps_of: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_row: tl.tensor,
    steps: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    HALF: tl.constexpr = GROUP // 2
    split = tl.program_id(2)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < rows, n < outputs
    groups = tl.cdiv(inputs, GROUP)
    x_rows = x + m.to(tl.int64)[:, None] * x_row
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(split * steps, tl.minimum((split + 1) * steps, tl.cdiv(groups, UNROLL))):
        for part in tl.static_range(UNROLL):
            g = step * UNROLL + part
            real_w = real_n & (g < groups)
            if BITS == 0:
                i = g * GROUP + tl.arange(0, GROUP)
                x_tile = tl.load(x_rows + i[None, :], mask=real_m[:, None] & (i < inputs)[None, :], other=0.0)
                w_place = n.to(tl.int64)[:, None] * inputs + i[None, :]
                w_tile = tl.load(weight + w_place, mask=real_n[:, None] & (i < inputs)[None, :], other=0.0)
                acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
            elif BITS == 8:
                i = g * GROUP + tl.arange(0, GROUP)
                x_tile = tl.load(x_rows + i[None, :], mask=real_m[:, None] & (i < inputs)[None, :], other=0.0)
                place = (tl.cast(g, tl.int64) * outputs + n)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                w_tile = tl.load(weight + place, mask=real_w[:, None], other=0)
                scale = tl.load(scales + tl.cast(g, tl.int64) * outputs + n, mask=real_w, other=0.0)
                if WIDE:
                    wide = (w_tile.to(tl.float32) * scale.to(tl.float32)[:, None]).to(x_tile.dtype)
                    acc = tl.dot(x_tile, tl.trans(wide), acc, input_precision=PRECISION)
                else:
                    sums = tl.dot(x_tile, tl.trans(w_tile.to(x_tile.dtype)), input_precision=PRECISION)
                    acc += sums * scale.to(tl.float32)[None, :]
            else:
                i = g * GROUP + tl.arange(0, HALF)
                low_x = tl.load(x_rows + i[None, :], mask=real_m[:, None] & (i < inputs)[None, :], other=0.0)
                j = i + HALF
                high_x = tl.load(x_rows + j[None, :], mask=real_m[:, None] & (j < inputs)[None, :], other=0.0)
                place = (tl.cast(g, tl.int64) * outputs + n)[:, None] * HALF + tl.arange(0, HALF)[None, :]
                pairs = tl.load(weight + place, mask=real_w[:, None], other=0)
                scale = tl.load(scales + tl.cast(g, tl.int64) * outputs + n, mask=real_w, other=0.0)
                if STEPS:
                    cell = tl.cast(g, tl.int64) * outputs + n
                    low_w = numbers_of(pairs & 15, steps_of, cell, real_w, 0, GROUP, low_x.dtype)
                    high_w = numbers_of(pairs >> 4, steps_of, cell, real_w, HALF, GROUP, low_x.dtype)
                else:
                    low_w = small_integers(pairs & 15, low_x.dtype)
                    high_w = small_integers(pairs >> 4, low_x.dtype)
                if WIDE:
                    scales_n = scale.to(tl.float32)[:, None]
                    low_w = (low_w.to(tl.float32) * scales_n).to(low_x.dtype)
                    high_w = (high_w.to(tl.float32) * scales_n).to(low_x.dtype)
                    acc = tl.dot(low_x, tl.trans(low_w), acc, input_precision=PRECISION)
                    acc = tl.dot(high_x, tl.trans(high_w), acc, input_precision=PRECISION)
                else:
                    sums = tl.dot(low_x, tl.trans(low_w), input_precision=PRECISION)
                    sums = tl.dot(high_x, tl.trans(high_w), sums, input_precision=PRECISION)
                    acc += sums * scale.to(tl.float32)[None, :]
    store_tile(out, acc, bias, split, m, n, rows, outputs, BIAS)


@triton.jit
def numbers_of(
    halves: tl.tensor,
    steps: tl.tensor,
    cell: tl.tensor,
    real: tl.tensor,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Those of half a group from its input FIRST on, a row for each `cell` (`kernels/steps.py`)."""
    i = FIRST + tl.arange(0, GROUP // 2)
    place = cell[:, None] * (GROUP // 16) + (i // 16)[None, :]
    byte = tl.load(steps + place, mask=real[:, None], other=0).to(tl.int16)
    step = byte & 15
    return (step * halves.to(tl.int16) - (step * ((byte >> 4) + 8) >> 1)).to(dtype)


@triton.jit
def store_tile(
    out: tl.tensor,
    acc: tl.tensor,
    bias: tl.tensor,
    split: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    BIAS: tl.constexpr,
) -> None:
    """Rows m and columns n of [rows, outputs], or of part `split` of the sum: [splits, rows, outputs]."""
    real_m, real_n = m < rows, n < outputs
    if BIAS:
        acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    place = (tl.cast(split, tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])


@triton.jit
def small_integers(nibbles: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """0 .. 15 -> -8 .. 7. In 16 bits without a conversion, which runs at a quarter of the speed of logic:
    the bits of 128 (bfloat16) or 1024 (float16) with a nibble in the last places are that sum.
    """
    if dtype == tl.bfloat16:
        return (nibbles.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    if dtype == tl.float16:
        return (nibbles.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return nibbles.to(dtype) - 8.0


def add_splits(out_TO: Tensor, partial_STO: Tensor, bias_O: Tensor | None) -> None:
    splits, rows, outputs = partial_STO.shape
    block = min(1024, power_of_two(outputs))
    add_kernel[(rows, triton.cdiv(outputs, block))](
        out_TO,
        partial_STO,
        out_TO if bias_O is None else bias_O,
        rows,
        outputs,
        splits,
        BLOCK=block,
        BIAS=bias_O is not None,
    )


@triton.jit(do_not_specialize=["rows", "splits"])
def add_kernel(
    out: tl.tensor,
    partial: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    splits: tl.tensor,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = n < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        total += tl.load(
            partial + (tl.cast(split, tl.int64) * rows + row) * outputs + n, mask=real, other=0.0
        )
    if BIAS:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), mask=real)
