"""Prompt log-probabilities on a GPU, asynchronously: the device computes numbers that are copied to the host
like a step's tokens; entries are built from them when the step is collected.

P rows of a step's prompts, G of them at once, M of those on this rank, E hidden, V this rank's vocabulary
shard, N alternatives, C columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmbox.kernels.sampling_types import CandidateRanks

from ..distributed.communicator import rows_of_rank
from ..ipc.messages import TokenLogprobs
from ..model.decoder import Decoder
from ..planning.memory_model import PROMPT_LOGPROB_ROWS
from ..sampling.draw_async import facts, likeliest
from ..sampling.logprobs import ranked_logprobs
from .input_batch import PromptRows

_FACTS = 4


@dataclass(frozen=True, slots=True)
class PromptNumbers:
    prompts: Sequence[PromptRows]
    numbers_PC: Tensor
    """float64 on the host, valid after the step's event: `CandidateRanks.stats_S4` of each prompt's next
    tokens, then N ids and their N logits."""

    def read(self) -> dict[str, list[TokenLogprobs]]:
        """Build log-probability entries by request id."""
        ids_PN, logits_PN = self.numbers_PC[:, _FACTS:].chunk(2, 1)
        ranks = CandidateRanks(self.numbers_PC[:, :_FACTS], ids_PN.long(), logits_PN)
        ids = [token for prompt in self.prompts for token in prompt.next_ids]
        top = [_top(prompt) for prompt in self.prompts for _ in prompt.next_ids]
        entries = iter(ranked_logprobs(ranks, ids, top))
        return {each.request.request_id: [next(entries) for _ in each.next_ids] for each in self.prompts}


def prompt_numbers(
    model: Decoder, hidden_PE: Tensor, next_P: Tensor, prompts: Sequence[PromptRows], vocab_size: int
) -> Tensor:
    """Compute `PromptNumbers.numbers_PC` on the device. Ranks split the rows evenly, each with whole rows."""
    top = min(max(map(_top, prompts)), vocab_size)
    at_once = PROMPT_LOGPROB_ROWS * model.rank.layout.tp
    parts = [
        _numbers(model, hidden_GE, next_G, top, vocab_size)
        for hidden_GE, next_G in zip(
            torch.split(hidden_PE, at_once), torch.split(next_P, at_once), strict=True
        )
    ]
    return torch.cat(parts)


def _numbers(model: Decoder, hidden_GE: Tensor, next_G: Tensor, top: int, vocab_size: int) -> Tensor:
    logits_GV = model.logits(hidden_GE)
    layout = model.rank.layout
    if layout.tp == 1:
        return _of_whole_rows(logits_GV[:, :vocab_size], next_G, top)
    collective, rows = model.rank.collective, len(next_G)
    whole_MV = collective.all_to_all_rows(logits_GV).transpose(0, 1).flatten(1)[:, :vocab_size]
    size = rows_of_rank(rows, layout.tp, 0).stop
    columns = _FACTS + 2 * top
    padded = torch.zeros(size, columns, dtype=torch.float64, device=logits_GV.device)
    if len(whole_MV):
        mine_M = next_G[rows_of_rank(rows, layout.tp, layout.tp_rank)]
        padded[: len(whole_MV)] = _of_whole_rows(whole_MV, mine_M, top)
    return collective.gather(padded).flatten(0, 1)[:rows]


def _of_whole_rows(logits_MV: Tensor, next_M: Tensor, top: int) -> Tensor:
    told = facts(logits_MV, next_M)
    columns = [told.best, told.total, told.logit, told.rank]
    if top:
        value_MN, id_MN = likeliest(logits_MV, top)
        columns += [*id_MN.unbind(1), *value_MN.unbind(1)]
    return torch.stack([column.double() for column in columns], 1)


def _top(prompt: PromptRows) -> int:
    return prompt.request.params.prompt_logprobs or 0
