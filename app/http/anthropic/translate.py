"""Translation of a Messages API request to a chat request."""

import json
from typing import Any

from ...errors import ApiError
from .conversation import chat_messages, referenced_tools
from .request_types import CountTokensRequest, MessagesRequest, OutputFormat, ToolParam, ToolResultBlock

_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_EFFORTS = {"max": "xhigh"}
"""Levels that chat templates know under another name."""


def prompt_fields(request: CountTokensRequest, *, late_system: bool) -> dict[str, Any]:
    """Build the fields that determine the prompt. `late_system`: see `chat_messages`. Raises ApiError 400."""
    messages = chat_messages(request, late_system=late_system)
    kwargs: dict[str, Any] = {"enable_thinking": is_thinking(request)}
    if (effort := _effort(request)) is not None:
        kwargs["reasoning_effort"] = effort
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "chat_template_kwargs": kwargs,
    }
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in last:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    found = referenced_tools(request.messages)
    offered = enumerate(request.tools or ())
    if tools := [_tool(f"tools[{n}]", tool) for n, tool in offered if _is_offered(tool, found)]:
        body["tools"] = tools
    return body


def chat_fields(request: MessagesRequest, *, late_system: bool) -> dict[str, Any]:
    body = prompt_fields(request, late_system=late_system)
    thinking = request.thinking
    given: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or None,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "user": request.metadata.user_id if request.metadata else None,
        "include_reasoning": is_thinking(request) and (thinking is None or thinking.display != "omitted"),
    }
    if (asked := output_format(request)) is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": asked.schema}}
    body |= {name: value for name, value in given.items() if value is not None}
    if "tools" in body and (choice := request.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or "-"}}
        body["tool_choice"] = _CHOICES.get(choice.type, named)
        if choice.disable_parallel_tool_use:
            body["parallel_tool_calls"] = False
    return body


def is_thinking(request: CountTokensRequest) -> bool:
    kind = "disabled" if request.thinking is None else request.thinking.type
    if kind == "between_tools":
        last = request.messages[-1].content if request.messages else ""
        return any(isinstance(block, ToolResultBlock) for block in last)
    return kind != "disabled"


def output_format(request: CountTokensRequest) -> OutputFormat | None:
    """Return the requested output format. Raises ApiError 400 where both of its field names are set."""
    new = None if request.output_config is None else request.output_config.format
    if new is not None and request.output_format is not None:
        raise ApiError(
            400,
            "'output_format' is the older name of 'output_config.format': send one of them.",
            code="invalid_value",
            param="output_format",
        )
    return new or request.output_format


def _effort(request: CountTokensRequest) -> str | None:
    asked = None if request.output_config is None else request.output_config.effort
    return None if asked is None else _EFFORTS.get(asked, asked)


def _is_offered(tool: ToolParam, found: set[str]) -> bool:
    return not tool.defer_loading or tool.name in found


def _tool(at: str, tool: ToolParam) -> dict[str, Any]:
    if tool.type not in {None, "custom"}:
        raise ApiError(
            400,
            f"Tools of type {tool.type!r} run at Anthropic, not here. Send your own, with 'input_schema'.",
            code="unsupported_parameter",
            param=f"{at}.type",
        )
    function = {
        "name": tool.name,
        "description": _description(tool),
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _description(tool: ToolParam) -> str | None:
    if not tool.input_examples:
        return tool.description
    examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in tool.input_examples)
    return f"{tool.description or ''}\nExamples of input:\n{examples}".lstrip()
