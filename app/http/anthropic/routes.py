"""Routes of the Anthropic dialect."""

from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body
from msgspec import UNSET

from ..auth.guard import Access
from ..openai.request_context import HttpRequest, RequestContext
from ..server.sse import EventStreamResponse, SseOptions, while_connected
from .batches import batches_router
from .request_types import CountTokensRequest, MessagesRequest
from .responder import complete_message, stream_message
from .response_types import AnthropicMessage, TokenCount, error_event, named_event
from .translate import count_prompt_tokens, prepare_message

_STREAM = SseOptions(last=b"", error=error_event, comment=named_event("ping"))


@post(
    "/v1/messages",
    status_code=200,
    opt={"access": Access.INFER},
    name="messages",
    operation_id="createMessage",
)
async def messages(
    request: HttpRequest, data: Annotated[MessagesRequest, Body()]
) -> Response[AnthropicMessage]:
    """Generate the model's next message, in the shape of Anthropic's API; server-sent events with
    `stream`.
    """
    call = await RequestContext.of(request)
    with call.recording_refusals():
        prepared = await prepare_message(call, data)
    if data.stream:
        return EventStreamResponse(stream_message(call.gateway, prepared), _STREAM)
    return Response(await while_connected(request.receive, complete_message(call.gateway, prepared)))


@post(
    "/v1/messages/count_tokens",
    status_code=200,
    opt={"access": Access.INFER},
    name="count_tokens",
    operation_id="countTokens",
)
async def count_tokens(request: HttpRequest, data: Annotated[CountTokensRequest, Body()]) -> TokenCount:
    """Count the tokens that the prompt of such a message would have."""
    call = await RequestContext.of(request)
    tokens, original = await count_prompt_tokens(call, data)
    edited = data.context_management is not None
    return TokenCount(
        input_tokens=tokens, context_management={"original_input_tokens": original} if edited else UNSET
    )


anthropic_router = Router(
    path="/", route_handlers=[messages, count_tokens, batches_router], tags=["Anthropic"]
)
