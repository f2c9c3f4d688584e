"""silu(gate) * up, quantised too where an 8-bit linear is next."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_cache import LARGEST
from .quantise import Rows8, to_eight_bits
from .rms_norm import warps_for
from .tiles import power_of_two

BLOCK = 2048


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.stride(1) == 1
    out_TF = torch.empty((rows, width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        silu_kernel[grid](out_TF, gate_up_T2F, gate_up_T2F.stride(0), WIDTH=width, BLOCK=BLOCK, num_warps=8)
    return out_TF


def silu_mul_quantised(gate_up_T2F: Tensor, dtype: torch.dtype) -> tuple[Tensor, Rows8]:
    """A program has a whole row: its largest number is wanted before any is stored."""
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    device = gate_up_T2F.device
    out_TF = torch.empty((rows, width), dtype=gate_up_T2F.dtype, device=device)
    numbers = torch.empty((rows, width), dtype=dtype, device=device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=device)
    if rows:
        silu_quantise_kernel[(rows,)](
            out_TF,
            numbers,
            scales,
            gate_up_T2F,
            gate_up_T2F.stride(0),
            WIDTH=width,
            BLOCK=power_of_two(width),
            LARGEST=LARGEST[dtype],
            num_warps=warps_for(width),
        )
    return out_TF, Rows8(numbers, scales)


@triton.jit
def gated(x: tl.tensor, column: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    inside = column < WIDTH
    gate = tl.load(x + column, mask=inside, other=0.0)
    up = tl.load(x + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded where the reference rounds
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def silu_kernel(
    out: tl.tensor, x: tl.tensor, x_row: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * WIDTH + column, gated(x + row * x_row, column, WIDTH), mask=column < WIDTH)


@triton.jit
def silu_quantise_kernel(
    out: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    result = gated(x + row * x_row, column, WIDTH)
    tl.store(out + row * WIDTH + column, result, mask=column < WIDTH)
    rounded, scale = to_eight_bits(result.to(tl.float32), LARGEST)
    tl.store(numbers + row * WIDTH + column, rounded.to(numbers.dtype.element_ty), mask=column < WIDTH)
    tl.store(scales + row, scale)
