"""Screen 2: requests in flight, then ended ones."""

from collections.abc import Iterable
from typing import ClassVar
from urllib.parse import quote

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from ..messages import FetchData, RunAction, count_requests
from ..rendering import heading
from ..widgets.lines import Lines
from ..widgets.request_rows import COLUMNS, SORTS, request_rows
from ..widgets.table import FixedTable
from .base import DashboardScreen


class RequestsScreen(DashboardScreen):
    TITLE = "Requests"
    FILTERS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "cancel", "Cancel"),
        Binding("y", "copy", "Copy as curl"),
        Binding("o", "sort", "Sort"),
    ]

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="line")
        yield FixedTable(COLUMNS, "")

    def wants(self) -> Iterable[FetchData]:
        if "history" not in self.state.answers:
            yield FetchData("history", "requests?limit=300")

    def draw(self) -> None:
        tick = self.state.tick
        rows = request_rows(tick.requests if tick else (), list(self.state.ended), tick.time if tick else 0.0)
        shown = [row for row in rows if self.matches(*(text for text, _ in row.cells))]
        hidden = f"; {len(shown)} of {len(rows)} match the filter" if len(shown) < len(rows) else ""
        note = f"{count_requests(tick)}{hidden}; sorted by {self._sort}"
        self.query_one("#title", Lines).show([heading(" Requests", self.size.width - 1, self.glyphs, note)])
        self.query_one(FixedTable).show(shown, empty=self._empty(bool(rows)))

    def _empty(self, hidden: bool) -> str:
        if hidden:
            return "Nothing matches the filter. Press esc to clear it."
        if self.state.refused.get("history"):
            return f"The request log cannot be read: {self.state.refused['history']}"
        if problem := self.state.answers.get("history", {}).get("problem"):
            return str(problem)
        return "No requests yet. Try: llmbox run builtin hello"

    # ------------------------------------------------------------------ keys

    @on(FixedTable.Chosen)
    def _detail(self, event: FixedTable.Chosen) -> None:
        self.dashboard.show_request(event.key)

    @property
    def _sort(self) -> str:
        column = self.query_one(FixedTable).sort_column
        return "age" if column is None else COLUMNS[column].title

    def action_sort(self) -> None:
        """Go to the next order."""
        grid = self.query_one(FixedTable)
        now = None if grid.sort_column is None else COLUMNS[grid.sort_column].title
        wanted = SORTS[(SORTS.index(now) + 1) % len(SORTS)] if now in SORTS else None
        titles = [column.title for column in COLUMNS]
        grid.sort_by(None if wanted is None else titles.index(wanted))

    def action_cancel(self) -> None:
        chosen = self.query_one(FixedTable).selected
        live = {request.id for request in self.state.tick.requests} if self.state.tick else set()
        if chosen is None or chosen not in live:
            self.notify("Choose a request that is in flight.", severity="warning")
            return
        self.post_message(
            RunAction(
                f"requests/{quote(chosen, safe='')}/cancel",
                {},
                f"{chosen} is cancelled.",
                question=f"Cancel {chosen}? Its client gets the tokens so far and an error.",
            )
        )

    def action_copy(self) -> None:
        chosen = self.query_one(FixedTable).selected
        if chosen is not None:
            self.dashboard.copy_request(chosen)
