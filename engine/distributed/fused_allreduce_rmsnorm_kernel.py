"""Triton kernel: all-reduce over mapped memory, residual addition, RMSNorm and, before an 8-bit linear,
quantization.

A layer has two all-reduces, each followed by `add_rms_norm`. Separately they are two kernels and five passes
over GPU memory; this kernel keeps the row in registers. Decoding has few rows, where launches dominate.

One program per row. It writes the row to this rank's buffer, signals the same program of every rank, waits
for all of them, and sums their rows in the order of ranks, in float32, rounded once: bit by bit the result of
`sum_in_order` and then `add_rms_norm`, in any batch.

Each row has an epoch, incremented at each call and kept on the device so that graphs can be replayed. Ranks
signal it and wait for it, and its parity selects the half of the buffer: a half is written again only after
all ranks have signaled the next call, which they do after reading it.

NO MACHINE WITH TWO GPUS HAS RUN IT YET: see `custom_all_reduce.py`.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmbox.kernels.triton.elementwise import store_norm
from llmbox.kernels.triton.linear.quantize_activations import RowFormat, Rows8, left_arguments, left_constants
from llmbox.kernels.triton.linear.tile_config import power_of_two, warps_for


@dataclass(frozen=True, slots=True)
class Peers:
    """Mapped memory of t ranks: for each, a buffer of two halves, then flags."""

    rank: int
    buffers_t: Tensor
    """int64 [t]: addresses of the buffers as mapped here, multiples of 16 bytes."""
    flags_t: Tensor
    """int64 [t]: addresses of the flags, int32 [rows, t]: the epoch that each rank has signaled."""
    epochs_R: Tensor
    """int32, this rank's own."""
    half_bytes: int
    memory: Tensor | None = None
    """This rank's buffer, kept alive."""


def all_reduce_add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, peers: Peers
) -> Tensor:
    return sum_norm_rows(x_TE, residual_TE, weight_E, eps, None, peers)[0]


def sum_norm_rows(
    x_TE: Tensor,
    residual_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    row_format: RowFormat | None,
    peers: Peers,
    *,
    compile_only: bool = False,
) -> tuple[Tensor, Rows8 | None]:
    """Add the sum of all ranks' x to the residual in place; return its RMSNorm as a new tensor.

    With `row_format` the result is also quantized, bit by bit as `norm_rows` does. All calls over the same
    peers must have one width and dtype: their rows must lie at the same addresses.
    """
    rows, width = x_TE.shape
    half = peers.half_bytes // x_TE.element_size()
    assert x_TE.is_contiguous()
    assert residual_TE.is_contiguous()
    assert rows * width <= half
    assert rows <= len(peers.epochs_R)
    out_TE = torch.empty_like(x_TE)
    eight = None if row_format is None else Rows8.empty(rows, width, row_format, x_TE.device)
    block = power_of_two(width)
    launch = partial(sum_norm_kernel.warmup, grid=(rows,)) if compile_only else sum_norm_kernel[(rows,)]
    launch(
        out_TE,
        residual_TE,
        *left_arguments(eight, row_format, out_TE),
        x_TE,
        weight_E,
        peers.buffers_t,
        peers.flags_t,
        peers.epochs_R,
        eps,
        half,
        RANK=peers.rank,
        RANKS=len(peers.buffers_t),
        WIDTH=width,
        BLOCK=block,
        **left_constants(block, row_format),
        num_warps=warps_for(width),
    )
    return out_TE, eight


@triton.jit(do_not_specialize=["step"])  # type: ignore[untyped-decorator] # it has no types
def sum_norm_kernel(
    out: tl.tensor,
    residual: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    buffers: tl.tensor,
    flags: tl.tensor,
    epochs: tl.tensor,
    eps: tl.tensor,
    half: tl.tensor,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    epoch = tl.load(epochs + row) + 1
    start = (epoch & 1).to(tl.int64) * half + row.to(tl.int64) * WIDTH
    place = row.to(tl.int64) * WIDTH + column

    mine = tl.multiple_of(tl.load(buffers + RANK).to(tl.pointer_type(x.dtype.element_ty)), 16)
    tl.store(mine + start + column, tl.load(x + place, mask=inside), mask=inside)
    tl.debug_barrier()  # all threads have written before one of them signals it
    for rank in tl.static_range(RANKS):
        theirs = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + row * RANKS + RANK, epoch, sem="release", scope="sys")
    signal_ptrs = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + row * RANKS
    for rank in tl.static_range(RANKS):
        # A rank may be one call ahead; the difference stays right when epochs wrap around.
        while tl.atomic_add(signal_ptrs + rank, 0, sem="acquire", scope="sys") - epoch < 0:
            pass
    tl.debug_barrier()  # no thread reads before all flags have been seen

    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        part = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
        total += tl.load(part + start + column, mask=inside, other=0.0).to(tl.float32)
    summed = total.to(x.dtype.element_ty).to(tl.float32)
    added = summed + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    stored = added.to(residual.dtype.element_ty)
    tl.store(residual + place, stored, mask=inside)
    values, long_row = stored.to(tl.float32), row.to(tl.int64)
    store_norm(
        out, numbers, scales, step, given, weight, values, long_row, eps,
        WIDTH, BLOCK, GROUP, LARGEST, GIVEN,
    )  # fmt: skip
    tl.store(epochs + row, epoch)
