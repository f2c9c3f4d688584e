"""Types of output formats: how model families write thoughts and tool calls.

`format_table.py` holds the formats, `output_parser.py` reads answers by them and `grammar/call_grammars.py`
makes grammars of them.
"""

import json
import re
from dataclasses import dataclass
from typing import Final, Literal

from ..stop_strings import CallMark

Thinking = Literal["no", "may", "inside"]
"""Initial reasoning state. `may`: the answer may begin with reasoning. `inside`: the prompt ends with its
opening mark.
"""
CallStyle = Literal["json", "named_json", "xml", "python", "gemma", "harmony"]
"""Notation inside the marks of a call: objects with name and arguments; a name and one object; a name and
marked parameters; Python calls; Gemma's `call:name{key:value}`; a message of harmony.
"""

MARK: Final = re.compile(r'<\|"\|>|<[^<>\s]+>|\[/?[A-Z_]+\]')
"""Mark that may be a special token."""
ATTRIBUTE: Final = "{string}"
"""Stands for `true` or `false`: whether a parameter is a string."""
NUMBER: Final = "{n}"
"""Stands for the number of a call."""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    opener: str
    closer: str
    anywhere: bool = False
    """Thoughts may also follow text: the marks are special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSyntax:
    """Syntax of tool calls, between `opener` and `closer`; without a closer up to the answer's end."""

    style: CallStyle
    opener: str
    closer: str = ""
    bare: bool = False
    """A call may also be an answer that begins with one, without the opener."""
    most: int | None = None
    """Most calls in one answer: the template would refuse a conversation with more."""
    several: bool = False
    """Marks hold any number of calls; otherwise one."""
    ends_thoughts: bool = False
    """The opener ends reasoning that was not closed."""
    other_marks: tuple[tuple[str, str], ...] = ()
    """Pairs that models write in place of opener and closer. These openers belong to the call."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    head: str = ""
    """Pattern before the arguments, of which one group is the tool's name. `named_json` and `xml`."""
    tail: str = ""
    """Pattern after the arguments."""
    before_name: str = ""
    after_name: str = ""
    """Text around the name, as grammars have it; with them `head` matches."""
    after_call: str = ""
    """Text after the arguments, as grammars have it; `tail` matches it."""
    between: str = ""
    """Text between two calls, as grammars have it."""
    padding: str = ""
    """Text inside each mark, next to it."""
    parameter: tuple[str, str, str] = ("", "", "")
    """Texts before a parameter's name, between name and value, and after the value, in the kind `xml`."""
    after_parameter: str = ""
    quote: str = '"'
    """Mark around strings, in the kind `gemma`."""

    def text_before_arguments(self, name: str) -> str:
        """Return the text with which a call of the tool `name` begins, as grammars have it."""
        match self.style:
            case "json":
                named = json.dumps(name, ensure_ascii=False)
                return f'{{"{self.name_key}": {named}, "{self.arguments_key}": '
            case "python":
                return f"{name}("
            case "gemma":
                return f"call:{name}{{"
        return self.before_name + name + self.after_name

    @property
    def call_mark(self) -> CallMark | None:
        """Mark between calls that can be cut there; None where several calls are one list, and where there is
        one call.
        """
        if self.after_call and self.several:
            number = re.escape(self.after_name).replace(re.escape(NUMBER), r"\d+")
            return CallMark(self.after_call, number=number if NUMBER in self.after_name else "")
        if self.several:
            return CallMark(self.between, begins_next=True) if self.between == self.opener else None
        return CallMark(self.closer) if self.closer and self.style != "harmony" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    name: str
    families: str = ""
    signs: tuple[tuple[str, ...], ...] = ()
    """Texts of which the chat template holds all of one row."""
    tools: ToolSyntax | None = None
    reasoning: ReasoningMarks | None = None
    wrapper: tuple[str, str] | None = None
    """Marks around the answer after the thoughts. They are left out."""

    @property
    def is_harmony(self) -> bool:
        return self.tools is not None and self.tools.style == "harmony"

    @property
    def has_parts(self) -> bool:
        """True if any answer may have parts, also one without tools whose prompt ends the thoughts."""
        anywhere = self.reasoning is not None and self.reasoning.anywhere
        return anywhere or self.wrapper is not None

    @property
    def marks(self) -> list[str]:
        """Marks in answers, without the text around them."""
        fields = [*(self.wrapper or ())]
        if self.reasoning is not None:
            fields += [self.reasoning.opener, self.reasoning.closer]
        if (tools := self.tools) is not None:
            fields += [tools.opener, tools.closer, tools.before_name, tools.after_name, tools.after_call]
            fields += [*tools.parameter, tools.quote]
        if self.is_harmony:
            fields.append(HARMONY_ANSWER)
        return [mark for each in fields for mark in MARK.findall(each)]


HARMONY_THOUGHTS: Final = ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", anywhere=True)
HARMONY_TURN: Final = "<|start|>assistant"
HARMONY_ANSWER: Final = f"{HARMONY_TURN}<|channel|>final<|message|>"
HARMONY: Final = ToolSyntax(
    style="harmony",
    opener="<|channel|>commentary to=functions.",
    closer="<|call|>",
    after_name=" <|constrain|>json<|message|>",
    most=1,
    ends_thoughts=True,
    other_marks=((f"{HARMONY_TURN} to=functions.", "<|call|>"),),
)


def beginning_length(mark: str, text: str) -> int:
    """Return the length of the longest beginning of `mark` that `text` ends with."""
    most = min(len(mark) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)


def thinking_after(format_: OutputFormat, prompt: str, continued: str | None) -> Thinking:
    """Return how an answer to the rendered `prompt` begins; `continued` is the message that it continues."""
    marks = format_.reasoning
    if marks is None:
        return "no"
    if format_.is_harmony:
        return "no" if prompt.rfind("<|message|>") > prompt.rfind("<|start|>") else "may"
    opener = marks.opener.rstrip()
    if continued is not None:
        return "inside" if continued.rfind(opener) > continued.rfind(marks.closer) else "no"
    said = prompt.rstrip()
    return "inside" if said.endswith(opener) else "no" if said.endswith(marks.closer) else "may"
