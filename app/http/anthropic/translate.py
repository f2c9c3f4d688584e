"""A request of the Messages API as the chat request that means the same."""

import json
from typing import Any

from ...errors import ApiError
from .fields import (
    Block,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)

_CHOICES = {"auto": "auto", "none": "none", "any": "required"}


def prompt_fields(request: CountTokensRequest) -> dict[str, Any]:
    """What the prompt depends on. Raises ApiError 400 for blocks and tools that are not for a text model."""
    messages = [] if not request.system else [{"role": "system", "content": _system(request.system)}]
    for number, message in enumerate(request.messages):
        messages += _messages(f"messages[{number}]", message)
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    body: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    if request.tools:
        body["tools"] = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(request.tools)]
    return body


def chat_fields(request: MessagesRequest) -> dict[str, Any]:
    body = prompt_fields(request)
    thinks: bool = body["chat_template_kwargs"]["enable_thinking"]
    given: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or None,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "user": request.metadata.user_id if request.metadata else None,
        "include_reasoning": thinks,
    }
    if (asked := request.output_format) is not None:
        given["response_format"] = {"type": "json_schema", "json_schema": {"schema": asked.schema}}
    body |= {name: value for name, value in given.items() if value is not None}
    if request.tools and (choice := request.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name or "-"}}
        body["tool_choice"] = _CHOICES.get(choice.type, named)
        if choice.disable_parallel_tool_use:
            body["parallel_tool_calls"] = False
    return body


def _system(system: str | list[TextBlock]) -> str:
    return system if isinstance(system, str) else "\n".join(block.text for block in system)


def _messages(at: str, message: MessageParam) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before the words that came with them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: dict[str, Any] = {"role": message.role, "content": []}
    results, calls, thoughts = [], [], []
    for number, block in enumerate(message.content):
        match block:
            case TextBlock():
                made["content"].append({"type": "text", "text": block.text})
            case ToolResultBlock():
                results.append(_result(f"{at}.content[{number}]", block))
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ImageBlock() | DocumentBlock():
                raise _not_text(f"{at}.content[{number}]", block)
    made |= {"tool_calls": calls} if calls else {}
    made |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    silent = not made["content"] and (results or calls)
    if silent and not calls:
        return results
    made["content"] = None if silent else made["content"]
    return [*results, made]


def _result(at: str, block: ToolResultBlock) -> dict[str, Any]:
    texts = [block.content or ""] if not isinstance(block.content, list) else []
    for each in block.content if isinstance(block.content, list) else ():
        if not isinstance(each, TextBlock):
            raise _not_text(at, each)
        texts.append(each.text)
    text = "\n".join(texts)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _tool(at: str, tool: ToolParam) -> dict[str, Any]:
    if tool.type not in {None, "custom"}:
        raise ApiError(
            400,
            f"Tools of type {tool.type!r} run at Anthropic, not here. Send your own, with 'input_schema'.",
            code="unsupported_parameter",
            param=f"{at}.type",
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def _not_text(at: str, block: Block) -> ApiError:
    kind = block.__struct_config__.tag
    return ApiError(
        400,
        f"'{at}': blocks of type {kind!r} are not supported: this model reads text.",
        code="unsupported_content",
        param=f"{at}.type",
    )
