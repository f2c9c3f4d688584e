"""Search over one row of logits for `sample`: sums above a threshold, the threshold of a sum, the n-th tie.

A row is a tuple: its logits x, `most` with the largest of each chunk, the vocabulary's size, the number of
chunks to walk, and with LISTED also the listed ids, their logits and their number; these ids are minus
infinity in x (`penalties.py`). Logits are compared as integers of the same order ("keys"), so that a
bisection ends. Weights are those of `kernels/reference/sampling.py`.
"""

import triton
import triton.language as tl

from .chunk_max import ordered, value_of, weights
from .penalties import above_in_list, between_in_list

GUESSES = tl.constexpr(26)
"""Bisection steps over values before those over keys: values narrow down faster, keys end for certain."""


@triton.jit
def above(
    row: tl.tuple,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the number of ids with at least `key` and the sum of their weights, int64."""
    x, most, vocabulary, chunks, _ids, listed, entries = row
    count = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for c in range(chunks):
        if ordered(tl.load(most + c)) >= key:
            v = c * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(x + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
            inside = (ordered(logit) >= key) & (v < vocabulary)
            count += tl.sum(inside.to(tl.int32), 0)
            total += tl.sum(tl.where(inside, weights(logit, best, temperature, least), 0), 0)
    if LISTED:
        more, weight = above_in_list(listed, entries, key, best, temperature, least)
        count += more
        total += weight
    return count, total


@triton.jit
def find(
    row: tl.tuple,
    target: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    BY_COUNT: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the largest key at which the number (BY_COUNT) or weight of ids at or above it reaches `target`.

    The target is reached at `low` and not at `high`.
    """
    low = tl.full((), 0, tl.int64) + low
    high = tl.full((), 0, tl.int64) + high
    turn = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        if turn < GUESSES:
            value = 0.5 * (tl.maximum(value_of(low), best - 100.0) + value_of(high))
            middle = tl.minimum(tl.maximum(ordered(value).to(tl.int64), low + 1), high - 1)
        count, total = above(row, middle, best, temperature, least, CHUNK, LISTED)
        reached = count >= target if BY_COUNT else total >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        turn += 1
    return low


@triton.jit
def pick(
    row: tl.tuple,
    key: tl.tensor,
    point: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    TIES: tl.constexpr,
    LISTED: tl.constexpr,
) -> tl.tensor:
    """Return the first id, in the order of ids, at which the cumulative weight exceeds `point`.

    Ids below `key` must have weight 0. With TIES ids of this key weigh 1 and others nothing: the result is
    number `point` of them, from 0 on.
    """
    if LISTED:
        token = _pick_listed(row, key, point, best, temperature, least, CHUNK, TIES)
    else:
        token = _pick_plain(row, key, point, best, temperature, least, CHUNK, TIES)
    return token


@triton.jit
def ties_before(
    row: tl.tuple, key: tl.tensor, token: tl.tensor, CHUNK: tl.constexpr, LISTED: tl.constexpr
) -> tl.tensor:
    """Count the ids below `token` whose logit equals its."""
    x, most, _vocabulary, _chunks, ids, listed, entries = row
    count = tl.full((), 0, tl.int64)
    for c in range(token // CHUNK + 1):
        if ordered(tl.load(most + c)) >= key:
            v = c * CHUNK + tl.arange(0, CHUNK)
            equal = ordered(tl.load(x + v, mask=v < token, other=float("-inf")).to(tl.float32)) == key
            count += tl.sum((equal & (v < token)).to(tl.int32), 0)
    if LISTED:
        count += between_in_list(ids, listed, entries, 0, token, key, 0.0, 1.0, 0, True)
    return count


@triton.jit
def _pick_plain(
    row: tl.tuple,
    key: tl.tensor,
    point: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    TIES: tl.constexpr,
) -> tl.tensor:
    """Pick in a row without a list."""
    x, most, vocabulary, chunks, _ids, _listed, _entries = row
    token = tl.full((), 0, tl.int32)
    left = tl.full((), 0, tl.int64) + point
    for c in range(chunks):
        if (left >= 0) & (ordered(tl.load(most + c)) >= key):
            v = c * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(x + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
            weight = _weight_of(logit, v < vocabulary, key, best, temperature, least, TIES)
            there = tl.sum(weight, 0)
            if there > left:
                token = c * CHUNK + tl.sum((tl.cumsum(weight, 0) <= left).to(tl.int32), 0)
            left -= there
    return token


@triton.jit
def _pick_listed(
    row: tl.tuple,
    key: tl.tensor,
    point: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    CHUNK: tl.constexpr,
    TIES: tl.constexpr,
) -> tl.tensor:
    """Pick in a row with a list. Its ids have no order: bisection finds the id in the chunk where the point
    lies.
    """
    x, most, vocabulary, chunks, ids, listed, entries = row
    token = tl.full((), 0, tl.int32)
    left = tl.full((), 0, tl.int64) + point
    for c in range(tl.cdiv(vocabulary, CHUNK)):
        if left >= 0:
            start = c * CHUNK
            v = start + tl.arange(0, CHUNK)
            read = (v < vocabulary) & (c < chunks) & (ordered(tl.load(most + c)) >= key)
            logit = tl.load(x + v, mask=read, other=float("-inf")).to(tl.float32)
            weight = _weight_of(logit, read, key, best, temperature, least, TIES)
            there = tl.sum(weight, 0)
            there += between_in_list(
                ids, listed, entries, start, start + CHUNK, key, best, temperature, least, TIES
            )
            if there > left:
                low = start
                high = start + CHUNK - 1
                while low < high:
                    middle = (low + high) // 2
                    until = tl.sum(tl.where(v <= middle, weight, 0), 0)
                    until += between_in_list(
                        ids, listed, entries, start, middle + 1, key, best, temperature, least, TIES
                    )
                    low = tl.where(until > left, low, middle + 1)
                    high = tl.where(until > left, middle, high)
                token = low
            left -= there
    return token


@triton.jit
def _weight_of(
    logit: tl.tensor,
    inside: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    TIES: tl.constexpr,
) -> tl.tensor:
    if TIES:
        weight = ((ordered(logit) == key) & inside).to(tl.int64)
    else:
        weight = tl.where(inside, weights(logit, best, temperature, least), 0)
    return weight
