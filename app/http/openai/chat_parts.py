"""Parts of a chat answer (reasoning, tool calls): which are possible, their ids and their token counts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...gateway.open_request import OpenRequest
from ...text.chat_template import Chat, RenderedChat
from ...text.output_parser import (
    THINK,
    THOUGHT,
    OutputParser,
    Thinking,
    ToolSyntax,
    thinking_after,
    tool_syntax,
)
from ...text.tokenizer.tokenizer import TextModel
from .request_types import ChatCompletionRequest
from .tools import custom_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    thinking: Thinking
    tools: ToolSyntax | None
    names: frozenset[str]
    custom: frozenset[str]
    """Names of tools that take a text."""
    most_calls: int | None
    tells_thoughts: bool

    @classmethod
    def of(cls, body: ChatCompletionRequest, text: TextModel, chat: Chat, prompt: RenderedChat) -> "Parsing":
        continued = chat.messages[-1]["content"] if chat.continue_final_message else None
        return cls(
            thinking=thinking_after(text.chat_template or "", prompt.marked, continued),
            tools=tool_syntax(text.chat_template) if chat.tools else None,
            names=frozenset(tool["function"]["name"] for tool in chat.tools or ()),
            custom=custom_names(body),
            most_calls=1 if body.parallel_tool_calls is False else None,
            tells_thoughts=body.include_reasoning is not False,
        )

    @property
    def needed(self) -> bool:
        """True if the answer has parts to tell apart. Otherwise it is its text."""
        return self.thinking != "no" or self.tools is not None

    def parser(self) -> OutputParser:
        return OutputParser(self.thinking, self.tools, self.names, self.most_calls)

    def needs_special(self, text: TextModel) -> bool:
        """True if a mark is a special token, which detokenized text otherwise leaves out."""
        marks = [] if self.thinking == "no" else [THINK, THOUGHT]
        if self.tools is not None:
            marks += [self.tools.opener, self.tools.closer]
        return any(text.tokenizer.token_to_id(mark) in text.tokens.special_ids for mark in marks if mark)


def call_id(answer: str, choice: int, number: int) -> str:
    """Make a tool call's id of nine letters and digits: Mistral's templates take no other length."""
    return hashlib.sha256(f"{answer}:{choice}:{number}".encode()).hexdigest()[:9]


def final_reason(reason: str, parser: OutputParser) -> str:
    return "tool_calls" if parser.called and reason == "stop" else reason


def reasoning_tokens(opened: OpenRequest, parsers: Sequence[OutputParser]) -> int:
    """Count the reasoning tokens of all choices, closing marks included. For answers that have ended."""
    text = opened.generation.model.text
    pairs = zip(opened.sequences, parsers, strict=True)
    return sum(_thoughts(sequence.output_ids, text) for sequence, parser in pairs if parser.thought)


def _thoughts(ids: list[int], text: TextModel) -> int:
    end = text.tokenizer.token_to_id(THOUGHT)
    if end is not None:
        return ids.index(end) + 1 if end in ids else len(ids)
    detokenizer = text.detokenizer()
    said = accumulate(map(detokenizer.push, ids), lambda before, piece: (before + piece)[-64:])
    return next((count for count, tail in enumerate(said, 1) if THOUGHT in tail), len(ids))
