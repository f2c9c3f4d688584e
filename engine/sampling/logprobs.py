"""Log-probabilities of sampled tokens, from the model's unchanged logits.

Penalties, bias, masks and temperature are not applied (vLLM's default, `raw_logprobs`). Rank 1 is the most
likely token; ties rank by lowest id, so the n-th entry of `top` has rank n.

R rows, V vocabulary, K candidates, S sampled rows, N alternatives.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import CandidateRanks

from ..ipc.messages import TokenLogprobs
from .integer_softmax import log_total, weights
from .topk import best_of, next_size, ranked


def token_logprobs(logits_RV: Tensor, chosen: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """Build one entry per row of float32 logits: the chosen id and the row's `top` best ids.

    A row with NaN or infinity has no probabilities: its logprob is NaN, its rank 0, its `top` empty.
    """
    facts = _facts(logits_RV, torch.tensor(chosen, device=logits_RV.device))
    leaders = _leaders(logits_RV, max(top))
    entries = []
    for row, (token, count) in enumerate(zip(chosen, top, strict=True)):
        best, total, logit = facts[row]
        if not math.isfinite(best):
            entries.append(TokenLogprobs(token_id=token, logprob=math.nan, rank=0))
            continue
        norm = log_total(best, int(total))
        best_first = [(i, value - norm) for i, value in leaders[row][:count]]
        rank = _rank_among(leaders[row], token) or _count_ahead(logits_RV[row], token) + 1
        entries.append(TokenLogprobs(token_id=token, logprob=logit - norm, rank=rank, top=best_first))
    return entries


def ranked_logprobs(ranks: CandidateRanks, chosen: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """Build the same entries from the results of `Ops.rank`."""
    rows = zip(ranks.stats_S4.tolist(), ranks.ids_SN.tolist(), ranks.logits_SN.tolist(), strict=True)
    entries = []
    for (told, ids, logits), token, count in zip(rows, chosen, top, strict=True):
        best, total, logit, rank = told
        if not math.isfinite(best):
            entries.append(TokenLogprobs(token_id=token, logprob=math.nan, rank=0))
            continue
        norm = log_total(best, int(total))
        best_first = [(i, value - norm) for i, value in zip(ids[:count], logits, strict=False)]
        entries.append(TokenLogprobs(token_id=token, logprob=logit - norm, rank=int(rank), top=best_first))
    return entries


def _facts(logits_RV: Tensor, chosen_R: Tensor) -> list[tuple[float, float, float]]:
    """Return for each row: largest logit, sum of weights, chosen logit."""
    best_R = best_of(logits_RV)[0]
    total_R = weights(logits_RV, best_R[:, None], torch.ones_like(best_R)).sum(-1)
    logit_R = logits_RV.gather(1, chosen_R[:, None])[:, 0]
    packed_R3 = torch.stack([best_R.double(), total_R.double(), logit_R.double()], 1)
    return [(best, total, logit) for best, total, logit in packed_R3.tolist()]


def _leaders(logits_RV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the best (id, logit) of each row in order: at least `count`, more where they are known."""
    vocab_size = logits_RV.shape[1]
    value_RK, id_RK, certain_R = ranked(logits_RV, next_size(count, vocab_size))
    leaders = []
    for row, known in enumerate(certain_R.tolist()):
        if known >= min(count, vocab_size):
            id_K, value_K = id_RK[row, :known], value_RK[row, :known]
        else:  # ties at the border: settle them by a full sort
            value_1V, id_1V, _ = ranked(logits_RV[row : row + 1], vocab_size)
            id_K, value_K = id_1V[0, :count], value_1V[0, :count]
        leaders.append(list(zip(id_K.tolist(), value_K.tolist(), strict=True)))
    return leaders


def _rank_among(leaders: Sequence[tuple[int, float]], token: int) -> int | None:
    return next((rank for rank, (i, _) in enumerate(leaders, start=1) if i == token), None)


def _count_ahead(logits_V: Tensor, token: int) -> int:
    """Ids that are more likely than `token`, or as likely and lower."""
    larger = torch.count_nonzero(logits_V > logits_V[token])
    return int(larger + torch.count_nonzero(logits_V[:token] == logits_V[token]))
