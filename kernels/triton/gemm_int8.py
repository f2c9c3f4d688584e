"""Linears of int8 rows and int8 weights in groups: sums inside a group are exact integers.

The same arithmetic as the C++ kernels': activations have one scale a row and group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import STEP, Grouped, add_splits, num_splits
from .quantise import quantise_rows
from .tiles import tile_of_8_bits


def int8_product(x_TI: Tensor, weight: Grouped, bias_O: Tensor | None, *, fixed: bool = False) -> Tensor:
    """[T, O] in x's dtype. With `fixed` a row's bits do not depend on the number of rows."""
    assert weight.bits == 8
    rows, inputs = x_TI.shape
    group, outputs = weight.group, weight.outputs
    out_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not rows:
        return out_TO
    eight = quantise_rows(x_TI, torch.int8, group)
    tile = tile_of_8_bits(x_TI.device, rows, fixed=fixed)
    row_tiles, columns = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns)
    steps = triton.cdiv(inputs, group)
    splits = num_splits(x_TI.device, columns if fixed else columns * row_tiles, steps * group // STEP)
    target = out_TO
    if splits > 1:
        target = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x_TI.device)
    int8_kernel[(row_tiles, columns, splits)](
        target,
        eight.numbers,
        eight.scales,
        weight.weight,
        weight.scales,
        out_TO if bias_O is None else bias_O,
        rows,
        outputs,
        inputs,
        triton.cdiv(steps, splits),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=group,
        BIAS=bias_O is not None and splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        add_splits(out_TO, target, bias_O)
    return out_TO


@triton.jit(do_not_specialize=["rows", "steps"])
def int8_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    steps: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < rows, n < outputs
    groups = tl.cdiv(inputs, GROUP)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    split = tl.program_id(2)
    for g in range(split * steps, tl.minimum((split + 1) * steps, groups)):
        i = g * GROUP + tl.arange(0, GROUP)
        x_place = m.to(tl.int64)[:, None] * inputs + i[None, :]
        x_tile = tl.load(x + x_place, mask=real_m[:, None] & (i < inputs)[None, :], other=0)
        place = (tl.cast(g, tl.int64) * outputs + n)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        w_tile = tl.load(weight + place, mask=real_n[:, None], other=0)
        scale_m = tl.load(x_scales + m.to(tl.int64) * groups + g, mask=real_m, other=0.0)
        scale_n = tl.load(scales + tl.cast(g, tl.int64) * outputs + n, mask=real_n, other=0.0).to(tl.float32)
        sums = tl.dot(x_tile, tl.trans(w_tile), out_dtype=tl.int32)
        acc += sums.to(tl.float32) * (scale_m[:, None] * scale_n[None, :])
    if BIAS:
        acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    place = (tl.cast(split, tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])
