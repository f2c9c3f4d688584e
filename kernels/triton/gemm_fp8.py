"""Linears of E4M3 rows and weights: a scale for each row and output, or for blocks of inputs and outputs.

Where `torch._scaled_mm` can, it does the product; this kernel does the rest: blocks, float16 results,
odd sizes, and sums in an order that does not depend on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import store_tile
from .gemm_8_bits import product_of_8_bits
from .quantise import Rows8

BLOCK = 128
"""Inputs, and of blockwise scales also outputs, that share a scale; as DeepSeek-V3 has them."""


def fp8_product(
    x: Rows8,
    weight_OI: Tensor,
    scales: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    fixed: bool = False,
) -> Tensor:
    """[T, O] in `dtype`. `scales` [O, 1] with x.scales [T, 1], or [O / 128, I / 128] with [T, I / 128], or
    [O, I / 128] where outputs do not share them by 128.
    """
    outputs = weight_OI.shape[0]
    return product_of_8_bits(
        fp8_kernel,
        x,
        weight_OI,
        scales,
        bias_O,
        outputs,
        BLOCK,
        dtype,
        fixed=fixed,
        BLOCKWISE=x.scales.shape[1] > 1 or scales.shape[0] < outputs,
        SHARED=BLOCK if scales.shape[0] < outputs else 1,
    )


@triton.jit(do_not_specialize=["rows", "steps", "x_step"])
def fp8_kernel(
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
    BLOCKWISE: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    acc = sum_fp8(
        x, x_scales, x_step, weight, scales, m, m < rows, n, n < outputs,
        split * steps, tl.minimum((split + 1) * steps, tl.cdiv(inputs, GROUP)), inputs,
        ROWS, COLUMNS, GROUP, BLOCKWISE, SHARED,
    )  # fmt: skip
    store_tile(out, acc, bias, split, m, n, rows, outputs, BIAS)


@triton.jit
def sum_fp8(
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
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    SHARED: tl.constexpr,
) -> tl.tensor:
    """[ROWS, COLUMNS] of rows `m` and outputs `n`, over blocks `first` to before `last`, scaled."""
    blocks = tl.cdiv(inputs, GROUP)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for b in range(first, last):
        i = b * GROUP + tl.arange(0, GROUP)
        inside = (i < inputs)[None, :]
        x_place = m.to(tl.int64)[:, None] * inputs + i[None, :]
        x_tile = tl.load(x + x_place, mask=real_m[:, None] & inside, other=0.0)
        w_place = n.to(tl.int64)[:, None] * inputs + i[None, :]
        w_tile = tl.load(weight + w_place, mask=real_n[:, None] & inside, other=0.0)
        if BLOCKWISE:
            scale_m = tl.load(x_scales + tl.cast(b, tl.int64) * x_step + m, mask=real_m, other=0.0)
            scale_n = tl.load(scales + (n // SHARED).to(tl.int64) * blocks + b, mask=real_n, other=0.0)
            sums = tl.dot(x_tile, tl.trans(w_tile))
            acc += sums * (scale_m[:, None] * scale_n[None, :])
        else:
            # The tensor core's own sums keep 14 bits: they go to full float32 after every block.
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, max_num_imprecise_acc=GROUP)
    if not BLOCKWISE:
        scale_m = tl.load(x_scales + m, mask=real_m, other=0.0)
        scale_n = tl.load(scales + n, mask=real_n, other=0.0)
        acc *= scale_m[:, None] * scale_n[None, :]
    return acc
