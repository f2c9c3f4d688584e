"""Screen 1: devices, loaded models, charts, live and last requests, errors and events."""

import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.types import CSSPathType
from textual.widget import Widget

from llmbox.app.telemetry.snapshot import NA, EngineSnapshot, GpuReading, Host, Number, Tick

from ..messages import SPARKS, DashboardState, FetchData, count_requests
from ..rendering import (
    DASH,
    Glyphs,
    Line,
    bar,
    clean,
    count,
    fit,
    gigabytes,
    heading,
    known,
    percent,
    rate,
    seconds,
    size,
    unit,
)
from ..widgets.charts import chart_lines, chart_rows
from ..widgets.lines import Column, FixedTable, Lines, Row, cut
from .base import DashboardScreen
from .models import fail_tone
from .requests import COLUMNS, request_rows

MOST_GPUS = 8
_WARM = 85.0
"""Degrees Celsius from which a temperature is colored; the alert comes at `alerts.HOT`."""
MODEL_COLUMNS = (
    Column("MODEL", 0, middle=True, least=22),
    Column("STATE", 10),
    Column("DEVICE", 7, rank=7),
    Column("RUN", 4, right=True),
    Column("QUEUE", 6, right=True),
    Column("TOK/S", 6, right=True),
    Column("TTFT P95", 9, right=True, rank=2),
    Column("TPOT P95", 9, right=True, rank=3),
    Column("KV CACHE", 17, rank=1),
    Column("PREFIX", 7, right=True, rank=4),
    Column("WEIGHTS", 8, right=True, rank=8),
    Column("CONTEXT", 7, right=True, rank=9),
)
_STATE_TONES = {"ready": "good", "loading": "warn", "restarting": "bad", "failed": "bad"}
_MOST_ENDED = 60
"""Ended requests in the list; screen 2 has more."""
_RANGES = (1, 2, 5)
"""Seconds per dot of the charts."""


class OverviewScreen(DashboardScreen):
    TITLE = "Overview"
    CSS_PATH: ClassVar[CSSPathType | None] = ["../view.tcss", "overview.tcss"]
    AUTO_FOCUS = "#requests"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "range", "Time range"),
        Binding("tab", "app.focus_next", "Other list"),
    ]
    step = 1
    """Seconds per dot of the charts."""

    def body(self) -> Iterable[Widget]:
        yield Lines(id="devices")
        yield Lines(id="models-title")
        yield FixedTable(MODEL_COLUMNS, "", id="models")
        yield Lines(id="charts")
        with Container(id="lower"):
            with Container(id="left"):
                yield Lines(id="requests-title")
                yield FixedTable(COLUMNS, "", id="requests")
            yield Lines(id="events")

    def draw(self) -> None:
        width, glyphs, state = self.size.width, self.glyphs, self.state
        tick = state.tick
        is_wide = width >= 160
        self.set_class(is_wide, "-wide")
        devices = device_lines(tick, width, glyphs, tall=self.size.height)
        self._set_lines("#devices", devices)
        models = model_rows(tick, glyphs)
        note = f"{len(models)} loaded" if models else ""
        self.query_one("#models-title", Lines).show([heading(" Models", width - 1, glyphs, note)])
        grid = self.query_one("#models", FixedTable)
        grid.styles.height = 1 + max(1, min(len(models), 3 if self.size.height < 32 else 6))
        grid.show(models, empty=NO_MODEL if tick else "")
        room = self.size.height - 3 - len(devices) - 2 - grid.styles.height.value  # type: ignore[union-attr]
        charts = self._charts(width, int(room))
        left = width * 2 // 3 if is_wide else width
        title = heading(" Requests", left - 1, glyphs, str(count_requests(tick)) if tick else "")
        self.query_one("#requests-title", Lines).show([title])
        ended = list(islice(state.ended, _MOST_ENDED))
        rows = request_rows(tick.requests, ended, tick.time) if tick else []
        self.query_one("#requests", FixedTable).show(rows, empty=empty_hint(tick))
        number = int(room) - len(charts) if is_wide else 0 if room - len(charts) < 12 else 4
        self._set_lines("#events", event_lines(state, width - left if is_wide else width, number, glyphs))

    def _charts(self, width: int, room: int) -> list[Line]:
        """Draw the charts, if their content has changed."""
        state = self.state
        drawn = state.tick, width, room, self.step, "past" in state.answers
        if drawn != self._drawn:
            self._drawn = drawn
            self._chart_lines = chart_lines(state, width, *chart_rows(room), self.glyphs, self.step)
            self._set_lines("#charts", self._chart_lines)
        return self._chart_lines

    _drawn: tuple[object, ...] = ()
    _chart_lines: list[Line]

    def _set_lines(self, name: str, lines: list[Line]) -> None:
        widget = self.query_one(name, Lines)
        if widget.styles.height is None or widget.styles.height.value != len(lines):
            widget.styles.height = len(lines)
        widget.show(lines)

    def wants(self) -> Iterable[FetchData]:
        if "past" not in self.state.answers and self.state.tick is not None:
            yield FetchData("past", f"telemetry?step=1&series={','.join(SPARKS)}")
        if "history" not in self.state.answers:
            yield FetchData("history", "requests?limit=300")
        yield FetchData("marks", "marks?since=0&limit=50")

    def action_range(self) -> None:
        """Show the next longer time range in the charts, or the shortest one again."""
        self.step = _RANGES[(_RANGES.index(self.step) + 1) % len(_RANGES)]
        self.redraw()

    @on(FixedTable.Chosen, "#requests")
    def _show_request(self, event: FixedTable.Chosen) -> None:
        self.dashboard.show_request(event.key)

    @on(FixedTable.Chosen, "#models")
    def _show_model(self, event: FixedTable.Chosen) -> None:
        self.dashboard.show_model(event.key)


