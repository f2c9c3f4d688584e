"""Linears of E4M3 rows and weights: a scale for each row and output, or for blocks of inputs and outputs.

Where `torch._scaled_mm` can, it does the product; this kernel does the rest: blocks, float16 results,
odd sizes, and sums in an order that does not depend on the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import add_splits, num_splits
from .quantise import Rows8
from .tiles import tile_of_8_bits

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
    rows, inputs = x.numbers.shape
    outputs = weight_OI.shape[0]
    out_TO = torch.empty((rows, outputs), dtype=dtype, device=weight_OI.device)
    if not rows:
        return out_TO
    tile = tile_of_8_bits(weight_OI.device, rows, fixed=fixed)
    row_tiles, columns = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns)
    steps = triton.cdiv(inputs, BLOCK)
    splits = num_splits(weight_OI.device, columns if fixed else columns * row_tiles, steps)
    target = out_TO
    if splits > 1:
        target = torch.empty((splits, rows, outputs), dtype=torch.float32, device=weight_OI.device)
    fp8_kernel[(row_tiles, columns, splits)](
        target,
        x.numbers,
        x.scales,
        weight_OI,
        scales,
        out_TO if bias_O is None else bias_O,
        rows,
        outputs,
        inputs,
        triton.cdiv(steps, splits),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK=BLOCK,
        BLOCKWISE=x.scales.shape[1] > 1 or scales.shape[0] < outputs,
        SHARED=BLOCK if scales.shape[0] < outputs else 1,
        BIAS=bias_O is not None and splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        add_splits(out_TO, target, bias_O)
    return out_TO


@triton.jit(do_not_specialize=["rows", "steps"])
def fp8_kernel(
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
    BLOCK: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < rows, n < outputs
    blocks = tl.cdiv(inputs, BLOCK)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    split = tl.program_id(2)
    for b in range(split * steps, tl.minimum((split + 1) * steps, blocks)):
        i = b * BLOCK + tl.arange(0, BLOCK)
        inside = (i < inputs)[None, :]
        x_place = m.to(tl.int64)[:, None] * inputs + i[None, :]
        x_tile = tl.load(x + x_place, mask=real_m[:, None] & inside, other=0.0)
        w_place = n.to(tl.int64)[:, None] * inputs + i[None, :]
        w_tile = tl.load(weight + w_place, mask=real_n[:, None] & inside, other=0.0)
        if BLOCKWISE:
            scale_m = tl.load(x_scales + m.to(tl.int64) * blocks + b, mask=real_m, other=0.0)
            scale_n = tl.load(scales + (n // SHARED).to(tl.int64) * blocks + b, mask=real_n, other=0.0)
            sums = tl.dot(x_tile, tl.trans(w_tile))
            acc += sums * (scale_m[:, None] * scale_n[None, :])
        else:
            # The tensor core's own sums keep 14 bits: they go to full float32 after every block.
            acc = tl.dot(x_tile, tl.trans(w_tile), acc, max_num_imprecise_acc=BLOCK)
    if not BLOCKWISE:
        scale_m = tl.load(x_scales + m, mask=real_m, other=0.0)
        scale_n = tl.load(scales + n, mask=real_n, other=0.0)
        acc *= scale_m[:, None] * scale_n[None, :]
    if BIAS:
        acc += tl.load(bias + n, mask=real_n, other=0.0).to(tl.float32)[None, :]
    place = (tl.cast(split, tl.int64) * rows + m)[:, None] * outputs + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])
