"""Draws a token for every row on the device, by the rules of `engine/sampler`.

A token weighs floor(2^40 exp((logit - best) / temperature)). Sums of integers do not depend on their order:
neither the batch nor this kernel's way of walking a row can change what is drawn. Nothing is sorted. Whatever
"best first" asks (the k-th logit, where the nucleus ends, whom the noise hits) is a threshold: the largest
logit such that those at or above it weigh, or count, enough; it is found by bisection. Chunks whose largest
logit lies below the threshold in question are passed over, so a row is read whole only once or twice.

Noise is Philox-4x32-10 of (seed, position), bit by bit as in `engine/noise.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..rows import Sampled, SampleRows
from .threshold import above, find, ordered, pick, value_of, weights

CHUNK = 4096
LOWEST = tl.constexpr(-2139095041)
"""`ordered` of minus infinity."""


def sample(logits_RV: Tensor, rows: SampleRows) -> Sampled:
    """Columns must be contiguous. A row without a valid id gets 0; `best` tells."""
    count, vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1
    device = logits_RV.device
    out = Sampled(
        ids=torch.empty(count, dtype=torch.int64, device=device),
        best=torch.empty(count, dtype=torch.float32, device=device),
        logit=torch.empty(count, dtype=torch.float32, device=device),
        total=torch.empty(count, dtype=torch.int64, device=device),
        rank=torch.empty(count, dtype=torch.int32, device=device),
    )
    if not count:
        return out
    chunks = triton.cdiv(vocabulary, CHUNK)
    maxima = torch.empty((count, chunks), dtype=torch.float32, device=device)
    maxima_kernel[(count, chunks)](maxima, logits_RV, logits_RV.stride(0), vocabulary, CHUNK=CHUNK)
    sample_kernel[(count,)](
        out.ids,
        out.best,
        out.logit,
        out.total,
        out.rank,
        logits_RV,
        maxima,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seed,
        rows.position,
        rows.logprobs,
        logits_RV.stride(0),
        vocabulary,
        chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return out


@triton.jit
def maxima_kernel(
    maxima: tl.tensor, logits: tl.tensor, row_stride: tl.tensor, vocabulary: tl.tensor, CHUNK: tl.constexpr
) -> None:
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), 0)  # noqa: PLR0124 - a maximum would pass over NaN
    most = tl.where(broken > 0, float("nan"), tl.max(x, 0))
    tl.store(maxima + row * tl.num_programs(1) + chunk, most)


@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "ks", "ps", "min_ps", "seeds", "positions", "wanted"]
)
def sample_kernel(
    ids: tl.tensor,
    bests: tl.tensor,
    logit_out: tl.tensor,
    totals: tl.tensor,
    ranks: tl.tensor,
    logits: tl.tensor,
    maxima: tl.tensor,
    temperatures: tl.tensor,
    ks: tl.tensor,
    ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    wanted: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * row_stride
    most = maxima + row * chunks
    c = tl.arange(0, CHUNKS)
    tops = tl.load(most + c, mask=c < chunks, other=float("-inf"))
    broken = tl.max((tops != tops).to(tl.int32), 0)  # noqa: PLR0124
    best = tl.max(tops, 0)
    best = tl.where(broken > 0, float("nan"), tl.where(best == 0.0, 0.0, best))
    tl.store(bests + row, best)
    temperature = tl.load(temperatures + row)
    token = tl.full((), 0, tl.int32)
    if tl.abs(best) < float("inf"):
        if temperature < 1e-5:
            token = pick(x, most, ordered(best), 0, best, 1.0, 0, vocabulary, chunks, CHUNK, True)
        else:
            token = draw(
                x, most, best, temperature.to(tl.float32), tl.load(ks + row), tl.load(ps + row),
                tl.load(min_ps + row), noise_of(tl.load(seeds + row), tl.load(positions + row).to(tl.int64)),
                vocabulary, chunks, CHUNK,
            )  # fmt: skip
        if tl.load(wanted + row) != 0:
            logit = tl.load(x + token).to(tl.float32)
            key = ordered(logit)
            _, total = above(x, most, ordered(best - 28.0), best, 1.0, 0, vocabulary, chunks, CHUNK)
            ahead, _ = above(x, most, key.to(tl.int64) + 1, best, 1.0, 0, vocabulary, chunks, CHUNK)
            tl.store(logit_out + row, logit)
            tl.store(totals + row, total)
            tl.store(ranks + row, (ahead + 1 + ties_before(x, most, key, token, CHUNK)).to(tl.int32))
    tl.store(ids + row, token.to(tl.int64))


@triton.jit
def noise_of(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """`engine.noise.uniform`: a multiple of 2^-53 in [0, 1), float64."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    nothing = low * 0
    w0, w1, _, _ = tl.philox(seed, low, high, nothing, nothing, 10)
    return (((w1.to(tl.uint64) << 32) | w0.to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def draw(
    x: tl.tensor,
    most: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    min_p: tl.tensor,
    noise: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    least = (min_p * 1099511627776.0).to(tl.int64)
    end = ordered(best).to(tl.int64) + 1
    # exp(-28) 2^40 is below 1: nothing beneath weighs anything.
    bottom = ordered(best - 28.0 * temperature).to(tl.int64)
    cuts_k = (k > 0) & (k < vocabulary)
    token = tl.full((), 0, tl.int32)
    if cuts_k | (p < 1.0):
        low = bottom
        if cuts_k:
            low = find(
                x, most, k.to(tl.int64), LOWEST, end, best, temperature, least,
                vocabulary, chunks, CHUNK, True,
            )  # fmt: skip
            ahead, total = above(x, most, low + 1, best, temperature, least, vocabulary, chunks, CHUNK)
            total += (k - ahead) * weights(value_of(low), best, temperature, least)
        else:
            _, total = above(x, most, bottom, best, temperature, least, vocabulary, chunks, CHUNK)
        # Ids are kept while those before them weigh less than `limit`.
        limit = tl.ceil(p * total.to(tl.float64)).to(tl.int64)
        edge = find(
            x,
            most,
            tl.maximum(limit, 1),
            low,
            end,
            best,
            temperature,
            least,
            vocabulary,
            chunks,
            CHUNK,
            False,
        )
        _, before = above(x, most, edge + 1, best, temperature, least, vocabulary, chunks, CHUNK)
        each = tl.maximum(weights(value_of(edge), best, temperature, least), 1)
        kept = before + ((tl.maximum(limit, 1) - 1 - before) // each + 1) * each
        point = tl.minimum((noise * kept.to(tl.float64)).to(tl.int64), kept - 1)
        hit = find(x, most, point + 1, edge, end, best, temperature, least, vocabulary, chunks, CHUNK, False)
        _, before = above(x, most, hit + 1, best, temperature, least, vocabulary, chunks, CHUNK)
        each = tl.maximum(weights(value_of(hit), best, temperature, least), 1)
        tie = (point - before) // each
        token = pick(x, most, hit, tie, best, temperature, least, vocabulary, chunks, CHUNK, True)
    else:
        _, total = above(x, most, bottom, best, temperature, least, vocabulary, chunks, CHUNK)
        point = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
        token = pick(x, most, bottom, point, best, temperature, least, vocabulary, chunks, CHUNK, False)
    return token


@triton.jit
def ties_before(
    x: tl.tensor, most: tl.tensor, key: tl.tensor, token: tl.tensor, CHUNK: tl.constexpr
) -> tl.tensor:
    """Ids lower than `token` whose logit equals its."""
    count = tl.full((), 0, tl.int64)
    for c in range(token // CHUNK + 1):
        if ordered(tl.load(most + c)) >= key:
            v = c * CHUNK + tl.arange(0, CHUNK)
            equal = ordered(tl.load(x + v, mask=v < token, other=float("-inf")).to(tl.float32)) == key
            count += tl.sum((equal & (v < token)).to(tl.int32), 0)
    return count