NO_MODEL = "No model is loaded. Press 3 to load one, or run: llmbox load builtin"


def empty_hint(tick: Tick | None) -> str:
    if tick is None or not tick.engines:
        return ""
    return f"No requests yet. Press 7 to chat, or run: llmbox run {clean(tick.engines[0].model)} hello"


# ------------------------------------------------------------------ models


def model_rows(tick: Tick | None, glyphs: Glyphs) -> list[Row]:
    """Return a row for each loaded or loading model."""
    return [] if tick is None else [_model_row(tick, engine, glyphs) for engine in tick.engines]


def _model_row(tick: Tick, engine: EngineSnapshot, glyphs: Glyphs) -> Row:
    counts = count_requests(tick, engine.model)
    total = engine.blocks_total
    live = engine.blocks_live / total if total else 0.0
    cached = engine.blocks_cached / total if total else 0.0
    share = percent(live) if total else DASH
    shares = bar([(live, "kv"), (cached, "cached")], 10, glyphs) if total else ()
    failing = next((each for each in tick.error_rates if each.model == engine.model and each.failed), None)
    state = f"{percent(failing.rate)} fail" if failing and engine.state == "ready" else engine.state
    return Row(
        engine.model,
        (
            (clean(engine.model), "strong"),
            (state, fail_tone(failing) if failing else _STATE_TONES.get(engine.state, "")),
            (clean(engine.device) or DASH, "muted"),
            (count(counts.running), ""),
            (count(counts.queued), "warn" if counts.queued else "muted"),
            (count(engine.tokens_out), "strong"),
            (seconds(engine.ttft_p95), _late(engine.ttft_p95, engine.ttft_target)),
            (seconds(engine.tpot_p95), _late(engine.tpot_p95, engine.tpot_target)),
            (share, "kv"),
            (percent(engine.prefix_hit), "muted"),
            (size(engine.weights_bytes) if engine.weights_bytes else DASH, "muted"),
            (count(engine.context_window) if engine.context_window else DASH, "muted"),
        ),
        (engine.model, state, engine.device, counts.running, counts.queued, *(
            None if value is NA else value for value in (engine.tokens_out, engine.ttft_p95, engine.tpot_p95)
        ), live, None if engine.prefix_hit is NA else engine.prefix_hit, engine.weights_bytes,
         engine.context_window),
        {8: (*shares, (fit(share, 6, glyphs, right=True), "kv"))},
    )  # fmt: skip


