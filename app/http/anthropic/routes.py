"""The Anthropic dialect's routes."""

from typing import Annotated

from litestar import Response, Router, post
from litestar.params import Body

from ..disconnect import while_connected
from ..guard import Access
from ..openai.chat import ChatCall, chat_ids
from ..openai.context import Call, HttpRequest
from ..openai.messages import build_chat
from ..openai.translated import chat_request, prepare_translated
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..sse import EventStreamResponse, StreamOptions
from .answers import Message, TokenCount, error_event
from .fields import CountTokensRequest, MessagesRequest
from .messages import complete_message, stream_message
from .translate import chat_fields, prompt_fields

_STREAM = StreamOptions(last=b"", error=error_event)


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
        chat = await _prepared(call, data)
    if data.stream:
        return EventStreamResponse(stream_message(call.gateway, chat), _STREAM)
    return Response(await while_connected(request.receive, complete_message(call.gateway, chat)))


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
    refuse_unsupported(data)
    body = chat_request(prompt_fields(data))
    model = await call.find_model(body.model)
    chat = build_chat(body, call.limits)
    return TokenCount(len(await chat_ids(call.gateway, model, chat)))


async def _prepared(call: Call, data: MessagesRequest) -> ChatCall:
    refuse_unsupported(data)
    return await prepare_translated(
        call, chat_fields(data), _warnings(call, data), "msg", {"response_format": "output_format"}
    )


def _warnings(call: Call, data: MessagesRequest) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    thinking = data.thinking
    if thinking is not None and thinking.budget_tokens is not None:
        found.append("'thinking.budget_tokens' has no effect: thoughts end when the model ends them.")
    return found


anthropic_router = Router(path="/", route_handlers=[messages, count_tokens], tags=["Anthropic"])
