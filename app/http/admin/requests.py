"""The request log, what is in flight, and cancelling."""

from dataclasses import asdict
from typing import Any

from litestar import Request, get, post
from litestar.datastructures import State

from ...errors import ApiError
from ...services import Services
from ...store.record import RecordFilter
from .schema import Cancelled, RequestDetail, Requests

MOST_ROWS = 1000


@get("/requests", name="admin_requests")
async def requests(
    request: Request[Any, Any, State],
    model: str | None = None,
    status: int | None = None,
    errors: bool = False,
    since: float | None = None,
    before: int | None = None,
    limit: int = 50,
) -> Requests:
    """`since` is Unix seconds; `before` a `seq`, for the next page."""
    services: Services = request.app.state.services
    want = RecordFilter(
        model=model,
        status=status,
        errors_only=errors,
        since=since,
        before_seq=before,
        limit=max(1, min(limit, MOST_ROWS)),
    )
    rows = await services.request_log.query(want)
    live = [each for each in services.gateway.in_flight() if model in {None, each.model}]
    return Requests(
        live, [{"seq": seq, **asdict(record)} for seq, record in rows], services.request_log.dropped
    )


@get("/requests/{request_id:str}", name="admin_request")
async def request_detail(request: Request[Any, Any, State], request_id: str) -> RequestDetail:
    services: Services = request.app.state.services
    live = next((each for each in services.gateway.in_flight() if each.id == request_id), None)
    record = await services.request_log.get(request_id)
    if live is None and record is None:
        raise _not_found(request_id)
    return RequestDetail(live, record)


@post("/requests/{request_id:str}/cancel", status_code=200, sync_to_thread=False, name="admin_cancel")
def cancel_request(request: Request[Any, Any, State], request_id: str) -> Cancelled:
    services: Services = request.app.state.services
    if not services.gateway.cancel(request_id):
        raise _not_found(request_id, "in flight")
    return Cancelled(request_id)


def _not_found(request_id: str, where: str = "known") -> ApiError:
    return ApiError(404, f"No request {request_id!r} is {where}.", "request_not_found", "request_id")
