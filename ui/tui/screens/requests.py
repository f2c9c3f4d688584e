"""Screen 2: requests in flight, then ended ones. Requests as table rows, and details in two columns: one
request in full with its phases, the result of a fit.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

from textual import on
from textual.binding import Binding, BindingType
from textual.widget import Widget

from llmbox.app.store.record import LiveRequest

from ..messages import FetchData, RunAction, count_requests
from ..rendering import DASH, Glyphs, Line, bar, clean, count, heading, seconds, size, wrap
from ..widgets.lines import Column, FixedTable, Lines, Row
from .base import DashboardScreen

AGE_WIDTH = 9
COLUMNS = (
    Column("ID", 16, middle=True),
    Column("AGE", AGE_WIDTH, right=True),
    Column("KEY", 13, rank=9, middle=True),
    Column("MODEL", 0, middle=True, least=18),
    Column("STATE", 9),
    Column("PROMPT", 15, right=True, rank=7),
    Column("OUTPUT", 7, right=True),
    Column("TOK/S", 6, right=True, rank=1),
    Column("TTFT", 7, right=True, rank=6),
    Column("END", 16, rank=8),
)
SORTS = (None, "MODEL", "STATE", "PROMPT", "OUTPUT", "TOK/S", "TTFT")
"""Columns that the sort key goes through; None: newest requests first."""


def request_rows(live: Sequence[LiveRequest], ended: Sequence[Mapping[str, Any]], now: float) -> list[Row]:
    """Return rows of requests in flight, oldest first, then of ended ones, newest first."""
    waiting: Counter[str] = Counter()
    rows = []
    for request in live:
        position = ""
        if request.state == "queued":
            waiting[request.model] += 1
            position = str(waiting[request.model])
        rows.append(_live(request, position))
    gone = {request.id for request in live}
    return rows + [_ended(row, now) for row in ended if row["id"] not in gone]


def _live(request: LiveRequest, position: str) -> Row:
    end = f"resumed {request.resumes}x" if request.resumes else ""
    return Row(
        request.id,
        (
            (clean(request.id), ""),
            (_age(request.age), "muted"),
            (clean(request.key) or DASH, "muted"),
            (clean(request.model), ""),
            _state(request.state, position),
            (_prompt(request.prompt_tokens, request.cached_tokens), "muted"),
            (count(request.output_tokens), ""),
            (_speed(request.tokens_per_second), "strong"),
            (seconds(request.ttft), "muted"),
            (end, "warn"),
        ),
        (request.id, request.age, request.key, request.model, request.state, request.prompt_tokens,
         request.output_tokens, request.tokens_per_second, request.ttft, end),
    )  # fmt: skip


def _ended(row: Mapping[str, Any], now: float) -> Row:
    status = int(row["http_status"])
    tone = "bad" if status >= 500 else "warn" if status >= 400 else "muted"
    tpot = row["tpot_s"]
    speed, end = 1 / tpot if tpot else None, str(row["error_code"] or row["finish_reasons"])
    age = now - float(row["created"])
    return Row(
        str(row["id"]),
        (
            (clean(str(row["id"])), "muted"),
            (_ago(age), "muted"),
            (clean(str(row["key"])) or DASH, "muted"),
            (clean(str(row["model"])), "muted"),
            (str(status), tone),
            (_prompt(row["prompt_tokens"], row["cached_tokens"]), "muted"),
            (count(row["output_tokens"]), "muted"),
            (_speed(speed), "muted"),
            (seconds(row["ttft_s"]), "muted"),
            (clean(end), tone),
        ),
        (str(row["id"]), age, str(row["key"]), str(row["model"]), str(status), row["prompt_tokens"],
         row["output_tokens"], speed, row["ttft_s"], end),
        group=1,
    )  # fmt: skip


def time_bar(detail: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    """Draw the phases of an ended request: queue, prefill, decode."""
    whole, first, queued = detail.get("e2e_s"), detail.get("ttft_s"), detail.get("queue_s")
    if not whole:
        return []
    queue = min(queued if queued is not None else first or whole, whole)
    prefill = max(0.0, (first if first is not None else whole) - queue)
    decode = max(0.0, whole - queue - prefill)
    shares = [(queue / whole, "warn"), (prefill / whole, "kv"), (decode / whole, "accent")]
    legend: Line = (
        (f"queue {seconds(queue)}", "warn"),
        ("   ", ""),
        (f"prefill {seconds(prefill)}", "kv"),
        ("   ", ""),
        (f"decode {seconds(decode)}", "accent"),
    )
    return [bar(shares, width, glyphs), legend]


def _state(state: str, position: str = "") -> tuple[str, str]:
    """Format the state. `position` is that in the queue."""
    return f"{state} {position}".rstrip(), {"queued": "warn", "prefill": "kv", "decode": "good"}.get(
        state, ""
    )


def _prompt(prompt: int, cached: int) -> str:
    return f"{prompt:,} ({cached:,})" if cached else f"{prompt:,}"


def _speed(value: float | None) -> str:
    return DASH if value is None else count(float(value)) if value >= 10 else f"{value:.1f}"


def _age(value: float) -> str:
    return f"{int(value)} s" if value < 600 else f"{int(value / 60)} min"


def _ago(value: float) -> str:
    if value < 0:
        return "now"
    for limit, divisor, name in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if value < limit:
            age = f"{int(value / divisor)} {name}"
            return f"{age} ago" if len(age) <= AGE_WIDTH - len(" ago") else age
    return time.strftime("%d %b", time.localtime(time.time() - value))


_MOST_SHOWN = 4000
"""Maximum number of characters shown of a prompt and of an answer."""
_WORDS = {
    "id": "request", "n": "choices", "stream": "streamed", "prompt_tokens": "prompt tokens",
    "cached_tokens": "cached prompt tokens", "output_tokens": "output tokens", "ttft": "TTFT",
    "ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "end-to-end latency", "queue_s": "time in queue",
    "tokens_per_second": "tokens/s", "http_status": "HTTP status", "finish_reasons": "finish reason",
    "error_code": "error", "tier": "priority class", "params": "parameters", "resumes": "resumed",
}  # fmt: skip
"""Labels of a request's fields."""
_IN_WORDS = {"seq", "prefix_end", "looked_up_tokens", "output_hash", "fingerprint", "content"}


