"""Embedding lookup, with dequantization where the table has 8 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear.linear import DenseLinear, Fp8Linear, Linear, WeightOnlyIntLinear
from .linear.tile_config import power_of_two

BLOCK = 1024


def embed(packed: Linear, ids_T: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Look up rows of a table in any format, times `scale`: [T, E] in `dtype`."""
    match packed:
        case DenseLinear(weight_VE, _):
            return run(weight_VE, weight_VE, ids_T, weight_VE.shape[1], 0, dtype, scale)
        case WeightOnlyIntLinear(weight, _):
            assert weight.bits == 8
            return run(weight.weight, weight.scales, ids_T, weight.inputs, weight.group, dtype, scale)
        case Fp8Linear(weight_VE, scales_V1, _):
            return run(weight_VE, scales_V1, ids_T, weight_VE.shape[1], -1, dtype, scale)
        case _:
            raise AssertionError(f"no table is kept as {type(packed).__name__}")


def run(
    weight: Tensor,
    scales: Tensor,
    ids_T: Tensor,
    width: int,
    group: int,
    dtype: torch.dtype,
    scale: float,
) -> Tensor:
    """Launch the lookup. `group` is 0 without scales, -1 for one scale a row, else weights and scales are as
    in `Grouped`.
    """
    out_TE = torch.empty((len(ids_T), width), dtype=dtype, device=weight.device)
    if len(ids_T):
        block = min(BLOCK, power_of_two(width))
        gather_kernel[(len(ids_T), triton.cdiv(width, block))](
            out_TE,
            weight,
            scales,
            ids_T,
            weight.shape[-2],
            scale,
            WIDTH=width,
            GROUP=group,
            BLOCK=block,
            SCALED=scale != 1.0,
        )
    return out_TE


@triton.jit(do_not_specialize_on_alignment=["ids"])
def gather_kernel(
    out: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    ids: tl.tensor,
    vocabulary: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Write scale * code * row scale for one tile of a row, computed in float32.

    Reference: `embedding` in `kernels/reference/elementwise.py`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = tl.load(ids + row).to(tl.int64)
    if GROUP > 0:
        cell = (column // GROUP).to(tl.int64) * vocabulary + source
        values = tl.load(weight + cell * GROUP + column % GROUP, mask=inside, other=0).to(tl.float32)
        values *= tl.load(scales + cell, mask=inside, other=0.0).to(tl.float32)
    else:
        values = tl.load(weight + source * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if GROUP < 0:
            values *= tl.load(scales + source)
    if SCALED:
        values *= scale
    tl.store(out + row * WIDTH + column, values.to(out.dtype.element_ty), mask=inside)
