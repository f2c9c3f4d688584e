"""Chat messages and tools in the form that a chat template reads.

Content that a template cannot read is refused by name. A custom tool is shown as a function with one text,
`input`; what the model writes there is the tool's input.
"""

import contextlib
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...config.settings import LimitSettings
from ...errors import missing_parameter, unsupported_content, unsupported_parameter
from ...gateway.open_request import OpenRequest
from ...images.source import ImageSource
from ...text.chat_template import Chat, RenderedChat
from ...text.grammar.grammars import Grammar, json_input
from ...text.grammar.json_lark import LarkError, lark_in_json
from ...text.output import make_parser
from ...text.output.call_parsers import ParsedToolCall, Schemas
from ...text.output.output_formats import OutputFormat, ReasoningMarks, Thinking, ToolSyntax, thinking_after
from ...text.output.output_parser import OutputParser, read_arguments
from ...text.tokenizer.tokenizer import TextModel
from .request_types import (
    AllowedChoice,
    ChatCompletionRequest,
    ContentPart,
    CustomFunction,
    CustomReference,
    CustomTool,
    FunctionReference,
    FunctionTool,
    Message,
    Tool,
    ToolCall,
)
from .sampling import invalid

INPUT = "input"


def offered_tools(body: Any, most: int) -> list[dict[str, Any]] | None:
    """Return the template's tools; None where none are offered, `tool_choice: "none"` included. Raises
    ApiError 400.
    """
    tools: list[Tool] = body.tools or []
    choice = getattr(body, "tool_choice", None)
    if choice not in (None, "none") and not tools:
        raise invalid("tool_choice", "it is only allowed when 'tools' are given")
    if len(tools) > most:
        raise invalid("tools", f"at most {most} tools are allowed")
    allowed = _allowed(choice, tools)
    if choice == "none" or not tools:
        return None
    shown = tools if allowed is None else [tool for tool in tools if _place(tool) in allowed]
    return [{"type": "function", "function": _function(tool)} for tool in shown]


def custom_names(body: ChatCompletionRequest) -> frozenset[str]:
    return frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))


def input_grammars(body: ChatCompletionRequest, most: int) -> Mapping[str, list[Grammar]]:
    """Return the grammars of arguments, by the names of custom tools that have one. Raises ApiError 400."""
    found = {}
    for number, tool in enumerate(body.tools or ()):
        if not isinstance(tool, CustomTool) or tool.custom.format is None:
            continue
        asked, at = tool.custom.format, f"tools[{number}].custom.format"
        if asked.type == "text":
            continue
        if asked.grammar is None:
            raise invalid(at, "the type 'grammar' needs 'grammar'")
        definition = asked.grammar.definition
        if len(definition.encode("utf-8", "replace")) > most:
            raise invalid(f"{at}.grammar.definition", f"it has at most {most} bytes")
        try:
            found[tool.custom.name] = json_input(
                f"input{number}", lark_in_json(definition, asked.grammar.syntax), INPUT
            )
        except LarkError as error:
            raise invalid(f"{at}.grammar.definition", str(error)) from None
    return found


def input_of(call: ParsedToolCall) -> str:
    """Return the text that a model gives a custom tool. Models that miss the name of the field still say one
    text.
    """
    written = read_arguments(call.arguments, keeps_cut_text=True)
    texts = [value for value in written.values() if isinstance(value, str)]
    found = written.get(INPUT)
    if isinstance(found, str):
        return found
    return texts[0] if len(texts) == 1 else "" if call.is_cut else call.arguments


def is_forced(choice: Any) -> bool:
    """Return True if `tool_choice` asks for a call."""
    if isinstance(choice, AllowedChoice):
        choice = choice.allowed_tools.mode
    return choice not in (None, "auto", "none")


