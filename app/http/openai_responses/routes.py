"""Routes that generate responses."""

from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body

from ..auth.guard import Access
from ..openai.request_context import HttpRequest, RequestContext
from ..openai.stored import Store
from ..openai.unsupported import refuse_unsupported
from ..server.sse import EventStreamResponse, while_connected
from .background import check_background, start_background
from .compact import CompactedResponse, prepare_summary, summarize
from .conversations import conversations_router
from .prepare import count_input_tokens, prepare_response
from .request_types import CompactRequest, InputTokensRequest, ResponseRequest
from .responder import STREAM, complete_response, stream_response
from .response_types import InputTokens, ResponseObject
from .stored import stored_responses_router
from .translate import items_of


@post(
    "/v1/responses",
    status_code=200,
    opt={"access": Access.INFER},
    name="responses",
    operation_id="createResponse",
)
async def responses(
    request: HttpRequest, data: Annotated[ResponseRequest, Body()]
) -> Response[ResponseObject]:
    """Generate the model's next turn as items; server-sent events with `stream`. Stored with `store: true`
    only.
    """
    call = await RequestContext.of(request)
    with call.recording_refusals():
        check_background(data)
        store = Store.wanted(call, "response", data, items_of(data.input), data.previous_response_id or "")
        prepared = await prepare_response(call, data, store)
    if data.background and store is not None:
        live = start_background(call, prepared, store)
        return EventStreamResponse(live.follow(), STREAM) if data.stream else Response(live.response())
    if data.stream:
        return EventStreamResponse(stream_response(call.gateway, prepared), STREAM)
    work = complete_response(call.gateway, prepared)
    return Response(await while_connected(request.receive, work))


@post(
    "/v1/responses/input_tokens",
    status_code=200,
    opt={"access": Access.INFER},
    name="response_input_tokens",
    operation_id="countInputTokens",
)
async def input_tokens(request: HttpRequest, data: Annotated[InputTokensRequest, Body()]) -> InputTokens:
    """Count the tokens that the prompt of such a request would have."""
    call = await RequestContext.of(request)
    with call.recording_refusals():
        return InputTokens(input_tokens=await count_input_tokens(call, data))


@post(
    "/v1/responses/compact",
    status_code=200,
    opt={"access": Access.INFER},
    name="response_compact",
    operation_id="compactResponse",
)
async def compact(
    request: HttpRequest, data: Annotated[CompactRequest, Body()]
) -> Response[CompactedResponse]:
    """Return a shorter conversation: the user's messages, and a summary of the rest that the model writes."""
    call = await RequestContext.of(request)
    with call.recording_refusals():
        refuse_unsupported(data)
        summary = await prepare_summary(call, data)
    return Response(await while_connected(request.receive, summarize(call.gateway, summary)))


responses_router = Router(
    path="/",
    route_handlers=[responses, input_tokens, compact, stored_responses_router, conversations_router],
    tags=["OpenAI"],
)
