"""Rows of logits in parts, a rank each, and requests that draw them in all ways."""

from typing import Any

import torch
from torch import Tensor

from llmbox.engine.checkpoint.safetensors import ShardSlice
from llmbox.engine.core.request import Request
from llmbox.engine.distributed.communicator import rows_of_rank
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.sampling_params import SamplingParams
from support.rank_threads import Stage, ThreadCollective

CPU = torch.device("cpu")
KNOBS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 3.0, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 2.5, "top_p": 0.99},
    {"temperature": 1.0, "top_k": 900, "min_p": 0.01},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": {3: 4.0}},
]


class Counting(ThreadCollective):
    """Bytes that this rank sent."""

    def __init__(self, layout: ParallelLayout, stages: list[Stage]) -> None:
        super().__init__(layout, stages)
        self.bytes = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.bytes += x.nbytes
        return super().all_gather(x)

    def all_to_all_rows(self, x: Tensor) -> Tensor:
        """What it keeps is not sent."""
        mine = rows_of_rank(len(x), self._layout.tp, self._layout.tp_rank)
        self.bytes += x.nbytes - x[mine].nbytes
        return super().all_gather(x)[:, mine].transpose(0, 1).flatten(1)


def part_of(logits_RV: Tensor, part: ShardSlice) -> Tensor:
    """What one rank has, with numbers where nobody may look."""
    return torch.nn.functional.pad(logits_RV[:, part.start : part.stop], (0, part.pad), value=9.0)


def requests_of(rows: int, seed: int = 0) -> list[Request]:
    return [
        Request(
            request_id=str(row),
            prompt_ids=[1, 2, 3 + row % 7],
            params=SamplingParams(max_tokens=9, seed=seed * 1000 + row, **KNOBS[row % len(KNOBS)]),
        )
        for row in range(rows)
    ]
