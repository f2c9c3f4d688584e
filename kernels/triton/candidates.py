"""The best ids of a part of the vocabulary, for ranks that draw from what all of them have found.

The k-th logit is a threshold found by bisection, as in `sample`; then the part is walked once more, and what
is above it is written down in the order of ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import SampleRows
from .maxima import CHUNK, best_of_chunks, chunk_maxima, told_best
from .ordered import ordered
from .sample import LOWEST
from .threshold import above, find

FILL = tl.constexpr(1024)


def candidates(logits_RV: Tensor, rows: SampleRows, count: int, first_id: int) -> Tensor:
    """See `PartOps.candidates`. Columns must be contiguous."""
    rows_, vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1
    out_RK = torch.empty((rows_, count), dtype=torch.int64, device=logits_RV.device)
    if not rows_:
        return out_RK
    maxima = chunk_maxima(logits_RV)
    chunks = maxima.shape[1]
    candidates_kernel[(rows_,)](
        out_RK,
        logits_RV,
        maxima,
        rows.temperature,
        rows.top_k,
        logits_RV.stride(0),
        vocabulary,
        chunks,
        count,
        first_id,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return out_RK


@triton.jit(
    do_not_specialize=["room", "first_id"], do_not_specialize_on_alignment=["temperatures", "ks"]
)  # fmt: skip
def candidates_kernel(
    out: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    temperatures: tl.tensor,
    ks: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    room: tl.tensor,
    first_id: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    s = tl.program_id(0).to(tl.int64)
    x = logits + s * row_stride
    most = maxima + s * chunks
    mine = out + s * room
    best, broken = best_of_chunks(most, chunks, CHUNKS)
    best = told_best(best, broken)
    written = tl.full((), 0, tl.int64)
    if tl.abs(best) < float("inf"):
        k = tl.where(tl.load(temperatures + s) < 1e-5, 1, tl.load(ks + s)).to(tl.int64)
        k = tl.minimum(k, vocabulary)
        row = (x, most, vocabulary, chunks, x, x, 0)
        low = find(row, k, LOWEST, ordered(best).to(tl.int64) + 1, best, 1.0, 0, CHUNK, True, False)
        ahead, _total = above(row, low + 1, best, 1.0, 0, CHUNK, False)
        ties = k - ahead
        for each in range(chunks):
            if ordered(tl.load(most + each)) >= low:
                v = each * CHUNK + tl.arange(0, CHUNK)
                logit = tl.load(x + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
                key = ordered(logit)
                equal = ((key == low) & (v < vocabulary)).to(tl.int64)
                nth = tl.cumsum(equal, 0)
                takes = ((key > low) & (v < vocabulary)) | ((equal > 0) & (nth <= ties))
                place = written + tl.cumsum(takes.to(tl.int64), 0) - 1
                tl.store(mine + place, packed(logit, v + first_id), mask=takes)
                written += tl.sum(takes.to(tl.int64), 0)
                ties -= tl.sum(equal, 0)
    else:
        tl.store(mine, packed(best, first_id + tl.full((), 0, tl.int32)))
        written += 1
    for start in range(0, room, FILL):
        at = start + tl.arange(0, FILL)
        nothing = packed(tl.full((FILL,), float("-inf"), tl.float32), at * 0)
        tl.store(mine + at, nothing, mask=(at >= written) & (at < room))


@triton.jit
def packed(logit: tl.tensor, v: tl.tensor) -> tl.tensor:
    return (logit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | v.to(tl.int64)
