"""Linears of int8 rows and int8 weights in groups: sums inside a group are exact integers.

The same arithmetic as the C++ kernels': activations have one scale a row and group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import Grouped, store_tile
from .gemm_8_bits import product_of_8_bits
from .quantise import Rows8


def int8_product(
    x: Rows8, weight: Grouped, bias_O: Tensor | None, dtype: torch.dtype, *, fixed: bool = False
) -> Tensor:
    """[T, O] in `dtype`; x.scales [T, I / group]. With `fixed` a row's bits do not depend on their number."""
    assert weight.bits == 8
    assert x.scales.shape[1] == len(weight.scales)
    return product_of_8_bits(
        int8_kernel,
        x,
        weight.weight,
        weight.scales,
        bias_O,
        weight.outputs,
        weight.group,
        dtype,
        fixed=fixed,
    )


@triton.jit(do_not_specialize=["rows", "steps", "x_step"])
def int8_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    x_step: tl.tensor,
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
    split = tl.program_id(2)
    acc = sum_int8(
        x, x_scales, x_step, weight, scales, m, m < rows, n, n < outputs,
        split * steps, tl.minimum((split + 1) * steps, tl.cdiv(inputs, GROUP)), outputs, inputs,
        ROWS, COLUMNS, GROUP,
    )  # fmt: skip
    store_tile(out, acc, bias, split, m, n, rows, outputs, BIAS)


@triton.jit
def sum_int8(
    x: tl.tensor,
    x_scales: tl.tensor,
    x_step: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    m: tl.tensor,
    real_m: tl.tensor,
    n: tl.tensor,
    real_n: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """[ROWS, COLUMNS] of rows `m` and outputs `n` of all `outputs`, over groups `first` to `last` - 1."""
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for g in range(first, last):
        i = g * GROUP + tl.arange(0, GROUP)
        x_place = m.to(tl.int64)[:, None] * inputs + i[None, :]
        x_tile = tl.load(x + x_place, mask=real_m[:, None] & (i < inputs)[None, :], other=0)
        place = (tl.cast(g, tl.int64) * outputs + n)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        w_tile = tl.load(weight + place, mask=real_n[:, None], other=0)
        scale_m = tl.load(x_scales + tl.cast(g, tl.int64) * x_step + m, mask=real_m, other=0.0)
        scale_n = tl.load(scales + tl.cast(g, tl.int64) * outputs + n, mask=real_n, other=0.0).to(tl.float32)
        sums = tl.dot(x_tile, tl.trans(w_tile), out_dtype=tl.int32)
        acc += sums.to(tl.float32) * (scale_m[:, None] * scale_n[None, :])
    return acc
