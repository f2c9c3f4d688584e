"""Chat messages in the form that a chat template reads. Content that a template cannot read is refused by
name.
"""

import contextlib
import json
from typing import Any

from ...config.schema import LimitSettings
from ...errors import ApiError
from ...text.chat_template import Chat
from .request_types import ContentPart, Message, ToolCall
from .sampling import invalid
from .tools import INPUT, offered_tools


def build_chat(body: Any, limits: LimitSettings) -> Chat:
    """Build the template's messages and tools. `body` has the fields that chat and tokenize share."""
    most = limits.messages
    if not body.messages:
        raise invalid("messages", "there must be at least one message")
    if len(body.messages) > most:
        raise invalid("messages", f"at most {most} messages are allowed")
    continues = bool(body.continue_final_message)
    add = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and add:
        raise invalid("add_generation_prompt", "it cannot be combined with 'continue_final_message'")
    messages = [_message(i, message) for i, message in enumerate(body.messages)]
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "the last message is not the assistant's")
    return Chat(
        messages=messages,
        tools=offered_tools(body, limits.tools),
        add_generation_prompt=add,
        continue_final_message=continues,
        template_kwargs=body.chat_template_kwargs or {},
    )


def _message(index: int, message: Message) -> dict[str, Any]:
    at = f"messages[{index}]"
    if message.role == "function":
        raise ApiError(
            400,
            "Messages of the role 'function' are not supported: its successor is 'tool'.",
            code="unsupported_parameter",
            param=f"{at}.role",
        )
    for name in ("function_call", "audio"):
        if getattr(message, name) not in (None, []):
            raise ApiError(
                400,
                f"'{at}.{name}' is not supported yet.",
                code="unsupported_parameter",
                param=f"{at}.{name}",
            )
    # Templates know the older name of the role.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(at, message)}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [_called(f"{at}.tool_calls[{n}]", call) for n, call in calls]
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.reasoning is not None:
        plain.setdefault("reasoning_content", message.reasoning)
    return plain


def _called(at: str, call: ToolCall) -> dict[str, Any]:
    """Convert a tool call. Templates write arguments as JSON themselves, so they get the object."""
    arguments: Any
    if call.type == "custom" and call.custom is not None:
        name, arguments = call.custom.name, {INPUT: call.custom.input}
    elif call.type == "function" and call.function is not None:
        name, arguments = call.function.name, call.function.arguments
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    else:
        raise _missing(f"{at}.{call.type}")
    return {"id": call.id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(at: str, message: Message) -> str:
    content = message.content
    if message.tool_calls and not content:
        return ""
    if content is None:
        if message.role == "assistant" and message.refusal is not None:
            return message.refusal
        raise _missing(f"{at}.content")
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"{at}.content", "there must be at least one part")
    return "\n".join(_part(f"{at}.content[{j}]", part) for j, part in enumerate(content))


def _part(at: str, part: ContentPart) -> str:
    text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
    if part.type not in {"text", "refusal"}:
        raise ApiError(
            400,
            f"Content parts of type {part.type!r} are not supported: this model reads text.",
            code="unsupported_content",
            param=f"{at}.type",
        )
    if text is None:
        raise _missing(f"{at}.{part.type}")
    return text


def _missing(param: str) -> ApiError:
    return ApiError(400, f"Missing required parameter: '{param}'.", "missing_required_parameter", param)
