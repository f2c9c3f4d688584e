"""Workloads of a benchmark: prompts as token ids, drawn from a seed, so that every run is the same work."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. `after` delays its start, in seconds since the run began."""

    prompt: list[int]
    max_tokens: int
    after: float = 0.0
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order; at most `concurrency` are open at once."""

    asks: list[BenchRequest]
    concurrency: int


class Prompts:
    """Random token ids in a range. A new seed for every run, so that no cache helps by accident."""

    def __init__(self, seed: str, id_range: tuple[int, int]) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._range = id_range

    def ids(self, count: int) -> list[int]:
        return [self._random.randrange(*self._range) for _ in range(count)]

    def capped_exponential(self, mean: float, cap: int) -> int:
        """Draw an output length as in the classic continuous-batching experiment, from 1 to `cap`."""
        return min(cap, max(1, math.ceil(self._random.expovariate(1 / mean))))


def uniform(prompts: Prompts, count: int, concurrency: int, prompt: int, output: int) -> Workload:
    return Workload([BenchRequest(prompts.ids(prompt), output) for _ in range(count)], concurrency)


def heavy_tail(prompts: Prompts, count: int, concurrency: int, prompt: int, mean: int, cap: int) -> Workload:
    asks = [BenchRequest(prompts.ids(prompt), prompts.capped_exponential(mean, cap)) for _ in range(count)]
    return Workload(asks, concurrency)


def shared_prefix(
    prompts: Prompts, count: int, concurrency: int, prefix: int, tail: int, output: int
) -> Workload:
    head = prompts.ids(prefix)
    return Workload([BenchRequest(head + prompts.ids(tail), output) for _ in range(count)], concurrency)


def long_arrival(prompts: Prompts, streams: int, prompt: int, output: int, long_prompt: int) -> Workload:
    """Build a workload of `streams` that decode; once they do, one long prompt arrives (tag `long`)."""
    asks = [BenchRequest(prompts.ids(prompt), output, tag="stream") for _ in range(streams)]
    asks.append(BenchRequest(prompts.ids(long_prompt), 4, after=1.0, tag="long"))
    return Workload(asks, streams + 1)
