"""Translation of Ollama requests to chat requests."""

import json
from typing import Any

import msgspec

from ...errors import ApiError
from .request_types import ChatMessage, ChatRequest, Common, GenerateRequest, normalize_name

_SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
NAMES = {
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "top_k": "options.top_k",
    **{name: f"options.{name}" for name in _SAME},
}
"""Ollama's fields by those of the chat."""
_EFFORTS = {"max": "xhigh"}
"""Levels that chat templates know under another name."""
_OF_CHATS = {"chat_template_kwargs", "include_reasoning", "logprobs", "top_logprobs"}


def chat_fields(request: ChatRequest) -> dict[str, Any]:
    body = _common(request)
    body["messages"] = _messages(request.messages or [])
    if request.tools:
        body["tools"] = msgspec.to_builtins(request.tools)
    return body


def generate_fields(request: GenerateRequest) -> dict[str, Any]:
    body = _common(request)
    system = [{"role": "system", "content": request.system}] if request.system else []
    body["messages"] = [*system, {"role": "user", "content": request.prompt or ""}]
    return body


def raw_fields(request: GenerateRequest) -> dict[str, Any]:
    """Build a completion: the prompt as it is, or fill-in-the-middle before a suffix."""
    body = {name: value for name, value in _common(request).items() if name not in _OF_CHATS}
    body["prompt"] = request.prompt or ""
    if request.suffix:
        body["suffix"] = request.suffix
    return body


def _common(request: Common) -> dict[str, Any]:
    body: dict[str, Any] = {"model": normalize_name(request.model)}
    options = request.options
    if options is not None:
        given = {name: getattr(options, name) for name in _SAME}
        given["top_k"] = options.top_k or None
        given["repetition_penalty"] = options.repeat_penalty
        given["max_tokens"] = options.num_predict if (options.num_predict or 0) > 0 else None
        body |= {name: value for name, value in given.items() if value is not None}
    if (asked := request.format) not in (None, ""):
        body["response_format"] = _format(asked)
    if request.think is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.think is not False}
        body["include_reasoning"] = request.think is not False
        if isinstance(request.think, str):
            body["chat_template_kwargs"]["reasoning_effort"] = _EFFORTS.get(request.think, request.think)
    if request.logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    return body


def _format(asked: Any) -> dict[str, Any]:
    if asked == "json":
        return {"type": "json_object"}
    if isinstance(asked, str):
        raise ApiError(
            400,
            "Invalid value for 'format': it is 'json' or a JSON schema.",
            code="invalid_value",
            param="format",
        )
    return {"type": "json_schema", "json_schema": {"schema": asked}}


def _messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Convert messages. Ollama's calls have no ids, and some templates want them: results are matched to
    calls in order.
    """
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    calls = 0
    for number, message in enumerate(messages):
        if message.images:
            raise ApiError(
                400, "Images are not supported: this model reads text.", param=f"messages[{number}].images"
            )
        plain: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking is not None:
            plain["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            id_, calls = f"call{calls:05}", calls + 1
            waiting.append(id_)
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            plain.setdefault("tool_calls", []).append({"id": id_, "type": "function", "function": function})
        if message.role == "tool":
            if message.tool_name is not None:
                plain["name"] = message.tool_name
            if waiting:
                plain["tool_call_id"] = waiting.pop(0)
        made.append(plain)
    return made
