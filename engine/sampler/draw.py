"""Choosing one id a row: greedy, from the whole vocabulary, or from the ranked candidates.

The filters follow vLLM's order: min-p, then top-k, then top-p over what those leave. Top-k keeps exactly k.
A token is drawn by inverting the cumulative weights: in vocabulary order where nothing needs a ranking,
best first otherwise. One uniform number a row is all the noise there is.

Legend: R rows, V vocabulary, K candidates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .ranking import FindBest, best_of, ranked
from .weights import ONE, weights


class Knobs(NamedTuple):
    """Sampling parameters of some rows, each a tensor [R] on the device of the logits.

    float64 except `top_k`: products with sums of weights must not lose the order of two tokens.
    """

    temperature: Tensor
    top_k: Tensor
    """The vocabulary size where nothing is cut."""
    top_p: Tensor
    min_p: Tensor | None
    """None where no row uses it."""
    noise: Tensor


class Drawn(NamedTuple):
    """Per row, each a tensor [R]."""

    id: Tensor
    best: Tensor
    """The row's largest logit: NaN, inf or -inf mean that the row has no valid id."""
    covered: Tensor
    """False: the candidates were too few to know the answer; draw again from more."""


def draw_greedy(logits_RV: Tensor, find_best: FindBest = best_of) -> Drawn:
    best_R, id_R = find_best(logits_RV)
    return Drawn(id_R, best_R, torch.ones_like(id_R, dtype=torch.bool))


def draw_whole(logits_RV: Tensor, knobs: Knobs) -> Drawn:
    """Temperature and min-p only: no ranking needed."""
    best_R1 = logits_RV.amax(-1, keepdim=True)
    weight_RV = weights_above(logits_RV, best_R1, knobs)
    until_RV = weight_RV.cumsum(-1)
    id_R = invert(until_RV, points(until_RV[:, -1], knobs.noise))
    return Drawn(id_R, best_R1[:, 0], torch.ones_like(id_R, dtype=torch.bool))


def draw_ranked(logits_RV: Tensor, knobs: Knobs, size: int, *, cuts_k: bool) -> Drawn:
    """Top-k and top-p over the `size` best ids. `cuts_k`: every row has a top-k of at most `size`."""
    value_RK, id_RK, certain_R = ranked(logits_RV, size)
    return choose_ranked(logits_RV, value_RK, id_RK, certain_R, knobs, cuts_k=cuts_k)


def choose_ranked(
    logits_RV: Tensor, value_RK: Tensor, id_RK: Tensor, certain_R: Tensor, knobs: Knobs, *, cuts_k: bool
) -> Drawn:
    """From the best (values, ids) of each row, of which the first `certain_R` are sure to be in order."""
    total_R = None if cuts_k else weights_above(logits_RV, value_RK[:, :1], knobs).sum(-1)
    return draw_among(value_RK, id_RK, certain_R, knobs, total_R)


def draw_among(
    value_RK: Tensor, id_RK: Tensor, certain_R: Tensor, knobs: Knobs, total_R: Tensor | None
) -> Drawn:
    """As `choose_ranked`. `total_R`: sums of weights over all ids; None where top-k leaves only these."""
    best_R1 = value_RK[:, :1]
    weight_RK = weights_above(value_RK, best_R1, knobs)
    rank_K = torch.arange(weight_RK.shape[1], device=value_RK.device)
    weight_RK = torch.where(rank_K < knobs.top_k[:, None], weight_RK, 0)

    before_RK = weight_RK.cumsum(-1) - weight_RK
    if total_R is None:
        total_R = weight_RK.sum(-1)
    limit_R1 = (knobs.top_p * total_R)[:, None]
    kept_RK = (before_RK < limit_R1) & (weight_RK > 0)

    until_RK = torch.where(kept_RK, weight_RK, 0).cumsum(-1)
    column_R = invert(until_RK, points(until_RK[:, -1], knobs.noise))
    # Kept ids are a prefix; it is known exactly if it ends before the first uncertain candidate.
    covered_R = kept_RK.sum(-1) <= certain_R
    return Drawn(id_RK.gather(1, column_R[:, None])[:, 0], best_R1[:, 0], covered_R)


def weights_above(logits: Tensor, best_R1: Tensor, knobs: Knobs) -> Tensor:
    """Weights at the rows' temperatures, 0 where min-p cuts."""
    weight = weights(logits, best_R1, knobs.temperature)
    if knobs.min_p is None:
        return weight
    least_R1 = (knobs.min_p * ONE).to(torch.int64)[:, None]
    return torch.where(weight >= least_R1, weight, 0)


def points(total_R: Tensor, noise_R: Tensor) -> Tensor:
    """Where in the cumulative weights of each row its noise falls."""
    return torch.minimum((noise_R * total_R).to(torch.int64), total_R - 1)


def invert(cumulative: Tensor, point_R: Tensor) -> Tensor:
    """Column of each row where the cumulative weight first exceeds the point."""
    column_R = torch.searchsorted(cumulative, point_R[:, None], right=True)[:, 0]
    return column_R.clamp_(max=cumulative.shape[1] - 1)  # rows of NaN: any column, the caller rejects them
