"""How often each token occurs in one sequence, kept up to date one token at a time."""

from collections import Counter

import torch
from torch import Tensor

from ..request import Request


class TokenCounts:
    """Distinct ids that penalties touch and their counts in the output.

    Prompt ids are included, with count 0, only where the repetition penalty needs them.
    Tensors grow by doubling, so that a step costs one write and no rebuild.
    """

    def __init__(self, request: Request) -> None:
        output = Counter(request.token_ids[request.num_prompt :])
        counts = dict.fromkeys(request.prompt_ids, 0) if request.params.repetition_penalty != 1.0 else {}
        counts.update(output)
        self._slots = {token: slot for slot, token in enumerate(counts)}
        self._seen = request.num_tokens
        self._ids = torch.tensor(list(counts), dtype=torch.int64)
        self._output_counts = torch.tensor(list(counts.values()), dtype=torch.float32)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def ids(self) -> Tensor:
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> Tensor:
        return self._output_counts[: len(self._slots)]

    def catch_up(self, request: Request) -> None:
        """Count the tokens appended since the last call."""
        for token in request.token_ids[self._seen :]:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._add(token)
            self._output_counts[slot] += 1
        self._seen = request.num_tokens

    def _add(self, token: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            room = max(16, slot)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._output_counts = torch.cat([self._output_counts, self._output_counts.new_zeros(room)])
        self._slots[token] = slot
        self._ids[slot] = token
        return slot
