"""History of ticks at three resolutions.

Points are collected here and written at most about six times a minute by the store's writer thread. A full or
locked disk loses points but never blocks.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from ..store import RequestLog
from ..store import queries as sql
from ..util.threads import off_loop
from .snapshot import NA, Number, Tick

if TYPE_CHECKING:
    from sqlalchemy import Engine


log = logging.getLogger(__name__)

KEEP: Final = {1: 600, 10: 6 * 3600, 60: 30 * 86400}
"""Seconds that each resolution is kept, by its step in seconds."""
TREND_S: Final = 600
TREND_STEP: Final = 10


@dataclass(slots=True)
class _Bucket:
    """Running means of one step."""

    time: int
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        return {name: _short(total / self.counts[name]) for name, total in self.sums.items()}


@dataclass(frozen=True, slots=True)
class Chart:
    """Columns of equal length; None where a series has no value."""

    step: int
    times: list[int]
    series: dict[str, list[float | None]]


class History:
    """Use it only from the daemon's event loop."""

    def __init__(self, store: RequestLog) -> None:
        self._store = store
        self._open: dict[int, _Bucket] = {}
        self._unwritten: list[tuple[int, int, str]] = []
        self._writing = False
        self.dropped = 0
        self.trend: deque[tuple[int, dict[str, float]]] = deque(maxlen=TREND_S // TREND_STEP)
        """Means of the last ten minutes, oldest first, which need no read of the disk."""

    def add(self, time: float, values: Mapping[str, float]) -> None:
        """Add the values of a tick. `time` is Unix seconds."""
        due = False
        for step in KEEP:
            start = int(time) // step * step
            bucket = self._open.get(step)
            if bucket is not None and bucket.time != start:
                self._close(step, bucket)
                due |= step > 1
                bucket = None
            if bucket is None:
                bucket = self._open[step] = _Bucket(start)
            bucket.add(values)
        if due:
            self._write(int(time))

    async def chart(self, step: int, since: int, names: Iterable[str] | None = None) -> Chart:
        """Chart from `since` on, of all series or the named ones. Includes points that are not on disk
        yet.
        """
        recent = {time: series for each, time, series in self._unwritten if each == step}
        stored: list[tuple[int, str]] = await self._store.read(
            lambda engine: sql.requests.find_telemetry(engine, step, since), [], "the telemetry history"
        )
        rows = dict(stored)
        rows |= {time: series for time, series in recent.items() if time >= since}
        bucket = self._open.get(step)
        newest = {} if bucket is None or bucket.time < since else {bucket.time: bucket.means()}
        size = sum(map(len, rows.values()))  # a month is some 10 MB: a second of work
        return await off_loop(size, lambda: _build_chart(step, rows, newest, names))

    def close(self) -> None:
        """Hand the remaining points to the store, which writes them before it closes."""
        last = max((bucket.time for bucket in self._open.values()), default=0)
        for step, bucket in self._open.items():
            self._close(step, bucket)
        self._open.clear()
        self._writing = False  # points of an unfinished write are written twice, to the same effect
        self._write(last)

    def _close(self, step: int, bucket: _Bucket) -> None:
        means = bucket.means()
        if step == TREND_STEP:
            self.trend.append((bucket.time, means))
        self._unwritten.append((step, bucket.time, msgspec.json.encode(means).decode()))

    def _write(self, now: int) -> None:
        rows = list(self._unwritten)
        if not rows or self._writing:
            return
        self._writing = True
        loop = asyncio.get_running_loop()

        def report(*, written: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: these were the last points
                loop.call_soon_threadsafe(self._written, len(rows), written)

        def write(engine: "Engine") -> None:
            sql.requests.add_telemetry(engine, rows, KEEP, now)
            report(written=True)

        def give_up(why: str) -> None:
            log.debug("telemetry history: %d points lost: %s", len(rows), why)
            report(written=False)

        if not self._store.submit(write, failed=give_up):
            self._written(len(rows), written=False)

    def _written(self, count: int, written: bool) -> None:
        self._writing = False
        self.dropped += 0 if written else count
        del self._unwritten[:count]


def _build_chart(
    step: int, rows: Mapping[int, str], newest: Mapping[int, dict[str, float]], names: Iterable[str] | None
) -> Chart:
    points = {time: msgspec.json.decode(rows[time], type=dict[str, float]) for time in sorted(rows)}
    points.update(newest)
    wanted = sorted({name for point in points.values() for name in point}) if names is None else names
    return Chart(
        step, list(points), {name: [point.get(name) for point in points.values()] for name in wanted}
    )


IDLE_GAP_S: Final = 75
"""Maximum time between two samples of a running daemon: an idle one takes one a minute."""


def resample(chart: Chart, since: int, until: int, most: int) -> Chart:
    """Return the chart at equal intervals, at most `most` of them, as means of its samples.

    A sample stands for the time since the one before: rates are means over it. So an idle minute, which has
    one sample, is a line and not a slope. A longer time without samples is a gap: the daemon did not run.
    """
    width = max(1, math.ceil((until - since) / most / chart.step)) * chart.step
    begin = since // width * width
    times = list(range(begin, until, width))
    if len(times) > 1 and until - times[-1] < width:
        times.pop()  # the mean of an interval that has just begun would stand out as a spike
    return Chart(
        width,
        times,
        {name: _fill(chart, column, times, width) for name, column in chart.series.items()},
    )


def _fill(chart: Chart, column: list[float | None], times: list[int], width: int) -> list[float | None]:
    sums, counts = [0.0] * len(times), [0] * len(times)
    before: int | None = None
    for at, value in zip(chart.times, column, strict=True):
        alone = before is None or at - before > IDLE_GAP_S
        start = at if alone or before is None else before + chart.step
        before = at
        if value is None:
            continue
        for moment in range(start, at + 1, chart.step):
            if 0 <= (index := (moment - times[0]) // width) < len(times):
                sums[index] += value
                counts[index] += 1
    return [_short(total / count) if count else None for total, count in zip(sums, counts, strict=True)]


def step_for(seconds: float) -> int:
    """Finest resolution that reaches back so far."""
    return next((step for step, kept in KEEP.items() if seconds <= kept), max(KEEP))


TOTAL_SERIES: Final = (
    "tokens_in",
    "tokens_out",
    "running",
    "waiting",
    "open_requests",
    "ttft_p50",
    "ttft_p95",
    "tpot_p50",
    "tpot_p95",
    "kv_used",
    "prefix_hit",
    "error_rate",
)
HOST_SERIES: Final = ("cpu", "memory_available", "disk_free")
GPU_SERIES: Final = (
    "utilisation",
    "memory_ours",
    "memory_others",
    "memory_free",
    "temperature",
    "power",
    "clock_sm",
    "pcie_in",
    "pcie_out",
    "nvlink_in",
    "nvlink_out",
)


def series_of(tick: Tick) -> dict[str, float]:
    """Values of a tick to keep, by series name. Values that are not available are left out."""
    values: dict[str, Number] = {name: getattr(tick.totals, name) for name in TOTAL_SERIES}
    values |= {name: getattr(tick.host, name) for name in HOST_SERIES}
    for gpu in tick.gpus.devices:
        values |= {f"gpu{gpu.index}.{name}": getattr(gpu, name) for name in GPU_SERIES}
    return {name: value for name, value in values.items() if value is not NA and math.isfinite(value)}


def is_series(name: str) -> bool:
    gpu, _, field_name = name.partition(".")
    if field_name:
        return gpu.startswith("gpu") and gpu[3:].isdigit() and field_name in GPU_SERIES
    return name in TOTAL_SERIES or name in HOST_SERIES


def _short(value: float) -> float:
    """Round to six significant digits: enough for a chart, half the bytes."""
    return float(f"{value:.6g}")


KEPT_S: Final = max(KEEP.values())
REFUSALS_S: Final = 10
"""Seconds whose refusals make one annotation."""
REFUSALS: Final = {429, 503}
"""Refusals by the box, as opposed to the caller's own errors."""
MOST: Final = 500


class Annotation(Struct, frozen=True, kw_only=True):
    """One annotation. `kind` is `load`, `eviction`, `refusal`, `restart` or `failure`."""

    time: float
    """Unix seconds."""
    kind: str
    model: str
    text: str


class Annotations:
    """Recorder fed by the event stream. Use it only from the daemon's event loop."""

    def __init__(self, store: RequestLog, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._recent: deque[Annotation] = deque(maxlen=MOST)
        """Annotations of this daemon, whether they reached the disk or not."""
        self._refused: dict[tuple[str, str], int] = {}
        self._refused_from = 0.0

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """Record an event of any kind."""
        if kind == "request.refused":
            if data["http_status"] in REFUSALS:
                self._refuse(str(data["model"]), str(data["error_code"]))
        elif (mark := _format_event(kind, data)) is not None:
            self._add(Annotation(time=self._clock(), kind=mark[0], model=str(data["model"]), text=mark[1]))

    async def since(self, begin: float, most: int = MOST) -> list[Annotation]:
        """Annotations since `begin`, newest first."""
        self._end_refusals()
        none: list[Annotation] = []
        found = await self._store.read(lambda engine: _find_annotations(engine, begin, most), none, "marks")
        marks = {*found, *(mark for mark in self._recent if mark.time >= begin)}
        return sorted(marks, key=lambda mark: (mark.time, mark.kind, mark.model), reverse=True)[:most]

    def close(self) -> None:
        """Hand pending annotations to the store. Call it before the store closes."""
        self._end_refusals()

    def _refuse(self, model: str, code: str) -> None:
        if self._clock() - self._refused_from >= REFUSALS_S:
            self._end_refusals()
            self._refused_from = self._clock()
        self._refused[model, code] = self._refused.get((model, code), 0) + 1

    def _end_refusals(self) -> None:
        for (model, code), count in self._refused.items():
            text = f"{count} request{'' if count == 1 else 's'} refused: {code}"
            self._add(Annotation(time=self._refused_from, kind="refusal", model=model, text=text))
        self._refused.clear()
        self._refused_from = 0.0

    def _add(self, mark: Annotation) -> None:
        self._recent.append(mark)
        oldest = mark.time - KEPT_S
        self._store.submit(
            lambda engine: sql.requests.add_annotation(
                engine, mark.time, mark.kind, mark.model, mark.text, oldest
            ),
            failed=lambda why: log.debug("telemetry mark lost: %s", why),
        )


def _format_event(kind: str, data: dict[str, Any]) -> tuple[str, str] | None:
    """Return (kind, text) of an event's annotation; None for events without one."""
    cause = str(data.get("cause") or data.get("reason") or "")
    match kind:
        case "model.ready":
            return "load", "ready"
        case "model.evicted":
            return "eviction", cause
        case "model.refused":
            return "refusal", cause
        case "model.restarting":
            return "restart", cause
        case "model.failed":
            return "failure", cause
    return None


def _find_annotations(engine: "Engine", begin: float, most: int) -> list[Annotation]:
    rows = sql.requests.find_annotations(engine, begin, most)
    return [Annotation(time=at, kind=kind, model=model, text=text) for at, kind, model, text in rows]
