"""Walks over the listed ids of a row: those whose logits rules have changed (`edit.py`).

Sums of integers do not depend on their order, so what the list adds to a sum over the row is exact. An entry
whose logit is minus infinity weighs nothing.
"""

import triton
import triton.language as tl

from .ordered import ordered, weights

ENTRIES = tl.constexpr(1024)
"""Read at once: most lists are shorter."""


@triton.jit
def above_in_list(
    values: tl.tensor,
    entries: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
) -> tl.tensor:
    """How many have at least `key`, and what they weigh; int64."""
    count = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        value = tl.load(values + e, mask=e < entries, other=float("-inf"))
        inside = (ordered(value) >= key) & (e < entries)
        count += tl.sum(inside.to(tl.int32), 0)
        total += tl.sum(tl.where(inside, weights(value, best, temperature, least), 0), 0)
    return count, total


@triton.jit
def between_in_list(
    ids: tl.tensor,
    values: tl.tensor,
    entries: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    TIES: tl.constexpr,
) -> tl.tensor:
    """What ids from `low` to below `high` weigh; TIES: how many of them have this key. int64."""
    total = tl.full((), 0, tl.int64)
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        v = tl.load(ids + e, mask=e < entries, other=-1)
        inside = (v >= low) & (v < high) & (e < entries)
        value = tl.load(values + e, mask=inside, other=float("-inf"))
        if TIES:
            total += tl.sum(((ordered(value) == key) & inside).to(tl.int32), 0)
        else:
            total += tl.sum(tl.where(inside, weights(value, best, temperature, least), 0), 0)
    return total


@triton.jit
def largest_in_list(values: tl.tensor, entries: tl.tensor) -> tl.tensor:
    """The largest logit, minus infinity of none; and whether one is NaN, int32."""
    most = tl.full((), float("-inf"), tl.float32)
    broken = tl.full((), 0, tl.int32)
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        value = tl.load(values + e, mask=e < entries, other=float("-inf"))
        is_nan = value != value  # noqa: PLR0124 - a maximum would pass over NaN
        broken = tl.maximum(broken, tl.max(is_nan.to(tl.int32), 0))
        most = tl.maximum(most, tl.max(tl.where(is_nan, float("-inf"), value), 0))
    return most, broken


@triton.jit
def logit_in_list(ids: tl.tensor, values: tl.tensor, entries: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Of this id; minus infinity where it is not listed."""
    found = tl.full((), float("-inf"), tl.float32)
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        v = tl.load(ids + e, mask=e < entries, other=-1)
        value = tl.load(values + e, mask=(v == token) & (e < entries), other=float("-inf"))
        found = tl.maximum(found, tl.max(value, 0))
    return found


@triton.jit
def put_back(x: tl.tensor, ids: tl.tensor, values: tl.tensor, entries: tl.tensor) -> None:
    """The model's logits where they were: in whatever dtype they came, so that nothing is rounded."""
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        v = tl.load(ids + e, mask=e < entries, other=0)
        value = tl.load(values + e, mask=e < entries, other=0.0)
        tl.store(x + v, value.to(x.dtype.element_ty), mask=e < entries)
