"""Requests page: requests in flight above the log with its filters, and one request in detail."""

import asyncio
import csv
import io
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import urlencode

from litestar import MediaType, Response, get, post
from litestar.params import FromPath

from llmbox.app.errors import ApiError
from llmbox.app.http.admin.requests import readable
from llmbox.app.http.auth.guard import identity_of
from llmbox.app.http.server.sse import while_connected
from llmbox.app.inspect.detail import detail_of
from llmbox.app.inspect.replay import replay
from llmbox.app.inspect.why import times_of_record
from llmbox.app.store.record import RecordFilter, RecordOrder, RecordTotals, RequestRecord
from llmbox.app.store.usage import known_names, totals_of

from ..render import PageContext, PanelRequest, done, is_fragment, page, panel_of, render
from .request_help import HELP, remedies

ROWS = 50
SINCE = (("", "All time"), ("3600", "Last hour"), ("86400", "Last day"), ("604800", "Last week"))
MOST_LIVE = 100
PATIENCE_S = 0.2
"""Seconds that a live update waits for the log."""
WHOLE_LOG_S = 10.0
"""Seconds between two live updates that read the whole log: totals, and rows that are sorted."""
SORTS: dict[str, RecordOrder] = {
    "time": "e2e_s",
    "first-token": "ttft_s",
    "output": "output_tokens",
    "prompt": "prompt_tokens",
}
"""Columns by the value of `sort` in the URL."""
HISTORY = {
    "history-totals": "live/requests/history_totals.html",
    "history": "live/requests/history.html",
    "history-note": "live/requests/history_note.html",
    "history-pages": "live/requests/history_pages.html",
}
"""Templates by the name of their live fragment."""


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """Filter of the log as in the URL, so that a view can be shared."""

    model: str
    key: str
    status: str
    since: str
    before: str
    sort: str

    def wanted(self, rows: int) -> RecordFilter:
        status, since = _number(self.status, "status"), _number(self.since, "since")
        return RecordFilter(
            model=self.model or None,
            key=self.key or None,
            status=status,
            errors_only=self.status == "errors",
            since=None if since is None else time.time() - since,
            before_seq=None if self.sort else _number(self.before, "before"),
            order=SORTS.get(self.sort, ""),
            limit=rows,
        )

    def query(self, **changes: str) -> str:
        names = ("model", "key", "status", "since", "sort")
        values = {name: getattr(self, name) for name in names} | changes
        return urlencode({name: value for name, value in values.items() if value})


def filter_of(request: PanelRequest) -> RequestFilter:
    """Read the filter from the query of the URL."""
    values = {field.name: request.query_params.get(field.name, "") for field in fields(RequestFilter)}
    return RequestFilter(**values | {name: values[name].strip() for name in ("model", "key")})


@get("/requests", name="panel_requests")
async def requests_page(request: PanelRequest) -> Response[str]:
    panel = panel_of(request)
    chosen = filter_of(request)
    history = await _history(panel, chosen)
    # A read of a log that is locked waits for seconds: one of them is enough.
    models, keys = ([], []) if history["problem"] else await known_names(panel.services.request_log)
    return page(
        request,
        "requests/requests.html",
        "requests",
        live=_live(panel),
        most_live=MOST_LIVE,
        ranges=SINCE,
        models=sorted({*models, chosen.model} - {""}),
        keys=sorted({*keys, chosen.key} - {""}),
        **history,
    )


def requests_pieces(chosen: RequestFilter) -> Callable[[PageContext], Awaitable[dict[str, str]]]:
    """Create the fragments of one open page. While the log is slow, requests in flight are shown without it.

    Raises ApiError for an invalid filter.
    """
    chosen.wanted(ROWS)  # raises for an invalid filter now rather than in the stream
    reading: asyncio.Task[dict[str, Any]] | None = None
    totals: RecordTotals | None = None
    due = 0.0

    async def pieces(panel: PageContext) -> dict[str, str]:
        nonlocal reading, totals, due
        made = {
            "inflight": render("live/requests/inflight.html", panel, live=_live(panel), most_live=MOST_LIVE)
        }
        if time.monotonic() >= due:  # they read the whole log: not at every tick
            totals, due = None, time.monotonic() + WHOLE_LOG_S
        elif chosen.sort:
            return made
        reading = reading or asyncio.create_task(_history(panel, chosen, totals))
        await asyncio.wait({reading}, timeout=PATIENCE_S)
        if reading.done():
            history, reading = reading.result(), None
            totals = history["totals"]
            made |= {name: render(template, panel, **history) for name, template in HISTORY.items()}
        return made

    return pieces


