"""Base of the screens: top bar, alert line, footer, filter, and the list for small terminals."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.types import CSSPathType
from textual.widget import Widget
from textual.widgets import Input

from ..messages import DashboardState, FetchData, StateChanged
from ..rendering import Glyphs
from ..widgets.header import AlertLine, KeyFooter, TabBar, alert_line, compact_lines
from ..widgets.lines import FixedTable, Lines

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
