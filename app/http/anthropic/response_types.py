"""Answer types of the Messages API."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...errors import ApiError
from ...gateway.generation import TokenUsage
from ...gateway.open_request import OpenRequest
from ...text.output.output_parser import OutputParser
from ..server.errors import encode_error


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
    """Ours: drawn for this request."""
    warnings: list[str] | UnsetType = UNSET
    """Ours: what was ignored."""


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
