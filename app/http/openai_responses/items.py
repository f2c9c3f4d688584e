"""Conversation items: conversion to chat messages, and the objects of answers."""

import base64
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from ...errors import unsupported_content
from ...gateway.generation import TokenUsage
from ..openai.sampling import invalid
from .request_types import (
    CallOutputItem,
    CompactionItem,
    ContentPartParam,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    ResponseToolChoice,
)

_PACKED = "llmbox1."
_TEXTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"}
Item = TypeVar("Item")
Rename = Callable[[str | None, str], str]


def chat_messages(items: Iterable[tuple[str, dict[str, Any]]], joined: Rename) -> list[dict[str, Any]]:
    """Convert items. `items` come with their places; `joined` names a tool for the model from its namespace
    and its own name.

    Reasoning, text and calls of one turn of the model are separate items; a chat has one message for them.
    Raises ApiError 400 for items that are not for a text model.
    """
    messages: list[dict[str, Any]] = []
    for at, item in items:
        _add(messages, at, item, joined)
    return messages


def convert_item(at: str, item: Any, kind: type[Item]) -> Item:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`", "").replace("$", at)
        raise invalid(at, text) from None


def _add(messages: list[dict[str, Any]], at: str, item: dict[str, Any], joined: Rename) -> None:
    match item.get("type", "message"):
        case "message":
            message = convert_item(at, item, MessageItem)
            if message.role == "assistant":
                turn = _turn(messages, done=lambda last: bool(last["content"] or last.get("tool_calls")))
                turn["content"] = _text(f"{at}.content", message.content)
            else:
                messages.append({"role": message.role, "content": _content(f"{at}.content", message.content)})
        case "function_call":
            call = convert_item(at, item, FunctionCallItem)
            function = {"name": joined(call.namespace, call.name), "arguments": call.arguments}
            _add_call(messages, {"id": call.call_id, "type": "function", "function": function})
        case "custom_tool_call":
            said = convert_item(at, item, CustomCallItem)
            custom = {"name": joined(said.namespace, said.name), "input": said.input}
            _add_call(messages, {"id": said.call_id, "type": "custom", "custom": custom})
        case "function_call_output" | "custom_tool_call_output":
            output = convert_item(at, item, CallOutputItem)
            text = output.output if isinstance(output.output, str) else _output(output.output)
            messages.append({"role": "tool", "tool_call_id": output.call_id, "content": text})
        case "reasoning":
            thought = convert_item(at, item, ReasoningItem)
            text = _text(f"{at}.content", thought.content or thought.summary or [])
            _turn(messages, done=lambda _: True)["reasoning_content"] = text
        case "compaction":
            summary = read_summary(at, convert_item(at, item, CompactionItem).encrypted_content)
            turn = _turn(messages, done=lambda last: bool(last["content"] or last.get("tool_calls")))
            turn["content"] = f"Summary of the conversation so far:\n{summary}"
        case "additional_tools":
            pass
        case kind:
            raise unsupported_content(f"{at}.type", f"Items of type {kind!r} are not supported.")


def summary_item(id_: str, summary: str) -> dict[str, Any]:
    """Build the item that replaces a long conversation. It is encoded, not encrypted: its sender has seen all
    of it.
    """
    packed = base64.urlsafe_b64encode(summary.encode()).decode()
    return {"id": id_, "type": "compaction", "encrypted_content": _PACKED + packed}


def read_summary(at: str, packed: str) -> str:
    try:
        if packed.startswith(_PACKED):
            return base64.urlsafe_b64decode(packed.removeprefix(_PACKED)).decode()
    except ValueError:
        pass
    raise invalid(f"{at}.encrypted_content", "it was not created by this server's /v1/responses/compact")


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    _turn(messages).setdefault("tool_calls", []).append(call)


def _turn(
    messages: list[dict[str, Any]], done: Callable[[dict[str, Any]], bool] = lambda _: False
) -> dict[str, Any]:
    """Return the model's turn at the end; a new one where there is none or it is `done`."""
    if not messages or messages[-1]["role"] != "assistant" or done(messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(at: str, content: str | list[ContentPartParam]) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise unsupported_content(
                f"{at}[{number}].type",
                f"Content parts of type {part.type!r} are not supported: models read text, and images of "
                "users ('input_image').",
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def _content(at: str, content: str | list[ContentPartParam]) -> str | list[dict[str, Any]]:
    """Return text, or text and images as parts of a chat message."""
    if isinstance(content, str) or all(part.type != "input_image" for part in content):
        return _text(at, content)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if part.type != "input_image":
            parts.append({"type": "text", "text": _text(f"{at}[{number}]", [part])})
        elif part.image_url is None:
            raise unsupported_content(
                f"{at}[{number}]",
                "An image needs an 'image_url': files of this server ('file_id') are not supported.",
            )
        else:
            url = {"url": part.image_url, "detail": part.detail}
            parts.append({"type": "image_url", "image_url": url})
    return parts


def _output(parts: list[ContentPartParam]) -> str:
    """Return a tool's output as text. Images and files become a note to the model: an error would end an
    agent's session.
    """
    return "\n".join(
        (part.text or "") if part.type in _TEXTS else f"[{part.type} left out: only a tool's text is read]"
        for part in parts
    )


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
    """Ours: the seed drawn for this request."""
    warnings: list[str] | UnsetType = UNSET
    """Ours: warnings about ignored fields."""


class InputTokens(Struct, kw_only=True):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def choice_of(request: ResponseRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if isinstance(choice, ResponseToolChoice):
        result = msgspec.structs.asdict(choice)
        return {name: value for name, value in result.items() if value is not None}
    return choice or "auto"


def text_of(request: ResponseRequest) -> dict[str, Any]:
    asked = request.text.format if request.text is not None else None
    result = {"type": "text"} if asked is None else msgspec.structs.asdict(asked)
    return {"format": {name: value for name, value in result.items() if value is not None}}


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
