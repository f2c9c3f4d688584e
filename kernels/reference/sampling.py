"""Sampling in plain torch: the meaning of `Ops.draw`, `Ops.sample` and `Ops.rank`, without synchronizing.

Filters follow vLLM's order: min-p, then top-k, then top-p over the rest. Top-k keeps exactly k. A token is
sampled by inverting the cumulative distribution of integer probabilities ("weights"): in the order of ids
where no filter needs a ranking, likeliest first otherwise. Ties go to the lowest id. Each row uses one
uniform number, a function of (seed, position) alone.

Sums over the vocabulary are sums of integers, so their order cannot change a token.

R rows, V vocabulary, K candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..sampling_types import CandidateRanks, SampleRows

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would leave one token, or overflow."""
ONE = 1 << 40
"""Weight of the likeliest token. The sum of 2^18 such weights is far below 2^63."""
_SMALLEST = -50.0
# exp(-50) is below half a unit; lower values would only produce denormals, which are slow.
_MASK = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingKinds:
    """Sampling methods that the rows of a step need, known on the host: no other one is computed."""

    whole: bool = False
    """There are rows that draw without top-k and top-p."""
    candidates: int = 0
    """Likeliest ids that rows with top-k or top-p need; 0: there are no such rows."""


def sample_rows(logits_RV: Tensor, rows: SampleRows, kinds: SamplingKinds) -> tuple[Tensor, Tensor]:
    """Sample one id for each row; return (ids int64 [R], largest logits [R]).

    A largest logit that is not finite means that the row has no valid id.
    """
    best_R, id_R = torch.max(logits_RV, dim=-1)
    if not (kinds.whole or kinds.candidates):
        return id_R, best_R
    logits_RV, best_R1 = logits_RV.float(), best_R[:, None].float()
    noise_R = uniform_rows(rows.seed, rows.position)
    draws_R = rows.temperature >= GREEDY_BELOW
    cuts_R = (rows.top_k > 0) | (rows.top_p < 1)
    if kinds.whole:
        column_R = _invert(_kept_weights(logits_RV, best_R1, rows), noise_R)
        id_R = torch.where(draws_R & ~cuts_R, column_R, id_R)
    if kinds.candidates:
        value_RK, id_RK = likeliest(logits_RV, min(kinds.candidates, logits_RV.shape[1]))
        column_R = _invert(_nucleus(_kept_weights(value_RK, best_R1, rows), rows), noise_R)
        id_R = torch.where(draws_R & cuts_R, id_RK.gather(1, column_R[:, None])[:, 0], id_R)
    return id_R, best_R


def integer_softmax(logits: Tensor, best_R1: Tensor, temperature_R: Tensor) -> Tensor:
    """Compute floor(2^40 · exp((logit - best) / temperature)) as int64, in the shape of the float32 logits.

    `best_R1`: each row's largest logit. A token less likely than 2^-40 of the best one gets 0 and is never
    sampled; the probability of all those together is below 2^-40 · V, 2e-7 for the largest vocabularies.
    """
    scaled = (logits - best_R1).div_(temperature_R.float()[:, None])
    return scaled.clamp_(min=_SMALLEST).exp_().mul_(float(ONE)).to(torch.int64)


def rank_tokens(logits_RV: Tensor, id_R: Tensor, count: int) -> CandidateRanks:
    """Implement `Ops.rank` for every row: logprob statistics of `id_R`, and the `count` likeliest ids."""
    logits_RV = logits_RV.float()
    best_R = logits_RV.amax(-1)
    total_R = integer_softmax(logits_RV, best_R[:, None], torch.ones_like(best_R)).sum(-1)
    logit_R1 = logits_RV.gather(1, id_R[:, None])
    earlier_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) < id_R[:, None]
    ahead_RV = (logits_RV > logit_R1) | ((logits_RV == logit_R1) & earlier_RV)
    stats = (best_R, total_R, logit_R1[:, 0], ahead_RV.sum(-1) + 1)
    value_RN, id_RN = likeliest(logits_RV, min(count, logits_RV.shape[1]))
    return CandidateRanks(torch.stack([column.double() for column in stats], 1), id_RN, value_RN)


