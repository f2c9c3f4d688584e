"""Sampling without synchronizing with the device: the reference of `Ops.sample` in plain torch.

Results equal those of `sampler.py`, which reads the device's results to choose its next operation and so is
cheaper where that costs nothing (on a CPU). R rows, V vocabulary, K candidates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import Sampled, SampleRows

from .draw import SampledRows, SamplingTensors, choose_ranked, draw_greedy, draw_whole
from .integer_softmax import weights
from .philox import uniform_rows
from .topk import best_of

GREEDY_BELOW = 1e-5
_LARGEST_ID = (1 << 32) - 1
_MAGNITUDE = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class SamplingKinds:
    """Sampling methods that the rows of a step need, known on the host: no other one is computed."""

    greedy: bool = False
    whole: bool = False
    """Rows without top-k and top-p."""
    candidates: int = 0
    """Best ids that rows with top-k or top-p need; 0: there are no such rows."""


def plain_sample(logits_RV: Tensor, rows: SampleRows, needs: SamplingKinds) -> SampledRows:
    drawn = None
    if needs.greedy:
        drawn = draw_greedy(logits_RV)
    if needs.whole or needs.candidates:
        knobs = sampling_tensors(logits_RV.shape[1], rows)
        cuts_R = (rows.top_k > 0) | (rows.top_p < 1)
        if needs.whole:
            drawn = _pick(drawn, draw_whole(logits_RV.float(), knobs), rows.temperature >= GREEDY_BELOW)
        if needs.candidates:
            ranked = _draw_ranked(logits_RV.float(), knobs, needs.candidates)
            drawn = _pick(drawn, ranked, (rows.temperature >= GREEDY_BELOW) & cuts_R)
    assert drawn is not None
    return drawn


def likeliest(logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` best (logits_RK, ids_RK), ties by lowest id."""
    return from_keys(largest(keys(logits_RV), count))


def keys(logits_RV: Tensor, first_id: int = 0) -> Tensor:
    """Return int64 sort keys: larger is likelier, without ties in a row.

    `first_id`: id of the first column.
    """
    logits_RV = logits_RV.float() + 0.0  # minus zero equals zero
    bits_RV = logits_RV.view(torch.int32)
    ordered_RV = torch.where(bits_RV < 0, bits_RV ^ _MAGNITUDE, bits_RV)
    # NaN of either sign comes first: an invalid row must show it.
    ordered_RV = torch.where(logits_RV.isnan(), _MAGNITUDE, ordered_RV).to(torch.int64)
    id_V = torch.arange(first_id, first_id + logits_RV.shape[1], device=logits_RV.device)
    return (ordered_RV << 32) + (_LARGEST_ID - id_V)


def largest(key_RV: Tensor, count: int) -> Tensor:
    """Return the `count` largest keys in order: without ties the result does not depend on the algorithm."""
    if 4 * count < key_RV.shape[1]:
        return torch.topk(key_RV, count, dim=-1, sorted=True).values
    return torch.sort(key_RV, dim=-1, descending=True).values[:, :count]


def from_keys(key_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Decode `keys` to (logits, ids)."""
    ordered_RK = (key_RK >> 32).to(torch.int32)
    bits_RK = torch.where(ordered_RK < 0, ordered_RK ^ _MAGNITUDE, ordered_RK)
    return bits_RK.view(torch.float32), _LARGEST_ID - (key_RK & _LARGEST_ID)


def facts(logits_RV: Tensor, ids_R: Tensor) -> Sampled:
    """Compute numbers for log-probabilities and ranks of these ids, from the model's unchanged logits."""
    logits_RV = logits_RV.float()
    best_R = best_of(logits_RV)[0]
    total_R = weights(logits_RV, best_R[:, None], torch.ones_like(best_R)).sum(-1)
    logit_R1 = logits_RV.gather(1, ids_R[:, None])
    earlier_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) < ids_R[:, None]
    ahead_RV = (logits_RV > logit_R1) | ((logits_RV == logit_R1) & earlier_RV)
    rank_R = ahead_RV.sum(-1, dtype=torch.int32) + 1
    return Sampled(ids_R, best_R, best_R, logit_R1[:, 0], total_R, rank_R)


def sampling_tensors(vocab_size: int, rows: SampleRows) -> SamplingTensors:
    """Build `SamplingTensors`. Greedy rows get temperature 1; their samples are not used."""
    return SamplingTensors(
        temperature=torch.where(rows.temperature >= GREEDY_BELOW, rows.temperature, 1.0),
        top_k=torch.where(rows.top_k > 0, rows.top_k, vocab_size).to(torch.int64),
        top_p=rows.top_p,
        min_p=rows.min_p,
        noise=uniform_rows(rows.seed, rows.position),
    )


def _draw_ranked(logits_RV: Tensor, knobs: SamplingTensors, candidates: int) -> SampledRows:
    vocab_size = logits_RV.shape[1]
    value_RK, id_RK = likeliest(logits_RV, min(candidates, vocab_size))
    certain_R = torch.full((len(id_RK),), vocab_size, device=logits_RV.device)  # all in order
    return choose_ranked(logits_RV, value_RK, id_RK, certain_R, knobs, cuts_k=True)


def _pick(before: SampledRows | None, drawn: SampledRows, taken_R: Tensor) -> SampledRows:
    if before is None:
        return drawn
    return SampledRows(torch.where(taken_R, drawn.id, before.id), before.best, before.covered)
