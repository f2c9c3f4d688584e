"""Walks over one row of logits for `sample`: sums above a threshold, the threshold for a sum, the n-th tie.

x is the row, `most` the largest logit of each chunk of it. Logits are compared as integers in the same order
("keys"), so that a bisection ends; weights are those of `engine/sampler/weights.py`.
"""

import triton
import triton.language as tl

GUESSES = tl.constexpr(26)
"""Halvings of values before halvings of keys: values narrow down faster, keys end for certain."""


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """Float32 -> int32 of the same order; both zeros are one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key: tl.tensor) -> tl.tensor:
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weights(x: tl.tensor, best: tl.tensor, temperature: tl.tensor, least: tl.tensor) -> tl.tensor:
    scaled = tl.maximum(tl.div_rn(x - best, temperature), -50.0)
    weight = (tl.exp(scaled) * 1099511627776.0).to(tl.int64)
    return tl.where(weight >= least, weight, 0)


@triton.jit
def above(
    x: tl.tensor,
    most: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """How many ids have at least `key`, and what they weigh; int64."""
    count = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for c in range(chunks):
        if ordered(tl.load(most + c)) >= key:
            v = c * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(x + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
            inside = (ordered(logit) >= key) & (v < vocabulary)
            count += tl.sum(inside.to(tl.int32), 0)
            total += tl.sum(tl.where(inside, weights(logit, best, temperature, least), 0), 0)
    return count, total


@triton.jit
def find(
    x: tl.tensor,
    most: tl.tensor,
    target: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    BY_COUNT: tl.constexpr,
) -> tl.tensor:
    """The largest key that ids of `target` in number, or weight, reach. `low` is reached, `high` is not."""
    low = tl.full((), 0, tl.int64) + low
    high = tl.full((), 0, tl.int64) + high
    turn = 0
    while high - low > 1:
        middle = low + (high - low) // 2
        if turn < GUESSES:
            value = 0.5 * (tl.maximum(value_of(low), best - 100.0) + value_of(high))
            middle = tl.minimum(tl.maximum(ordered(value).to(tl.int64), low + 1), high - 1)
        count, total = above(x, most, middle, best, temperature, least, vocabulary, chunks, CHUNK)
        reached = count >= target if BY_COUNT else total >= target
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
        turn += 1
    return low


@triton.jit
def pick(
    x: tl.tensor,
    most: tl.tensor,
    key: tl.tensor,
    point: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr,
    TIES: tl.constexpr,
) -> tl.tensor:
    """The first id, in the order of ids, at which the sum of weights exceeds `point`; ids below `key` must
    weigh nothing. TIES: ids of this key weigh 1 and others nothing, so it is their number `point` from 0 on.
    """
    token = tl.full((), 0, tl.int32)
    left = tl.full((), 0, tl.int64) + point
    for c in range(chunks):
        if (left >= 0) & (ordered(tl.load(most + c)) >= key):
            v = c * CHUNK + tl.arange(0, CHUNK)
            logit = tl.load(x + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
            if TIES:
                weight = ((ordered(logit) == key) & (v < vocabulary)).to(tl.int64)
            else:
                weight = weights(logit, best, temperature, least)
            there = tl.sum(weight, 0)
            if there > left:
                token = c * CHUNK + tl.sum((tl.cumsum(weight, 0) <= left).to(tl.int32), 0)
            left -= there
    return token
