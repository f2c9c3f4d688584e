"""Response object and its output items."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from ...gateway.generation import TokenUsage
from .request_types import ResponseRequest, ResponseToolChoice


class InputDetails(Struct):
    cached_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: TokenUsage, reasoning_tokens: int) -> "ResponseUsage":
        return cls(
            usage.prompt_tokens,
            InputDetails(usage.cached_tokens),
            usage.output_tokens,
            OutputDetails(reasoning_tokens),
            usage.prompt_tokens + usage.output_tokens,
        )


class ResponseObject(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    incomplete_details: dict[str, str] | None = None
    error: dict[str, str] | None = None
    """`code` and `message`, where it failed."""
    output: list[dict[str, Any]] = field(default_factory=list)
    """Items: `reasoning`, `message`, `function_call`, `custom_tool_call`."""
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    temperature: float
    top_p: float
    text: dict[str, Any]
    reasoning: dict[str, Any]
    background: bool = False
    previous_response_id: str | None = None
    conversation: dict[str, str] | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    """True if the response can be retrieved later: otherwise it is not kept."""
    truncation: Literal["auto", "disabled"] = "disabled"
    top_logprobs: int = 0
    max_tool_calls: int | None = None
    user: str | None
    seed: int | UnsetType = UNSET
    """Ours: drawn for this request."""
    warnings: list[str] | UnsetType = UNSET
    """Ours: what was ignored."""


class InputTokens(Struct, kw_only=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def choice_of(request: ResponseRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if isinstance(choice, ResponseToolChoice):
        told = msgspec.structs.asdict(choice)
        return {name: value for name, value in told.items() if value is not None}
    return choice or "auto"


def text_of(request: ResponseRequest) -> dict[str, Any]:
    asked = request.text.format if request.text is not None else None
    told = {"type": "text"} if asked is None else msgspec.structs.asdict(asked)
    return {"format": {name: value for name, value in told.items() if value is not None}}


def tools_of(request: ResponseRequest) -> list[dict[str, Any]]:
    """Return the tools as they were sent; functions with every field that OpenAI's have."""
    whole = {"description": None, "parameters": None, "strict": False}
    return [{**whole, **tool} if tool.get("type") == "function" else tool for tool in request.tools or ()]


def text_part(text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def message_item(
    id_: str, text: str | None, logprobs: Sequence[Any] = (), *, whole: bool = True
) -> dict[str, Any]:
    """Build a message item. `text` None: no content part yet."""
    status = ("completed" if whole else "incomplete") if text is not None else "in_progress"
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": id_, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(id_: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": id_, "type": "reasoning", "summary": [], "content": content}
