"""Search of the operating point: the most streams of a server whose latencies stay within targets.

The number of streams is doubled until a target is missed, then bisected. That takes latencies for something
that grows with the load, so a point is not measured again.
"""

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..config.entries import LatencyTarget
from .client import BenchRequest, BenchTarget, Prompts, RequestTiming, Workload
from .measure import percentile, run

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
