"""Answers of the Messages API."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...errors import ApiError
from ...gateway.generation import Usage
from ...gateway.open_request import OpenRequest
from ...text.answer_parts import AnswerParser
from ..errors import encode_error


class MessageUsage(Struct, kw_only=True):
    """`input_tokens` are those that no cache had."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "MessageUsage":
        return cls(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    """Blocks: `thinking`, `text`, `tool_use`."""
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    seed: int | UnsetType = UNSET
    """Ours: drawn for this request."""
    warnings: list[str] | UnsetType = UNSET
    """Ours: what was ignored."""


class TokenCount(Struct):
    input_tokens: int


def stop_reason(opened: OpenRequest, parser: AnswerParser) -> tuple[str, str | None]:
    """Why the one answer ended, and the stop string if it was one."""
    (sequence,) = opened.sequences
    if sequence.finish_reason == "length":
        return "max_tokens", None
    if parser.called:
        return "tool_use", None
    found = sequence.stop_string
    return ("end_turn", None) if found is None else ("stop_sequence", found)


def named_event(name: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: %b\n\n" % encode_error(error, "/v1/messages")
