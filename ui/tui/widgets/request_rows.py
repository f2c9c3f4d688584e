"""Requests as table rows, in flight and ended, and the time that each phase took."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llmbox.app.gateway.request_events import LiveRequest

from ..rendering import DASH, Glyphs, Line, bar, clean, count, seconds
from .table import Column, Row

LIVE_COLUMNS = (
    Column("ID", 20),
    Column("AGE", 7, right=True),
    Column("MODEL", 0, rank=2),
    Column("STATE", 9),
    Column("PROMPT", 14, right=True, rank=4),
    Column("OUTPUT", 7, right=True),
    Column("TOK/S", 6, right=True, rank=1),
    Column("TTFT", 7, right=True, rank=3),
)
COLUMNS = (
    Column("ID", 20),
    Column("AGE", 10, right=True),
    Column("KEY", 10, rank=9),
    Column("MODEL", 0, rank=4),
    Column("STATE", 10),
    Column("PROMPT", 13, right=True, rank=5),
    Column("OUTPUT", 7, right=True),
    Column("TOK/S", 6, right=True, rank=3),
    Column("TTFT", 7, right=True, rank=2),
    Column("END", 16, rank=1),
)
SORTS = ("age", "model", "state", "output", "tok/s", "ttft")


def live_rows(requests: Sequence[LiveRequest]) -> list[Row]:
    return [
        Row(
            request.id,
            (
                (clean(request.id), ""),
                (_age(request.age), "muted"),
                (clean(request.model), ""),
                _state(request.state),
                (_prompt(request.prompt_tokens, request.cached_tokens), "muted"),
                (count(request.output_tokens), ""),
                (_speed(request.tokens_per_second), "strong"),
                (seconds(request.ttft), "muted"),
            ),
        )
        for request in requests
    ]


def all_rows(
    live: Sequence[LiveRequest], ended: Sequence[Mapping[str, Any]], sort: str, now: float
) -> list[Row]:
    """Return rows of requests in flight, then of ended ones; each part in the order of `sort`, largest
    first.
    """
    waiting: Counter[str] = Counter()
    entries = []
    for request in live:
        position = ""
        if request.state == "queued":
            waiting[request.model] += 1
            position = str(waiting[request.model])
        entries.append((_live_key(request, sort), _live(request, position)))
    gone = {request.id for request in live}
    rest = [(_ended_key(row, sort), _ended(row, now)) for row in ended if row["id"] not in gone]
    if sort != "age":
        entries.sort(key=lambda each: each[0], reverse=True)
        rest.sort(key=lambda each: each[0], reverse=True)
    return [row for _, row in entries] + [row for _, row in rest]


def _live(request: LiveRequest, position: str) -> Row:
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
            (f"resumed {request.resumes}x" if request.resumes else "", "warn"),
        ),
    )


def _ended(row: Mapping[str, Any], now: float) -> Row:
    status = int(row["http_status"])
    tone = "bad" if status >= 500 else "warn" if status >= 400 else "muted"
    tpot = row["tpot_s"]
    end = row["error_code"] or row["finish_reasons"]
    return Row(
        str(row["id"]),
        (
            (clean(str(row["id"])), "muted"),
            (_ago(now - float(row["created"])), "muted"),
            (clean(str(row["key"])) or DASH, "muted"),
            (clean(str(row["model"])), "muted"),
            (str(status), tone),
            (_prompt(row["prompt_tokens"], row["cached_tokens"]), "muted"),
            (count(row["output_tokens"]), "muted"),
            (_speed(1 / tpot if tpot else None), "muted"),
            (seconds(row["ttft_s"]), "muted"),
            (clean(str(end)), tone),
        ),
    )


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


def _live_key(request: LiveRequest, sort: str) -> Any:
    return {
        "model": request.model,
        "state": request.state,
        "output": request.output_tokens,
        "tok/s": request.tokens_per_second or 0.0,
        "ttft": request.ttft or 0.0,
    }.get(sort, request.age)


def _ended_key(row: Mapping[str, Any], sort: str) -> Any:
    tpot = row["tpot_s"]
    return {
        "model": row["model"],
        "state": row["http_status"],
        "output": row["output_tokens"],
        "tok/s": 1 / tpot if tpot else 0.0,
        "ttft": row["ttft_s"] or 0.0,
    }.get(sort, row["created"])


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
            return f"{int(value / divisor)} {name} ago"
    return time.strftime("%d %b", time.localtime(time.time() - value))
