"""Messages and state of the dashboard. A newer reading replaces an older one that is not drawn yet."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from textual.message import Message

from llmbox.app.telemetry.snapshot import NA, Alert, Tick


class NewestMessage(Message):
    """Message that replaces an earlier one of its class which was not handled yet."""

    def can_replace(self, message: Message) -> bool:
        return type(message) is type(self)


class TickReceived(NewestMessage):
    """The daemon sent its telemetry of one second."""

    def __init__(self, tick: Tick) -> None:
        super().__init__()
        self.tick = tick


class EventReceived(Message):
    """Any other event of the stream arrived."""

    def __init__(self, kind: str, data: dict[str, Any]) -> None:
        super().__init__()
        self.kind, self.data = kind, data


class Connected(Message):
    pass


class ConnectionLost(NewestMessage):
    """The connection to the daemon was lost, or there was none."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason


class StateChanged(NewestMessage, bubble=False):
    """Request to the visible screen to draw the state again."""


class ResponseReceived(Message):
    """Response of the admin API to a `FetchData`."""

    def __init__(self, name: str, answer: dict[str, Any]) -> None:
        super().__init__()
        self.name, self.answer = name, answer


class FetchData(Message):
    """Request for data of the admin API; the response goes into the state under `name`."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__()
        self.name, self.path = name, path


class RunAction(Message):
    """Request to change something in the daemon. `question` asks the user first, before destructive
    actions.
    """

    def __init__(self, path: str, body: dict[str, Any], done: str, question: str = "") -> None:
        super().__init__()
        self.path, self.body, self.done, self.question = path, body, done, question


class PromptUser(Message):
    """Request for a line of text from the user, which then becomes an action."""

    def __init__(self, title: str, hint: str, path: str, field: str, done: str) -> None:
        super().__init__()
        self.title, self.hint, self.path, self.field, self.done = title, hint, path, field, done


SPARK_S: Final = 600
MOST_ENDED: Final = 500
MOST_LOG: Final = 2000
SPARKS: Final = (
    "tokens_out", "tokens_in", "running", "waiting", "ttft_p50", "ttft_p95", "kv_used", "prefix_hit",
    "error_rate", "tpot_p50", "tpot_p95",
)  # fmt: skip
MODEL_CHANGES: Final = "model."


def alert_name(alert: Alert) -> str:
    """Return what names an alert while its numbers change."""
    return "".join(char for char in alert.text if not char.isdigit())


class InFlightCounts(NamedTuple):
    """Open requests by phase: the one source of such counts on all screens."""

    running: int
    """Requests in prefill or decode."""
    queued: int

    @property
    def in_flight(self) -> int:
        return self.running + self.queued

    def __str__(self) -> str:
        return f"{self.in_flight} in flight: {self.running} running, {self.queued} queued"


def count_requests(tick: Tick | None, model: str | None = None) -> InFlightCounts:
    """Count the open requests of one model, or of all."""
    if tick is None:
        return InFlightCounts(0, 0)
    phases = [each.state != "queued" for each in tick.requests if model in {None, each.model}]
    # A tick lists the oldest requests; those beyond its limit wait.
    beyond = max(0, tick.totals.open_requests - len(tick.requests)) if model is None else 0
    return InFlightCounts(sum(phases), len(phases) - sum(phases) + beyond)


@dataclass(slots=True)
class DashboardState:
    """Telemetry, requests, log lines and responses that the screens draw."""

    tick: Tick | None = None
    lost: str = ""
    """Reason why the daemon does not answer; empty while it does."""
    tick_at: float = 0.0
    """Time of the last tick in monotonic seconds."""
    sparks: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=SPARK_S) for name in SPARKS}
    )
    """Sparkline values, one a second; -1 where there was none."""
    ended: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_ENDED))
    """Records of ended requests, newest first."""
    log: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_LOG))
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Responses of the admin API, by the name of the `FetchData`."""
    alerts_since: dict[str, float] = field(default_factory=dict)
    """Unix time at which each alert, by its text without numbers, was first seen."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason why the last `FetchData` of that name failed."""
    clock: Callable[[], float] = time.monotonic

    @property
    def age(self) -> float:
        """Seconds since the last tick."""
        return self.clock() - self.tick_at if self.tick is not None else 0.0

    def take_tick(self, tick: Tick) -> None:
        """Store a tick and append its values to the sparklines."""
        self.tick, self.tick_at, self.lost = tick, self.clock(), ""
        counts = count_requests(tick)
        phases = {"running": counts.running, "waiting": counts.queued}
        for name, values in self.sparks.items():
            value = phases.get(name, getattr(tick.totals, name))
            values.append(-1.0 if value is NA else float(value))
        self._date_alerts()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Alerts of this moment, failures first: the daemon's alerts, and downloads that failed."""
        found = list(self.tick.attention) if self.tick is not None else []
        for each in self.answers.get("downloads", {}).get("downloads", []):
            if each.get("state") == "failed":
                error = each.get("error") or {}
                fix = error.get("fix") or f"llmbox pull {each['model']}"
                text = f"{each['model']}: download failed: {error.get('what', 'no reason is known')}"
                found.append(Alert(level="failure", text=text, fix=fix))
        return tuple(sorted(found, key=lambda each: each.level != "failure"))

    def _date_alerts(self) -> None:
        now = self.tick.time if self.tick is not None else 0.0
        names = [alert_name(each) for each in self.alerts]
        self.alerts_since = {name: self.alerts_since.get(name, now) for name in names}

    def take_event(self, kind: str, data: dict[str, Any]) -> None:
        """Store an event: a log line, an ended request, or the progress of a download."""
        if kind == "log":
            self.log.append(data)
        elif kind in {"request.finished", "request.refused"}:
            if all(row["id"] != data["id"] for row in self.ended):
                self.ended.appendleft(data)
        elif kind == "download.progress":
            self._take_download(data)

    def _take_past(self, answer: dict[str, Any]) -> None:
        """Put the daemon's history before the values received since."""
        if self.tick is None:
            return
        for name, values in self.sparks.items():
            column = answer["series"].get(name, [])
            known = dict(zip(answer["times"], column, strict=False))
            first = int(self.tick.time) - len(values) + 1
            past = [known.get(second) for second in range(first - SPARK_S + len(values), first)]
            values.extendleft(-1.0 if value is None else value for value in reversed(past))

    def _take_download(self, data: dict[str, Any]) -> None:
        known = self.answers.get("downloads", {}).get("downloads", [])
        others = [each for each in known if each["model"] != data["model"]]
        self.answers["downloads"] = {"downloads": [*others, data]}

    def take_answer(self, name: str, answer: dict[str, Any]) -> None:
        """Store the response to the `FetchData` of that name."""
        self.answers[name] = answer
        self.refused.pop(name, None)
        if name == "history":
            known = {row["id"] for row in answer["requests"]}
            fresh = [row for row in self.ended if row["id"] not in known]
            self.ended = deque([*fresh, *answer["requests"]], maxlen=MOST_ENDED)
        elif name == "past":
            self._take_past(answer)
        elif name == "log":
            self.log = deque(answer["lines"], maxlen=MOST_LOG)
