"""Integer linears and the lookup of embeddings with the bits of C++."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.gemm_inner import codes_of, load_words
from ..linear.linear import DenseLinear, WeightOnlyIntLinear
from ..linear.tile_config import power_of_two as whole_tile
from .arithmetic import codes_of_rows, multiply_add, range_of, rounded, scale_of_rows, widen
from .rows import ROWS

COLUMNS = 128
"""Outputs of one program."""


def linear(packed: WeightOnlyIntLinear, x_TI: Tensor, dtype: torch.dtype, ranks: int = 0) -> Tensor:
    """Multiply: new tensor [T, O] in `dtype`. With `ranks` in shares, see `Ops.linear_in_shares`."""
    weight, order_I = packed.weight, packed.order_I
    x_TI = x_TI if order_I is None else x_TI.index_select(1, order_I)
    rows, groups = len(x_TI), len(weight.weight)
    assert x_TI.stride(1) == 1
    device = x_TI.device
    codes_TI = torch.empty((rows, groups * weight.group), dtype=torch.int8, device=device)
    scales_TG = torch.empty((rows, groups), dtype=torch.float32, device=device)
    out_TO = torch.empty((rows, weight.outputs), dtype=dtype, device=device)
    if not rows:
        return out_TO
    tiles = triton.cdiv(rows, ROWS)
    portable_quantize_kernel[(tiles, groups)](
        codes_TI,
        scales_TG,
        x_TI,
        rows,
        weight.inputs,
        x_TI.stride(0),
        GROUP=weight.group,
        ROWS=ROWS,
        enable_fp_fusion=False,
    )
    shares = 1
    if ranks:
        shares = next(each for each in (4, 2, 1) if groups * ranks % each == 0) // ranks
    portable_product_kernel[(tiles, triton.cdiv(weight.outputs, COLUMNS))](
        out_TO,
        codes_TI,
        scales_TG,
        weight.weight,
        weight.scales,
        weight.offsets,
        out_TO if packed.bias_O is None else packed.bias_O,
        rows,
        weight.outputs,
        groups,
        GROUP=weight.group,
        BITS=weight.bits,
        GRID=weight.grid,
        SHARES=shares,
        BIAS=packed.bias_O is not None,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        enable_fp_fusion=False,
    )
    return out_TO


@triton.jit(do_not_specialize=["rows"])
def portable_quantize_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    x_row: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Quantize one group of ROWS rows. C++: `quantize_group` in `native/quantized/quantize_activations.h`."""
    m, g = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    real = m < rows
    i = g * GROUP + tl.arange(0, GROUP)
    inside = real[:, None] & (i < inputs)[None, :]
    v = widen(tl.load(x + m.to(tl.int64)[:, None] * x_row + i[None, :], mask=inside, other=0.0))
    most, finite = range_of(v, inside)
    place = codes + m.to(tl.int64)[:, None] * (tl.num_programs(1) * GROUP) + i[None, :]
    tl.store(place, codes_of_rows(v, most, finite, 127.0).to(tl.int8), mask=real[:, None])
    tl.store(scales + m * tl.num_programs(1) + g, scale_of_rows(most, finite, 127.0), mask=real)


