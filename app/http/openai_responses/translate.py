"""A request of the Responses API as the chat request that means the same."""

from collections.abc import Sequence
from typing import Any

from ..openai.effort import thinks
from .fields import PromptFields, ResponseRequest
from .items import chat_messages
from .tools import Placed, Toolbox, joined_name

LOGPROBS = "message.output_text.logprobs"


def prompt_fields(request: PromptFields, items: Sequence[Placed], tools: Toolbox) -> dict[str, Any]:
    """`items`: of the whole conversation, with their places in the request.

    Raises ApiError 400 for items that are not for a text model.
    """
    messages = chat_messages(items, joined_name)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    given = {
        "model": request.model,
        "messages": messages,
        "tools": tools.chat or None,
        "tool_choice": tools.choice(request.tool_choice),
        "response_format": _format(request),
        "parallel_tool_calls": request.parallel_tool_calls,
    }
    body = {name: value for name, value in given.items() if value is not None}
    effort = request.reasoning.effort if request.reasoning else None
    if effort is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinks(effort)}
    return body


def chat_fields(request: ResponseRequest, items: Sequence[Placed], tools: Toolbox) -> dict[str, Any]:
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    given = {
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": wants_logprobs or None,
        "top_logprobs": request.top_logprobs if wants_logprobs else None,
        "stream": request.stream,
        "metadata": request.metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }
    set_ones = {name: value for name, value in given.items() if value is not None}
    return {**prompt_fields(request, items, tools), **set_ones}


def items_of(given: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """A text as the message that it means."""
    if not isinstance(given, str):
        return given or []
    content = [{"type": "input_text", "text": given}]
    return [{"type": "message", "role": "user", "content": content}]


def _format(request: PromptFields) -> dict[str, Any] | None:
    asked = request.text.format if request.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema}}
