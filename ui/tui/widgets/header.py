"""Header of two lines (screens and health, then the first alert), footer, key help, and the compact view."""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from textual.app import App, ComposeResult
from textual.binding import ActiveBinding, Binding
from textual.events import Click
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

from ..messages import DashboardState, count_requests
from ..rendering import Glyphs, Line, Span, clean, count, duration, line_width, percent, seconds
from .lines import Lines, cut

if TYPE_CHECKING:
    from ..app import Dashboard

TITLES: Final = ("Overview", "Requests", "Models", "Memory", "Logs", "Bench & Doctor", "Chat", "Alerts")
_SHORT: Final = ("Over", "Req", "Mod", "Mem", "Log", "Bench", "Chat", "Alert")
_TABS: Final = ((TITLES, " {number} {name} "), (_SHORT, " {number} {name} "), (_SHORT, " {number} {name}"))
"""Names and forms of the tabs, the widest first."""


class TabBar(Lines):
    """First line of every screen. A click on a tab opens its screen."""

    def fill(self, app: "Dashboard", title: str, width: int) -> None:
        line, self._tabs = bar_line(app, title, width)
        self.show([line])

    def on_click(self, event: Click) -> None:
        for begin, end, title in self._tabs:
            if begin <= event.x < end:
                self.app.switch_mode(title)

    _tabs: tuple[tuple[int, int, str], ...] = ()
    """First column, column behind the last one, and screen of each tab."""


class AlertLine(Lines):
    """Second line of every screen. A click opens the list of alerts."""

    def on_click(self) -> None:
        self.app.switch_mode("Alerts")


class KeyFooter(Footer):
    """Footer that leaves out what all screens have where it would not fit."""

    SPARE: Final = ("pause", "themes", "app.focus_next", "quit", "range")

    def compose(self) -> ComposeResult:
        keys = list(super().compose())

        def width() -> int:
            return sum(
                len(key.key_display) + len(key.description) + 2 for key in keys if isinstance(key, FooterKey)
            )

        for action in self.SPARE:
            if width() <= self.screen.size.width:
                break
            keys = [key for key in keys if not (isinstance(key, FooterKey) and key.action == action)]
        yield from keys


def bar_line(app: "Dashboard", title: str, width: int) -> tuple[Line, tuple[tuple[int, int, str], ...]]:
    """Draw the first line, and say where its tabs are."""
    name = " llmbox " if width >= 100 else " "
    left: list[Span] = [(name, "strong"), *_health(app), (" " if width < 100 else "  ", "")]
    right = _right(app)
    begin = line_width(tuple(left))
    room = width - begin - line_width(right)
    for names, form in _TABS:
        texts = [form.format(number=at, name=each) for at, each in enumerate(names, 1)]
        if sum(map(len, texts)) <= room:
            break
    else:
        text = f" {TITLES.index(title) + 1} {title} "
        texts = ["" if each != title else text if len(text) <= room else "" for each in TITLES]
    spans: list[Span] = []
    places = []
    for full, text in zip(TITLES, texts, strict=True):
        tone = "tab" if full == title else "bad" if full == "Alerts" and _has_failure(app.state) else "muted"
        spans.append((text, tone))
        places.append((begin, begin + len(text), full))
        begin += len(text)
    gap = max(0, width - begin - line_width(right))
    return cut((*left, *spans, (" " * gap, ""), *right), width, app.glyphs), tuple(places)


def _has_failure(state: DashboardState) -> bool:
    return any(each.level == "failure" for each in state.alerts)


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
    found = state.alerts
    if not found:
        return ((" no alerts", "muted"),)
    first = found[0]
    more = f"  +{len(found) - 1}: press 8" if len(found) > 1 else ""
    fix = f"  {glyphs.rule} {clean(first.fix)}" if first.fix else ""
    tone = "bad" if first.level == "failure" else "warn"
    room = max(0, width - len(more) - 1)
    line = cut(((f" {glyphs.warning} {clean(first.text)}", tone), (fix, "muted")), room, glyphs)
    return (*line, (more, tone))


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


def compact_lines(state: DashboardState, width: int, glyphs: Glyphs) -> list[Line]:
    tick = state.tick
    if state.lost:
        return [cut(((f"{glyphs.warning} daemon gone", "bad"),), width, glyphs)]
    if tick is None:
        return [(("waiting", "muted"),)]
    totals, counts = tick.totals, count_requests(tick)
    facts: list[tuple[str, str]] = [
        ("out", f"{count(totals.tokens_out)} tok/s"),
        ("in", f"{count(totals.tokens_in)} tok/s"),
        ("requests", f"{counts.running} running, {counts.queued} queued"),
        ("failed", percent(totals.error_rate)),
        ("TTFT p95", seconds(totals.ttft_p95)),
        ("KV", percent(totals.kv_used)),
        ("CPU", percent(tick.host.cpu)),
    ]
    facts += [(f"GPU {gpu.index}", gpu.problem or percent(gpu.utilisation)) for gpu in tick.gpus.devices]
    facts += [(engine.state, engine.model) for engine in tick.engines]
    lines: list[tuple[Span, ...]] = [
        ((f"{glyphs.warning} {clean(each.text)}", "bad" if each.level == "failure" else "warn"),)
        for each in state.alerts
    ]
    lines += [((f"{name:<9}", "muted"), (clean(text), "")) for name, text in facts]
    lines += [((f"{request.id}", ""), (f" {request.state}", "muted")) for request in tick.requests]
    return [cut(line, width, glyphs) for line in lines]
