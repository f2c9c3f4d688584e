"""`background: true`: a response that is made while nobody waits for it."""

import contextlib

from ...errors import ApiError
from ...gateway.open_request import OpenRequest
from ..openai.context import Call
from ..openai.storing import Store
from .answers import ResponseObject
from .events import write_whole
from .fields import ResponseRequest
from .writer import PreparedResponse, Writer


def check_background(request: ResponseRequest) -> None:
    """Raises ApiError 400."""
    if request.background and not request.store:
        raise _refused("It needs 'store': true: here nothing is stored that was not asked for.")
    if request.background and request.stream:
        raise _refused("It cannot be combined with 'stream': its events are not kept.")


def begin_alone(call: Call, prepared: PreparedResponse, store: Store) -> ResponseObject:
    """It is on its way to the disk, as one in progress, before anything of it is made. Raises ApiError."""
    opened = call.gateway.open(prepared.chat.generation)
    writer = Writer(opened, prepared)
    response = writer.response()
    if not writer.keep(response):
        full = ApiError(
            503,
            "Too much waits for the disk.",
            "request_log_unavailable",
            type="server_error",
            headers={"Retry-After": "5"},
        )
        opened.end(full.status, full.code or "")
        raise full
    call.services.background.start((store.owner, response.id), _write(opened, writer), writer.response)
    return response


async def _write(opened: OpenRequest, writer: Writer) -> None:
    with contextlib.suppress(ApiError), opened:  # the error is in what is stored
        await write_whole(opened, writer)


def _refused(why: str) -> ApiError:
    message = f"The value of 'background' is not supported. {why}"
    return ApiError(400, message, code="unsupported_parameter", param="background")
