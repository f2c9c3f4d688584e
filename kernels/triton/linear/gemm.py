"""GEMM for few rows, and for any number of rows with a fixed order of sums: x_TI @ weight.T + bias.

Weights are plain [O, I], or integers in groups of inputs: [I / group, O, group] with scales [I / group, O],
so that a tile of a group is contiguous in memory. 4-bit groups hold inputs i and i + group / 2 in one byte.
Each group is a product of its own, scaled as it is added: integers are exact in every float dtype. With
steps, 4-bit codes become 8-bit integers in registers. The inner loop is in `gemm_inner.py`.

Few rows leave most multiprocessors idle, so the inputs are split too (split-K), and the partial sums added in
order.

From WIDE_FROM rows on, scaling every product costs more than scaling the weights of a tile: the weights are
then dequantized in registers and multiplied like plain ones.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile_config as tiles
from .gemm_inner import sum_grouped
from .tile_config import Tile, power_of_two

PLAIN_BLOCK = 64
"""Inputs of one loop step over plain weights."""
STEP = 128
"""Inputs of one loop step over grouped weights, several groups if they are smaller."""
WIDE_FROM = 129
MOST_SPLITS = 16
FIXED_ROWS = 1024
"""Rows of one launch with a fixed order of sums: bounds the memory of the partial sums."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """Integer weights. With `bits` 8 int8; with 4 pairs in uint8: codes plus 8, the nibbles n with `steps` or
    `zeros`, or E2M1.
    """

    weight: Tensor
    scales: Tensor
    bits: int
    inputs: int
    steps: Tensor | None = None
    """Step bytes, uint8 [I / group, O, group / 16] (`kernels/weight_packing.py`)."""
    zeros: Tensor | None = None
    """Zero points, uint8 [I / group, O]."""
    is_e2m1: bool = False
    """True if nibbles are floats, which times two are the codes."""

    @property
    def grid(self) -> int:
        """Meaning of nibbles, for kernels (`gemm_inner.py`)."""
        return 3 if self.steps is not None else 1 if self.zeros is not None else 2 * self.is_e2m1

    @property
    def offsets(self) -> Tensor:
        """Steps or zeros; any tensor where there are none."""
        offsets = self.steps if self.zeros is None else self.zeros
        return self.weight if offsets is None else offsets

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
    """Multiply: [T, O] in x's dtype. With `fixed` a row's bits do not depend on the number of rows."""
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
    if fixed or (hopper and rows > 32):
        return Tile(64, 64, 4, 4 if hopper else 3)
    if rows > 32:  # eight warps: in a narrower tile those of other rows would convert the same weights again
        return Tile(64, 128, 8, 3)
    return Tile(16 if rows <= 16 else 32, 64, 4, 5 if hopper else 3)


def num_splits(device: torch.device, programs: int, steps: int) -> int:
    """Return the number of splits: about two programs a multiprocessor, each of four steps or more."""
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
        grouped.offsets if grouped else data,
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
        GRID=grouped.grid if grouped else 0,
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
    offsets: tl.tensor,
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
    GRID: tl.constexpr,
    WIDE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write one tile of x @ weight.T + bias, or the partial sum of one split; sums are float32.

    Reference: `linear` in `kernels/reference/elementwise.py`.
    """
    split = tl.program_id(2)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    turns = tl.cdiv(tl.cdiv(inputs, GROUP), UNROLL)
    acc = sum_grouped(
        x + m.to(tl.int64)[:, None] * x_row, m < rows, weight, scales, offsets, n, n < outputs,
        split * steps, tl.minimum((split + 1) * steps, turns), outputs, inputs,
        ROWS, COLUMNS, GROUP, UNROLL, BITS, GRID, WIDE, PRECISION,
    )  # fmt: skip
    store_tile(out, acc, bias, split, m, n, rows, outputs, BIAS)


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
    """Store rows m and columns n of [rows, outputs], or of the partial sums [splits, rows, outputs]."""
    real_m, real_n = m < rows, n < outputs
    if BIAS:
        acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    place = (tl.cast(split, tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])


def add_splits(out_TO: Tensor, partial_STO: Tensor, bias_O: Tensor | None) -> None:
    """Add the partial sums and the bias."""
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
    """Write the sum of the splits, in their order, plus bias; float32."""
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


def linear_by_head(weight_HOI: Tensor, x_THI: Tensor, *, fixed: bool = False) -> Tensor:
    """Implement `Ops.linear_by_head`. Inputs are few, so they are not split."""
    (rows, heads, inputs), outputs = x_THI.shape, weight_HOI.shape[1]
    assert x_THI.stride(2) == 1
    out_THO = torch.empty((rows, heads, outputs), dtype=x_THI.dtype, device=x_THI.device)
    if not rows:
        return out_THO
    tile = tile_by_head(rows, x_THI.element_size(), fixed=fixed)
    heads_product_kernel[(triton.cdiv(outputs, tile.columns), triton.cdiv(rows, tile.rows), heads)](
        out_THO,
        x_THI,
        weight_HOI,
        rows,
        outputs,
        inputs,
        x_THI.stride(0),
        x_THI.stride(1),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK=PLAIN_BLOCK // (2 if x_THI.dtype == torch.float32 else 1),
        PRECISION="ieee" if x_THI.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_THO


def tile_by_head(rows: int, itemsize: int, *, fixed: bool) -> Tile:
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    return Tile(64, 64, 4, 3) if fixed or rows > 16 else Tile(16, 64, 4, 4)


@triton.jit(do_not_specialize=["rows"])
def heads_product_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_row: tl.tensor,
    x_head: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Multiply a tile of one head's rows by its weights, with float32 sums.

    Reference: `make_linear_by_head` in `kernels/reference/elementwise.py`.
    """
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < rows, n < outputs
    own = weight + head * outputs * inputs
    acc = sum_grouped(
        x + head * x_head + m.to(tl.int64)[:, None] * x_row, real_m, own, own, own, n, real_n, 0,
        tl.cdiv(inputs, BLOCK), outputs, inputs, ROWS, COLUMNS, BLOCK, 1, 0, 0, False, PRECISION,
    )  # fmt: skip
    place = (m.to(tl.int64)[:, None] * tl.num_programs(2) + head) * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])
