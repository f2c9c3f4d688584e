"""The Anthropic dialect's routes."""

from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body
from msgspec import UNSET

from ..disconnect import while_connected
from ..guard import Access
from ..openai.context import Call, HttpRequest
from ..sse import EventStreamResponse, StreamOptions
from .answers import Message, TokenCount, error_event, named_event
from .batches import batches_router
from .fields import CountTokensRequest, MessagesRequest
from .messages import complete_message, stream_message
from .prepare import count_prompt_tokens, prepare_message

_STREAM = StreamOptions(last=b"", error=error_event, comment=named_event("ping"))


@post(
    "/v1/messages",
    status_code=200,
    opt={"access": Access.INFER},
    name="messages",
    operation_id="createMessage",
)
async def messages(request: HttpRequest, data: Annotated[MessagesRequest, Body()]) -> Response[Message]:
    """The model's next message, as Anthropic's API gives it; server-sent events with `stream`."""
    call = await Call.of(request)
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
    """How many tokens the prompt of such a message would have."""
    call = await Call.of(request)
    tokens, original = await count_prompt_tokens(call, data)
    edited = data.context_management is not None
    return TokenCount(
        input_tokens=tokens, context_management={"original_input_tokens": original} if edited else UNSET
    )


anthropic_router = Router(
    path="/", route_handlers=[messages, count_tokens, batches_router], tags=["Anthropic"]
)
