"""A request of the Responses API as the chat request that means the same."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from ...errors import ApiError
from ..openai.effort import thinks
from .fields import (
    FunctionCallItem,
    FunctionChoice,
    FunctionOutputItem,
    FunctionTool,
    MessageItem,
    Part,
    ReasoningItem,
    ResponseRequest,
)

_TEXTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"}
Item = TypeVar("Item")


def chat_fields(request: ResponseRequest, before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`before`: items of the conversation that this one goes on with.

    Raises ApiError 400 for items that are not for a text model.
    """
    given = {
        "model": request.model,
        "messages": _messages(request, before),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "tools": [_tool(tool) for tool in request.tools or ()] or None,
        "tool_choice": _choice(request),
        "response_format": _format(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }
    body = {name: value for name, value in given.items() if value is not None}
    effort = request.reasoning.effort if request.reasoning else None
    if effort is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinks(effort)}
    return body


def _choice(request: ResponseRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice == "auto" and not request.tools else choice


def _format(request: ResponseRequest) -> dict[str, Any] | None:
    asked = request.text.format if request.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema}}


def _tool(tool: FunctionTool) -> dict[str, Any]:
    told = msgspec.structs.asdict(tool)
    del told["type"]
    function = {name: value for name, value in told.items() if value is not None}
    return {"type": "function", "function": function}


def items_of(request: ResponseRequest) -> list[dict[str, Any]]:
    """Its own, a text as the message that it means."""
    if not isinstance(request.input, str):
        return request.input
    content = [{"type": "input_text", "text": request.input}]
    return [{"type": "message", "role": "user", "content": content}]


def _messages(request: ResponseRequest, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    for number, item in enumerate(before):
        _add(messages, f"previous_response_id[{number}]", item)
    for number, item in enumerate(items_of(request)):
        _add(messages, f"input[{number}]", item)
    return messages


def _add(messages: list[dict[str, Any]], at: str, item: dict[str, Any]) -> None:
    """Thoughts, words and calls of one turn of the model are items of their own; a chat has one message."""
    match item.get("type", "message"):
        case "message":
            message = _convert(at, item, MessageItem)
            content = _text(f"{at}.content", message.content)
            if message.role == "assistant":
                turn = _turn(messages, done=lambda last: bool(last["content"] or last.get("tool_calls")))
                turn["content"] = content
            else:
                messages.append({"role": message.role, "content": content})
        case "function_call":
            call = _convert(at, item, FunctionCallItem)
            function = {"name": call.name, "arguments": call.arguments}
            made = {"id": call.call_id, "type": "function", "function": function}
            _turn(messages).setdefault("tool_calls", []).append(made)
        case "function_call_output":
            output = _convert(at, item, FunctionOutputItem)
            text = _text(f"{at}.output", output.output)
            messages.append({"role": "tool", "tool_call_id": output.call_id, "content": text})
        case "reasoning":
            thought = _convert(at, item, ReasoningItem)
            text = _text(f"{at}.content", thought.content or thought.summary or [])
            _turn(messages, done=lambda _: True)["reasoning_content"] = text
        case kind:
            raise ApiError(
                400,
                f"Items of type {kind!r} are not supported.",
                code="unsupported_content",
                param=f"{at}.type",
            )


def _turn(messages: list[dict[str, Any]], done: Any = lambda _: False) -> dict[str, Any]:
    """The model's turn at the end, or a new one where there is none or it is `done`."""
    if not messages or messages[-1]["role"] != "assistant" or done(messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(at: str, content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise ApiError(
                400,
                f"Content parts of type {part.type!r} are not supported: this model reads text.",
                code="unsupported_content",
                param=f"{at}[{number}].type",
            )
    return "\n".join(part.text or part.refusal or "" for part in content)


def _convert(at: str, item: dict[str, Any], kind: type[Item]) -> Item:
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        told = str(error).replace("`", "").replace("$", at)
        raise ApiError(400, f"Invalid value for '{at}': {told}.", code="invalid_value", param=at) from None
