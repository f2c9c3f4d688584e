"""Penalties, biases and bans on the device: they edit the listed ids of a row, and sampling reads those from
the list.

Sums of integers do not depend on their order, so what the list adds to a sum over the row is exact. An entry
whose logit is minus infinity weighs nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...sampling_types import COUNTS, FORBIDDEN, FORBIDDEN_EARLY, ONLY_LISTED, PenaltyState
from .chunk_max import ordered, weights

ENTRIES = tl.constexpr(1024)
"""Entries read at once; most lists are shorter."""


@triton.jit
def above_in_list(
    values: tl.tensor,
    entries: tl.tensor,
    key: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
) -> tl.tensor:
    """Return the number of entries with at least `key` and the sum of their weights, int64."""
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
    """Return the sum of weights of ids low .. high - 1; with TIES the number of them that have this key.
    int64.
    """
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
    """Return the largest logit, minus infinity for no entries, and 1 if one is NaN, int32."""
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
    """Return the logit of an id; minus infinity if it is not listed."""
    found = tl.full((), float("-inf"), tl.float32)
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        v = tl.load(ids + e, mask=e < entries, other=-1)
        value = tl.load(values + e, mask=(v == token) & (e < entries), other=float("-inf"))
        found = tl.maximum(found, tl.max(value, 0))
    return found


@triton.jit
def put_back(x: tl.tensor, ids: tl.tensor, values: tl.tensor, entries: tl.tensor) -> None:
    """Restore the model's logits, in the dtype they came in, so that nothing is rounded."""
    for start in range(0, entries, ENTRIES):
        e = start + tl.arange(0, ENTRIES)
        v = tl.load(ids + e, mask=e < entries, other=0)
        value = tl.load(values + e, mask=e < entries, other=0.0)
        tl.store(x + v, value.to(x.dtype.element_ty), mask=e < entries)


BLOCK = 1024
IS_COUNTING = tl.constexpr(COUNTS)
IS_ONLY_LISTED = tl.constexpr(ONLY_LISTED)
IS_FORBIDDEN = tl.constexpr(FORBIDDEN)
IS_FORBIDDEN_EARLY = tl.constexpr(FORBIDDEN_EARLY)
LARGEST = tl.constexpr(3.4028234663852886e38)


def edit(logits_SV: Tensor, position_S: Tensor, rules: PenaltyState) -> None:
    """Edit the logits for the tokens that are drawn at `position_S`, and count the last tokens."""
    _launch(logits_SV, position_S, rules, edits=True)


def count_last_tokens(position_S: Tensor, rules: PenaltyState) -> None:
    """Count the last tokens of rows that are sampled elsewhere. `edit` counts no token twice."""
    _launch(rules.values_3N, position_S, rules, edits=False)