async def _history(
    panel: PageContext, chosen: RequestFilter, totals: RecordTotals | None = None
) -> dict[str, Any]:
    rows, problem = await readable(panel.services, chosen.wanted(ROWS + 1))
    if totals is None:
        totals = (
            RecordTotals() if problem else await totals_of(panel.services.request_log, chosen.wanted(ROWS))
        )
    return {
        "rows": [record for _, record in rows[:ROWS]],
        "problem": problem,
        "chosen": chosen,
        "older": chosen.query(before=str(rows[ROWS - 1][0])) if len(rows) > ROWS and not chosen.sort else "",
        "totals": totals,
        "help": HELP,
        "dropped": panel.services.request_log.dropped,
    }


@get("/requests/{request_id:str}", name="panel_request")
async def request_page(request: PanelRequest, request_id: FromPath[str]) -> Response[str]:
    panel = panel_of(request)
    detail = await detail_of(panel.control, identity_of(request), request_id)
    record = detail.request
    return page(
        request,
        "requests/request.html",
        "requests",
        detail=detail,
        live=detail.in_flight,
        record=record,
        help=HELP.get(record.error_code) if record else None,
        remedies=remedies(panel, record) if record else [],
        phases=_phases(record) if record else [],
        times=await times_of_record(panel.services, record) if record else None,
        params=json.loads(record.params) if record else {},
    )


@post("/requests/{request_id:str}/replay", status_code=200, name="panel_replay")
async def replay_request(request: PanelRequest, request_id: FromPath[str]) -> Response[str]:
    """Replay a request. The response is sent whole; closing the page cancels the work."""
    panel = panel_of(request)
    work = replay(panel.services, identity_of(request), request_id)
    answer = await while_connected(request.receive, work)
    if is_fragment(request):
        html = render("live/requests/replayed.html", panel, replayed=answer)
        return Response(html, media_type=MediaType.HTML)
    return page(request, "requests/replayed.html", "requests", replayed=answer)


@post("/requests/{request_id:str}/cancel", status_code=200, name="panel_cancel")
async def cancel_request(request: PanelRequest, request_id: FromPath[str]) -> Response[str]:
    if not panel_of(request).services.gateway.cancel(request_id):
        raise ApiError(404, "That request has ended already.", "request_not_found")
    return done(request, "/admin/requests", f"Cancelled {request_id}.")


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """Phase of a request. `start` and `share` are percent of the whole time."""

    name: str
    seconds: float
    start: float
    share: float


def _phases(record: RequestRecord) -> list[RequestPhase]:
    whole = record.e2e_s
    if not whole or record.ttft_s is None:
        return []
    queue = min(record.queue_s or 0.0, record.ttft_s)
    parts = (
        ("queue", queue),
        ("prefill", record.ttft_s - queue),
        ("decode", max(0.0, whole - record.ttft_s)),
    )
    made: list[RequestPhase] = []
    start = 0.0
    for name, seconds in parts:
        share = 100 * seconds / whole
        made.append(RequestPhase(name, seconds, round(start, 2), round(share, 2)))
        start += share
    return made


def _live(panel: PageContext) -> list[Any]:
    return list(panel.services.gateway.in_flight())


def _number(text: str, name: str) -> int | None:
    if not text or text == "errors":
        return None
    if not text.isdecimal() or len(text) > 15:
        raise ApiError(400, f"The filter {name} must be a whole number.", "invalid_value", name)
    return int(text)


MOST_ROWS = 10_000


@get("/requests.csv", name="panel_requests_csv")
async def export_csv(request: PanelRequest) -> Response[str]:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(RequestRecord)])
    writer.writeheader()
    for record in await _records(request, filter_of(request)):
        writer.writerow({name: _plain(value) for name, value in asdict(record).items()})
    return _file(text.getvalue(), "csv", "text/csv")


@get("/requests.json", name="panel_requests_json")
async def export_json(request: PanelRequest) -> Response[str]:
    records = await _records(request, filter_of(request))
    rows = [asdict(record) for record in records]
    return _file(json.dumps({"schema": "llmbox.requests/1", "requests": rows}), "json", "application/json")


async def _records(request: PanelRequest, chosen: RequestFilter) -> list[RequestRecord]:
    wanted = chosen.wanted(MOST_ROWS)
    return [record for _, record in await panel_of(request).services.request_log.query(wanted)]


def _plain(value: object) -> object:
    """Quote text that spreadsheets would run as a formula; names and ids come from clients."""
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@", "\t"} else value


def _file(text: str, ending: str, media_type: str) -> Response[str]:
    disposition = f'attachment; filename="llmbox-requests.{ending}"'
    return Response(text, media_type=media_type, headers={"Content-Disposition": disposition})
