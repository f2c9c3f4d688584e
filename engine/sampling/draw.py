"""Sample one id per row: greedy, from the whole vocabulary, or from ranked candidates.

Filters follow vLLM's order: min-p, then top-k, then top-p over the rest. Top-k keeps exactly k. A token is
sampled by inverting the cumulative distribution of integer probabilities ("weights", `integer_softmax.py`):
in vocabulary order where no filter needs a ranking, best first otherwise. Each row uses one uniform number.

R rows, V vocabulary, K candidates, B bins.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .integer_softmax import ONE, weights
from .topk import FindBest, best_of, ranked


class SamplingTensors(NamedTuple):
    """Sampling parameters of rows, each a tensor [R] on the device of the logits.

    float64 except `top_k`: products with sums of weights must not lose the order of two tokens.
    """

    temperature: Tensor
    top_k: Tensor
    """Vocabulary size where top-k is off."""
    top_p: Tensor
    min_p: Tensor | None
    """None where no row uses it."""
    noise: Tensor


class SampledRows(NamedTuple):
    """Results of rows, each a tensor [R]."""

    id: Tensor
    best: Tensor
    """Largest logit of the row: NaN, inf or -inf mean that the row has no valid id."""
    covered: Tensor
    """False: the candidates were too few to determine the id; sample again from more."""


def draw_greedy(logits_RV: Tensor, find_best: FindBest = best_of) -> SampledRows:
    best_R, id_R = find_best(logits_RV)
    return SampledRows(id_R, best_R, torch.ones_like(id_R, dtype=torch.bool))


def draw_whole(logits_RV: Tensor, knobs: SamplingTensors) -> SampledRows:
    """Sample with temperature and min-p only, which need no ranking."""
    best_R1 = logits_RV.amax(-1, keepdim=True)
    weight_RV = weights_above(logits_RV, best_R1, knobs)
    until_RV = weight_RV.cumsum(-1)
    id_R = invert(until_RV, points(until_RV[:, -1], knobs.noise))
    return SampledRows(id_R, best_R1[:, 0], torch.ones_like(id_R, dtype=torch.bool))


def draw_ranked(logits_RV: Tensor, knobs: SamplingTensors, size: int, *, cuts_k: bool) -> SampledRows:
    """Sample with top-k and top-p over the `size` best ids. `cuts_k`: every row has a top-k <= `size`."""
    value_RK, id_RK, certain_R = ranked(logits_RV, size)
    return choose_ranked(logits_RV, value_RK, id_RK, certain_R, knobs, cuts_k=cuts_k)


def choose_ranked(
    logits_RV: Tensor,
    value_RK: Tensor,
    id_RK: Tensor,
    certain_R: Tensor,
    knobs: SamplingTensors,
    *,
    cuts_k: bool,
) -> SampledRows:
    """Sample from the best (values, ids) of each row, of which the first `certain_R` are surely in order."""
    total_R = None if cuts_k else weights_above(logits_RV, value_RK[:, :1], knobs).sum(-1)
    return draw_among(value_RK, id_RK, certain_R, knobs, total_R)


def draw_among(
    value_RK: Tensor, id_RK: Tensor, certain_R: Tensor, knobs: SamplingTensors, total_R: Tensor | None
) -> SampledRows:
    """Do as `choose_ranked`. `total_R`: sums of weights over all ids; None where top-k keeps only these."""
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
    # The kept ids are a prefix, exact if it ends before the first uncertain candidate.
    covered_R = kept_RK.sum(-1) <= certain_R
    return SampledRows(id_RK.gather(1, column_R[:, None])[:, 0], best_R1[:, 0], covered_R)


def weights_above(logits: Tensor, best_R1: Tensor, knobs: SamplingTensors) -> Tensor:
    """Compute integer probabilities at the rows' temperatures, 0 where min-p filters."""
    weight = weights(logits, best_R1, knobs.temperature)
    if knobs.min_p is None:
        return weight
    least_R1 = (knobs.min_p * ONE).to(torch.int64)[:, None]
    return torch.where(weight >= least_R1, weight, 0)


def points(total_R: Tensor, noise_R: Tensor) -> Tensor:
    """Map each row's noise to a point of its cumulative weights, [R] int64."""
    return torch.minimum((noise_R * total_R).to(torch.int64), total_R - 1)


def invert(cumulative: Tensor, point_R: Tensor) -> Tensor:
    """Invert the cumulative weights: the first column of each row that exceeds its point, [R]."""
    column_R = torch.searchsorted(cumulative, point_R[:, None], right=True)[:, 0]
    return column_R.clamp_(max=cumulative.shape[1] - 1)  # NaN rows get any column: the caller rejects them


_BINS = 2048
_DEEPEST = -28.0
# Below it a weight is 0 (2^-40 = e^-27.7), so all lower logits share the last bin.


def draw_binned(logits_RV: Tensor, knobs: SamplingTensors) -> SampledRows:
    """Sample with top-p by a histogram of logits: the result of `draw_ranked` over the whole vocabulary.

    For rows without top-k.
    """
    best_R1 = logits_RV.amax(-1, keepdim=True)
    weight_RV = weights_above(logits_RV, best_R1, knobs)
    ids = [
        _draw_row(logits_V, weight_V, _bins(logits_V - best, temperature), top_p, noise)
        for logits_V, weight_V, best, temperature, top_p, noise in zip(
            logits_RV,
            weight_RV,
            best_R1,
            knobs.temperature.tolist(),
            knobs.top_p.tolist(),
            knobs.noise.tolist(),
            strict=True,
        )
    ]
    id_R = torch.tensor(ids, device=logits_RV.device)
    return SampledRows(id_R, best_R1[:, 0], torch.ones_like(id_R, dtype=torch.bool))


def _bins(below_best_V: Tensor, temperature: float) -> Tensor:
    """Return the bin of each id: ids of a bin are likelier than all of the next; equal logits share a bin."""
    depth_V = (below_best_V / temperature).clamp_(min=_DEEPEST)
    return depth_V.mul_((_BINS - 1) / _DEEPEST).to(torch.int64)


def _draw_row(logits_V: Tensor, weight_V: Tensor, bin_V: Tensor, top_p: float, noise: float) -> int:
    until_B = weight_V.new_zeros(_BINS).scatter_add_(0, bin_V, weight_V).cumsum(0)
    limit = top_p * float(until_B[-1])
    edge = int((until_B.double() < limit).sum())
    before = _mass_before(until_B, edge)
    _, weight_K = _ranked_bin(logits_V, weight_V, bin_V, edge)
    before_K = before + weight_K.cumsum(0) - weight_K
    kept = before + int(weight_K[before_K.double() < limit].sum())

    point = min(int(noise * kept), kept - 1)
    place = int(torch.searchsorted(until_B, point, right=True))
    id_K, weight_K = _ranked_bin(logits_V, weight_V, bin_V, place)
    into = point - _mass_before(until_B, place)
    return int(id_K[torch.searchsorted(weight_K.cumsum(0), into, right=True)])


def _mass_before(until_B: Tensor, index: int) -> int:
    return int(until_B[index - 1]) if index else 0


def _ranked_bin(logits_V: Tensor, weight_V: Tensor, bin_V: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Return the ids of one bin and their weights, best first, ties by lowest id."""
    id_K = (bin_V == index).nonzero()[:, 0]
    id_K = id_K[torch.sort(logits_V[id_K], descending=True, stable=True).indices]
    return id_K, weight_V[id_K]
