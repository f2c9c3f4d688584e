"""Parts of a chat answer (reasoning, tool calls): which are possible, their ids and their token counts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ...gateway.open_request import OpenRequest
from ...text.chat_template import Chat, RenderedChat
from ...text.output.call_parsers import Schemas
from ...text.output.output_formats import OutputFormat, ReasoningMarks, Thinking, ToolSyntax, thinking_after
from ...text.output.output_parser import OutputParser
from ...text.tokenizer.tokenizer import TextModel
from .request_types import ChatCompletionRequest
from .tools import custom_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    thinking: Thinking
    format: OutputFormat
    schemas: Schemas | None
    """Schemas of the offered tools' arguments, None where none are offered."""
    custom: frozenset[str]
    """Names of tools that take a text."""
    most_calls: int | None
    tells_thoughts: bool

    @classmethod
    def of(cls, body: ChatCompletionRequest, text: TextModel, chat: Chat, prompt: RenderedChat) -> "Parsing":
        continued = chat.messages[-1]["content"] if chat.continue_final_message else None
        functions = [tool["function"] for tool in chat.tools or ()]
        return cls(
            thinking=thinking_after(text.output_format, prompt.marked, continued),
            format=text.output_format,
            schemas={each["name"]: each.get("parameters") or {} for each in functions} or None,
            custom=custom_names(body),
            most_calls=1 if body.parallel_tool_calls is False else None,
            tells_thoughts=body.include_reasoning is not False,
        )

    @property
    def tools(self) -> ToolSyntax | None:
        """Syntax of calls, None where no tools are offered."""
        return None if self.schemas is None else self.format.tools

    @property
    def needed(self) -> bool:
        """True if the answer may have parts to tell apart. Otherwise it is its text."""
        return self.thinking != "no" or self.tools is not None or self.format.has_parts

    def parser(self) -> OutputParser:
        return OutputParser(self.format, self.thinking, self.schemas, self.most_calls)

    def needs_special(self, text: TextModel) -> bool:
        """True if a mark is a special token, which detokenized text otherwise leaves out."""
        if not self.needed:
            return False
        return any(text.tokenizer.token_to_id(mark) in text.tokens.special_ids for mark in self.format.marks)


PLAIN = Parsing(
    thinking="no",
    format=OutputFormat(name="plain"),
    schemas=None,
    custom=frozenset(),
    most_calls=None,
    tells_thoughts=False,
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
