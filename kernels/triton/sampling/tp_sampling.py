"""Sampling with tensor parallelism: top candidates and weights of one rank's part of the vocabulary.

The k-th logit is a threshold found by bisection, as in `sample`. The part is then walked once more, and the
candidates above it are written in the order of ids.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sampling_types import SampleRows
from .chunk_max import CHUNK, best_of_chunks, canonicalize_best, chunk_maxima, ordered, weights
from .sample import LOWEST, noise_of
from .topk_topp_search import above, find

FILL = tl.constexpr(1024)


def candidates(logits_RV: Tensor, rows: SampleRows, count: int, first_id: int) -> Tensor:
    """Implement `PartOps.candidates`. Columns must be contiguous."""
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
    """Write the top candidates of one row: logit bits << 32 | id, int64, ties by lowest id.

    Logits are float32. Reference: `PartOps.candidates` in `kernels/sampling_types.py`.
    """
    s = tl.program_id(0).to(tl.int64)
    x = logits + s * row_stride
    most = maxima + s * chunks
    mine = out + s * room
    best, broken = best_of_chunks(most, chunks, CHUNKS)
    best = canonicalize_best(best, broken)
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
    """Pack a float32 logit and an id into int64."""
    return (logit.to(tl.int32, bitcast=True).to(tl.int64) << 32) | v.to(tl.int64)


ROWS = 128


@dataclass(frozen=True, slots=True)
class Weighed:
    """Implement `PartWeights` by the sums of each chunk: only one chunk is read again."""

    logits_RV: Tensor
    best_R: Tensor
    rows: SampleRows
    sums_RC: Tensor

    @property
    def total_R(self) -> Tensor:  # noqa: N802
        return self.sums_RC.sum(-1)

    def columns(self, point_R: Tensor) -> Tensor:
        count, chunks = self.sums_RC.shape
        out_R = torch.empty(count, dtype=torch.int64, device=point_R.device)
        column_kernel[(count,)](
            out_R,
            point_R,
            self.sums_RC,
            self.logits_RV,
            self.best_R,
            self.rows.temperature,
            self.rows.min_p,
            self.logits_RV.stride(0),
            self.logits_RV.shape[1],
            chunks,
            CHUNK=CHUNK,
            CHUNKS=triton.next_power_of_2(chunks),
        )
        return out_R


def weigh(logits_RV: Tensor, best_R: Tensor, rows: SampleRows) -> Weighed:
    """Implement `PartOps.weigh`. Columns must be contiguous."""
    count, vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1
    chunks = triton.cdiv(vocabulary, CHUNK)
    sums_RC = torch.empty((count, chunks), dtype=torch.int64, device=logits_RV.device)
    sums_kernel[(count, chunks)](
        sums_RC,
        logits_RV,
        best_R,
        rows.temperature,
        rows.min_p,
        logits_RV.stride(0),
        vocabulary,
        CHUNK=CHUNK,
    )
    return Weighed(logits_RV, best_R, rows, sums_RC)


def noise(rows: SampleRows) -> Tensor:
    """Implement `PartOps.noise`."""
    count = len(rows.seed)
    out_R = torch.empty(count, dtype=torch.float64, device=rows.seed.device)
    noise_kernel[(triton.cdiv(count, ROWS),)](out_R, rows.seed, rows.position, count, BLOCK=ROWS)
    return out_R


@triton.jit(do_not_specialize_on_alignment=["bests", "temperatures", "min_ps"])
def sums_kernel(
    sums: tl.tensor,
    logits: tl.tensor,
    bests: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Write the sum of weights of one chunk, int64."""
    s, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = c * CHUNK + tl.arange(0, CHUNK)
    weight = weights_at(logits + s * row_stride, v, vocabulary, bests, temperatures, min_ps, s)
    tl.store(sums + s * tl.num_programs(1) + c, tl.sum(weight, 0))


@triton.jit(do_not_specialize_on_alignment=["points", "bests", "temperatures", "min_ps"])
def column_kernel(
    out: tl.tensor,
    points: tl.tensor,
    sums: tl.tensor,
    logits: tl.tensor,
    bests: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Write the first column at which the cumulative weight exceeds the row's point, int64."""
    s = tl.program_id(0).to(tl.int64)
    point = tl.load(points + s)
    c = tl.arange(0, CHUNKS)
    there = tl.load(sums + s * chunks + c, mask=c < chunks, other=0)
    passed = (tl.cumsum(there, 0) <= point) & (c < chunks)
    # Any column will do if the point lies beyond this part.
    chunk = tl.minimum(tl.sum(passed.to(tl.int32), 0), chunks - 1)
    left = point - tl.sum(tl.where(c < chunk, there, 0), 0)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = weights_at(logits + s * row_stride, v, vocabulary, bests, temperatures, min_ps, s)
    column = chunk * CHUNK + tl.sum((tl.cumsum(weight, 0) <= left).to(tl.int32), 0)
    tl.store(out + s, tl.minimum(column, vocabulary - 1).to(tl.int64))


@triton.jit
def weights_at(
    x: tl.tensor,
    v: tl.tensor,
    vocabulary: tl.tensor,
    bests: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    s: tl.tensor,
) -> tl.tensor:
    """Return the weights of columns `v`, int64. Greedy rows get temperature 1, as in
    `engine/sampling/draw_async.py`.
    """
    temperature = tl.load(temperatures + s)
    temperature = tl.where(temperature >= 1e-5, temperature, 1.0).to(tl.float32)
    least = (tl.load(min_ps + s) * 1099511627776.0).to(tl.int64)
    logit = tl.load(x + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    return tl.where(v < vocabulary, weights(logit, tl.load(bests + s), temperature, least), 0)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["seeds", "positions"])
def noise_kernel(
    out: tl.tensor, seeds: tl.tensor, positions: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Write the noise of each row, float64; see `noise_of`."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seeds + row, mask=row < count, other=0)
    position = tl.load(positions + row, mask=row < count, other=0).to(tl.int64)
    tl.store(out + row, noise_of(seed, position), mask=row < count)
