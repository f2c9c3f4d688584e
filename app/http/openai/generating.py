"""Frame of routes that generate: declaration, recorded refusals, a stream or one answer."""

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from litestar import Response, post

from ..auth.guard import Access
from ..server.sse import DEFAULT_OPTIONS, EventStreamResponse, SseOptions, while_connected
from .request_context import HttpRequest, RequestContext

Prepared = TypeVar("Prepared")


def inference_route(path: str, name: str, operation_id: str | None = None) -> post:
    """Declare a POST route for callers who may use models. Without `operation_id` it is not in the API
    description.
    """
    return post(
        path,
        status_code=200,
        opt={"access": Access.INFER},
        name=name,
        operation_id=operation_id,
        include_in_schema=operation_id is not None,
    )


async def answer(
    request: HttpRequest,
    prepare: Callable[[RequestContext], Coroutine[Any, Any, Prepared]],
    complete: Callable[[RequestContext, Prepared], Coroutine[Any, Any, Any]],
    stream: Callable[[RequestContext, Prepared], AsyncIterator[bytes]] | None = None,
    options: SseOptions = DEFAULT_OPTIONS,
) -> Response[Any]:
    """Prepare a request, with its refusals in the log, then stream it or wait for the whole answer.

    `complete` returns the answer, or its JSON as bytes. It is cancelled when the client disconnects. `stream`
    is None for a request that wants one answer.
    """
    call = await RequestContext.of(request)
    with call.recording_refusals():
        prepared = await prepare(call)
    if stream is not None:
        return EventStreamResponse(stream(call, prepared), options)
    made = await while_connected(request.receive, complete(call, prepared))
    return Response(made, media_type="application/json") if isinstance(made, bytes) else Response(made)
