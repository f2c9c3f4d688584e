"""Translation of a Messages API request to a chat request."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from ...engines.loaded_model import LoadedModel
from ...errors import ApiError, unsupported_parameter
from ...gateway.gateway import model_limit
from ..openai.chat import ChatCall, chat_ids, prepare_translated
from ..openai.chat_messages import build_chat
from ..openai.request_context import RequestContext, check_prompts
from ..openai.request_types import ChatCompletionRequest
from ..openai.unsupported import refuse_unsupported, unknown_fields
from ..server.errors import NO_THREADS
from ..server.request import convert
from .conversation import chat_messages, has_late_system, referenced_tools
from .request_types import (
    AnthropicOutputFormat,
    ContextEdit,
    CountTokensRequest,
    MessageParam,
    MessagesRequest,
    OutputConfig,
    RedactedThinkingBlock,
    ThinkingBlock,
    ToolParam,
    ToolResultBlock,
)

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
    if thinking is not None and is_thinking(request):
        given["thinking_token_budget"] = thinking.budget_tokens
    given["reasoning_effort"] = _effort(request)
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


def output_format(request: CountTokensRequest) -> AnthropicOutputFormat | None:
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
        raise unsupported_parameter(
            f"{at}.type",
            f"Tools of type {tool.type!r} run at Anthropic, not here. Send your own, with 'input_schema'.",
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


_CLEAR_THINKING = "clear_thinking_20251015"


@dataclass(slots=True)
class AppliedEdits:
    """Thinking blocks that were removed, one list for each turn; None where no edit was requested."""

    thoughts: list[list[str]] | None = None
    messages: list[MessageParam] = field(default_factory=list)

    def describe(self, count_tokens: Any) -> dict[str, Any] | None:
        """Build Anthropic's `context_management` field of an answer. `count_tokens` measures a text."""
        if self.thoughts is None:
            return None
        edit = {
            "type": _CLEAR_THINKING,
            "cleared_thinking_turns": len(self.thoughts),
            "cleared_input_tokens": sum(count_tokens("\n".join(turn)) for turn in self.thoughts),
        }
        return {"applied_edits": [edit] if self.thoughts else []}


def apply_edits(request: CountTokensRequest) -> AppliedEdits:
    """Apply the edits to the request's messages. Raises ApiError 400 for edits that are not
    supported here.
    """
    asked = request.context_management
    if asked is None:
        return AppliedEdits(messages=request.messages)
    thoughts: list[list[str]] = []
    messages = list(request.messages)
    for number, edit in enumerate(asked.edits or ()):
        if edit.type != _CLEAR_THINKING:
            raise unsupported_parameter(
                f"context_management.edits[{number}].type",
                f"Edits of type {edit.type!r} are not supported, {_CLEAR_THINKING!r} is. Nothing is cut from "
                "conversations here: shorten them in the client.",
            )
        thoughts += _clear_thinking(messages, _count_kept_turns(edit, len(messages)))
    return AppliedEdits(thoughts, messages)


def _count_kept_turns(edit: ContextEdit, everything: int) -> int:
    keep = edit.keep
    if keep is None:
        return 1
    if keep == "all" or keep.type == "all":
        return everything
    return keep.value or 1


def _clear_thinking(messages: list[MessageParam], keep: int) -> list[list[str]]:
    """Remove thinking blocks from all turns but the latest `keep` that have some, in place. Returns them."""
    cleared: list[list[str]] = []
    for number in reversed(range(len(messages))):
        message = messages[number]
        if message.role != "assistant" or isinstance(message.content, str):
            continue
        rest = [b for b in message.content if not isinstance(b, ThinkingBlock | RedactedThinkingBlock)]
        if len(rest) == len(message.content):
            continue
        if keep:
            keep -= 1
            continue
        cleared.append([block.thinking for block in message.content if isinstance(block, ThinkingBlock)])
        messages[number] = structs.replace(message, content=rest)
    return cleared[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCall:
    chat: ChatCall
    context_management: dict[str, Any] | None
    """Edits that were applied; None where the request asked for none."""


async def prepare_message(call: RequestContext, data: MessagesRequest) -> MessageCall:
    """Check a request and build its chat. Raises ApiError for every error that can be found before the engine
    has the request.
    """
    edits, edited = _edited(data)
    assert isinstance(edited, MessagesRequest)
    late_system = await _renders_late_system(call, data)
    plain = chat_fields(edited, late_system=late_system)
    format_name = "output_config.format" if data.output_format is None else "output_format"
    names = {
        "response_format": format_name,
        "continue_final_message": "messages",
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    chat = await prepare_translated(call, plain, [], "msg_", names)
    generation = replace(chat.generation, max_tokens_clamped=True)
    _check_prompt(generation.model, len(generation.prompts[0]))
    warnings = [*_warnings(call, data), *chat.warnings]
    return MessageCall(
        chat=replace(chat, generation=generation, warnings=warnings),
        context_management=await _described(edits, generation.model),
    )


async def count_prompt_tokens(call: RequestContext, data: CountTokensRequest) -> tuple[int, int]:
    """Count the prompt's tokens as it would be sent, and before any edit. Raises ApiError."""
    edits, edited = _edited(data)
    output_format(data)
    late_system = await _renders_late_system(call, data)
    model = await call.find_model(data.model)

    async def count(request: CountTokensRequest) -> int:
        body = convert(prompt_fields(request, late_system=late_system), ChatCompletionRequest)
        ids = await chat_ids(call.gateway, model, build_chat(body, call.limits))
        check_prompts([ids], "messages", model)
        return len(ids)

    tokens = await count(edited)
    return tokens, await count(data) if edits.thoughts else tokens


def _edited(data: CountTokensRequest) -> tuple[AppliedEdits, CountTokensRequest]:
    if data.thread is not None:
        raise ApiError(
            400,
            "The value of 'thread' is not supported. Send the whole conversation each time.",
            code=NO_THREADS,
            param="thread",
        )
    refuse_unsupported(data)
    if data.output_config is not None:
        refuse_unsupported(data.output_config, "output_config.")
    edits = apply_edits(data)
    return edits, structs.replace(data, messages=edits.messages)


async def _renders_late_system(call: RequestContext, data: CountTokensRequest) -> bool:
    if not has_late_system(data):
        return True
    model = await call.find_model(data.model)
    return await model.text.renders_late_system(call.gateway.templates)


def _check_prompt(model: LoadedModel, size: int) -> None:
    """Refuse a prompt that is too long, in Anthropic's words: its agents read them to shorten a conversation
    by themselves.
    """
    if size >= (limit := model_limit(model)):
        raise ApiError(
            400,
            f"prompt is too long: {size} tokens > {limit - 1} maximum. Shorten it, or load the model with a "
            "larger context.",
            code="context_length_exceeded",
            param="messages",
        )


async def _described(edits: AppliedEdits, model: LoadedModel) -> dict[str, Any] | None:
    size = sum(len(text) for turn in edits.thoughts or () for text in turn)

    def count_tokens(text: str) -> int:
        return len(model.text.encode(text, add_special_tokens=False))

    return await model.text.off_loop(size, lambda: edits.describe(count_tokens))


def _warnings(call: RequestContext, data: MessagesRequest) -> list[str]:
    found = unknown_fields(type(data), call.plain)
    found += unknown_fields(OutputConfig, call.plain.get("output_config") or {}, "output_config.")
    if data.diagnostics:
        found.append("'diagnostics' has no effect: the request log says where a prefix ended.")
    return found
