"""OpenAI's Batch API: a file of requests, answered in the background, and files of the results."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from litestar import Router, get, post
from litestar.params import Body, FromPath, QueryParameter
from msgspec import Meta, Struct

from ...config.settings import LimitSettings
from ...errors import ApiError
from ...services import Services
from ...store.batches import Batch, BatchItem, BatchKind, BatchPage, BatchResult
from ...util.threads import off_loop
from ..auth.guard import Access, services_and_owner
from ..server import request as strict_json
from ..server.request import StrictRequest
from .request_types import MetadataKey, MetadataValue

_PATH = "/v1/batches"
MOST_REQUESTS = 50_000
"""OpenAI's limit."""
_READ_AT_ONCE = 64
_LINE = 100
"""Characters of a line beside its answer."""
_UNANSWERED = {
    "expired": ("batch_expired", "This request was not answered before the batch's time was over."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was answered."),
}
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
OutputKind = Literal["output", "error"]


class BatchCreateRequest(Struct, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,2}h\Z")]
    """Hours, `24h` at OpenAI; requests without an answer by then get none."""
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None


class BatchRequestCounts(Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: None = None
    input_file_id: str
    completion_window: str
    status: Literal["in_progress", "completed", "expired", "cancelled"]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: None = None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, str] | None


class BatchObjectList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@post(_PATH, status_code=200, opt={"access": Access.INFER}, operation_id="createBatch")
async def create_batch(request: StrictRequest, data: Annotated[BatchCreateRequest, Body()]) -> BatchObject:
    """Begin a batch. Its requests run when nothing else waits, and resume after a restart of the daemon."""
    services, owner = services_and_owner(request)
    file = await services.files.get(owner, data.input_file_id)
    if file is None:
        raise ApiError(
            400, f"There is no file {data.input_file_id!r} of yours.", "file_not_found", "input_file_id"
        )
    limits = services.settings.limits
    items = await asyncio.to_thread(read_items, services.files.path(file), data.endpoint, limits)
    details = {
        "endpoint": data.endpoint,
        "input_file_id": file.id,
        "completion_window": data.completion_window,
        "metadata": data.metadata,
    }
    seconds = 3600.0 * int(data.completion_window[:-1])
    try:
        batch = await services.batches.create(
            "openai", owner, "batch_", items, details=details, seconds=seconds
        )
    except ApiError as error:
        error.param = "input_file_id"
        raise
    return to_batch_object(batch)


@get(_PATH, opt={"access": Access.STORED}, operation_id="listBatches")
async def list_batches(
    request: StrictRequest,
    after: Annotated[str | None, QueryParameter(max_length=128)] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=100)] = 20,
) -> BatchObjectList:
    """The caller's batches, newest first."""
    services, owner = services_and_owner(request)
    page = BatchPage(kind="openai", owner=owner, after=after or "", limit=limit)
    found = await services.batches.store.find(page)
    if found is None:
        raise batch_not_found(after or "", "after")
    data = [to_batch_object(batch) for batch in found[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return BatchObjectList(data=data, first_id=first, last_id=last, has_more=len(found) > limit)


@get(_PATH + "/{batch_id:str}", opt={"access": Access.STORED}, operation_id="retrieveBatch")
async def retrieve_batch(request: StrictRequest, batch_id: FromPath[str]) -> BatchObject:
    """Return one batch with its progress."""
    services, owner = services_and_owner(request)
    return to_batch_object(await find_batch(services, "openai", owner, batch_id))


@post(
    _PATH + "/{batch_id:str}/cancel",
    status_code=200,
    opt={"access": Access.STORED},
    operation_id="cancelBatch",
)
async def cancel_batch(request: StrictRequest, batch_id: FromPath[str]) -> BatchObject:
    """Cancel a batch. Results that it already has stay."""
    services, owner = services_and_owner(request)
    batch = await find_batch(services, "openai", owner, batch_id)
    if batch.ended is not None:
        raise ApiError(
            409,
            f"This batch has ended already: it is {to_batch_object(batch).status}.",
            "batch_ended",
            "batch_id",
        )
    await services.batches.cancel(batch)
    return to_batch_object(await find_batch(services, "openai", owner, batch_id))


def read_items(path: Path, endpoint: str, limits: LimitSettings) -> list[BatchItem]:
    """Parse the requests of a JSONL file. Safe in any thread. Raises ApiError 400 that names the first bad
    line.
    """
    items: dict[str, BatchItem] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            if len(items) == MOST_REQUESTS:
                raise _bad_file(number, f"a batch has at most {MOST_REQUESTS} requests")
            if len(line) > limits.body_bytes:
                raise _bad_file(number, f"it is longer than {limits.body_bytes} bytes (limits.body_bytes)")
            item = _item(number, line, endpoint, limits.json_depth)
            if item.custom_id in items:
                raise _bad_file(number, f"the custom_id {item.custom_id!r} occurs twice")
            items[item.custom_id] = item
    if not items:
        raise _bad_file(1, "the file holds no request")
    return list(items.values())


def _item(number: int, line: bytes, endpoint: str, depth: int) -> BatchItem:
    try:
        data = strict_json.load(line.strip(), depth + 1)
    except ApiError as error:
        raise _bad_file(number, error.message) from None
    if not isinstance(data, dict):
        raise _bad_file(number, "it is not a JSON object")
    custom_id, body = data.get("custom_id"), data.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise _bad_file(number, "'custom_id' must be a text of 1 to 512 characters")
    if data.get("method") != "POST":
        raise _bad_file(number, "'method' must be 'POST'")
    if data.get("url") != endpoint:
        raise _bad_file(number, f"'url' must be the batch's endpoint, {endpoint}")
    if not isinstance(body, dict):
        raise _bad_file(number, "'body' must be an object: the fields of the request")
    for name in ("stream", "background"):
        if body.get(name):
            raise _bad_file(number, f"'body.{name}' is not for requests of a batch")
    return BatchItem(custom_id=custom_id, path=endpoint, body=msgspec.json.encode(body))


def _bad_file(number: int, why: str) -> ApiError:
    return ApiError(
        400,
        f"Line {number} of the input file: {why.removesuffix('.')}.",
        "invalid_batch_file",
        "input_file_id",
    )


def output_id(batch: Batch, kind: OutputKind) -> str:
    return f"file-{batch.id}-{kind}"


async def find_output(services: Services, owner: str, id_: str) -> tuple[Batch, OutputKind] | None:
    """Find the batch that has this file as its output or error file. None if there is none."""
    for kind in ("output", "error"):
        if id_.startswith("file-batch_") and id_.endswith(f"-{kind}"):
            name = id_.removeprefix("file-").removesuffix(f"-{kind}")
            batch = await services.batches.store.get("openai", owner, name)
            if batch is not None and has_output(batch, kind):
                return batch, kind
    return None


def has_output(batch: Batch, kind: OutputKind) -> bool:
    counts = batch.counts
    some = counts.succeeded if kind == "output" else counts.failed + counts.cancelled + counts.expired
    return batch.ended is not None and some > 0


async def output_lines(services: Services, batch: Batch, kind: OutputKind) -> AsyncGenerator[bytes, None]:
    """Stream the file's content: one line of JSON for each request that succeeded, or for each that
    failed.
    """
    after = 0
    while found := await services.batches.store.results(batch.seq, after, _READ_AT_ONCE):
        wanted = [each for each in found if (each.http_status == 200) == (kind == "output")]
        if wanted:
            yield b"".join(map(_line, wanted))
        after = found[-1].seq


async def output_size(services: Services, batch: Batch, kind: OutputKind) -> int:
    """Return the bytes of the file that `output_lines` streams. The answers themselves are not read."""
    found = await services.batches.store.result_sizes(batch.seq)
    wanted = [each for each in found if (each[0].http_status == 200) == (kind == "output")]
    # An answer stands in its line as it is.
    return await off_loop(_LINE * len(wanted), lambda: sum(len(_line(r)) + n for r, n in wanted))


def _line(result: BatchResult) -> bytes:
    response: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    if result.status == "done":
        body = msgspec.Raw(result.answer)
        response = {"status_code": result.http_status, "request_id": result.request_id, "body": body}
    else:
        code, message = _UNANSWERED[result.status]
        error = {"code": code, "message": message}
    data = {
        "id": f"batch_req_{result.seq}",
        "custom_id": result.custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(data) + b"\n"


def to_batch_object(batch: Batch) -> BatchObject:
    counts = batch.counts
    ended = None if batch.ended is None else int(batch.ended)
    cancelled = None if batch.cancelled is None else int(batch.cancelled)
    if ended is None:
        status: Literal["in_progress", "completed", "expired", "cancelled"] = "in_progress"
    elif cancelled is not None:
        status = "cancelled"
    else:
        status = "expired" if counts.expired else "completed"
    details = batch.details
    return BatchObject(
        id=batch.id,
        endpoint=str(details.get("endpoint", "")),
        input_file_id=str(details.get("input_file_id", "")),
        completion_window=str(details.get("completion_window", "")),
        status=status,
        output_file_id=output_id(batch, "output") if has_output(batch, "output") else None,
        error_file_id=output_id(batch, "error") if has_output(batch, "error") else None,
        created_at=int(batch.created),
        in_progress_at=int(batch.created),
        expires_at=int(batch.expires),
        finalizing_at=ended if status == "completed" else None,
        completed_at=ended if status == "completed" else None,
        expired_at=ended if status == "expired" else None,
        cancelling_at=cancelled,
        cancelled_at=ended if status == "cancelled" else None,
        request_counts=BatchRequestCounts(
            total=batch.total, completed=counts.succeeded, failed=counts.failed
        ),
        metadata=details.get("metadata"),
    )


async def find_batch(services: Services, kind: BatchKind, owner: str, batch_id: str) -> Batch:
    """Return one of the caller's batches. Raises ApiError 404."""
    found = await services.batches.store.get(kind, owner, batch_id)
    if found is None:
        raise batch_not_found(batch_id, "batch_id")
    return found


def batch_not_found(batch_id: str, param: str) -> ApiError:
    return ApiError(404, f"There is no batch {batch_id!r} of yours.", "batch_not_found", param)


openai_batches_router = Router(
    path="/", route_handlers=[create_batch, list_batches, retrieve_batch, cancel_batch], tags=["OpenAI"]
)
