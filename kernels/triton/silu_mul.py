"""silu(gate) * up, quantised too where an 8-bit linear is next."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .quantise import RowFormat, Rows8, left_arguments, left_constants, store_eight_bits
from .tiles import power_of_two, warps_for

BLOCK = 2048


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    return gate_rows(gate_up_T2F, None)[0]


def gate_rows(gate_up_T2F: Tensor, row_format: RowFormat | None) -> tuple[Tensor, Rows8 | None]:
    """The product; with `row_format` also quantised."""
    rows, width = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    assert gate_up_T2F.stride(1) == 1
    device = gate_up_T2F.device
    out_TF = torch.empty((rows, width), dtype=gate_up_T2F.dtype, device=device)
    eight = None if row_format is None else Rows8.empty(rows, width, row_format, device)
    whole = row_format is not None and row_format.group is None
    # The largest number of a row is wanted before any is stored.
    block = power_of_two(width) if whole else BLOCK
    if rows:
        silu_kernel[(rows, triton.cdiv(width, block))](
            out_TF,
            *left_arguments(eight, row_format, out_TF),
            gate_up_T2F,
            gate_up_T2F.stride(0),
            WIDTH=width,
            BLOCK=block,
            **left_constants(block, row_format),
            num_warps=warps_for(width) if whole else 8,
        )
    return out_TF, eight


@triton.jit
def gated(x: tl.tensor, column: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    inside = column < WIDTH
    gate = tl.load(x + column, mask=inside, other=0.0)
    up = tl.load(x + WIDTH + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded where the reference rounds
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit(do_not_specialize=["step"])
def silu_kernel(
    out: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    x: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    column = first + tl.arange(0, BLOCK)
    result = gated(x + row * x_row, column, WIDTH)
    tl.store(out + row * WIDTH + column, result, mask=column < WIDTH)
    if GROUP:
        store_eight_bits(
            numbers, scales, step, given, result, row, first, WIDTH, BLOCK, GROUP, LARGEST, GIVEN
        )
