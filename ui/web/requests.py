"""Requests: those in flight, above the log with its filters; one in detail."""

import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from litestar import Response, get, post

from llmbox.app.errors import ApiError
from llmbox.app.store.record import RecordFilter, RequestRecord

from .forms import done
from .render import Panel, PanelRequest, page, panel_of, render
from .snippets import as_curl, as_python

ROWS = 50
SINCE = (("", "All time"), ("3600", "Last hour"), ("86400", "Last day"), ("604800", "Last week"))
MOST_LIVE = 100


@dataclass(frozen=True, slots=True)
class Filter:
    """As the URL says it, so that a view can be sent to somebody."""

    model: str
    status: str
    since: str
    before: str

    def wanted(self, rows: int) -> RecordFilter:
        status, since = _number(self.status, "status"), _number(self.since, "since")
        return RecordFilter(
            model=self.model or None,
            status=status,
            errors_only=self.status == "errors",
            since=None if since is None else time.time() - since,
            before_seq=_number(self.before, "before"),
            limit=rows,
        )

    def query(self, **changes: str) -> str:
        values = {"model": self.model, "status": self.status, "since": self.since, **changes}
        return urlencode({name: value for name, value in values.items() if value})


def filter_of(model: str, status: str, since: str, before: str) -> Filter:
    return Filter(model.strip(), status, since, before)


@get("/requests", name="panel_requests")
async def requests_page(
    request: PanelRequest, model: str = "", status: str = "", since: str = "", before: str = ""
) -> Response[str]:
    panel = panel_of(request)
    chosen = filter_of(model, status, since, before)
    rows = await panel.services.request_log.query(chosen.wanted(ROWS + 1))
    older = chosen.query(before=str(rows[ROWS - 1][0])) if len(rows) > ROWS else ""
    return page(
        request,
        "requests.html",
        "requests",
        live=_live(panel),
        most_live=MOST_LIVE,
        rows=[record for _, record in rows[:ROWS]],
        chosen=chosen,
        older=older,
        ranges=SINCE,
        dropped=panel.services.request_log.dropped,
    )


async def requests_pieces(panel: Panel) -> dict[str, str]:
    return {"inflight": render("live/inflight.html", panel, live=_live(panel), most_live=MOST_LIVE)}


@get("/requests/{request_id:str}", name="panel_request")
async def request_page(request: PanelRequest, request_id: str) -> Response[str]:
    panel = panel_of(request)
    live = next((each for each in panel.services.gateway.in_flight() if each.id == request_id), None)
    record = None if live else await panel.services.request_log.get(request_id)
    if live is None and record is None:
        raise ApiError(404, f"No request {request_id!r} is known.", "request_not_found")
    url = panel.control.running.url
    return page(
        request,
        "request.html",
        "requests",
        live=live,
        record=record,
        phases=_phases(record) if record else [],
        params=json.loads(record.params) if record else {},
        curl=as_curl(url, record) if record else "",
        python=as_python(url, record) if record else "",
    )


@post("/requests/{request_id:str}/cancel", status_code=200, name="panel_cancel")
async def cancel_request(request: PanelRequest, request_id: str) -> Response[str]:
    if not panel_of(request).services.gateway.cancel(request_id):
        raise ApiError(404, "That request has ended already.", "request_not_found")
    return done(request, "/admin/requests", f"Cancelled {request_id}.")


@dataclass(frozen=True, slots=True)
class Phase:
    """`start` and `share` are percent of the whole time."""

    name: str
    seconds: float
    start: float
    share: float


def _phases(record: RequestRecord) -> list[Phase]:
    whole = record.e2e_s
    if not whole or record.ttft_s is None:
        return []
    queue = min(record.queue_s or 0.0, record.ttft_s)
    parts = (
        ("queue", queue),
        ("prefill", record.ttft_s - queue),
        ("decode", max(0.0, whole - record.ttft_s)),
    )
    made: list[Phase] = []
    start = 0.0
    for name, seconds in parts:
        share = 100 * seconds / whole
        made.append(Phase(name, seconds, round(start, 2), round(share, 2)))
        start += share
    return made


def _live(panel: Panel) -> list[Any]:
    return list(panel.services.gateway.in_flight())


def _number(text: str, name: str) -> int | None:
    if not text or text == "errors":
        return None
    if not text.isdecimal() or len(text) > 15:
        raise ApiError(400, f"The filter {name} must be a whole number.", "invalid_value", name)
    return int(text)
