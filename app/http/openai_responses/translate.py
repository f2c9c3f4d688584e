"""A request of the Responses API as the chat request that means the same."""

from collections.abc import Sequence
from typing import Any

from ..openai.effort import thinks
from .fields import ResponseRequest
from .items import chat_messages
from .tools import Toolbox, joined_name, with_places

Placed = tuple[str, dict[str, Any]]


def chat_fields(request: ResponseRequest, items: Sequence[Placed], tools: Toolbox) -> dict[str, Any]:
    """`items`: of the whole conversation, with their places in the request.

    Raises ApiError 400 for items that are not for a text model.
    """
    messages = chat_messages(items, joined_name)
    if request.instructions:
        messages.insert(0, {"role": "system", "content": request.instructions})
    given = {
        "model": request.model,
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": request.stream,
        "tools": tools.chat or None,
        "tool_choice": tools.choice(request.tool_choice),
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


def items_of(request: ResponseRequest) -> list[dict[str, Any]]:
    """Its own, a text as the message that it means."""
    if not isinstance(request.input, str):
        return request.input
    content = [{"type": "input_text", "text": request.input}]
    return [{"type": "message", "role": "user", "content": content}]


def all_items(request: ResponseRequest, before: Sequence[dict[str, Any]]) -> list[Placed]:
    """`before`: items of the conversation that this request goes on with."""
    return [*with_places("previous_response_id", before), *with_places("input", items_of(request))]


def _format(request: ResponseRequest) -> dict[str, Any] | None:
    asked = request.text.format if request.text is not None else None
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema}}
