"""Processes over gloo, each with a part of the vocabulary, that draw by the kernels: what whole rows give.

python tp_draw_processes.py FOLDER RANKS VOCABULARY SEED
"""

import os
import sys
import traceback
from pathlib import Path

import torch

from llmbox.engine.distributed.communicator import TensorParallel
from llmbox.engine.distributed.torch_communicator import join, leave
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.sampling import Sampler
from support.device_steps import Steps, alike
from support.lanes import NIGHTLY
from support.late_device import LateDevice
from support.sampling import make_request
from support.shared_logits import CPU, part_of
from support.triton_interpreter import turn_on

turn_on()
from llmbox.kernels.triton.backend import triton_ops

KNOBS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 3.0, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 3, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 16, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {3: 4.0}},
    {"temperature": 1.0, "frequency_penalty": 1.0, "presence_penalty": 0.5, "logprobs": 1},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.3, "bad_words": ((5,), (3, 4), (4, 3))},
    {
        "temperature": 1.0,
        "top_k": 10,
        "allowed_token_ids": (3, 4, 5, 600),
        "min_tokens": 2,
        "stop_token_ids": (3,),
    },
]


def main(folder: Path, ranks: int, vocab: int, seed: int) -> None:
    torch.set_num_threads(1)
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            try:
                work(folder / "meet", ParallelLayout(ranks, 1, rank), vocab, seed)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    sys.exit(any(os.waitpid(child, 0)[1] for child in children))


def work(meet: Path, layout: ParallelLayout, vocab: int, seed: int) -> None:
    rank = TensorParallel(layout, join(layout, CPU, meet, ordered=True))
    part, ops = layout.vocabulary(vocab), triton_ops(CPU, torch.float32)
    requests = [
        make_request(str(n), prompt=[n, 1, 2], seed=seed + n, **knobs) for n, knobs in enumerate(KNOBS)
    ]
    generator = torch.Generator().manual_seed(seed)
    steps = Steps(ops, vocab, requests, LateDevice(), late=True, rank=rank)
    favorites_V = torch.zeros(vocab)
    favorites_V[[3, 4, 5, 600]] = 4.0
    for levels in (3, None, None)[: None if NIGHTLY else 2]:
        logits_SV = 2 * torch.randn(len(requests), vocab, generator=generator) + favorites_V
        if levels is not None:  # ties at every border
            logits_SV = torch.randint(levels, (len(requests), vocab), generator=generator).float()
            logits_SV[1, 7] = torch.nan
            logits_SV[5, -1] = torch.inf
        mine_SV = part_of(logits_SV, part)
        kept_SV = mine_SV.clone()
        wanted = Sampler(vocab, CPU).sample(logits_SV, steps.known)
        found = steps.draw(mine_SV)
        assert all(map(alike, found, wanted)), (seed, found, wanted)
        assert [isinstance(pick, str) for pick in found].count(True) == 2 * (levels is not None)
        assert torch.equal(mine_SV.nan_to_num(), kept_SV.nan_to_num()), "the model's logits are put back"
        for each in (steps.requests, steps.known):  # most go to another rank in the next step
            each.reverse()
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
