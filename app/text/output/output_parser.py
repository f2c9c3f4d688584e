"""Incremental output parser: splits a streamed chat answer into reasoning, text and tool calls.

The parts do not depend on where the pieces were cut. Text that is no call stays text: nothing is lost. A call
that the answer's longest length cuts off is returned with the arguments so far.
"""

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .call_parsers import ParsedToolCall, Schemas, is_inside_value, parse_calls, parse_cut_calls
from .output_formats import OutputFormat, Thinking, ToolSyntax, beginning_length

_Place = Literal["start", "thoughts", "text", "call"]
_MOST_CLOSERS: Final = 64
"""Closing marks inside values of one call; beyond them the call is text."""


@dataclass(slots=True)
class ParsedOutput:
    reasoning: str = ""
    content: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)

    def add(self, later: "ParsedOutput") -> None:
        self.reasoning += later.reasoning
        self.content += later.content
        self.calls += later.calls


class OutputParser(ABC):
    """State of one answer. `schemas` are those of the offered tools, None without tools; `most_calls` bounds
    the calls; `is_forced`: the answer is calls alone.
    """

    def __init__(
        self,
        format_: OutputFormat,
        thinking: Thinking,
        schemas: Schemas | None = None,
        most_calls: int | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        self.thought = thinking == "inside"
        """True once reasoning was begun."""
        self.called = 0
        """Number of calls returned so far."""
        self.marks = format_.reasoning
        """Marks around thoughts."""
        self._tools: ToolSyntax | None = format_.tools if schemas else None
        self._schemas = schemas or {}
        self._is_forced = is_forced and self._tools is not None
        self._most_calls = most_calls if self._tools is None else most_calls or self._tools.most
        self._held = ""
        self._written = ""
        """Beginning of the call that is being read."""
        self._lead = self.thought  # white space at the beginning of this part is layout
        self._begin(format_, thinking)

    @abstractmethod
    def _begin(self, format_: OutputFormat, thinking: Thinking) -> None:
        """Set what a subclass keeps."""

    @abstractmethod
    def _advance(self, parts: ParsedOutput) -> bool:
        """Take one step through the held text. Returns False when more text is needed."""

    @abstractmethod
    def _end(self, parts: ParsedOutput) -> None:
        """Take the held text, at the answer's end."""

    @property
    @abstractmethod
    def _is_in_call(self) -> bool: ...

    def push(self, text: str) -> ParsedOutput:
        self._held += text
        parts = ParsedOutput()
        while self._advance(parts):
            pass
        return parts

    def parse_whole(self, text: str, *, is_cut: bool = False) -> ParsedOutput:
        """Parse the rest of an answer at once, to its end. `is_cut`: as in `finish`."""
        parts = self.push(text)
        parts.add(self.finish(is_cut=is_cut))
        return parts

    def finish(self, *, is_cut: bool = False) -> ParsedOutput:
        """Return the held-back text, at the answer's end. `is_cut`: the answer was cut off at its longest
        length, so that its last call may be a beginning.
        """
        parts = ParsedOutput()
        if not (is_cut and self._end_cut_call(parts)):
            self._end(parts)
        return parts

    def _end_cut_call(self, parts: ParsedOutput) -> bool:
        """End the call within which the answer was cut off. Returns False if the held text is no call's."""
        if self._is_in_call and self._tools is not None:
            calls = parse_cut_calls(self._tools, self._with_opener(self._held), self._schemas)
            is_certain = self._is_forced or bool(self._written)  # an answer may begin like a bare call
            if calls or (calls is not None and is_certain):
                self._held = ""
                self._add_calls(calls, parts)
        return not self._held

    def _end_call(self, raw: str, parts: ParsedOutput, otherwise: str) -> None:
        """Add the calls in `raw`; where they are none, the text `otherwise`."""
        calls = self._parsed(raw)
        if calls is None:
            parts.content += otherwise
            self._lead = False
            return
        self._add_calls(calls, parts)
        self._lead = True

    def _parsed(self, raw: str) -> list[ParsedToolCall] | None:
        assert self._tools is not None
        return parse_calls(self._tools, self._with_opener(raw), self._schemas)

    def _with_opener(self, raw: str) -> str:
        """Return the text of a call with the opener that belongs to it."""
        assert self._tools is not None
        return raw if self._written in {"", self._tools.opener} else self._written + raw

    def _add_calls(self, calls: list[ParsedToolCall], parts: ParsedOutput) -> None:
        wanted = calls if self._most_calls is None else calls[: max(0, self._most_calls - self.called)]
        parts.calls += wanted
        self.called += len(wanted)

    def _take_until(self, marks: Sequence[str]) -> tuple[str, str]:
        """Return the text before the first mark, without white space around it, and the mark; without a mark,
        the text that is certain, and an empty text.
        """
        if self._lead:
            self._held = self._held.lstrip()
            self._lead = not self._held
        held = self._held
        found = [(at, mark) for mark in marks if (at := held.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._held = held[at + len(mark) :]
            return held[:at].rstrip(), mark
        keep = len(held) - max(beginning_length(mark, held) for mark in marks)
        keep = len(held[:keep].rstrip())
        text, self._held = held[:keep], held[keep:]
        return text, ""


class MarkParser(OutputParser):
    """State of one answer whose thoughts and calls stand between marks."""

    def _begin(self, format_: OutputFormat, thinking: Thinking) -> None:
        begins: dict[Thinking, _Place] = {"no": "text", "may": "start", "inside": "thoughts"}
        self._place: _Place = begins[thinking]
        self._wrapper = format_.wrapper
        self._wrapped = False
        self._first = True
        self._closer = ""
        self._searched = 0
        """Length of the held text that holds no closer that counts."""
        self._closers = 0

    @property
    def _is_in_call(self) -> bool:
        return self._place == "call"

    def _end(self, parts: ParsedOutput) -> None:
        while self._place == "call" and not self._end_last_call(parts):
            while self._advance(parts):
                pass
        rest, self._held = self._held, ""
        if self._place == "thoughts":
            parts.reasoning += rest
        elif self._place != "call":
            parts.content += rest

    def _advance(self, parts: ParsedOutput) -> bool:
        match self._place:
            case "start":
                return self._read_start()
            case "thoughts":
                return self._read_thoughts(parts)
            case "text":
                return self._read_text(parts)
            case "call":
                return self._read_call(parts)

    def _read_start(self) -> bool:
        assert self.marks is not None
        opener = self.marks.opener
        seen = self._held.lstrip()
        if seen.startswith(opener):
            self._held = seen[len(opener) :]
            self._place, self._lead, self.thought = "thoughts", True, True
            return True
        if opener.startswith(seen):
            return False
        self._place = "text"
        return True

    def _read_thoughts(self, parts: ParsedOutput) -> bool:
        assert self.marks is not None
        tools = self._tools
        marks = [self.marks.closer]
        if tools is not None and tools.ends_thoughts:
            marks.append(tools.opener)
        text, found = self._take_until(marks)
        parts.reasoning += text
        if found == self.marks.closer:
            self._place, self._lead = "text", True
        elif found:
            self._begin_call(found)
        return bool(found)

    def _read_text(self, parts: ParsedOutput) -> bool:
        if self._wrapper is not None and not self._wrapped and not self._unwrap():
            return False
        if self._first and self._tools is not None and self._tools.bare:
            if not self._held.strip():
                return False
            self._first = False
            if self._held.lstrip().startswith("[" if self._tools.style == "python" else "{"):
                self._begin_call("")
                return True
        marks = self._text_marks()
        if not marks:
            text, self._held = self._held.lstrip() if self._lead else self._held, ""
            self._lead = self._lead and not text
            parts.content += text
            return False
        text, found = self._take_until(marks)
        parts.content += text
        if not found:
            return False
        if self.marks is not None and found == self.marks.opener:
            self._place, self._lead, self.thought = "thoughts", True, True
        elif self._wrapper is not None and found == self._wrapper[1]:
            self._wrapper, self._lead = None, True
        else:
            self._begin_call(found)
        return True

    def _text_marks(self) -> list[str]:
        marks = []
        if self._tools is not None:
            marks += [self._tools.opener, *(opener for opener, _ in self._tools.other_marks)]
        if self.marks is not None and self.marks.anywhere:
            marks.append(self.marks.opener)
        if self._wrapper is not None:
            marks.append(self._wrapper[1])
        return marks

    def _unwrap(self) -> bool:
        """Leave out the opening mark around the answer. Returns False when more text is needed."""
        assert self._wrapper is not None
        opener = self._wrapper[0]
        seen = self._held.lstrip()
        if seen.startswith(opener):
            self._held, self._wrapped, self._lead = seen[len(opener) :], True, True
        elif opener.startswith(seen):
            return False
        else:
            self._wrapper = None
        return True

    # ------------------------------------------------------------------ calls

    def _begin_call(self, opener: str) -> None:
        assert self._tools is not None
        pairs = {self._tools.opener: self._tools.closer, **dict(self._tools.other_marks)}
        self._place, self._written, self._closer = "call", opener, pairs.get(opener, "")
        self._searched = self._closers = 0

    def _read_call(self, parts: ParsedOutput) -> bool:
        assert self._tools is not None
        closer = self._closer
        at = self._held.find(closer, self._searched) if closer else -1
        if at < 0:
            self._searched = max(self._searched, len(self._held) - len(closer) + 1)
            return False
        raw = self._held[:at]
        if self._closers < _MOST_CLOSERS and is_inside_value(self._tools, raw):
            self._closers += 1
            self._searched = at + 1
            return True
        self._close_call(at, parts)
        return True

    def _close_call(self, at: int, parts: ParsedOutput) -> None:
        raw, self._held = self._held[:at], self._held[at + len(self._closer) :]
        self._place = "text"
        self._end_call(raw, parts, self._written + raw + self._closer)

    def _end_last_call(self, parts: ParsedOutput) -> bool:
        """End a call whose closer never came. Returns False if text is left to parse: a closer that was taken
        for the text of a value ends the call after all.
        """
        at = self._held.find(self._closer) if self._closers else -1
        if at < 0 or self._parsed(self._held) is not None:
            raw, self._held = self._held, ""
            self._place = "text"
            self._end_call(raw, parts, self._written + raw)
            return True
        self._close_call(at, parts)
        return False

    def _end_cut_call(self, parts: ParsedOutput) -> bool:
        if self._is_forced and self._place in {"start", "text"}:
            self._held = ""  # the beginning of a mark
        return super()._end_cut_call(parts)


_JSON_TOKEN = re.compile(
    r'"(?:[^"\\]|\\u(?![0-9a-fA-F]{0,3}\Z)|\\[^u])*(?:"|(?P<cut>(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z))|[{}\[\],]',
    re.DOTALL,
)
"""Strings and marks of JSON. `cut`: where a string is cut off."""


def read_arguments(text: str, *, keeps_cut_text: bool = False) -> dict[str, Any]:
    """Return the arguments of a call as an object; of a call that was cut off, what is complete.

    `keeps_cut_text`: with a string that was cut off. Half a file name may be another file's.
    """
    closers: list[str] = []
    kept, said = 0, text
    for token in _JSON_TOKEN.finditer(text):
        match token[0][:1]:
            case "{" | "[" as opener:
                closers.append("}" if opener == "{" else "]")
                kept = token.end()
            case "}" | "]":
                del closers[-1:]
                kept = token.end()
            case ",":
                kept = token.start()
            case _ if token["cut"] is not None:
                said = f'{text[: token.start("cut")]}"' if keeps_cut_text else ""
    end = "".join(reversed(closers))
    for each in (said + end, text[:kept] + end):
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(each, strict=False)
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair could not be sent
            if isinstance(found, dict):
                return found
    return {}
