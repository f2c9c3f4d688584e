"""Anthropic's Message Batches API: lists of messages that run in the background."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, Router, delete, get, post
from litestar.params import Body, FromPath, QueryParameter
from litestar.response import Stream
from msgspec import Meta, Struct

from ...errors import ApiError
from ...services import Services
from ...store.batches import Batch, BatchItem, BatchPage, BatchResult
from ...util.formatting import rfc3339
from ..auth.guard import Access, services_and_owner
from ..openai.batches import batch_not_found, find_batch
from ..openai.sampling import invalid
from ..server.request import StrictRequest

_PATH = "/v1/messages/batches"
_ONE = _PATH + "/{batch_id:str}"
_READ_AT_ONCE = 64
CustomId = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
Cursor = Annotated[str | None, QueryParameter(max_length=512)]


class BatchedMessage(Struct, kw_only=True):
    custom_id: CustomId
    params: dict[str, Any]
    """Fields of `/v1/messages`, checked when the request runs."""


class BatchRequest(Struct, kw_only=True):
    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=100_000)]


class RequestCounts(Struct, kw_only=True):
    """Requests by result. All are `processing` until the batch has ended."""

    processing: int
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: None = None
    results_url: str | None


class BatchList(Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedBatch(Struct, kw_only=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


@post(_PATH, status_code=200, opt={"access": Access.INFER}, operation_id="createMessageBatch")
async def create_batch(request: StrictRequest, data: Annotated[BatchRequest, Body()]) -> MessageBatch:
    """Begin a batch. Its requests run when nothing else waits, and resume after a restart of the daemon."""
    services, owner = services_and_owner(request)
    seen: set[str] = set()
    for number, each in enumerate(data.requests):
        if each.custom_id in seen:
            raise invalid(f"requests[{number}].custom_id", f"{each.custom_id!r} occurs twice")
        if each.params.get("stream"):
            raise invalid(f"requests[{number}].params.stream", "answers of a batch are not streamed")
        seen.add(each.custom_id)
    items = [
        BatchItem(custom_id=each.custom_id, path="/v1/messages", body=msgspec.json.encode(each.params))
        for each in data.requests
    ]
    return _to_message_batch(request, await services.batches.create("anthropic", owner, "msgbatch_", items))


@get(_PATH, opt={"access": Access.STORED}, operation_id="listMessageBatches")
async def list_batches(
    request: StrictRequest,
    after_id: Cursor = None,
    before_id: Cursor = None,
    limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 20,
) -> BatchList:
    """The caller's batches, newest first."""
    services, owner = services_and_owner(request)
    if after_id and before_id:
        raise invalid("before_id", "it cannot be combined with 'after_id'")
    page = BatchPage(kind="anthropic", owner=owner, after=after_id or "", before=before_id or "", limit=limit)
    found = await services.batches.store.find(page)
    if found is None:
        raise batch_not_found(after_id or before_id or "", "batch_id")
    shown = [_to_message_batch(request, batch) for batch in found[:limit]]
    if before_id:
        shown.reverse()
    return BatchList(
        data=shown,
        has_more=len(found) > limit,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
    )


@get(_ONE, opt={"access": Access.STORED}, operation_id="retrieveMessageBatch")
async def retrieve_batch(request: StrictRequest, batch_id: FromPath[str]) -> MessageBatch:
    """Return one batch with its progress."""
    services, owner = services_and_owner(request)
    return _to_message_batch(request, await find_batch(services, "anthropic", owner, batch_id))


@post(_ONE + "/cancel", status_code=200, opt={"access": Access.STORED}, operation_id="cancelMessageBatch")
async def cancel_batch(request: StrictRequest, batch_id: FromPath[str]) -> MessageBatch:
    """Cancel a batch. Answers that it already has stay; a batch that has ended stays as it is."""
    services, owner = services_and_owner(request)
    await services.batches.cancel(await find_batch(services, "anthropic", owner, batch_id))
    return _to_message_batch(request, await find_batch(services, "anthropic", owner, batch_id))


@delete(_ONE, status_code=200, opt={"access": Access.STORED}, operation_id="deleteMessageBatch")
async def delete_batch(request: StrictRequest, batch_id: FromPath[str]) -> DeletedBatch:
    """Erase a batch that has ended, with its results; the bytes are overwritten."""
    services, owner = services_and_owner(request)
    batch = await find_batch(services, "anthropic", owner, batch_id)
    if batch.ended is None:
        raise ApiError(
            400,
            "A batch that has not ended cannot be deleted: cancel it first.",
            "batch_not_ended",
            "batch_id",
        )
    await services.batches.delete(batch)
    return DeletedBatch(id=batch.id)


@get(_ONE + "/results", opt={"access": Access.STORED}, operation_id="getMessageBatchResults")
async def batch_results(request: StrictRequest, batch_id: FromPath[str]) -> Response[Any]:
    """Return one line of JSON for each request, in their order."""
    services, owner = services_and_owner(request)
    batch = await find_batch(services, "anthropic", owner, batch_id)
    if batch.ended is None:
        raise ApiError(400, "This batch has not ended yet.", "batch_not_ended", "batch_id")
    return Stream(_lines(services, batch), media_type="application/x-jsonl")


async def _lines(services: Services, batch: Batch) -> AsyncGenerator[bytes, None]:
    after = 0
    while found := await services.batches.store.results(batch.seq, after, _READ_AT_ONCE):
        yield b"".join(map(_line, found))
        after = found[-1].seq


def _line(result: BatchResult) -> bytes:
    data: dict[str, Any]
    if result.status != "done":
        data = {"type": "canceled" if result.status == "cancelled" else "expired"}
    elif result.http_status == 200:
        data = {"type": "succeeded", "message": msgspec.Raw(result.answer)}
    else:
        data = {"type": "errored", "error": msgspec.Raw(result.answer)}
    return msgspec.json.encode({"custom_id": result.custom_id, "result": data}) + b"\n"


def _to_message_batch(request: StrictRequest, batch: Batch) -> MessageBatch:
    counts, has_ended = batch.counts, batch.ended is not None
    return MessageBatch(
        id=batch.id,
        processing_status="ended" if has_ended else "in_progress",
        request_counts=RequestCounts(
            processing=0,
            succeeded=counts.succeeded,
            errored=counts.failed,
            canceled=counts.cancelled,
            expired=counts.expired,
        )
        if has_ended
        else RequestCounts(processing=batch.total),
        created_at=rfc3339(batch.created),
        expires_at=rfc3339(batch.expires),
        ended_at=None if batch.ended is None else rfc3339(batch.ended),
        cancel_initiated_at=None if batch.cancelled is None else rfc3339(batch.cancelled),
        results_url=f"{str(request.base_url).rstrip('/')}{_PATH}/{batch.id}/results" if has_ended else None,
    )


batches_router = Router(
    path="/",
    route_handlers=[create_batch, list_batches, retrieve_batch, cancel_batch, delete_batch, batch_results],
    tags=["Anthropic"],
)
