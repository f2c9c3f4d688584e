"""Measurement of a workload: TTFT, time per token, throughput and their percentiles."""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .client import RequestTiming, Target, complete
from .workload import BenchRequest, Workload


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One pass of a workload."""

    samples: list[tuple[BenchRequest, RequestTiming]]
    seconds: float

    def good(self, tag: str | None = None) -> list[RequestTiming]:
        return [s for ask, s in self.samples if not s.error and tag in (None, ask.tag)]

    @property
    def errors(self) -> list[str]:
        return [sample.error for _, sample in self.samples if sample.error]

    @property
    def output_rate(self) -> float:
        """Output tokens a second over the whole run."""
        return sum(sample.tokens for sample in self.good()) / self.seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run; times in seconds, percentiles by nearest rank."""

    requests: int
    errors: int
    seconds: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    inter_token_p50: float | None
    inter_token_p99: float | None
    inter_token_max: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def run(target: Target, workload: Workload) -> BenchRun:
    """Send all requests of `workload` to `target`."""
    pending = deque(workload.asks)
    done: list[tuple[BenchRequest, RequestTiming]] = []
    began = time.perf_counter()

    async def worker() -> None:
        while pending:
            ask = pending.popleft()
            await asyncio.sleep(max(0.0, began + ask.after - time.perf_counter()))
            done.append((ask, await complete(target, ask.prompt, ask.max_tokens)))

    await asyncio.gather(*(worker() for _ in range(workload.concurrency)))
    return BenchRun(done, time.perf_counter() - began)


def summarise(run: BenchRun) -> Summary:
    good = run.good()
    ttft = [s.ttft for s in good]
    gaps = [gap for s in good for gap in s.gaps]
    tpot = [s.tpot for s in good if s.tpot is not None]
    return Summary(
        requests=len(run.samples),
        errors=len(run.errors),
        seconds=run.seconds,
        output_tokens=sum(s.tokens for s in good),
        prompt_tokens=sum(s.prompt_tokens for s in good),
        cached_tokens=sum(s.cached_tokens for s in good),
        output_tokens_per_s=run.output_rate,
        ttft_p50=percentile(ttft, 50),
        ttft_p95=percentile(ttft, 95),
        tpot_p50=percentile(tpot, 50),
        inter_token_p50=percentile(gaps, 50),
        inter_token_p99=percentile(gaps, 99),
        inter_token_max=max(gaps, default=None),
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by nearest rank: a value that was measured, never one between two."""
    if not values:
        return None
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[int(rank) - 1]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of B over A, pair by pair, with its spread: what an interleaved comparison may claim."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


def ratio(of: Sequence[float], to: Sequence[float]) -> Ratio:
    """Return median, lowest and highest of the per-round ratios `of / to`. Both must come from the same
    rounds.
    """
    pairs = [a / b for a, b in zip(of, to, strict=True)]
    return Ratio(statistics.median(pairs), min(pairs), max(pairs))
