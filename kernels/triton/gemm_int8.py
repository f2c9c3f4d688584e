"""Linears of int8 rows and int8 weights in groups: sums inside a group are exact integers.

The same arithmetic as the C++ kernels': activations have one scale a row and group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import Grouped
from .quantise import quantise_rows
from .tiles import tile_of_8_bits


def int8_product(x_TI: Tensor, weight: Grouped, bias_O: Tensor | None) -> Tensor:
    assert weight.bits == 8
    rows, inputs = x_TI.shape
    group, outputs = weight.group, weight.outputs
    out_TO = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    if not rows:
        return out_TO
    eight = quantise_rows(x_TI, torch.int8, group)
    tile = tile_of_8_bits(x_TI.device, rows)
    int8_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns))](
        out_TO,
        eight.numbers,
        eight.scales,
        weight.weight,
        weight.scales,
        out_TO if bias_O is None else bias_O,
        rows,
        outputs,
        inputs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        GROUP=group,
        BIAS=bias_O is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_TO


@triton.jit(do_not_specialize=["rows"])
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
    for g in range(groups):
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
    place = m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])
