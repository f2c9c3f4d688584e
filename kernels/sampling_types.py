"""Data types of sampling: state of running requests that stays on the device, one fixed row each.

R rows, S of them sampled in this step, V vocabulary, B blocks of the longest context, N entries of all
penalty lists, W bad words of a step. Used by backends with `Ops.sample` and `Ops.prepare_decode_inputs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode state of the rows. A row of length 0 is free: it writes no KV, and its attention is 0."""

    ids_R: Tensor
    """int64: each request's last token, whose KV is not computed yet."""
    lengths_R: Tensor
    """int32: number of tokens so far, the last one included."""
    tables_RB: Tensor
    """int32: block table of each row."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of a decode step over R rows of one token, int32; `Ops.prepare_decode_inputs` writes them."""

    positions_R: Tensor
    slots_R: Tensor
    """-1 in free rows: `write_kv` skips them."""
    context_lens_R: Tensor


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Sampling parameters of each row, all [R]; `kernels/reference/sampling.py` defines their meaning."""

    temperature: Tensor
    """float64; below 1e-5: greedy."""
    top_k: Tensor
    """int32; 0 keeps all."""
    top_p: Tensor
    """float64."""
    min_p: Tensor
    """float64."""
    seed: Tensor
    """int64, read as 64 unsigned bits."""
    position: Tensor
    """int32 or int64: position of the token that is sampled."""
    logprobs: Tensor
    """int32: not 0 where `Sampled.logit`, `total` and `rank` are wanted. They are undefined elsewhere."""


ONLY_LISTED = 1
"""Row flag: ids that are not in the row's list are banned."""
COUNTS = 2
"""Row flag: sampled tokens are counted."""
FORBIDDEN = 1
"""Entry flag: the id is banned."""
FORBIDDEN_EARLY = 2
"""Entry flag: the id is banned while the row is at a position before its `until`."""


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """Penalties, biases and bans applied to logits; `engine/sampling/logits_processors.py` defines the
    arithmetic.

    Each row has a list of the ids that its parameters touch, each id once. `Ops.sample` keeps the counts:
    before it draws the next token it counts the row's last one, and adds it to the list if there is room.
    """

    row_S: Tensor
    """int64: row of the state for each row of logits."""
    facts_R5: Tensor
    """int64: first entry; number of entries (updated); position after which last tokens are to be counted;
    `until`; flags. A row without entries and flags has no penalties.
    """
    penalties_R3: Tensor
    """float32: repetition, frequency, presence."""
    last_R: Tensor
    """int64: the last token."""
    marks_3N: Tensor
    """int32: id; number of times it was sampled (updated), -1 if it is not even in the prompt; flags."""
    values_3N: Tensor
    """float32: bias; two more that `Ops.sample` writes, the model's logit and the edited one."""
    word_starts_S1: Tensor
    """int32: first bad word of each row in the two tensors below."""
    word_last_W: Tensor
    """int64: last token after which `word_id_W` is banned; negative: after any token."""
    word_id_W: Tensor
    """int64: the id that must not come next. It is in the row's list."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of sampling, all [R]. New tensors at each call."""

    ids: Tensor
    """int64."""
    best: Tensor
    """float32: the row's largest logit after penalties and bans. -inf: every id is banned."""
    raw_best: Tensor
    """float32: the largest logit of the model. NaN or inf: the model's output is broken."""
    logit: Tensor
    """float32: the model's logit of the sampled id. `total` and `rank` are of the model's logits too."""
    total: Tensor
    """int64: sum over the vocabulary of floor(2^40 exp(logit - raw_best)), from which logprobs follow:
    logit - raw_best - log(total / 2^40)."""
    rank: Tensor
    """int32: 1 for the likeliest id; equal logits are ranked by lowest id."""


class LogitEdits(NamedTuple):
    """Edits of a request's row of logits before sampling. Ids lie in the vocabulary."""

    bias_ids: Tensor
    """int64, all different."""
    biases: Tensor
    """float32."""
    counted_ids: Tensor
    """int64, all different: ids that penalties touch."""
    counts: Tensor
    """float32: number of times each id occurs in the output."""
    repetition: float
    frequency: float
    presence: float
    forbidden: Sequence[int]
    allowed: Tensor | None
    """int64, ascending: the only ids that are not banned. None: all ids are allowed."""


class DrawRow(NamedTuple):
    """Sampling parameters of one row for `Ops.draw`."""

    temperature: float
    """Below 1e-5: greedy."""
    top_p: float
    min_p: float
    top_k: int
    """0, or at least the vocabulary's size: top-k is off."""
    seed: int
    position: int
    """Position of the token that is sampled. Noise is a function of it and the seed."""
    edits: LogitEdits | None


class CandidateRanks(NamedTuple):
    """Logprob statistics of S rows with N alternatives each, from `Ops.rank`."""

    stats_S4: Tensor
    """float64: largest logit, sum over the vocabulary of floor(2^40 exp(logit - largest)), logit of the
    chosen id, its rank. Rank 1 is the likeliest; equal logits rank by lowest id. Only the largest logit is
    set where it is not finite.
    """
    ids_SN: Tensor
    """int64: the N likeliest ids, in order."""
    logits_SN: Tensor
    """float32: their logits."""
