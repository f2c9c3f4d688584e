"""Request log and requests in flight: read, replay, cancel, purge."""

from dataclasses import asdict
from typing import Annotated

from litestar import get, post
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from msgspec import Struct

from ...errors import ApiError
from ...inspect.detail import RequestDetail, detail_of
from ...inspect.replay import ReplayResult, replay
from ...inspect.why import RequestTime, request_time
from ...services import Services
from ...store.record import RecordFilter, RequestRecord, StoreError
from ...store.stored_answers import Kind
from ..auth.guard import identity_of
from ..server.request import StrictRequest
from ..server.sse import while_connected
from .keys import erase_stored_of_gone_keys
from .schema import Before, CancelledRequest, HttpStatus, PurgedRows, PurgeRequest, RequestPage, Since

MOST_ROWS = 1000


@get("/requests")
async def requests(
    request: StrictRequest,
    model: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    status: HttpStatus = None,
    errors: FromQuery[bool] = False,
    since: Since = None,
    before: Before = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MOST_ROWS)] = 50,
) -> RequestPage:
    services = request.services
    want = RecordFilter(
        model=model,
        key=key,
        status=status,
        errors_only=errors,
        since=since,
        before_seq=before,
        limit=limit,
    )
    rows, problem = await readable(services, want)
    live = [each for each in services.gateway.in_flight() if model in {None, each.model}]
    return RequestPage(
        [each for each in live if key in {None, each.key}],
        [{"seq": seq, **asdict(record)} for seq, record in rows],
        services.request_log.dropped,
        problem,
    )


async def readable(services: Services, want: RecordFilter) -> tuple[list[tuple[int, RequestRecord]], str]:
    """Return the rows, or an empty list and the reason: requests in flight are shown and cancelled whatever
    happened to the log.
    """
    try:
        return await services.request_log.query(want), ""
    except StoreError as error:
        return [], f"The request log cannot be read now: {error}"


@get("/requests/{request_id:str}")
async def request_detail(request: StrictRequest, request_id: FromPath[str]) -> RequestDetail:
    return await detail_of(request.app.state.control, identity_of(request), request_id)


@get("/requests/{request_id:str}/why")
async def request_why(request: StrictRequest, request_id: FromPath[str]) -> RequestTime:
    return await request_time(request.services, request_id)


@post("/requests/{request_id:str}/cancel", status_code=200, sync_to_thread=False)
def cancel_request(request: StrictRequest, request_id: FromPath[str]) -> CancelledRequest:
    if not request.services.gateway.cancel(request_id):
        raise ApiError(404, f"No request {request_id!r} is in flight.", "request_not_found", "request_id")
    return CancelledRequest(request_id)


@post("/requests/{request_id:str}/replay", status_code=200)
async def replay_request(request: StrictRequest, request_id: FromPath[str]) -> ReplayResult:
    """Send a request again. Ends with the answer, or when the client leaves."""
    work = replay(request.services, identity_of(request), request_id)
    return await while_connected(request.receive, work)


@post("/requests/purge", status_code=200)
async def purge_requests(request: StrictRequest, data: JSONBody[PurgeRequest]) -> PurgedRows:
    """Erase requests that were created before a moment."""
    services = request.services
    erased = await services.request_log.purge(data.before, data.what)
    if data.what != "content":
        erased += await services.files.erase_before(data.before)
    return PurgedRows(erased)


class StoredOfKey(Struct, kw_only=True):
    """Stored answers of one key. Times are Unix seconds."""

    key: str
    """Name of the key; empty for callers without one."""
    kind: Kind
    answers: int
    size: int
    """Bytes."""
    oldest_at: float
    newest_at: float


class StoredByKey(Struct):
    stored: list[StoredOfKey]


@get("/stored")
async def stored(request: StrictRequest) -> StoredByKey:
    services = request.services
    rows = []
    for total in await services.stored.totals():
        key = services.security.keys.by_id(total.owner)
        rows.append(
            StoredOfKey(
                key=total.owner if key is None else key.name,
                kind=total.kind,
                answers=total.answers,
                size=total.size,
                oldest_at=total.oldest,
                newest_at=total.newest,
            )
        )
    return StoredByKey(rows)


@post("/stored/forget", status_code=200)
async def forget_stored(request: StrictRequest) -> PurgedRows:
    """Erase stored answers of deleted keys now, rather than within the hour."""
    return PurgedRows(await erase_stored_of_gone_keys(request.services))
