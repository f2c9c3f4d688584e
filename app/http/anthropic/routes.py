"""Routes of the Anthropic dialect."""

from typing import Annotated

from litestar import Response, Router
from litestar.params import Body
from msgspec import UNSET

from ..openai.generating import answer, inference_route
from ..openai.request_context import HttpRequest, RequestContext
from ..server.sse import SseOptions
from .batches import batches_router
from .request_types import CountTokensRequest, MessagesRequest
from .responder import (
    AnthropicMessage,
    TokenCount,
    complete_message,
    error_event,
    named_event,
    stream_message,
)
from .translate import count_prompt_tokens, prepare_message

_STREAM = SseOptions(last=b"", error=error_event, comment=named_event("ping"))


@inference_route("/v1/messages", "messages", "createMessage")
async def messages(
    request: HttpRequest, data: Annotated[MessagesRequest, Body()]
) -> Response[AnthropicMessage]:
    """Generate the model's next message, in the shape of Anthropic's API; server-sent events with
    `stream`.
    """
    return await answer(
        request,
        lambda call: prepare_message(call, data),
        lambda call, made: complete_message(call.gateway, made),
        (lambda call, made: stream_message(call.gateway, made)) if data.stream else None,
        _STREAM,
    )


@inference_route("/v1/messages/count_tokens", "count_tokens", "countTokens")
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