def _late(value: Number, target: Number) -> str:
    return "warn" if value is not NA and target is not NA and value > target else ""


# ------------------------------------------------------------------ devices


def device_lines(tick: Tick | None, width: int, glyphs: Glyphs, *, tall: int) -> list[Line]:
    """Draw GPUs and the host. `tall`: rows of the terminal; small ones have no second lines."""
    lines = [heading(" Devices", width - 1, glyphs)]
    if tick is None:
        return [*lines, ((" waiting for the first reading", "muted"),)]
    if tick.gpus.problem:
        lines.append(cut(((f" {glyphs.warning} {clean(tick.gpus.problem)}", "warn"),), width, glyphs))
    for gpu in tick.gpus.devices[:MOST_GPUS]:
        drawn = gpu_lines(gpu, width, glyphs)
        lines += [cut(line, width, glyphs) for line in (drawn if tall >= 45 else drawn[:1])]
    if len(tick.gpus.devices) > MOST_GPUS:
        lines.append(((f" {len(tick.gpus.devices) - MOST_GPUS} more GPUs: screen 4", "muted"),))
    host = host_lines(tick.host, width, glyphs)
    return [*lines, *(cut(line, width, glyphs) for line in (host if tall >= 32 else host[:1]))]


def gpu_lines(gpu: GpuReading, width: int, glyphs: Glyphs) -> list[Line]:
    name = fit(f" {gpu.index} {clean(gpu.name.removeprefix('NVIDIA '))}", 14, glyphs)
    if gpu.problem:
        return [((name, "strong"), (f"{glyphs.warning} {clean(gpu.problem)}", "bad"))]
    cells = _cells(width)
    used = [(_share(gpu.memory_ours, gpu), "accent"), (_share(gpu.memory_others, gpu), "others")]
    ours = "" if gpu.memory_ours is NA else f"{size(gpu.memory_ours)} ours"
    others = "" if gpu.memory_others is NA else f" + {size(gpu.memory_others)} others"
    if width < 100:
        memory = gigabytes(_used(gpu))
    else:
        memory = f"{ours}{others}" if ours else f"{gigabytes(_used(gpu))} used"
    hot = "warn" if known(gpu.temperature) >= _WARM else ""
    main: Line = (
        (name, "strong"),
        *_meter(known(gpu.utilisation), cells, glyphs),
        (fit(percent(gpu.utilisation), 6, glyphs, right=True) + "  ", ""),
        *bar(used, cells, glyphs),
        (fit(f" {memory} of {gigabytes(gpu.memory_total)}", 42 if width >= 100 else 21, glyphs), ""),
    )
    power = f"{unit(gpu.power, 'W')} of {unit(gpu.power_cap, 'W')}"
    if width < 100:
        power = f"{count(gpu.power)}/{unit(gpu.power_cap, 'W')}"
    clock = unit(gpu.clock_sm, "MHz")
    rest: Line = (
        (fit(unit(gpu.temperature, glyphs.degree), 7, glyphs, right=True) + "  ", hot),
        (fit(power, 9 if width < 100 else 16, glyphs), ""),
        (fit(clock, 8, glyphs), "muted"),
    )
    link = f"PCIe {gpu.pcie}  {glyphs.down}{rate(gpu.pcie_in)} {glyphs.up}{rate(gpu.pcie_out)}"
    if gpu.nvlink_in is not NA:
        link += f"   NVLink {glyphs.down}{rate(gpu.nvlink_in)} {glyphs.up}{rate(gpu.nvlink_out)}"
    held = (f"   throttled: {', '.join(gpu.throttle)}", "warn") if gpu.throttle else ("", "")
    if width >= 150:
        return [(*main, *rest, (f"  {link}", "muted"), held)]
    if width >= 118:
        return [(*main, *rest), ((" " * 14 + link, "muted"), held)]
    below = f"   {clock}  {link}".replace("   NVLink", "  NVLink") if width >= 100 else f" {clock} {link}"
    return [(*main, *rest[:2]), ((below, "muted"), held)]


