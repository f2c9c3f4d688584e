"""Routes of the Anthropic dialect: a generated chat as a message, whole or as events."""

from collections.abc import AsyncGenerator, Iterator
from typing import Annotated, Any, Literal

import msgspec
from litestar import Response, Router
from litestar.params import Body
from msgspec import UNSET, Struct, UnsetType

from ...errors import ApiError
from ...gateway.gateway import Gateway
from ...gateway.generation import Delta, TokenUsage
from ...gateway.open_request import OpenRequest
from ...text.output.output_parser import OutputParser, ParsedOutput, read_arguments
from ..openai.chat import ChatCall
from ..openai.chat_messages import call_id, reasoning_tokens
from ..openai.request_context import RequestContext, answer, inference_route
from ..server.errors import encode_error
from ..server.request import StrictRequest
from ..server.sse import SseOptions
from .batches import batches_router
from .request_types import CountTokensRequest, MessagesRequest
from .translate import MessageCall, count_prompt_tokens, prepare_message


class MessageUsage(Struct, kw_only=True):
    """Token counts. `input_tokens` are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: dict[str, int] | None = None

    @classmethod
    def of(cls, usage: TokenUsage, thinking_tokens: int | None = None) -> "MessageUsage":
        details = None if thinking_tokens is None else {"thinking_tokens": thinking_tokens}
        return cls(
            output_tokens_details=details,
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )


class AnthropicMessage(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    """Blocks: `thinking`, `text`, `tool_use`."""
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    usage: MessageUsage
    context_management: dict[str, Any] | UnsetType = UNSET
    """Edits that were applied, where the request asked for some."""
    seed: int | UnsetType = UNSET
    """Ours: the seed drawn for this request."""
    warnings: list[str] | UnsetType = UNSET
    """Ours: warnings about ignored fields."""


class TokenCount(Struct, kw_only=True):
    input_tokens: int
    context_management: dict[str, int] | UnsetType = UNSET
    """Tokens before edits, where the request asked for some."""


def stop_reason(opened: OpenRequest, parser: OutputParser) -> tuple[str, str | None]:
    """Return the stop reason, and the stop string if one ended the answer."""
    (sequence,) = opened.sequences
    if sequence.finish_reason == "length":
        asked = opened.generation.max_tokens
        whole = asked is None or sequence.output_tokens >= asked
        return "max_tokens" if whole else "model_context_window_exceeded", None
    if parser.called:
        return "tool_use", None
    found = sequence.stop_string
    return ("end_turn", None) if found is None else ("stop_sequence", found)


def named_event(name: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % encode_error(error, "/v1/messages")


async def complete_message(gateway: Gateway, call: MessageCall) -> AnthropicMessage:
    chat = call.chat
    parser = chat.parsing.parser()
    with gateway.open(chat.generation) as opened:
        pieces = [delta.text async for delta in opened.deltas()]
    parts = parser.parse_whole("".join(pieces), is_cut=opened.sequences[0].finish_reason == "length")
    reason, found = stop_reason(opened, parser)
    return AnthropicMessage(
        id=chat.generation.id,
        model=chat.model_name,
        content=_blocks(parts, chat),
        stop_reason=reason,
        stop_sequence=found,
        usage=MessageUsage.of(opened.usage, reasoning_tokens(opened, [parser])),
        context_management=call.context_management or UNSET,
        **chat.extras(opened),
    )


async def stream_message(gateway: Gateway, call: MessageCall) -> AsyncGenerator[bytes, None]:
    with gateway.open(call.chat.generation) as opened:
        events = _Events(opened, call)
        yield events.begin()
        async for delta in opened.deltas():
            if said := b"".join(events.say(delta)):
                yield said
    yield b"".join(events.end())


def _blocks(parts: ParsedOutput, chat: ChatCall) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if parts.reasoning and chat.parsing.includes_reasoning:
        blocks.append({"type": "thinking", "thinking": parts.reasoning, "signature": ""})
    if parts.content:
        blocks.append({"type": "text", "text": parts.content})
    for number, call in enumerate(parts.calls):
        block = _tool_use(chat, number, call.name)
        blocks.append({**block, "input": read_arguments(call.arguments)})
    return blocks


def _tool_use(chat: ChatCall, number: int, name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id(chat.generation.id, 0, number), "name": name, "input": {}}


class _Events:
    """Content block events: each block is started, filled and stopped before the next."""

    def __init__(self, opened: OpenRequest, call: MessageCall) -> None:
        self._opened = opened
        self._chat = chat = call.chat
        self._context_management = call.context_management
        self._parser: OutputParser = chat.parsing.parser()
        self._open: str | None = None
        """Kind of the block that is being filled."""
        self._index = -1

    def begin(self) -> bytes:
        message = AnthropicMessage(
            id=self._chat.generation.id,
            model=self._chat.model_name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=MessageUsage.of(self._opened.usage),
        )
        return named_event("message_start", message=message)

    def say(self, delta: Delta) -> Iterator[bytes]:
        before = self._parser.called
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts.add(self._parser.finish(is_cut=delta.finish_reason == "length"))
        if parts.reasoning and self._chat.parsing.includes_reasoning:
            yield from self._fill("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": parts.reasoning})
        if parts.content:
            yield from self._fill("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": parts.content})
        for number, call in enumerate(parts.calls, before):
            yield from self._close()
            yield from self._fill("tool_use", _tool_use(self._chat, number, call.name))
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def end(self) -> Iterator[bytes]:
        yield from self._close()
        reason, found = stop_reason(self._opened, self._parser)
        thoughts = reasoning_tokens(self._opened, [self._parser])
        usage = MessageUsage.of(self._opened.usage, thoughts)
        edits = self._context_management
        yield named_event(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": found, "stop_details": None},
            usage=usage,
            **({} if edits is None else {"context_management": edits}),
            **{name: value for name, value in self._chat.extras(self._opened).items() if value},
        )
        yield named_event("message_stop")

    def _fill(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        """Start a block of this kind unless one is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield named_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield named_event("content_block_stop", index=self._index)


_STREAM = SseOptions(last=b"", error=error_event, comment=named_event("ping"))


@inference_route("/v1/messages", "createMessage")
async def messages(
    request: StrictRequest, data: Annotated[MessagesRequest, Body()]
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


@inference_route("/v1/messages/count_tokens", "countTokens")
async def count_tokens(request: StrictRequest, data: Annotated[CountTokensRequest, Body()]) -> TokenCount:
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
