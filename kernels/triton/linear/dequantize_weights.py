"""Dequantization of integer weights, for products of so many rows that one more pass over the weights costs
little.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm import Grouped
from .gemm_inner import codes_of

BLOCK = 32
"""Outputs of one program."""


def dequantize(packed: Grouped, dtype: torch.dtype) -> Tensor:
    """Dequantize to [O, I] in `dtype`."""
    out_OI = torch.empty((packed.outputs, packed.inputs), dtype=dtype, device=packed.weight.device)
    grid = (triton.cdiv(packed.outputs, BLOCK), packed.weight.shape[0])
    dequantize_kernel[grid](
        out_OI,
        packed.weight,
        packed.scales,
        packed.offsets,
        packed.outputs,
        packed.inputs,
        GROUP=packed.group,
        BITS=packed.bits,
        GRID=packed.grid,
        BLOCK=BLOCK,
    )
    return out_OI


@triton.jit
def dequantize_kernel(
    out: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    GRID: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write scale * code for one group of BLOCK outputs, computed in float32.

    Reference: `QuantizedWeight.floats` in `kernels/weight_packing.py`.
    """
    WIDTH: tl.constexpr = GROUP * BITS // 8
    g = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n < outputs
    j = tl.arange(0, WIDTH)
    cell = g * outputs + n
    stored = tl.load(weight + cell[:, None] * WIDTH + j[None, :], mask=real[:, None], other=0)
    scale = tl.load(scales + cell, mask=real, other=0.0).to(tl.float32)[:, None]
    i = g * GROUP + j
    place = n.to(tl.int64)[:, None] * inputs + i[None, :]
    if BITS == 8:
        low = stored.to(tl.float32)
    else:
        low = codes_of(stored & 15, offsets, cell, real, 0, GROUP, GRID, tl.float32)
    wide = low * scale
    tl.store(out + place, wide.to(out.dtype.element_ty), mask=real[:, None] & (i < inputs)[None, :])
    if BITS == 4:
        high = codes_of(stored >> 4, offsets, cell, real, WIDTH, GROUP, GRID, tl.float32)
        wide = high * scale
        inside = real[:, None] & (i + WIDTH < inputs)[None, :]
        tl.store(out + place + WIDTH, wide.to(out.dtype.element_ty), mask=inside)
