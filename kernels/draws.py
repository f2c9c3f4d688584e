"""How rows of logits are drawn on the host: what `Ops.draw` and `Ops.rank` take and give.

S rows, N alternatives asked for. What each number means: `engine/sampler`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Edits(NamedTuple):
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
    edits: Edits | None


class Drawn(NamedTuple):
    id: float
    raw_best: float
    """The row's largest logit: NaN, inf or -inf mean that the row has no valid id."""
    best: float
    """After the edits."""


class Ranks(NamedTuple):
    told_S4: Tensor
    """float64: largest logit, sum over the vocabulary of floor(2^40 exp(logit - largest)), logit of the
    chosen id, its rank. Rank 1 is the likeliest; equal logits rank by lowest id. The largest alone is told
    where it is not finite."""
    ids_SN: Tensor
    """int64: the likeliest, in order."""
    logits_SN: Tensor
    """float32, theirs."""
