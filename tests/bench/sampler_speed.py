"""What drawing the tokens of a step costs, with the C++ kernels and in plain PyTorch, on one thread.

    python -P tests/bench/sampler_speed.py [--rows 1,8,32] [--rounds N] [--vocab N] [--kernels "cpu avx2"]

In this thread's own CPU time, microseconds a row with everything from `Sampler.sample` on, both by turns, the
median of all rounds. Logits are normal with a deviation of 3, those of "flat" of 0.3.
"""

import argparse
import statistics
import time

import torch

from llmbox.engine.core.request import Request
from llmbox.engine.sampling import Sampler
from llmbox.engine.sampling_params import SamplingParams
from llmbox.kernels.dispatch import load_backend

CPU = torch.device("cpu")
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k 20, top-p 0.9": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-p 0.95, flat": {"top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}
PROMPT, OUTPUT = 500, 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--kernels", default="cpu", help="an instruction set, as LLMBOX_KERNELS names it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend = load_backend(options.kernels)
    backend.use_threads([0])
    samplers = Sampler(options.vocab, CPU, backend.ops()), Sampler(options.vocab, CPU)
    print(f"{'us a row':24}{'rows':>5}{backend.name:>18}{'PyTorch':>12}{'ratio':>8}")
    for rows in [int(count) for count in options.rows.split(",")]:
        for name, params in KINDS.items():
            logits_RV = torch.randn(rows, options.vocab) * (0.3 if "flat" in name else 3.0)
            spent = measure(samplers, logits_RV, requests(rows, options.vocab, params), options.rounds)
            kernels, plain = (statistics.median(times) / rows * 1e6 for times in spent)
            print(f"{name:24}{rows:5}{kernels:18.0f}{plain:12.0f}{plain / kernels:8.1f}")


def requests(rows: int, vocab: int, params: dict[str, float]) -> list[Request]:
    made = []
    for row in range(rows):
        ids = torch.randint(vocab, (PROMPT + OUTPUT,)).tolist()
        settings = SamplingParams(max_tokens=1000, seed=row, **params)
        made.append(
            Request(request_id=str(row), prompt_ids=ids[:PROMPT], params=settings, token_ids=list(ids))
        )
    return made


def measure(
    samplers: tuple[Sampler, Sampler], logits_RV: torch.Tensor, asked: list[Request], rounds: int
) -> list[list[float]]:
    spent: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        for times, sampler in zip(spent, samplers, strict=True):
            started = time.thread_time()
            sampler.sample(logits_RV, asked)
            if turn:  # the first warms up
                times.append(time.thread_time() - started)
    return spent


if __name__ == "__main__":
    main()
