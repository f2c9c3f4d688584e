"""State of running requests that stays on the device from step to step, one fixed row each.

R rows, V vocabulary, B blocks of the longest context. For backends with `Ops.sample` and `Ops.advance`.
"""

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Sampled:
    """All [R], written anew by each call."""

    ids: Tensor
    """int64."""
    best: Tensor
    """float32: the row's largest logit. NaN or inf: the model is broken; -inf: nothing is left to choose."""
    logit: Tensor
    """float32, of the drawn id."""
    total: Tensor
    """int64: sum over the vocabulary of floor(2^40 exp(logit - best)), from which logprobs follow:
    logit - best - log(total / 2^40)."""
    rank: Tensor
    """int32: 1 for the most likely id, equal logits by lowest id."""
