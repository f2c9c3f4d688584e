"""Measurement of a workload: TTFT, time per token, throughput and their percentiles; files of results."""

import asyncio
import contextlib
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ..config.paths import Paths
from ..errors import CliError
from .client import BenchRequest, BenchTarget, RequestTiming, Workload, complete


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One pass of a workload."""

    samples: list[tuple[BenchRequest, RequestTiming]]
    seconds: float
    is_whole: bool = True
    """All requests were sent and answered."""

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


async def run(
    target: BenchTarget,
    workload: Workload,
    *,
    ends: Callable[[BenchRequest, RequestTiming], bool] = lambda *_: False,
    seconds: float | None = None,
) -> BenchRun:
    """Send all requests of `workload` to `target`.

    `ends` is called with each request that has ended; True gives up those that are left. So does the end of
    `seconds`.
    """
    pending = deque(workload.asks)
    done: list[tuple[BenchRequest, RequestTiming]] = []
    is_over = asyncio.Event()
    began = time.perf_counter()

    async def worker() -> None:
        while pending:
            ask = pending.popleft()
            await asyncio.sleep(max(0.0, began + ask.after - time.perf_counter()))
            timing = await complete(target, ask.prompt, ask.max_tokens)
            done.append((ask, timing))
            if ends(ask, timing):
                is_over.set()

    async def work() -> None:
        await asyncio.gather(*(worker() for _ in range(workload.concurrency)))

    working = asyncio.create_task(work())
    working.add_done_callback(lambda _: is_over.set())
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await is_over.wait()
        if working.done():
            working.result()
    finally:
        working.cancel()
        await asyncio.wait({working})
    seconds = time.perf_counter() - began
    is_whole = len(done) == len(workload.asks)
    if is_whole and all(timing.ended for _, timing in done):
        # The client reads answers after they have ended, which takes the server no time.
        seconds = max(timing.ended for _, timing in done) - began
    return BenchRun(done, seconds, is_whole)


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


FIGURES: Final = ("output_tokens_per_s", "ttft_p50", "tpot_p50", "inter_token_p99")

Levels = dict[int, dict[str, float | None]]
"""Figures by concurrency."""


def read_levels(path: Path) -> Levels:
    """Read a result file. Raises CliError for a file that is not a result of `llmbox bench --json`."""
    try:
        saved = json.loads(path.read_text())
        return _by_concurrency(saved["levels"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"cannot compare with {path}",
            f"it is not what `llmbox bench --json` prints ({type(error).__name__}: {error})",
            f"llmbox bench --json > {path}",
        ) from None


def ratios(now: Sequence[Mapping[str, Any]], earlier: Levels) -> dict[int, dict[str, float | None]]:
    """Divide this run by the earlier one, for the levels that both have; None where either has no such
    figure.
    """
    return {
        level: {name: _ratio(figures[name], earlier[level][name]) for name in FIGURES}
        for level, figures in _by_concurrency(now).items()
        if level in earlier
    }


def _by_concurrency(levels: Sequence[Mapping[str, Any]]) -> Levels:
    return {
        int(level["concurrency"]): {
            name: None if level.get(name) is None else float(level[name]) for name in FIGURES
        }
        for level in levels
    }


def _ratio(now: float | None, earlier: float | None) -> float | None:
    return now / earlier if now is not None and earlier else None


KEPT: Final = 50


class SavedRun(Struct, frozen=True, kw_only=True):
    """`levels` holds what `llmbox bench --json` prints for each concurrency."""

    time: float
    """Unix seconds."""
    model: str
    url: str
    levels: list[dict[str, Any]]


def bench_folder(paths: Paths) -> Path:
    return paths.state_dir / "bench"


def keep_run(folder: Path, model: str, url: str, levels: Sequence[Mapping[str, Any]]) -> None:
    """Write one run and drop the oldest beyond `KEPT`. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    now = time.time()
    run = SavedRun(time=now, model=model, url=url, levels=[dict(level) for level in levels])
    (folder / f"{int(now * 1000)}.json").write_bytes(msgspec.json.encode(run))
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        old.unlink(missing_ok=True)


def read_runs(folder: Path) -> list[SavedRun]:
    """Return saved runs, newest first; other files are skipped."""
    runs = []
    for path in sorted(folder.glob("*.json"), reverse=True)[:KEPT]:
        try:
            runs.append(msgspec.json.decode(path.read_bytes(), type=SavedRun))
        except (OSError, msgspec.DecodeError):
            continue
    return runs
