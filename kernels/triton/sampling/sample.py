"""Sampler: draws a token for every row on the device, bit for bit as `kernels/reference/sampling.py`, and
prepares the decode step after it.

A token weighs floor(2^40 exp((logit - best) / temperature)). Sums of integers do not depend on their order:
neither the batch nor the way this kernel walks a row can change what is drawn. Nothing is sorted. Each
question about the descending order (the k-th logit, the end of the nucleus, the token that the noise hits) is
a threshold: the largest logit such that the ids at or above it weigh, or count, enough. Bisection finds it.
Chunks whose largest logit lies below the threshold are skipped, so a row is read whole only once or twice.

Rows with penalties are read together with a list of their edited logits (`penalties.py`).

Noise is Philox-4x32-10 of (seed, position), bit for bit as in `kernels/reference/sampling.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sampling_types import DecodeInputs, DecodeRows, PenaltyState, Sampled, SampleRows
from .chunk_max import CHUNK, best_of_chunks, canonicalize_best, chunk_maxima, ordered, value_of, weights
from .penalties import IS_ONLY_LISTED, edit, largest_in_list, logit_in_list, put_back
from .topk_topp_search import above, find, pick, ties_before

LOWEST = tl.constexpr(-2139095041)
"""Key of minus infinity, see `ordered`."""
ROWS = 128
"""Rows of a program that prepares a decode step."""


def sample(logits_RV: Tensor, rows: SampleRows, rules: PenaltyState | None = None) -> Sampled:
    """Implement `Ops.sample`. Columns must be contiguous. A row without a valid id gets id 0; `raw_best` and
    `best` show it.
    """
    count, vocabulary = logits_RV.shape
    assert logits_RV.stride(1) == 1
    device = logits_RV.device
    out = Sampled(
        ids=torch.empty(count, dtype=torch.int64, device=device),
        best=torch.empty(count, dtype=torch.float32, device=device),
        raw_best=torch.empty(count, dtype=torch.float32, device=device),
        logit=torch.empty(count, dtype=torch.float32, device=device),
        total=torch.empty(count, dtype=torch.int64, device=device),
        rank=torch.empty(count, dtype=torch.int32, device=device),
    )
    if not count:
        return out
    if rules is not None:
        edit(logits_RV, rows.position, rules)
    maxima = chunk_maxima(logits_RV)
    chunks = maxima.shape[1]
    listed = (maxima, maxima, maxima, maxima, 0)
    if rules is not None:
        listed = (rules.row_S, rules.facts_R5, rules.marks_3N, rules.values_3N, rules.marks_3N.shape[1])
    sample_kernel[(count,)](
        out.ids,
        out.best,
        out.raw_best,
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
        *listed,
        logits_RV.stride(0),
        vocabulary,
        chunks,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        LISTED=rules is not None,
        num_warps=8,
    )
    return out


@triton.jit(
    do_not_specialize=["entries"],
    do_not_specialize_on_alignment=[
        "temperatures", "ks", "ps", "min_ps", "seeds", "positions", "wanted", "rule_rows",
    ],
)  # fmt: skip
def sample_kernel(
    ids: tl.tensor,
    bests: tl.tensor,
    raw_bests: tl.tensor,
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
    rule_rows: tl.tensor,
    facts: tl.tensor,
    marks: tl.tensor,
    values: tl.tensor,
    entries: tl.tensor,
    row_stride: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    """Sample one row by temperature, top-k, top-p and min-p, or greedily; with `wanted` also its logprob sums
    and rank.

    Weights and their sums are int64, logits float32, noise and top-p float64. Reference:
    `kernels/reference/sampling.py`.
    """
    s = tl.program_id(0).to(tl.int64)
    x = logits + s * row_stride
    most = maxima + s * chunks
    raw_best, broken = best_of_chunks(most, chunks, CHUNKS)
    best = raw_best
    if LISTED:
        rule_row = tl.load(rule_rows + s)
        first = tl.load(facts + rule_row * 5)
        count = tl.load(facts + rule_row * 5 + 1)
        only = (tl.load(facts + rule_row * 5 + 4) & IS_ONLY_LISTED) != 0
        listed_ids = marks + first
        raws, edits = values + entries + first, values + 2 * entries.to(tl.int64) + first
        raw_most, raw_broken = largest_in_list(raws, count)
        edit_most, _edit_broken = largest_in_list(edits, count)
        broken = tl.maximum(broken, raw_broken)
        raw_best = tl.maximum(raw_best, raw_most)
        best = tl.maximum(tl.where(only, float("-inf"), best), edit_most)
        drawn_from = (x, most, vocabulary, tl.where(only, 0, chunks), listed_ids, edits, count)
        given = (x, most, vocabulary, chunks, listed_ids, raws, count)
    else:
        drawn_from = (x, most, vocabulary, chunks, x, x, 0)
        given = drawn_from
    raw_best, best = canonicalize_best(raw_best, broken), canonicalize_best(best, broken)
    tl.store(bests + s, best)
    tl.store(raw_bests + s, raw_best)
    temperature = tl.load(temperatures + s)
    token = tl.full((), 0, tl.int32)
    if tl.abs(best) < float("inf"):
        if temperature < 1e-5:
            token = pick(drawn_from, ordered(best), 0, best, 1.0, 0, CHUNK, True, LISTED)
        else:
            token = draw(
                drawn_from, best, temperature.to(tl.float32), tl.load(ks + s), tl.load(ps + s),
                tl.load(min_ps + s), noise_of(tl.load(seeds + s), tl.load(positions + s).to(tl.int64)),
                CHUNK, LISTED,
            )  # fmt: skip
        if tl.load(wanted + s) != 0:
            logit = tl.load(x + token).to(tl.float32)
            if LISTED:
                logit = tl.maximum(logit, logit_in_list(listed_ids, raws, count, token))
            key = ordered(logit)
            _, total = above(given, ordered(raw_best - 28.0), raw_best, 1.0, 0, CHUNK, LISTED)
            ahead, _ = above(given, key.to(tl.int64) + 1, raw_best, 1.0, 0, CHUNK, LISTED)
            ahead += ties_before(given, key, token, CHUNK, LISTED)
            tl.store(logit_out + s, logit)
            tl.store(totals + s, total)
            tl.store(ranks + s, (ahead + 1).to(tl.int32))
    tl.store(ids + s, token.to(tl.int64))
    if LISTED:
        tl.debug_barrier()  # no thread still reads the row
        put_back(x, listed_ids, raws, count)


@triton.jit
def noise_of(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the noise of (seed, position): a multiple of 2^-53 in [0, 1), float64.

    Reference: `kernels/reference/sampling.py`.
    """
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    nothing = low * 0
    w0, w1, _, _ = tl.philox(seed, low, high, nothing, nothing, 10)
    return (((w1.to(tl.uint64) << 32) | w0.to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def draw(
    row: tl.tuple,
    best: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    min_p: tl.tensor,
    noise: tl.tensor,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Draw an id: apply top-k, top-p and min-p as thresholds, then find the id at noise * (weight of those
    kept).
    """
    vocabulary = row[2]
    least = (min_p * 1099511627776.0).to(tl.int64)
    end = ordered(best).to(tl.int64) + 1
    # exp(-28) 2^40 is below 1: logits beneath have weight 0.
    bottom = ordered(best - 28.0 * temperature).to(tl.int64)
    cuts_k = (k > 0) & (k < vocabulary)
    token = tl.full((), 0, tl.int32)
    if cuts_k | (p < 1.0):
        low = bottom
        if cuts_k:
            low = find(row, k.to(tl.int64), LOWEST, end, best, temperature, least, CHUNK, True, LISTED)
            ahead, total = above(row, low + 1, best, temperature, least, CHUNK, LISTED)
            total += (k - ahead) * weights(value_of(low), best, temperature, least)
        else:
            _, total = above(row, bottom, best, temperature, least, CHUNK, LISTED)
        # Ids are kept while those before them weigh less than `limit`.
        limit = tl.maximum(tl.ceil(p * total.to(tl.float64)).to(tl.int64), 1)
        edge = find(row, limit, low, end, best, temperature, least, CHUNK, False, LISTED)
        _, before = above(row, edge + 1, best, temperature, least, CHUNK, LISTED)
        each = tl.maximum(weights(value_of(edge), best, temperature, least), 1)
        kept = before + ((limit - 1 - before) // each + 1) * each
        point = tl.minimum((noise * kept.to(tl.float64)).to(tl.int64), kept - 1)
        hit = find(row, point + 1, edge, end, best, temperature, least, CHUNK, False, LISTED)
        _, before = above(row, hit + 1, best, temperature, least, CHUNK, LISTED)
        each = tl.maximum(weights(value_of(hit), best, temperature, least), 1)
        tie = (point - before) // each
        token = pick(row, hit, tie, best, temperature, least, CHUNK, True, LISTED)
    else:
        _, total = above(row, bottom, best, temperature, least, CHUNK, LISTED)
        point = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
        token = pick(row, bottom, point, best, temperature, least, CHUNK, False, LISTED)
    return token


def prepare_decode_inputs(
    rows: DecodeRows, drawn_R: Tensor | None, inputs: DecodeInputs, block_size: int
) -> None:
    """Implement `Ops.prepare_decode_inputs`: from the state on the device, no host tensor is read."""
    count = len(rows.lengths_R)
    if not count:
        return
    advance_kernel[(triton.cdiv(count, ROWS),)](
        rows.ids_R,
        rows.lengths_R,
        rows.tables_RB,
        rows.ids_R if drawn_R is None else drawn_R,
        inputs.positions_R,
        inputs.slots_R,
        inputs.context_lens_R,
        count,
        rows.tables_RB.stride(0),
        PAGE=block_size,
        DRAWN=drawn_R is not None,
        BLOCK=ROWS,
    )


@triton.jit(do_not_specialize=["count", "table_row"])
def advance_kernel(
    ids: tl.tensor,
    lengths: tl.tensor,
    tables: tl.tensor,
    drawn: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    contexts: tl.tensor,
    count: tl.tensor,
    table_row: tl.tensor,
    PAGE: tl.constexpr,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Append sampled tokens to the rows (with DRAWN), then write position, slot and context length of each.

    All numbers are integers. A free row (length 0) gets position 0, slot -1 and context length 0.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < count
    length = tl.load(lengths + row, mask=real, other=0)
    taken = length > 0
    if DRAWN:
        token = tl.load(drawn + row, mask=taken, other=0)
        tl.store(ids + row, token, mask=taken)
        length = tl.where(taken, length + 1, 0)
        tl.store(lengths + row, length, mask=taken)
    position = tl.maximum(length - 1, 0)
    block = tl.load(tables + row.to(tl.int64) * table_row + position // PAGE, mask=taken, other=0)
    tl.store(positions + row, position, mask=real)
    tl.store(slots + row, tl.where(taken, block * PAGE + position % PAGE, -1), mask=real)
    tl.store(contexts + row, length, mask=real)