def _launch(logits_SV: Tensor, position_S: Tensor, rules: PenaltyState, *, edits: bool) -> None:
    edit_kernel[(len(position_S),)](
        logits_SV,
        position_S,
        rules.row_S,
        rules.facts_R5,
        rules.penalties_R3,
        rules.last_R,
        rules.marks_3N,
        rules.values_3N,
        rules.word_starts_S1,
        rules.word_last_W,
        rules.word_id_W,
        logits_SV.stride(0),
        rules.marks_3N.shape[1],
        BLOCK=BLOCK,
        EDITS=edits,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=["entries"],
    do_not_specialize_on_alignment=["positions", "rows", "word_starts", "word_lasts", "word_ids"],
)
def edit_kernel(
    logits: tl.tensor,
    positions: tl.tensor,
    rows: tl.tensor,
    facts: tl.tensor,
    penalties: tl.tensor,
    lasts: tl.tensor,
    marks: tl.tensor,
    values: tl.tensor,
    word_starts: tl.tensor,
    word_lasts: tl.tensor,
    word_ids: tl.tensor,
    row_stride: tl.tensor,
    entries: tl.tensor,
    BLOCK: tl.constexpr,
    EDITS: tl.constexpr,
) -> None:
    """Count the row's last token, then move the logits of its entries to the list and set them to minus
    infinity in the row.

    With EDITS the list gets the model's logit and the edited one: bias, repetition, frequency and presence
    penalty, bans. Arithmetic is float32. Reference: `engine/sampling/logits_processors.py`.
    """
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + s)
    count = tl.load(facts + row * 5 + 1)
    kind = tl.load(facts + row * 5 + 4)
    first = tl.load(facts + row * 5)
    x = logits + s * row_stride
    ids, counts, flags = marks + first, marks + entries + first, marks + 2 * entries.to(tl.int64) + first
    biases, raws, edits = values + first, values + entries + first, values + 2 * entries.to(tl.int64) + first
    position = tl.load(positions + s).to(tl.int64)
    token = tl.load(lasts + row)
    counting = ((kind & IS_COUNTING) != 0) & (position > tl.load(facts + row * 5 + 2))
    early = position < tl.load(facts + row * 5 + 3)
    repetition = tl.load(penalties + row * 3)
    frequency = tl.load(penalties + row * 3 + 1)
    presence = tl.load(penalties + row * 3 + 2)
    word, words_end = tl.load(word_starts + s), tl.load(word_starts + s + 1)
    found = tl.full((), 0, tl.int32)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        inside = e < count
        v = tl.load(ids + e, mask=inside, other=0)
        drawn = tl.load(counts + e, mask=inside, other=-1)
        flag = tl.load(flags + e, mask=inside, other=0)
        hit = inside & counting & (v == token)
        found = tl.maximum(found, tl.max(hit.to(tl.int32), 0))
        drawn = tl.where(hit, tl.maximum(drawn, 0) + 1, drawn)
        tl.store(counts + e, drawn, mask=hit)
        if EDITS:
            raw = tl.load(x + v, mask=inside, other=float("-inf")).to(tl.float32)
            bias = tl.load(biases + e, mask=inside, other=0.0)
            new = changed(raw, bias, drawn, repetition, frequency, presence)
            banned = ((flag & IS_FORBIDDEN) != 0) | (((flag & IS_FORBIDDEN_EARLY) != 0) & early)
            for w in range(word, words_end):
                asked = tl.load(word_lasts + w)
                banned = banned | ((v == tl.load(word_ids + w)) & ((asked < 0) | (asked == token)))
            tl.store(raws + e, raw, mask=inside)
            tl.store(edits + e, tl.where(banned, float("-inf"), new), mask=inside)
            tl.store(x + v, float("-inf"), mask=inside)
    raw = tl.load(x + token).to(tl.float32) if EDITS else 0.0
    tl.debug_barrier()  # all threads have read what the next lines overwrite
    if counting & (found == 0):
        only = (kind & IS_ONLY_LISTED) != 0
        tl.store(ids + count, token.to(tl.int32))
        tl.store(counts + count, 1)
        tl.store(flags + count, tl.where(only, IS_FORBIDDEN, 0))
        tl.store(biases + count, 0.0)
        tl.store(facts + row * 5 + 1, count + 1)
        if EDITS:
            new = changed(raw, tl.full((), 0.0, tl.float32), found + 1, repetition, frequency, presence)
            tl.store(raws + count, raw)
            tl.store(edits + count, tl.where(only, float("-inf"), new))
            tl.store(x + token, float("-inf"))
    if counting:
        tl.store(facts + row * 5 + 2, position)


@triton.jit
def changed(
    raw: tl.tensor,
    bias: tl.tensor,
    drawn: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
) -> tl.tensor:
    """Apply the bias and the penalties to a logit, float32: (x / r or x * r) - frequency * count -
    presence.
    """
    old = bounded(raw + bias, raw)
    new = tl.where(old > 0, tl.div_rn(old, repetition), old * repetition)
    new = tl.where(drawn >= 0, new, old)
    times = tl.maximum(drawn, 0).to(tl.float32)
    new = new - frequency * times
    new = new - tl.where(drawn > 0, presence, 0.0)
    return bounded(new, old)


@triton.jit
def bounded(new: tl.tensor, old: tl.tensor) -> tl.tensor:
    """Clamp the result: a finite logit stays finite."""
    return tl.where(tl.abs(old) < float("inf"), tl.minimum(tl.maximum(new, -LARGEST), LARGEST), old)
