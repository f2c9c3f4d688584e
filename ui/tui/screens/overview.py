"""Screen 1: devices, main metrics of two minutes, and requests in flight."""

from collections.abc import Iterable
from typing import ClassVar

from textual import on
from textual.types import CSSPathType
from textual.widget import Widget

from llmbox.app.telemetry.snapshot import NA, GpuReading, Host, Number, Tick

from ..messages import SPARKS, Fetch, State
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
    spark,
    unit,
)
from ..widgets.lines import Lines, cut
from ..widgets.request_rows import LIVE_COLUMNS, live_rows
from ..widgets.table import Grid
from .base import View

MOST_GPUS = 8
_WARM = 85.0
"""Degrees Celsius from which a temperature is colored; the alert comes at `alerts.HOT`."""


class OverviewScreen(View):
    TITLE = "Overview"
    CSS_PATH: ClassVar[CSSPathType | None] = ["../view.tcss", "overview.tcss"]

    def body(self) -> Iterable[Widget]:
        yield Lines(id="devices")
        yield Lines(id="figures")
        yield Lines(id="live-title")
        yield Grid(LIVE_COLUMNS, "")

    def draw(self) -> None:
        width, glyphs, state = self.size.width, self.glyphs, self.state
        devices = device_lines(state.tick, width, glyphs)
        self._set_lines("#devices", devices)
        self._set_lines("#figures", figure_lines(state, width, glyphs))
        number = len(state.tick.requests) if state.tick else 0
        note = f"{number} in flight" if number else ""
        self.query_one("#live-title", Lines).show([heading(" Live requests", width - 1, glyphs, note)])
        rows = live_rows(state.tick.requests) if state.tick else []
        self.query_one(Grid).show(rows, empty=empty_hint(state.tick))

    def _set_lines(self, name: str, lines: list[Line]) -> None:
        widget = self.query_one(name, Lines)
        if widget.styles.height is None or widget.styles.height.value != len(lines):
            widget.styles.height = len(lines)
        widget.show(lines)

    def wants(self) -> Iterable[Fetch]:
        if "past" not in self.state.answers and self.state.tick is not None:
            yield Fetch("past", f"telemetry?step=1&series={','.join(SPARKS)}")

    @on(Grid.Chosen)
    def _detail(self, event: Grid.Chosen) -> None:
        self.dashboard.show_request(event.key)


def empty_hint(tick: Tick | None) -> str:
    if tick is None:
        return ""
    if not tick.engines:
        return "No model is loaded. Press 3, choose one and press l, or run: llmbox load builtin"
    if not tick.totals.requests:
        return f"No requests yet. Try: llmbox run {clean(tick.engines[0].model)} hello"
    return "No requests in flight. Finished ones are on screen 2."


# ------------------------------------------------------------------ devices


def device_lines(tick: Tick | None, width: int, glyphs: Glyphs) -> list[Line]:
    lines = [heading(" Devices", width - 1, glyphs)]
    if tick is None:
        return [*lines, ((" waiting for the first reading", "muted"),)]
    if tick.gpus.problem:
        lines.append(cut(((f" {glyphs.warning} {clean(tick.gpus.problem)}", "warn"),), width, glyphs))
    for gpu in tick.gpus.devices[:MOST_GPUS]:
        lines += [cut(line, width, glyphs) for line in gpu_lines(gpu, width, glyphs)]
    if len(tick.gpus.devices) > MOST_GPUS:
        lines.append(((f" {len(tick.gpus.devices) - MOST_GPUS} more GPUs: screen 4", "muted"),))
    return [*lines, *(cut(line, width, glyphs) for line in host_lines(tick.host, width, glyphs))]


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
    held = (f"   held down: {', '.join(gpu.throttle)}", "warn") if gpu.throttle else ("", "")
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


# ------------------------------------------------------------------ figures


def figure_lines(state: State, width: int, glyphs: Glyphs) -> list[Line]:
    """Draw the metrics in two columns of name, value and sparkline."""
    lines = [heading(" Last two minutes", width - 1, glyphs)]
    if state.tick is None:
        return lines
    totals = state.tick.totals
    nothing = not totals.requests and not totals.open_requests
    figures = [
        ("tokens/s out", "tokens_out", "-" if nothing else count(totals.tokens_out), None),
        ("TTFT p50", "ttft_p50", seconds(totals.ttft_p50), None),
        ("tokens/s in", "tokens_in", "-" if nothing else count(totals.tokens_in), None),
        ("TTFT p95", "ttft_p95", seconds(totals.ttft_p95), None),
        ("running", "running", count(totals.running), None),
        ("KV in use", "kv_used", percent(totals.kv_used), 1.0),
        ("waiting", "waiting", count(totals.waiting), None),
        ("prefix hits", "prefix_hit", percent(totals.prefix_hit), 1.0),
        ("failed", "error_rate", percent(totals.error_rate), 1.0),
        ("TPOT p95", "tpot_p95", seconds(totals.tpot_p95), None),
    ]
    half = width // 2
    cells = min(60, half - 26)
    drawn = []
    for label, name, value, top in figures:
        tone = _tone(name, getattr(totals, name))
        line = spark(list(state.sparks[name]), cells, glyphs, top=top)
        drawn.append(((f" {label:<13}", "muted"), (f"{value:>9}  ", tone), (line, "spark"), (" ", "")))
    for left, right in zip(drawn[::2], drawn[1::2], strict=True):
        gap = half - sum(len(text) for text, _ in left)
        lines.append((*left, (" " * gap, ""), *right))
    return lines


def _tone(name: str, value: Number) -> str:
    if name == "error_rate" and known(value) > 0:
        return "bad"
    return "warn" if name == "waiting" and known(value) else "strong"
