"""Header of two lines: screens and the daemon's health, then the first alert."""

import time
from typing import TYPE_CHECKING

from ..rendering import Line, Span, clean, duration, line_width
from .lines import cut

if TYPE_CHECKING:
    from ..app import Dashboard

TITLES = ("Overview", "Requests", "Models", "Memory", "Logs", "Bench & Doctor")
SHORT = ("Over", "Req", "Mod", "Mem", "Log", "Bench")


def bar_line(app: "Dashboard", title: str, width: int) -> Line:
    left: list[Span] = [(" llmbox ", "strong"), *_health(app), ("  ", "")]
    right = _right(app)
    room = width - line_width(tuple(left)) - line_width(right) - 1
    tabs = next(
        (tabs for tabs in (_tabs(TITLES, title), _tabs(SHORT, title)) if line_width(tabs) <= room), ()
    )
    if not tabs:
        tabs = ((f"{TITLES.index(title) + 1} {title}", "tab"),) if room > len(title) + 3 else ()
    gap = max(0, width - line_width((*left, *tabs)) - line_width(right))
    return cut((*left, *tabs, (" " * gap, ""), *right), width, app.glyphs)


def _tabs(names: tuple[str, ...], title: str) -> Line:
    spans: list[Span] = []
    for number, (name, full) in enumerate(zip(names, TITLES, strict=True), 1):
        spans.append((f" {number} {name} ", "tab" if full == title else "muted"))
    return tuple(spans)


def _health(app: "Dashboard") -> list[Span]:
    dot, state = app.glyphs.dot, app.state
    if state.lost:
        return [(f"{dot} gone", "bad")]
    if state.tick is None:
        return [(f"{dot} connecting", "muted")]
    if state.tick.ready:
        return [(f"{dot} ready", "good")] if state.tick.engines else [(f"{dot} empty", "muted")]
    loading = "loading" in state.tick.cause
    return [(f"{dot} loading", "warn") if loading else (f"{dot} not ready", "bad")]


def _right(app: "Dashboard") -> Line:
    state = app.state
    flags = [
        word for word, on in (("paused", app.paused), ("read-only", app.read_only), (app.source, True)) if on
    ]
    spans: list[Span] = [(" ".join(flags) + " ", "warn")] if any(flags) else []
    if state.tick is not None:
        spans.append((time.strftime("%H:%M:%S", time.localtime(state.tick.time)) + " ", "muted"))
    return tuple(spans)


def alert_line(app: "Dashboard", width: int) -> Line:
    state, glyphs = app.state, app.glyphs
    if state.lost:
        if state.tick is None:
            text = f"no daemon: {state.lost}. Start one with: llmbox up"
        else:
            text = f"daemon gone ({state.lost}); all below is {duration(state.age)} old; trying again"
        return cut(((f" {glyphs.warning} {clean(text)}", "bad"),), width, glyphs)
    if state.tick is None:
        return ((" waiting for the first reading", "muted"),)
    found = state.tick.attention
    if not found:
        return ((" all is well", "muted"),)
    first = found[0]
    more = f"  (+{len(found) - 1} more)" if len(found) > 1 else ""
    fix = f"  {glyphs.rule} {clean(first.fix)}" if first.fix else ""
    tone = "bad" if first.level == "failure" else "warn"
    return cut(((f" {glyphs.warning} {clean(first.text)}", tone), (fix + more, "muted")), width, glyphs)
