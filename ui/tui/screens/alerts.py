"""Screen 8: current alerts, their age, and what to do about each."""

import time
from collections.abc import Iterable
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from llmbox.app.telemetry.snapshot import Alert

from ..messages import FetchData, alert_name
from ..rendering import DASH, Line, clean, heading, wrap
from ..widgets.lines import Column, FixedTable, Lines, Row
from .base import DashboardScreen

COLUMNS = (
    Column("SINCE", 8),
    Column("LEVEL", 8),
    Column("WHAT", 0),
    Column("WHAT TO DO", 40, rank=1),
)
CHECKED = (
    "models that failed to load or whose engine failed, failed requests (5xx) of the last five minutes, "
    "missed TTFT and TPOT targets, a full KV cache with requests in the queue, GPU faults, heat and "
    "throttling, low memory, low disk space, failed downloads"
)


class AlertsScreen(DashboardScreen):
    TITLE = "Alerts"
    FILTERS = True
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy what to do")]

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="line")
        yield FixedTable(COLUMNS, "")
        yield Lines(id="detail")
        yield Lines(id="checked")

    def wants(self) -> Iterable[FetchData]:
        yield FetchData("downloads", "downloads")

    def draw(self) -> None:
        width = self.size.width
        alerts = self.state.alerts
        failures = sum(each.level == "failure" for each in alerts)
        note = (
            f"{_number(failures, 'failure')}, {_number(len(alerts) - failures, 'warning')}"
            if alerts
            else "nothing is wrong"
        )
        self.query_one("#title", Lines).show([heading(" Alerts", width - 1, self.glyphs, note)])
        rows = []
        for number, each in enumerate(alerts):
            since = self.state.alerts_since.get(alert_name(each))
            tone = "bad" if each.level == "failure" else "warn"
            stamp = DASH if since is None else time.strftime("%H:%M:%S", time.localtime(since))
            cells = (
                (stamp, "muted"),
                (each.level, tone),
                (clean(each.text), ""),
                (clean(each.fix) or DASH, "accent"),
            )
            if self.matches(each.text, each.fix, each.level):
                rows.append(Row(f"{number}", cells))
        hidden = alerts and not rows
        empty = (
            "Nothing matches the filter. Press esc to clear it."
            if hidden
            else "No alerts: nothing is wrong now."
        )
        self.query_one(FixedTable).show(rows, empty=empty)
        self._set_lines("#detail", self._detail_lines(width))
        lines = [heading(" Checked each second", width - 1, self.glyphs)]
        lines += [((" ", ""), (line[0][0], "muted")) for line in wrap(CHECKED, width - 4)]
        self._set_lines("#checked", lines if self.size.height >= 32 else [])

    def _set_lines(self, name: str, lines: list[Line]) -> None:
        shown = self.query_one(name, Lines)
        shown.styles.height = len(lines)
        shown.show(lines)

    def _detail_lines(self, width: int) -> list[Line]:
        """Draw the alert under the cursor in full."""
        alert = self._chosen
        if alert is None:
            return []
        lines: list[Line] = [heading(" Alert under the cursor", width - 1, self.glyphs)]
        tone = "bad" if alert.level == "failure" else "warn"
        lines += [((" ", ""), (line[0][0], tone)) for line in wrap(alert.text, width - 4)]
        lines += [((" ", ""), (line[0][0], "accent")) for line in wrap(alert.fix, width - 4)]
        return [*lines, ()]

    @property
    def _chosen(self) -> Alert | None:
        chosen, alerts = self.query_one(FixedTable).selected, self.state.alerts
        return alerts[int(chosen)] if chosen is not None and int(chosen) < len(alerts) else None

    @on(FixedTable.Moved)
    def _moved(self) -> None:
        self._set_lines("#detail", self._detail_lines(self.size.width))

    @on(FixedTable.Chosen)
    def _show_alert(self) -> None:
        if (alert := self._chosen) is not None:
            self.dashboard.show_texts(
                "Alert", {"level": alert.level, "what": alert.text, "what to do": alert.fix}
            )

    def action_copy(self) -> None:
        """Copy the command or advice of the alert under the cursor."""
        if (alert := self._chosen) is not None and alert.fix:
            self.dashboard.copy_to_clipboard(alert.fix)
            self.notify("Copied.")


def _number(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"
