"""Screen 4: memory of each device by owner, the KV blocks, and loads, evictions and refusals."""

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from llmbox.app.telemetry.device_memory import DeviceMemory, devices_of
from llmbox.app.telemetry.snapshot import NA, EngineSnapshot, Tick

from ..messages import DashboardState, FetchData
from ..rendering import Glyphs, Line, Span, bar, clean, count, heading, percent, seconds, size
from ..widgets.lines import Lines, cut, prefix_lines, strip_lines
from .base import DashboardScreen

CELLS = 1024
MARKS = 50
TONES = {
    "weights": "accent", "live": "kv", "cached": "cached", "kv_free": "kvfree", "workspace": "work",
    "others": "others",
}  # fmt: skip
MARK_TONES = {"load": "good", "eviction": "warn", "refusal": "warn", "restart": "bad", "failure": "bad"}


class MemoryScreen(DashboardScreen):
    TITLE = "Memory"
    AUTO_FOCUS = ""
    ASK_S = 2.0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "scroll(1)", "Down", key_display="↓"),
        Binding("up", "scroll(-1)", "Up", key_display="↑"),
        Binding("pagedown", "scroll(10)", "Further down", show=False),
        Binding("pageup", "scroll(-10)", "Further up", show=False),
    ]
    top = 0

    def body(self) -> Iterable[Widget]:
        yield Lines(id="memory")

    def wants(self) -> Iterable[FetchData]:
        yield FetchData("blocks", f"blocks?cells={CELLS}")
        yield FetchData("marks", f"marks?since=0&limit={MARKS}")

    def draw(self) -> None:
        width = self.size.width
        shown = self.query_one("#memory", Lines)
        lines = memory_lines(self.state, width, self.glyphs, tall=self.size.height)
        self.top = max(0, min(self.top, len(lines) - shown.size.height))
        shown.show([cut(line, width, self.glyphs) for line in lines[self.top :]])

    def action_scroll(self, lines: int) -> None:
        self.top += lines
        self.redraw()


def memory_lines(state: DashboardState, width: int, glyphs: Glyphs, tall: int = 24) -> list[Line]:
    """Draw the screen. `tall` is the terminal's number of rows; small terminals get a shorter form."""
    tick = state.tick
    if tick is None:
        return [((" waiting for the first reading", "muted"),)]
    gap: list[Line] = [()] if tall >= 32 else []
    lines = [heading(" Devices", width - 1, glyphs), *_legend(glyphs)]
    for device in devices_of(tick):
        lines += _device(device, width, glyphs)
    if links := _links(tick):
        lines.append(((f" links  {links}", "muted"),))
    lines += [*gap, heading(" KV blocks", width - 1, glyphs)]
    maps = {str(each["model"]): each for each in state.answers.get("blocks", {}).get("models", [])}
    rows = 1 if tall < 32 else 2 if tall < 50 else 4
    for engine in tick.engines:
        lines += _cache(engine, maps.get(engine.model), width, rows, glyphs)
    if not tick.engines:
        lines.append(((" No model is loaded. Press 3 to load one.", "muted"),))
    lines += [*gap, heading(" Loads, evictions, refusals", width - 1, glyphs)]
    return [*lines, *_marks(state)]


def _legend(glyphs: Glyphs) -> list[Line]:
    names = (("weights", "weights"), ("live", "KV in use"), ("cached", "KV cached"), ("kv_free", "KV free"),
             ("workspace", "workspace"), ("others", "others"))  # fmt: skip
    spans: list[Span] = [(" ", "")]
    for kind, name in names:
        spans += [(glyphs.bar, TONES[kind]), (f" {name}  ", "muted")]
    return [(*spans, (glyphs.rest, "track"), (" free", "muted"))]


