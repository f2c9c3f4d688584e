"""Measurement of a workload: TTFT, time per token, throughput and their percentiles; files of results; and
the search of the operating point, the most streams of a server whose latencies stay within targets.

The search doubles the number of streams until a target is missed, then bisects. That takes latencies for
something that grows with the load, so a point is not measured again.
"""

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from ..config.entries import LatencyTarget
from ..config.paths import Paths
from ..errors import CliError
from .client import BenchRequest, BenchTarget, Prompts, RequestTiming, Workload, complete


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


ROUNDS: Final = 3
"""Requests of a stream that are measured."""
FINE: Final = 16
"""Precision of the search: the found point is at most one such part of its streams too low."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Figures of one load. Times in seconds, at the percentile of the search."""

    concurrency: int
    requests: int
    errors: int
    first_error: str
    requests_per_s: float
    output_tokens_per_s: float
    ttft: float | None
    tpot: float | None
    missed: tuple[str, ...]
    """Targets that were missed: `ttft`, `tpot`, `errors`, or `time` for a load that was not over in time."""

    @property
    def is_within(self) -> bool:
        return not self.missed


@dataclass(frozen=True, slots=True)
class OperatingPointSearch:
    """Result of a search: points in the order in which they were tried."""

    points: Sequence[LoadPoint]
    is_over: bool
    """True if the search finished; False if its time or the limit of streams ended it."""

    @property
    def found(self) -> LoadPoint | None:
        """Point with the most streams within the targets."""
        within = [point for point in self.points if point.is_within]
        return max(within, key=lambda point: point.concurrency, default=None)


@dataclass(frozen=True, slots=True)
class PointSpec:
    """Requests of a point, and what they must keep."""

    prompt: int
    """Prompt tokens."""
    output: int
    """Output tokens in the mean: lengths differ by up to half, so that streams do not move in step."""
    target: LatencyTarget
    percent: int
    """Percentile of the requests that has to be within the target."""
    requests: int = 0
    """Requests that are measured at each point; 0 for as many as its percentile needs."""

    def count(self, streams: int) -> int:
        """Return how many requests of a point are measured."""
        return self.requests or max(100 // (100 - self.percent), ROUNDS * streams)


async def find_operating_point(
    measure: Callable[[int, float], Awaitable[LoadPoint]],
    most: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> OperatingPointSearch:
    """Search between 1 and `most` streams for `seconds`. `measure` gets streams and the seconds left."""
    ends_at = clock() + seconds
    points: list[LoadPoint] = []
    low, high, streams = 0, most + 1, 1
    while (left := ends_at - clock()) > 0:
        point = await measure(streams, left)
        points.append(point)
        if point.is_within:
            low = streams
        elif point.missed == ("time",):
            break
        else:
            high = streams
        if high - low <= max(1, low // FINE):
            return OperatingPointSearch(points, high <= most)
        streams = min(2 * streams, most) if high > most else (low + high) // 2
    return OperatingPointSearch(points, is_over=False)


async def measure_point(
    server: BenchTarget, prompts: Prompts, spec: PointSpec, streams: int, seconds: float, spread: float
) -> LoadPoint:
    """Measure so many streams, each of which sends its next request when it has its answer. Stops early where
    a target cannot be kept any more.

    `spread`: seconds over which the first requests are sent. These warm up and are not counted.
    """
    draw = random.Random(streams)  # noqa: S311 - a workload, not a secret
    count = spec.count(streams)
    asks = [
        BenchRequest(
            prompts.ids(spec.prompt),
            max(2, round(spec.output * draw.uniform(0.5, 1.5))),
            after=spread * index / streams if index < streams else 0.0,
            tag="first" if index < streams else "",
        )
        for index in range(streams + count)
    ]
    judge = _Judge(spec, count)
    made = await run(server, Workload(asks, streams), ends=judge.add, seconds=seconds)
    good = made.good("")
    missed = judge.missed
    return LoadPoint(
        concurrency=streams,
        requests=len(made.samples),
        errors=len(made.errors),
        first_error=(made.errors or [""])[0],
        requests_per_s=len(made.good()) / made.seconds,
        output_tokens_per_s=made.output_rate,
        ttft=percentile([each.ttft for each in good], spec.percent),
        tpot=percentile([each.tpot for each in good if each.tpot is not None], spec.percent),
        missed=missed if missed or made.is_whole else ("time",),
    )


class _Judge:
    """Count of the requests that missed a target."""

    def __init__(self, spec: PointSpec, count: int) -> None:
        self._target = spec.target
        self._allowed = count * (100 - spec.percent) // 100
        self._misses = {"ttft": 0, "tpot": 0, "errors": 0}

    def add(self, ask: BenchRequest, timing: RequestTiming) -> bool:
        """Count a request; return True once too many have missed a target."""
        if timing.error:
            self._misses["errors"] += 1
        elif not ask.tag:
            self._misses["ttft"] += timing.ttft > self._target.ttft
            self._misses["tpot"] += (timing.tpot or 0.0) > self._target.tpot
        return bool(self.missed)

    @property
    def missed(self) -> tuple[str, ...]:
        """Targets that more requests missed than the percentile allows. No error is allowed."""
        allowed: dict[str, Any] = {"errors": 0}
        return tuple(name for name, count in self._misses.items() if count > allowed.get(name, self._allowed))
