"""State of running requests that stays on the device from step to step, one fixed row each.

R rows, S of them that are drawn, V vocabulary, B blocks of the longest context, N entries of all lists of
rules, W bad words of a step. For backends with `Ops.sample` and `Ops.advance`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A row of length 0 is free: it writes no KV, and its attention is 0."""

    ids_R: Tensor
    """int64: each request's last token, whose KV is not computed yet."""
    lengths_R: Tensor
    """int32: its tokens so far, that one included."""
    tables_RB: Tensor
    """int32: its blocks."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What one forward pass over N = R rows of one token each reads; all int32. Written by `Ops.advance`."""

    positions_R: Tensor
    slots_R: Tensor
    """-1 in free rows: `write_kv` skips them."""
    context_lens_R: Tensor


@dataclass(frozen=True, slots=True)
class SampleRows:
    """How each row of logits is drawn; see `engine/sampler` for what each number means. All [R]."""

    temperature: Tensor
    """float64; below 1e-5: greedy."""
    top_k: Tensor
    """int32; 0 keeps all."""
    top_p: Tensor
    """float64."""
    min_p: Tensor
    """float64."""
    seed: Tensor
    """int64, taken as 64 bits."""
    position: Tensor
    """int32 or int64: of the token that is drawn."""
    logprobs: Tensor
    """int32: not 0 where `Sampled.logit`, `total` and `rank` are wanted; they are undefined elsewhere."""


ONLY_LISTED = 1
"""Kind of a row: ids that are not in its list are forbidden."""
COUNTS = 2
"""Kind of a row: what it draws is counted."""
FORBIDDEN = 1
"""Flag of an entry: always."""
FORBIDDEN_EARLY = 2
"""Flag of an entry: while the row is at a position before its `until`."""


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """What changes logits before a token is drawn; see `engine/sampling/logits_processors.py` for the
    arithmetic.

    Each row has a list of the ids that its rules touch, every id once. `Ops.sample` keeps the counts: it
    counts a row's last token before it draws the next one, and adds it to the list, where there is room.
    """

    row_S: Tensor
    """int64: which row of the state each row of logits is."""
    facts_R5: Tensor
    """int64: first entry, number of entries (changed), position from which on last tokens are to be counted,
    `until`, kind. A row without entries and of kind 0 has no rules."""
    penalties_R3: Tensor
    """float32: repetition, frequency, presence."""
    last_R: Tensor
    """int64: the last token."""
    marks_3N: Tensor
    """int32: id; how often it was drawn (changed), -1 where it is not even in the prompt; flags."""
    values_3N: Tensor
    """float32: bias; two more that `Ops.sample` writes, a logit and what the rules make of it."""
    word_starts_S1: Tensor
    """int32: each row's part of these:"""
    word_last_W: Tensor
    """int64: if this was the last token, or if it is negative,"""
    word_id_W: Tensor
    """int64: this one, which is in the row's list, must not come next."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """All [R], written anew by each call."""

    ids: Tensor
    """int64."""
    best: Tensor
    """float32: the row's largest logit, after the rules. -inf: nothing is left to choose."""
    raw_best: Tensor
    """float32: the largest that the model gave. NaN or inf: the model is broken."""
    logit: Tensor
    """float32, of the drawn id, as the model gave it; the same holds of the next two."""
    total: Tensor
    """int64: sum over the vocabulary of floor(2^40 exp(logit - raw_best)), from which logprobs follow:
    logit - raw_best - log(total / 2^40)."""
    rank: Tensor
    """int32: 1 for the most likely id, equal logits by lowest id."""


class LogitEdits(NamedTuple):
    """What a request changes in its row before anything is chosen. Ids lie in the vocabulary."""

    bias_ids: Tensor
    """int64, all different."""
    biases: Tensor
    """float32."""
    counted_ids: Tensor
    """int64, all different: what penalties touch."""
    counts: Tensor
    """float32: how often each stands in the output."""
    repetition: float
    frequency: float
    presence: float
    forbidden: Sequence[int]
    allowed: Tensor | None
    """int64, ascending: all others are forbidden. None: no others are."""


class DrawRow(NamedTuple):
    temperature: float
    """Below 1e-5: greedy."""
    top_p: float
    min_p: float
    top_k: int
    """0, or the vocabulary's size and more, cuts nothing."""
    seed: int
    position: int
    """Of the token that is drawn. It and the seed make the noise."""
    edits: LogitEdits | None


class DrawResult(NamedTuple):
    id: float
    raw_best: float
    """The row's largest logit: NaN, inf or -inf mean that the row has no valid id."""
    best: float
    """After the edits."""


class CandidateRanks(NamedTuple):
    told_S4: Tensor
    """float64: largest logit, sum over the vocabulary of floor(2^40 exp(logit - largest)), logit of the
    chosen id, its rank. Rank 1 is the likeliest; equal logits rank by lowest id. The largest alone is told
    where it is not finite."""
    ids_SN: Tensor
    """int64: the likeliest, in order."""
    logits_SN: Tensor
    """float32, theirs."""


class PartWeights(Protocol):
    """What ids of a part weigh, whose weights are those of `engine/sampling/integer_softmax.py`."""

    @property
    def total_R(self) -> Tensor:  # noqa: N802
        """int64."""
        ...

    def columns(self, point_R: Tensor) -> Tensor:
        """Where the sum of weights first exceeds the point, int64; any column where it does not."""
        ...


@dataclass(frozen=True, slots=True)
class PartOps:
    count: Callable[[Tensor, PenaltyState], None]
    """(position_S, rules): counts each row's last token, unless it was at this position before."""

    candidates: Callable[[Tensor, SampleRows, int, int], Tensor]
    """(logits_RV, rows, K, first id): the best of each row, one where it is greedy, otherwise as many as
    top-k keeps, at most K, in the order of ids; minus infinity after them. int64 [R, K]: bits of the float32
    logit, then 32 bits of the id. A row with NaN or infinity has that first."""

    weigh: Callable[[Tensor, Tensor, SampleRows], PartWeights]
    """(logits_RV, best_R float32 of all parts, rows): at each row's temperature, 0 where min-p cuts."""

    noise: Callable[[SampleRows], Tensor]
    """float64 [R]: `engine.noise.uniform` of seed and position."""