def _device(device: DeviceMemory, width: int, glyphs: Glyphs) -> list[Line]:
    title: Line = ((f" {device.name} ", "strong"), (f"{clean(device.what)}  ", "muted"))
    if device.problem:
        return [(*title, (f"{glyphs.warning} {clean(device.problem)}", "bad"))]
    note = f"{size(device.free)} free of {size(device.total)}{'  ' if device.note else ''}{device.note}"
    shares = [(part.size / device.total, TONES[part.kind]) for part in device.parts]
    lines: list[Line] = [(*title, (note, "muted")), ((" ", ""), *bar(shares, width - 2, glyphs))]
    for model in device.models:
        weights, live, cached, free, work = (
            device.of(model, kind) for kind in ("weights", "live", "cached", "kv_free", "workspace")
        )
        text = (
            f"   {clean(model)}: weights {size(weights)}, KV {size(live + cached + free)} "
            f"({size(live)} in use, {size(cached)} cached), workspace {size(work)}"
        )
        lines.append(((text, "muted"),))
    return lines


def _cache(engine: EngineSnapshot, blocks: Any, width: int, rows: int, glyphs: Glyphs) -> list[Line]:
    total = engine.blocks_total
    if not total:
        return [((f" {clean(engine.model)}", "strong"), (f"  {engine.state}", "muted"))]
    waste = ""
    if engine.blocks_live and engine.block_size:
        filled = engine.slots_used / (engine.blocks_live * engine.block_size)
        waste = f", {percent(filled)} of their slots hold a token"
    counts = f"{engine.blocks_live:,} in use, {engine.blocks_cached:,} cached, {engine.blocks_free:,} free"
    title: Line = (
        (f" {clean(engine.model)}", "strong"),
        (f"  {counts} of {total:,} blocks of {engine.block_size} tokens{waste}", "muted"),
    )
    if blocks is None:
        shares = [(engine.blocks_live / total, "kv"), (engine.blocks_cached / total, "cached")]
        strip: list[Line] = [((" ", ""), *bar(shares, width - 2, glyphs))]
        prefixes: list[Line] = []
    else:
        strip, prefixes = strip_lines(blocks, width - 2, rows, glyphs), prefix_lines(blocks)
    return [title, *strip, *_prefix_cache(engine), *prefixes]


def _prefix_cache(engine: EngineSnapshot) -> list[Line]:
    hits = (
        f"prefix cache: {count(engine.prefix_hits)} of {count(engine.prefix_queries)} prompt tokens found"
        if engine.prefix_queries
        else "prefix cache: no lookups yet"
    )
    tail = f", last minute {percent(engine.prefix_hit)}" if engine.prefix_hit is not NA else ""
    preempted = f"; {engine.preemptions:,} preemptions" if engine.preemptions else ""
    speed = f"   {count(engine.tokens_out)} tok/s out, TPOT p50 {seconds(engine.tpot_p50)}"
    if engine.roofline is not NA:
        speed += f", {percent(engine.roofline)} of what the memory bandwidth allows"
    if engine.draft_tokens:
        speed += f", {percent(engine.accepted_tokens / engine.draft_tokens)} of draft tokens accepted"
        methods = ", ".join(
            f"{method} {percent(each.accepted_tokens / each.draft_tokens)}"
            for method, each in engine.draft_methods.items()
        )
        speed += f" ({methods})" if methods else ""
    return [((speed, "muted"),), ((f"   {hits}{tail}{preempted}", "muted"),)]


def _marks(state: DashboardState) -> list[Line]:
    marks = state.answers.get("marks", {}).get("marks", [])
    if not marks:
        refused = state.refused.get("marks")
        text = refused or "Nothing was loaded, evicted or refused yet."
        return [((f" {clean(text)}", "muted"),)]
    now = state.tick.time if state.tick else time.time()
    return [
        (
            (f" {_when(float(mark['time']), now)} ", "muted"),
            (f"{mark['kind']:<9}", MARK_TONES.get(str(mark["kind"]), "")),
            (clean(str(mark["model"])), ""),
            (f"  {clean(str(mark['text']))}", "muted"),
        )
        for mark in marks
    ]


def _when(at: float, now: float) -> str:
    """Format a time, with the date only if it is not of today."""
    then, today = time.localtime(at), time.localtime(now)
    same = then[:3] == today[:3]
    return f"{time.strftime('%H:%M:%S' if same else '%d %b %H:%M', then):<12}"


def _links(tick: Tick) -> str:
    return "   ".join(f"GPU {link.first}-{link.second} {link.kind}" for link in tick.gpus.links)
