"""Header of two lines (screens and health, then the first alert), key help, and the compact view."""

import time
from typing import TYPE_CHECKING

from ..rendering import Line, Span, clean, duration, line_width
from .lines import cut

if TYPE_CHECKING:
    from ..app import Dashboard
from collections.abc import Callable, Iterable

from textual.app import App
from textual.binding import ActiveBinding, Binding

from ..messages import State
from ..rendering import Glyphs, count, percent, seconds

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
        return ((" no alerts", "muted"),)
    first = found[0]
    more = f"  (+{len(found) - 1} more)" if len(found) > 1 else ""
    fix = f"  {glyphs.rule} {clean(first.fix)}" if first.fix else ""
    tone = "bad" if first.level == "failure" else "warn"
    return cut(((f" {glyphs.warning} {clean(first.text)}", tone), (fix + more, "muted")), width, glyphs)


_TEXTUALS = ("scroll_", "page_", "app.focus_", "screen.copy_", "help_quit")
"""Actions of every Textual program that have no use here."""
_GROUPS = ("Screens", "On this screen", "Moving", "Everywhere")


def key_lines(active: Iterable[ActiveBinding], display: Callable[[Binding], str]) -> list[Line]:
    """Format the active bindings in groups; keys of the same action share a line."""
    groups: dict[str, dict[str, list[str]]] = {name: {} for name in _GROUPS}
    for each in active:
        binding = each.binding
        if binding.description and not binding.system and not binding.action.startswith(_TEXTUALS):
            keys = groups[_group(each)].setdefault(_sentence(binding.description), [])
            keys.append(display(binding))
    joined = {
        name: [(" ".join(dict.fromkeys(keys)), text) for text, keys in rows.items()]
        for name, rows in groups.items()
    }
    width = max((len(keys) for rows in joined.values() for keys, _ in rows), default=0)
    lines: list[Line] = []
    for name, rows in joined.items():
        if rows:
            lines += [*([()] if lines else []), ((name, "title"),)]
            lines += [((f"{keys:>{width}}", "accent"), (f"   {text}", "")) for keys, text in rows]
    return lines


def _group(active: ActiveBinding) -> str:
    if active.binding.action.startswith("switch_mode"):
        return "Screens"
    if isinstance(active.node, App):
        return "Everywhere"
    is_move = active.binding.action.startswith(("move(", "scroll("))
    return "Moving" if is_move else "On this screen"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def compact_lines(state: State, width: int, glyphs: Glyphs) -> list[Line]:
    tick = state.tick
    if state.lost:
        return [cut(((f"{glyphs.warning} daemon gone", "bad"),), width, glyphs)]
    if tick is None:
        return [(("waiting", "muted"),)]
    totals = tick.totals
    facts: list[tuple[str, str]] = [
        ("out", f"{count(totals.tokens_out)} tok/s"),
        ("in", f"{count(totals.tokens_in)} tok/s"),
        ("requests", f"{totals.running} run, {totals.waiting} wait"),
        ("failed", percent(totals.error_rate)),
        ("TTFT p95", seconds(totals.ttft_p95)),
        ("KV", percent(totals.kv_used)),
        ("CPU", percent(tick.host.cpu)),
    ]
    facts += [(f"GPU {gpu.index}", gpu.problem or percent(gpu.utilisation)) for gpu in tick.gpus.devices]
    facts += [(engine.state, engine.model) for engine in tick.engines]
    lines: list[tuple[Span, ...]] = [
        ((f"{glyphs.warning} {clean(each.text)}", "bad" if each.level == "failure" else "warn"),)
        for each in tick.attention
    ]
    lines += [((f"{name:<9}", "muted"), (clean(text), "")) for name, text in facts]
    lines += [((f"{request.id}", ""), (f" {request.state}", "muted")) for request in tick.requests]
    return [cut(line, width, glyphs) for line in lines]