def fact_lines(
    facts: Mapping[str, Any], prefix: str = "", names: Mapping[str, str] | None = None
) -> list[Line]:
    """Format facts as lines of name and value.

    Nested facts are prefixed with their name. `names` maps keys to labels. Empty values are left out.
    """
    lines: list[Line] = []
    for key, value in facts.items():
        name = f"{prefix}{(names or {}).get(key, key)}"
        if isinstance(value, Mapping):
            lines += fact_lines(value, f"{name}.")
        elif value not in (None, "", [], False):
            lines.append(((f"{clean(name):<24}", "muted"), (clean(_format_value(key, value)), "")))
    return lines


def request_lines(answer: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[Line]:
    """Format the admin API's response for a request; missing parts are left out."""
    detail = answer.get("request") or answer["in_flight"]
    facts = {key: value for key, value in detail.items() if key not in _IN_WORDS and value != "{}"}
    parts = [
        time_bar(detail, width, glyphs),
        wrap(answer.get("prefix_note", ""), width),
        fact_lines(facts, names=_WORDS),
        *_texts(answer, width, glyphs),
        wrap(answer.get("content_note", ""), width),
    ]
    lines: list[Line] = []
    for part in filter(None, parts):
        lines += [(), *part] if lines else part
    return lines


def fit_lines(answer: Mapping[str, Any], width: int) -> list[Line]:
    """Format the admin API's response for a fit."""
    words = dict(answer["words"])
    lines: list[Line] = [*wrap(words.pop("verdict"), width), ()]
    rows = [
        *words.items(),
        *(("would fit", remedy) for remedy in answer["remedies"]),
        *(("note", note) for note in answer["notes"]),
    ]
    for name, text in rows:
        for number, line in enumerate(wrap(text, width - 12)):
            lines.append(((f"{'' if number else clean(name):<12}", "muted"), *line))
    return lines


def _texts(answer: Mapping[str, Any], width: int, glyphs: Glyphs) -> list[list[Line]]:
    content = answer.get("content")
    if content is None:
        return []
    blocks = []
    for title, texts in (("Prompt", content["prompts"]), ("Answer", content["outputs"])):
        for text in texts:
            shown = text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + glyphs.more
            paragraphs = [line for each in shown.split("\n") for line in wrap(each, width) or [()]]
            blocks.append([heading(title, width, glyphs), *paragraphs])
    return blocks


def _format_value(key: str, value: object) -> str:
    if value is True:
        return "yes"
    if isinstance(value, float) and (key.endswith("_s") or key in {"age", "ttft"}):
        return seconds(value)
    if isinstance(value, float) and key in {"created", "time", "loaded_at", "last_used", "modified"}:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, int) and key.endswith("_bytes"):
        return size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


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