@triton.jit(do_not_specialize=["rows", "groups"])
def portable_product_kernel(
    out: tl.tensor,
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GRID: tl.constexpr,
    SHARES: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write one tile of x @ weight.T + bias: groups ascend in each of SHARES parts, which are added in pairs.

    C++: `multiply_groups` in `native/quantized/quant_gemm_dot.h` and `multiply_shares` in `quant_linear.h`.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real_m, real_n = m < rows, n < outputs
    part = groups // SHARES
    x_rows, s_rows = x + m.to(tl.int64)[:, None] * (groups * GROUP), x_scales + m * groups
    total = sum_groups(
        x_rows, s_rows, weight, scales, offsets, n, real_m, real_n, outputs, 0, part,
        ROWS, COLUMNS, GROUP, BITS, GRID,
    )  # fmt: skip
    if BIAS:
        total += widen(tl.load(bias + n, mask=real_n, other=0.0))[None, :]
    if SHARES > 1:
        total += sum_groups(
            x_rows, s_rows, weight, scales, offsets, n, real_m, real_n, outputs, part, 2 * part,
            ROWS, COLUMNS, GROUP, BITS, GRID,
        )  # fmt: skip
    if SHARES > 2:
        third = sum_groups(
            x_rows, s_rows, weight, scales, offsets, n, real_m, real_n, outputs, 2 * part, 3 * part,
            ROWS, COLUMNS, GROUP, BITS, GRID,
        )  # fmt: skip
        total += third + sum_groups(
            x_rows, s_rows, weight, scales, offsets, n, real_m, real_n, outputs, 3 * part, 4 * part,
            ROWS, COLUMNS, GROUP, BITS, GRID,
        )  # fmt: skip
    place = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(place, rounded(total, out.dtype.element_ty), mask=real_m[:, None] & real_n[None, :])


@triton.jit
def sum_groups(
    x_rows: tl.tensor,
    s_rows: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    n: tl.tensor,
    real_m: tl.tensor,
    real_n: tl.tensor,
    outputs: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GRID: tl.constexpr,
) -> tl.tensor:
    """Return the sum over groups `first` to `last` - 1, float32: an exact sum of integers each, times the
    row's scale, and a multiply-add with the weights' scale.
    """
    WIDTH: tl.constexpr = GROUP * BITS // 8
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    i = tl.arange(0, WIDTH)[None, :]
    for g in range(first, last):
        cell = tl.cast(g, tl.int64) * outputs + n
        low = tl.load(x_rows + g * GROUP + i, mask=real_m[:, None], other=0)
        if BITS == 8:
            stored = tl.load(weight + cell[:, None] * WIDTH + i, mask=real_n[:, None], other=0)
            sums = tl.dot(low, tl.trans(stored), out_dtype=tl.int32)
        else:
            high = tl.load(x_rows + g * GROUP + WIDTH + i, mask=real_m[:, None], other=0)
            words = load_words(weight, cell, real_n, WIDTH)
            low_w = codes_of(words, 0, offsets, cell, real_n, GROUP, GRID, tl.float32).to(tl.int8)
            high_w = codes_of(words, 4, offsets, cell, real_n, GROUP, GRID, tl.float32).to(tl.int8)
            sums = tl.dot(low, tl.trans(low_w), out_dtype=tl.int32)
            sums = tl.dot(high, tl.trans(high_w), sums, out_dtype=tl.int32)
        of_rows = tl.load(s_rows + g, mask=real_m, other=0.0)
        by = widen(tl.load(scales + cell, mask=real_n, other=0.0))
        acc = multiply_add(sums.to(tl.float32) * of_rows[:, None], by[None, :], acc)
    return acc


def embed(
    packed: WeightOnlyIntLinear | DenseLinear, ids_T: Tensor, dtype: torch.dtype, scale: float
) -> Tensor:
    """Look up rows of a table of integers or an unquantized one, times `scale`: [T, E] in `dtype`."""
    if isinstance(packed, DenseLinear):
        table, scales, width, group = packed.weight_OI, packed.weight_OI, packed.weight_OI.shape[1], 0
    else:
        table, scales = packed.weight.weight, packed.weight.scales
        width, group = packed.weight.inputs, packed.weight.group
        assert packed.weight.bits == 8
    out_TE = torch.empty((len(ids_T), width), dtype=dtype, device=ids_T.device)
    if len(ids_T):
        portable_embed_kernel[(len(ids_T),)](
            out_TE,
            table,
            scales,
            ids_T,
            table.shape[-2],
            scale,
            WIDTH=width,
            GROUP=group,
            PADDED=whole_tile(width),
            enable_fp_fusion=False,
        )
    return out_TE


def scale(x_TE: Tensor, factor: float) -> Tensor:
    """Multiply in place, rounded as `embed` rounds."""
    ids_T = torch.arange(len(x_TE), device=x_TE.device)
    return x_TE.copy_(embed(DenseLinear(x_TE.contiguous(), None), ids_T, x_TE.dtype, factor))


@triton.jit
def portable_embed_kernel(
    out: tl.tensor,
    table: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Write one row, rounded once. C++: `QuantEmbeddingOp` in `native/linear/embedding.h`."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    inside, source = i < WIDTH, tl.load(ids + row).to(tl.int64)
    if GROUP > 0:
        cell = (i // GROUP).to(tl.int64) * vocabulary + source
        v = tl.load(table + cell * GROUP + i % GROUP, mask=inside, other=0).to(tl.float32)
        v = v * widen(tl.load(scales + cell, mask=inside, other=0.0))
    else:
        v = widen(tl.load(table + source * WIDTH + i, mask=inside, other=0.0))
    tl.store(out + row * WIDTH + i, rounded(v * scale, out.dtype.element_ty), mask=inside)