def likeliest(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest (logits_RK, ids_RK), ties by lowest id. NaN counts as the largest.

    They are sorted by integers without ties, so the result does not depend on the algorithm of `topk`.
    """
    logits_RV = logits_RV.float() + 0.0  # minus zero equals zero
    bits_RV = logits_RV.view(torch.int32)
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ _MAGNITUDE, bits_RV)
    # NaN of either sign comes first: an invalid row must show it.
    ordered_RV = torch.where(logits_RV.isnan(), _MAGNITUDE, ordered_RV).to(torch.int64)
    key_RV = (ordered_RV << 32) + (_MASK - torch.arange(logits_RV.shape[1], device=logits_RV.device))
    if 4 * count < key_RV.shape[1]:
        key_RK = torch.topk(key_RV, count, dim=-1, sorted=True).values
    else:
        key_RK = torch.sort(key_RV, dim=-1, descending=True).values[:, :count]
    ordered_RK = (key_RK >> 32).to(torch.int32)
    bits_RK = torch.where(ordered_RK < 0, ordered_RK ^ _MAGNITUDE, ordered_RK)
    return bits_RK.view(torch.float32), _MASK - (key_RK & _MASK)


def uniform_rows(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return noise of (seed, position): multiples of 2^-53 in [0, 1), float64 [R].

    Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the key is the
    64-bit seed, the counter the position of the sampled token. There is no state, so a request that is
    resumed, preempted or batched with others gets the same tokens, on any device. Products of 32-bit words
    wrap around in int64; their low and high words are still correct.
    """
    position_R = position_R.to(torch.int64)
    c0, c1 = position_R & _MASK, position_R >> 32 & _MASK
    c2 = c3 = torch.zeros_like(position_R)
    k0, k1 = seed_R & _MASK, seed_R >> 32 & _MASK
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (high >> 32 & _MASK) ^ c1 ^ k0,
            high & _MASK,
            (low >> 32 & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return ((c1 << 21) | (c0 >> 11)).double() * 2.0**-53


def _kept_weights(logits: Tensor, best_R1: Tensor, rows: SampleRows) -> Tensor:
    """Compute weights at the rows' temperatures, 0 where min-p filters. Greedy rows get any weights."""
    temperature_R = torch.where(rows.temperature >= GREEDY_BELOW, rows.temperature, 1.0)
    weight = integer_softmax(logits, best_R1, temperature_R)
    least_R1 = (rows.min_p * ONE).to(torch.int64)[:, None]
    return torch.where(weight >= least_R1, weight, 0)


def _nucleus(weight_RK: Tensor, rows: SampleRows) -> Tensor:
    """Set the weights of candidates, likeliest first, to 0 where top-k or top-p filters."""
    rank_K = torch.arange(weight_RK.shape[1], device=weight_RK.device)
    cut_RK = (rows.top_k[:, None] > 0) & (rank_K >= rows.top_k[:, None])
    weight_RK = torch.where(cut_RK, 0, weight_RK)
    before_RK = weight_RK.cumsum(-1) - weight_RK
    # In float64: products with sums of weights must not lose the order of two tokens.
    limit_R1 = (rows.top_p * weight_RK.sum(-1))[:, None]
    return torch.where(before_RK < limit_R1, weight_RK, 0)


def _invert(weight: Tensor, noise_R: Tensor) -> Tensor:
    """Return each row's first column whose cumulative weight exceeds the noise times the whole weight."""
    until = weight.cumsum(-1)
    total_R = until[:, -1]
    point_R = torch.minimum((noise_R * total_R).to(torch.int64), total_R - 1)
    column_R = torch.searchsorted(until, point_R[:, None], right=True)[:, 0]
    return column_R.clamp_(max=weight.shape[1] - 1)  # NaN rows get any column: the caller rejects them
