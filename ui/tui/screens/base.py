"""Base of the screens: first line (screens and health), alert line, footer, filter, and the list for small
terminals.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Final, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.screen import Screen
from textual.types import CSSPathType
from textual.widget import Widget
from textual.widgets import Footer, Input
from textual.widgets._footer import FooterKey

from ..messages import DashboardState, FetchData, StateChanged, count_requests
from ..rendering import Glyphs, Line, Span, clean, count, duration, line_width, percent, seconds
from ..widgets.lines import FixedTable, Lines, cut

if TYPE_CHECKING:
    from ..app import Dashboard

SMALL = (60, 16)
"""Columns and rows below which only a list is shown."""


class DashboardScreen(Screen[None]):
    """Base of a screen: it draws in `draw` and requests data in `wants`, and never changes the state."""

    TITLE: ClassVar[str]
    CSS_PATH: ClassVar[CSSPathType | None] = "../view.tcss"
    AUTO_FOCUS = "FixedTable"
    FILTERS: ClassVar[bool] = False
    """True if `/` opens a filter line."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("escape", "back", "Back", show=False),
    ]

    ASK_S: ClassVar[float] = 5.0
    """Seconds between two requests for what it `wants`."""

    filter_text: str = ""

    @property
    def dashboard(self) -> "Dashboard":
        return cast("Dashboard", self.app)

    @property
    def state(self) -> DashboardState:
        return self.dashboard.state

    @property
    def glyphs(self) -> Glyphs:
        return self.dashboard.glyphs

    def compose(self) -> ComposeResult:
        yield TabBar(id="bar", of_now=True)
        yield AlertLine(id="alert", of_now=True)
        yield from self.body()
        yield Input(
            placeholder="Filter: words that a row must contain. Esc clears it.", id="filter", compact=True
        )
        yield Lines(id="compact")
        yield KeyFooter(compact=True, show_command_palette=False)

    def body(self) -> Iterable[Widget]:
        raise NotImplementedError

    def draw(self) -> None:
        """Draw the state into the screen's widgets."""
        raise NotImplementedError

    def wants(self) -> Iterable[FetchData]:
        """Return the data to fetch when the screen is shown, and again every few seconds while it is
        visible.
        """
        return ()

    # ------------------------------------------------------------------ lifecycle

    def on_mount(self) -> None:
        self.query_one("#filter", Input).display = False
        self.set_interval(self.ASK_S, self.ask)

    def on_screen_resume(self) -> None:
        self.ask()
        self.redraw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)

    @on(StateChanged)
    def _changed(self) -> None:
        self.redraw()

    @on(FixedTable.Sorted)
    def _sorted(self) -> None:
        self.redraw()

    def ask(self) -> None:
        if self.is_current:
            for fetch in self.wants():
                self.post_message(fetch)

    def redraw(self) -> None:
        if not self.is_mounted:
            return
        small = self.size.width < SMALL[0] or self.size.height < SMALL[1]
        self.set_class(small, "-small")
        self.set_class(self.size.height >= 32, "-tall")
        width = self.size.width
        self.query_one("#bar", TabBar).fill(self.dashboard, self.TITLE, width)
        self.query_one("#alert", AlertLine).show([alert_line(self.dashboard, width)])
        if small:
            self.query_one("#compact", Lines).show(compact_lines(self.state, width, self.glyphs))
        else:
            self.draw()

    # ------------------------------------------------------------------ filter

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "filter":
            return self.FILTERS
        return super().check_action(action, parameters)

    def action_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.display = True
        line.focus()

    def action_back(self) -> None:
        line = self.query_one("#filter", Input)
        line.value = ""
        self._close_filter()

    @on(Input.Changed, "#filter")
    def _filter(self, event: Input.Changed) -> None:
        self.filter_text = event.value.casefold()
        self.redraw()

    @on(Input.Submitted, "#filter")
    def _close_filter(self) -> None:
        line = self.query_one("#filter", Input)
        line.display = bool(line.value)
        for grid in self.query("FixedTable"):
            grid.focus()
            break

    def matches(self, *texts: str) -> bool:
        """Return whether each word of the filter occurs in one of the texts."""
        whole = " ".join(texts).casefold()
        return all(word in whole for word in self.filter_text.split())


TITLES: Final = ("Overview", "Requests", "Models", "Memory", "Logs", "Bench & Doctor", "Chat", "Alerts")
_SHORT: Final = ("Over", "Req", "Mod", "Mem", "Log", "Bench", "Chat", "Alert")
_TABS: Final = ((TITLES, " {number} {name} "), (_SHORT, " {number} {name} "), (_SHORT, " {number} {name}"))
"""Names and forms of the tabs, the widest first."""


class TabBar(Lines):
    """First line of every screen. A click on a tab opens its screen."""

    under = "frame"

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
    """Footer that leaves out what would not fit: first what all screens have, then the last keys but help."""

    SPARE: Final = ("pause", "themes", "app.focus_next", "quit", "range")

    def compose(self) -> ComposeResult:
        keys = list(super().compose())

        def width() -> int:
            return 1 + sum(
                len(key.key_display) + len(key.description) + 2 for key in keys if isinstance(key, FooterKey)
            )

        for action in self.SPARE:
            if width() <= self.screen.size.width:
                break
            keys = [key for key in keys if not (isinstance(key, FooterKey) and key.action == action)]
        while len(keys) > 1 and width() > self.screen.size.width:
            keys.pop(-2)  # the last one is help, which lists them all
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
        if sum(map(len, texts)) + (not form.endswith(" ")) <= room:
            break
    else:  # the name of this screen, and the keys of the others
        texts = [f" {at} " if each != title else f" {at} {each} " for at, each in enumerate(TITLES, 1)]
        if sum(map(len, texts)) > room:
            texts = [text if text.endswith(f"{title} ") and len(text) <= room else "" for text in texts]
    at = TITLES.index(title)
    if texts[at] and not texts[at].endswith(" ") and at + 1 < len(texts):
        # Where blanks are shared, the one behind the tab is its own: the highlight is even.
        texts[at], texts[at + 1] = texts[at] + " ", texts[at + 1].lstrip()
    spans: list[Span] = []
    places = []
    for full, text in zip(TITLES, texts, strict=True):
        tone = "tab" if full == title else "bad" if full == "Alerts" and _has_failure(app.state) else "muted"
        if tone == "muted":  # the number is the key that goes there, and looks like those of the footer
            key = len(text) - len(text.lstrip()) + 1 if text else 0
            spans += [(text[:key], "accent"), (text[key:], tone)]
        else:
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
            text = f"daemon gone ({state.lost}); the data below is {duration(state.age)} old; retrying"
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
