"""W8A8 GEMM, 8-bit rows by 8-bit weights: launch and split-K in common, kernels for FP8 and int8; and FP8 by
`torch._scaled_mm` (cuBLAS and CUTLASS), in three layouts of scales.

    tensor   one scale for all rows, one for all weights
    rows     a scale for each row and each output
    blocks   a scale for each row and 128 inputs, one for 128 x 128 weights: with cuBLAS 12.9, on compute
             capability 9.0 alone

`scaled_mm_choice.py` decides at load whether a linear uses it. PyTorch checks the requirements of each layout
in aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import STEP, Grouped, add_splits, num_splits, store_tile
from .quantize_activations import Rows8
from .tile_config import tile_of_8_bits


def product_of_8_bits(
    kernel: Any,
    x: Rows8,
    weight: Tensor,
    scales: Tensor,
    bias_O: Tensor | None,
    outputs: int,
    group: int,
    dtype: torch.dtype,
    *,
    fixed: bool,
    **constants: Any,
) -> Tensor:
    """Launch `kernel`: [T, O] in `dtype`. `group` is the inputs of one loop step, `constants` the kernel's
    own ones.

    With `fixed` a row's bits do not depend on the number of rows.
    """
    rows, inputs = x.numbers.shape
    device = x.numbers.device
    assert rows < 2 or x.scales.stride(0) == 1
    out_TO = torch.empty((rows, outputs), dtype=dtype, device=device)
    if not rows:
        return out_TO
    tile = tile_of_8_bits(device, rows, fixed=fixed)
    row_tiles, columns = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.columns)
    steps = triton.cdiv(inputs, group)
    splits = num_splits(device, columns if fixed else columns * row_tiles, steps * group // STEP)
    target = out_TO
    if splits > 1:
        target = torch.empty((splits, rows, outputs), dtype=torch.float32, device=device)
    kernel[(row_tiles, columns, splits)](
        target,
        x.numbers,
        x.scales,
        x.scales.stride(1),
        weight,
        scales,
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
        **constants,
    )
    if splits > 1:
        add_splits(out_TO, target, bias_O)
    return out_TO


BLOCK = 128
"""Inputs that share a scale, and with block scales outputs too; the same as in DeepSeek-V3."""


def fp8_product(
    x: Rows8,
    weight_OI: Tensor,
    scales: Tensor,
    bias_O: Tensor | None,
    dtype: torch.dtype,
    *,
    fixed: bool = False,
) -> Tensor:
    """Multiply FP8 rows and weights: [T, O] in `dtype`.

    `scales` are [O, 1] with x.scales [T, 1]; [O / 128, I / 128] with x.scales [T, I / 128]; or [O, I / 128]
    where outputs do not share them.
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
    """Write one tile of (x * x_scales) @ (weight * scales).T + bias, or the partial sum of one split; sums
    are float32.

    Reference: `quantized_linear` in `tests/support/fake_quantized.py`.
    """
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
    """Return the scaled float32 sums [ROWS, COLUMNS] of rows `m` and outputs `n` over blocks `first` to
    `last` - 1.
    """
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


def int8_product(
    x: Rows8, weight: Grouped, bias_O: Tensor | None, dtype: torch.dtype, *, fixed: bool = False
) -> Tensor:
    """Multiply int8 rows and weights: [T, O] in `dtype`; x.scales are [T, I / group].

    With `fixed` a row's bits do not depend on the number of rows.
    """
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
    """Write one tile of (x * x_scales) @ (weight * scales).T + bias, or the partial sum of one split.

    Products of a group are summed in int32, groups in float32. Reference: `quantized_linear` in
    `tests/support/fake_quantized.py`.
    """
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
    """Return the scaled float32 sums [ROWS, COLUMNS] of rows `m` and outputs `n` of all `outputs`.

    The sum is over groups `first` to `last` - 1; inside a group it is int32.
    """
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


Sharing = Literal["tensor", "rows", "blocks"]
"""Layout of scales for `torch._scaled_mm`."""


def fits_scaled_mm(sharing: Sharing, outputs: int, inputs: int) -> bool:
    """Return whether a linear of this shape can be multiplied with scales in this layout.

    Block scales must not need padding, as cuBLAS wants them in fours along the inputs. Versions of PyTorch
    that do not check this give wrong results.
    """
    if sharing == "blocks":
        return outputs % BLOCK == 0 and inputs % (4 * BLOCK) == 0
    return outputs % 16 == 0 and inputs % 16 == 0


def scaled_mm(
    rows: Rows8, row_scales: Tensor, weight_OI: Tensor, scales: Tensor, dtype: torch.dtype, sharing: Sharing
) -> Tensor:
    """Multiply by `torch._scaled_mm`. Padding rows of blocks are multiplied too and cut off."""
    is_blocked = sharing == "blocks"
    whole = rows.whole() if is_blocked else rows
    out = torch._scaled_mm(  # noqa: SLF001 - torch's only door to them
        whole.numbers,
        weight_OI.t(),
        scale_a=whole.scales if is_blocked else row_scales,
        scale_b=scales.t(),
        out_dtype=dtype,
        use_fast_accum=not is_blocked,
    )
    return out[: len(rows.numbers)]
