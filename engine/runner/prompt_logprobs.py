"""Prompt log-probabilities on a GPU, asynchronously: the device computes numbers that are copied to the host
like a step's tokens; entries are built from them when the step is collected.

P rows of a step's prompts, G of them at once, M of those on this rank, E hidden, V this rank's vocabulary
shard, C columns of `rank_columns`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmbox.kernels.reference.sampling import rank_tokens

from ..ipc.messages import TokenLogprobs
from ..model.decoder import Decoder
from ..planning.memory_model import PROMPT_LOGPROB_ROWS
from ..sampling.sampler import logprobs_of, rank_column_count, rank_columns
from .input_batch import PromptRows


@dataclass(frozen=True, slots=True)
class PromptNumbers:
    prompts: Sequence[PromptRows]
    numbers_PC: Tensor
    """float64 on the host, valid after the step's event."""
    top: int
    """Alternatives in each row."""

    def read(self) -> dict[str, list[TokenLogprobs]]:
        """Build log-probability entries by request id."""
        rows = iter(self.numbers_PC.tolist())
        return {
            prompt.request.request_id: [
                logprobs_of(next(rows), token, prompt.top, self.top) for token in prompt.next_ids
            ]
            for prompt in self.prompts
        }


def prompt_numbers(model: Decoder, hidden_PE: Tensor, next_P: Tensor, top: int, vocab_size: int) -> Tensor:
    """Compute `PromptNumbers.numbers_PC` on the device."""
    at_once = PROMPT_LOGPROB_ROWS * model.rank.layout.tp
    parts = zip(torch.split(hidden_PE, at_once), torch.split(next_P, at_once), strict=True)

    def rank(next_G: Tensor, whole_MV: Tensor, mine: slice) -> Tensor:
        return rank_columns(rank_tokens(whole_MV[:, :vocab_size], next_G[mine], top))

    return torch.cat(
        [
            model.rank.map_whole_rows(model.logits(hidden_GE), rank_column_count(top), partial(rank, next_G))
            for hidden_GE, next_G in parts
        ]
    )
