"""Log-probabilities of chosen tokens, from the logits as the model gave them.

Penalties, bias, masks and temperature are not in them (vLLM's default, `raw_logprobs`). Rank 1 is the most
likely token; equal logits rank by lowest id, so the n-th entry of `top` has rank n.

Legend: R rows, V vocabulary, K candidates.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..messages import TokenLogprobs
from .ranking import best_of, next_size, ranked
from .weights import log_total, weights


def token_logprobs(logits_RV: Tensor, chosen: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row of float32 logits: the chosen id and the row's `top` best ids.

    A row with NaN or infinity has no probabilities: its logprob is NaN, its rank 0, its `top` empty.
    """
    chosen_R = torch.tensor(chosen, device=logits_RV.device)
    facts = _facts(logits_RV, chosen_R).tolist()
    leaders = _leaders(logits_RV, max(top))
    result = []
    for token, (best, total, logit, rank), row_leaders, count in zip(
        chosen, facts, leaders, top, strict=True
    ):
        if not math.isfinite(best):
            result.append(TokenLogprobs(token_id=token, logprob=math.nan, rank=0))
            continue
        norm = log_total(best, int(total))
        best_first = [(i, value - norm) for i, value in row_leaders[:count]]
        result.append(TokenLogprobs(token_id=token, logprob=logit - norm, rank=int(rank), top=best_first))
    return result


def _facts(logits_RV: Tensor, chosen_R: Tensor) -> Tensor:
    """float64 [R, 4]: largest logit, sum of weights, chosen logit, its rank."""
    best_R = best_of(logits_RV)[0]
    total_R = weights(logits_RV, best_R[:, None], torch.ones_like(best_R)).sum(-1)
    logit_R1 = logits_RV.gather(1, chosen_R[:, None])
    id_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    ahead_RV = (logits_RV > logit_R1) | ((logits_RV == logit_R1) & (id_V < chosen_R[:, None]))
    return torch.stack(
        [best_R.double(), total_R.double(), logit_R1[:, 0].double(), ahead_RV.sum(-1).double() + 1], 1
    )


def _leaders(logits_RV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` best (id, logit) of each row."""
    rows, vocab_size = logits_RV.shape
    count = min(count, vocab_size)
    if count == 0:
        return [[] for _ in range(rows)]
    value_RK, id_RK, certain_R = ranked(logits_RV, next_size(count, vocab_size))
    packed = torch.stack([id_RK[:, :count].double(), value_RK[:, :count].double()], 2).tolist()
    leaders = [[(int(i), value) for i, value in row] for row in packed]
    for row in (certain_R < count).nonzero()[:, 0].tolist():  # ties at the border: settle them by a full sort
        value_1K, id_1K, _ = ranked(logits_RV[row : row + 1], vocab_size)
        leaders[row] = list(zip(id_1K[0, :count].tolist(), value_1K[0, :count].tolist(), strict=True))
    return leaders