def _allowed(choice: Any, tools: list[Tool]) -> set[tuple[str, str]] | None:
    """Return the (type, name) pairs that may be called. None: all of them."""
    match choice:
        case FunctionReference() | CustomReference():
            wanted, every = [choice], True
        case AllowedChoice():
            wanted, every = choice.allowed_tools.tools, False
        case _:
            return None
    places = {_place(tool) for tool in tools}
    for kind, name in map(_place, wanted):
        if (kind, name) not in places:
            raise invalid("tool_choice", f"there is no tool {name!r} of type {kind!r} in 'tools'")
    if not wanted:
        raise invalid("tool_choice", "at least one tool must be allowed")
    return None if every else {_place(each) for each in wanted}


def _place(tool: Tool | FunctionReference | CustomReference) -> tuple[str, str]:
    if isinstance(tool, FunctionTool | FunctionReference):
        return "function", tool.function.name
    return "custom", tool.custom.name


def _function(tool: Tool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return _as_function(tool.custom)
    described = msgspec.structs.asdict(tool.function)
    del described["strict"]
    return {name: value for name, value in described.items() if value is not None}


def _as_function(tool: CustomFunction) -> dict[str, Any]:
    text = {"type": "string", "description": "The whole input as plain text."}
    grammar = None if tool.format is None else tool.format.grammar
    if grammar is not None:
        text["description"] += f" It follows this {grammar.syntax} grammar:\n{grammar.definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {name: value for name, value in described.items() if value is not None}


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
    images = ChatImages()
    messages = [_message(i, message, images) for i, message in enumerate(body.messages)]
    if len(images.sources) > limits.images:
        raise invalid("messages", f"at most {limits.images} images are allowed (limits.images)")
    if continues and messages[-1]["role"] != "assistant":
        raise invalid("continue_final_message", "the last message is not the assistant's")
    return Chat(
        messages=messages,
        tools=offered_tools(body, limits.tools),
        add_generation_prompt=add,
        continue_final_message=continues,
        template_kwargs=body.chat_template_kwargs or {},
        images=tuple(images.sources),
        image_mark=images.mark if images.sources else "",
    )


class ChatImages:
    """Images of a conversation, and the mark for each in the text around them."""

    def __init__(self) -> None:
        self.sources: list[ImageSource] = []
        self.mark = f"\uf8ff{secrets.token_hex(8)}\uf8ff"

    def add(self, at: str, part: ContentPart) -> str:
        found = part.image_url
        if found is None:
            raise missing_parameter(f"{at}.image_url")
        url, detail = (found, None) if isinstance(found, str) else (found.url, found.detail)
        self.sources.append(ImageSource(url, detail == "low", f"{at}.image_url"))
        return self.mark


def _message(index: int, message: Message, images: ChatImages) -> dict[str, Any]:
    at = f"messages[{index}]"
    if message.role == "function":
        raise unsupported_parameter(
            f"{at}.role", "Messages of the role 'function' are not supported: its successor is 'tool'."
        )
    for name in ("function_call", "audio"):
        if getattr(message, name) not in (None, []):
            raise unsupported_parameter(f"{at}.{name}", f"'{at}.{name}' is not supported yet.")
    # Templates know the older name of the role.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(at, message, images)}
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
        raise missing_parameter(f"{at}.{call.type}")
    return {"id": call.id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(at: str, message: Message, images: ChatImages) -> str:
    content = message.content
    if message.tool_calls and not content:
        return ""
    if content is None:
        if message.role == "assistant" and message.refusal is not None:
            return message.refusal
        raise missing_parameter(f"{at}.content")
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(f"{at}.content", "there must be at least one part")
    if not any(part.type == "image_url" for part in content):
        return "\n".join(_part(f"{at}.content[{j}]", part) for j, part in enumerate(content))
    if message.role not in {"user", "tool"}:
        raise unsupported_content(
            f"{at}.content",
            f"Messages of the role {message.role!r} cannot contain images: send them in a user message.",
        )
    joined, ends_in_text = "", False
    for j, part in enumerate(content):
        is_text = part.type != "image_url"
        own = _part(f"{at}.content[{j}]", part) if is_text else images.add(f"{at}.content[{j}]", part)
        joined += "\n" + own if is_text and ends_in_text else own
        ends_in_text = is_text
    return joined


def _part(at: str, part: ContentPart) -> str:
    text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
    if part.type not in {"text", "refusal"}:
        raise unsupported_content(
            f"{at}.type",
            f"Content parts of type {part.type!r} are not supported: models read text and images "
            "('image_url').",
        )
    if text is None:
        raise missing_parameter(f"{at}.{part.type}")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserOptions:
    thinking: Thinking
    format: OutputFormat
    schemas: Schemas | None
    """Schemas of the offered tools' arguments, None where none are offered."""
    custom: frozenset[str]
    """Names of tools that take a text."""
    most_calls: int | None
    is_forced: bool
    """True if the answer must be a call."""
    includes_reasoning: bool

    @classmethod
    def of(
        cls, body: ChatCompletionRequest, text: TextModel, chat: Chat, prompt: RenderedChat
    ) -> "ParserOptions":
        continued = chat.messages[-1]["content"] if chat.continue_final_message else None
        functions = [tool["function"] for tool in chat.tools or ()]
        return cls(
            thinking=thinking_after(text.output_format, prompt.marked, continued),
            format=text.output_format,
            schemas={each["name"]: each.get("parameters") or {} for each in functions} or None,
            custom=custom_names(body),
            most_calls=1 if body.parallel_tool_calls is False else None,
            is_forced=is_forced(body.tool_choice),
            includes_reasoning=body.include_reasoning is not False,
        )

    @property
    def tools(self) -> ToolSyntax | None:
        """Syntax of calls, None where no tools are offered."""
        return None if self.schemas is None else self.format.tools

    @property
    def needed(self) -> bool:
        """True if the answer may have several parts. Otherwise it is text alone."""
        return self.thinking != "no" or self.tools is not None or self.format.has_parts

    def parser(self) -> OutputParser:
        return make_parser(
            self.format, self.thinking, self.schemas, self.most_calls, is_forced=self.is_forced
        )

    def needs_special(self, text: TextModel) -> bool:
        """True if a mark is a special token, which detokenized text otherwise leaves out."""
        if not self.needed:
            return False
        return any(text.tokenizer.token_to_id(mark) in text.tokens.special_ids for mark in self.format.marks)


PLAIN = ParserOptions(
    thinking="no",
    format=OutputFormat(name="plain"),
    schemas=None,
    custom=frozenset(),
    most_calls=None,
    is_forced=False,
    includes_reasoning=False,
)
"""Parsing of answers without parts."""


def call_id(answer: str, choice: int, number: int) -> str:
    """Make a tool call's id of nine letters and digits: Mistral's templates take no other length."""
    return hashlib.sha256(f"{answer}:{choice}:{number}".encode()).hexdigest()[:9]


def final_reason(reason: str, parser: OutputParser) -> str:
    return "tool_calls" if parser.called and reason == "stop" else reason


def reasoning_tokens(opened: OpenRequest, parsers: Sequence[OutputParser]) -> int:
    """Count the reasoning tokens of all choices, closing marks included. For answers that have ended."""
    text = opened.generation.model.text
    pairs = zip(opened.sequences, parsers, strict=True)
    return sum(
        _count_thoughts(sequence.output_ids, text, parser.marks)
        for sequence, parser in pairs
        if parser.thought and parser.marks is not None
    )


def _count_thoughts(ids: list[int], text: TextModel, marks: ReasoningMarks) -> int:
    end = text.tokenizer.token_to_id(marks.closer)
    if end is not None and not marks.anywhere:
        return ids.index(end) + 1 if end in ids else len(ids)
    detokenizer = text.detokenizer(skip_special=False)
    count, tail, inside = 0, "", not marks.anywhere
    for token in ids:
        tail = (tail + detokenizer.push(token))[-64:]
        count += inside
        if inside and marks.closer in tail:
            inside, tail = False, ""
            if not marks.anywhere:
                return count
        elif not inside and marks.opener in tail:
            inside = True
    return count