def host_lines(host: Host, width: int, glyphs: Glyphs) -> list[Line]:
    if host.problem:
        return [((f" {glyphs.warning} {clean(host.problem)}", "warn"),)]
    cells = _cells(width)
    total, available = known(host.memory_total), known(host.memory_available)
    ours = sum(process.memory for process in host.processes)
    used = max(0.0, total - available)
    parts = [(min(ours, used) / total, "accent"), (max(0.0, used - ours) / total, "others")] if total else []
    memory = f" {size(used)} of {gigabytes(host.memory_total)}" if total else DASH
    main: Line = (
        (fit(f" CPU {host.cores} cores", 14, glyphs), "strong"),
        *_meter(known(host.cpu), cells, glyphs),
        (fit(percent(host.cpu), 6, glyphs, right=True) + "  ", ""),
        *bar(parts, cells, glyphs),
        (fit(memory, 23, glyphs), ""),
        (f"disk {gigabytes(host.disk_free)} free", "" if known(host.disk_free, 1e12) > 1e9 else "bad"),
    )
    own = "   ".join(
        f"{clean(process.role)} {size(process.memory)} {percent(process.cpu)}" for process in host.processes
    )
    return [main, ((" " * 14 + own, "muted"),)] if own else [main]


def _cells(width: int) -> int:
    return 8 if width < 100 else 11 if width < 150 else 16


def _meter(share: float, cells: int, glyphs: Glyphs) -> Line:
    return bar([(share, "accent" if share < 0.95 else "warn")], cells, glyphs)


def _share(value: float | object, gpu: GpuReading) -> float:
    total = known(gpu.memory_total)
    if total <= 0:
        return 0.0
    if value is NA:
        return known(_used(gpu)) / total if value is gpu.memory_ours else 0.0
    return float(value) / total  # type: ignore[arg-type]


def _used(gpu: GpuReading) -> float:
    return max(0.0, known(gpu.memory_total) - known(gpu.memory_free))


# ------------------------------------------------------------------ errors and events


def event_lines(state: DashboardState, width: int, number: int, glyphs: Glyphs) -> list[Line]:
    """Draw errors of requests with loads, evictions, refusals and restarts, newest first."""
    if number < 2 or state.tick is None:
        return []
    failed = [row for row in state.ended if int(row["http_status"]) >= 400]
    found: list[tuple[float, Line]] = [(_ended_at(row), _error_line(row)) for row in failed]
    for mark in state.answers.get("marks", {}).get("marks", []):
        tone = {"load": "good", "restart": "bad", "failure": "bad"}.get(str(mark["kind"]), "warn")
        line: Line = (
            (f"{mark['kind']:<8} ", tone),
            (clean(str(mark["model"])), ""),
            (f" {clean(str(mark['text']))}", "muted"),
        )
        found.append((float(mark["time"]), line))
    found.sort(key=lambda each: -each[0])
    recent = [int(row["http_status"]) for row in failed if _ended_at(row) > state.tick.time - 300]
    broken = sum(status >= 500 for status in recent)
    note = f"last 5 min: {broken} failed (5xx), {len(recent) - broken} rejected (4xx)"
    lines = [heading(" Errors and events", width - 1, glyphs, note)]
    for at, line in found[: number - 1]:
        stamp = time.strftime("%H:%M:%S", time.localtime(at))
        lines.append(cut(((f" {stamp} ", "muted"), *line), width - 1, glyphs))
    if not found:
        lines.append(((" Nothing failed, was loaded or evicted yet.", "muted"),))
    return lines


def _ended_at(row: Mapping[str, Any]) -> float:
    return float(row["created"]) + float(row["e2e_s"] or 0.0)


def _error_line(row: Mapping[str, Any]) -> Line:
    status = int(row["http_status"])
    return (
        (f"{status:<8} ", "bad" if status >= 500 else "warn"),
        (clean(str(row["model"])) or DASH, ""),
        (f" {clean(str(row['error_code']))}", "muted"),
    )
