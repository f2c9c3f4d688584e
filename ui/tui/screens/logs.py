"""Screen 5: the daemon's log as it is written."""

import time
from collections.abc import Iterable
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from ..messages import FetchData
from ..rendering import clean, heading
from ..widgets.lines import Column, FixedTable, Lines, Row
from .base import DashboardScreen

COLUMNS = (
    Column("TIME", 8, sortable=False),
    Column("LEVEL", 8, rank=1, sortable=False),
    Column("COMPONENT", 10, rank=3, sortable=False),
    Column("MODEL", 20, rank=2, middle=True, sortable=False),
    Column("MESSAGE", 0, least=28, sortable=False),
)
LEVELS = ("debug", "info", "warning", "error", "critical")
TONES = {"warning": "warn", "error": "bad", "critical": "bad", "debug": "muted"}


class LogsScreen(DashboardScreen):
    TITLE = "Logs"
    FILTERS = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "level", "Level"),
        Binding("c", "component", "Component"),
        Binding("F", "follow", "Follow"),
    ]
    level = "debug"
    component = ""

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="line")
        yield FixedTable(COLUMNS, "")

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(FixedTable).follow = True

    def wants(self) -> Iterable[FetchData]:
        if "log" not in self.state.answers:
            yield FetchData("log", "logs?lines=500")

    def draw(self) -> None:
        wanted = LEVELS[LEVELS.index(self.level) :]
        rows = [
            _row(number, entry)
            for number, entry in enumerate(self.state.log)
            if entry["level"] in wanted
            and self.component in {"", entry["component"]}
            and self.matches(entry["message"], entry["component"], entry["level"])
        ]
        part = f", component {self.component}" if self.component else ""
        following = ", following" if self.query_one(FixedTable).follow else ""
        note = f"{len(rows)} lines, level {self.level} and above{part}{following}"
        self.query_one("#title", Lines).show([heading(" Log", self.size.width - 1, self.glyphs, note)])
        empty = "Nothing matches. Press v for other levels, c for other components, esc to clear the filter."
        self.query_one(FixedTable).show(rows, empty=empty if self.state.log else "The log is empty.")

    # ------------------------------------------------------------------ keys

    def action_level(self) -> None:
        self.level = LEVELS[(LEVELS.index(self.level) + 1) % len(LEVELS)]
        self.redraw()

    def action_component(self) -> None:
        known = ["", *sorted({str(entry["component"]) for entry in self.state.log})]
        at = known.index(self.component) if self.component in known else 0
        self.component = known[(at + 1) % len(known)]
        self.redraw()

    def action_follow(self) -> None:
        grid = self.query_one(FixedTable)
        grid.follow = not grid.follow
        if grid.follow:
            grid.action_move(len(grid.rows))
        self.redraw()

    @on(FixedTable.Chosen)
    def _jump(self, event: FixedTable.Chosen) -> None:
        """Open the request that the line names, if it names one."""
        entry = self.state.log[int(event.key)]
        live = [request.id for request in self.state.tick.requests] if self.state.tick else []
        for known in [*live, *(str(row["id"]) for row in self.state.ended)]:
            if known in entry["message"]:
                self.dashboard.show_request(known)
                return
        self.dashboard.show_facts("log line", entry)


def split_model(message: str) -> tuple[str, str]:
    """Split a line of an engine, `MODEL | text`, into its model and its text without the model's name."""
    model, mark, text = message.partition(" | ")
    if not mark or not model or " " in model:
        return "", message
    for prefix in (f"{model}: ", f"{model} "):
        text = text.removeprefix(prefix)
    return model, text


def _row(number: int, entry: dict[str, Any]) -> Row:
    level = str(entry["level"])
    stamp = time.strftime("%H:%M:%S", time.localtime(entry["time"])) if entry["time"] else ""
    tone = TONES.get(level, "")
    model, text = split_model(str(entry["message"]))
    message = clean(text) + (" (with trace)" if entry.get("trace") else "")
    return Row(
        str(number),
        (
            (stamp, "muted"),
            (clean(level), tone or "muted"),
            (clean(str(entry["component"])), "muted"),
            (clean(model), "muted"),
            (message, tone),
        ),
    )
