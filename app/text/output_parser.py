"""Incremental output parser: splits a streamed chat answer into reasoning, text and tool calls.

The parts do not depend on where the pieces were cut. An incomplete call stays text: nothing is lost.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_BETWEEN = " \t\r\n;,"


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    name: str
    arguments: str
    """JSON object as text."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Syntax of tool calls, between `opener` and `closer`; without a closer they go on to the
    answer's end.
    """

    opener: str
    closer: str = ""
    bare: bool = False
    """A call may also be an answer that is JSON from its first character, without the opener."""
    most: int | None = None
    """Most calls in one answer: the template would refuse a conversation with more."""


HERMES = ToolSyntax("<tool_call>", "</tool_call>")
"""Hermes, Qwen2.5, Qwen3: one JSON object between the marks."""
MISTRAL = ToolSyntax("[TOOL_CALLS]")
"""A list of JSON objects after the mark."""
LLAMA = ToolSyntax("<|python_tag|>", bare=True, most=1)
"""Llama 3.1 and later: one JSON object, mostly without the mark."""


def tool_syntax(template: str | None) -> ToolSyntax | None:
    """Detect the syntax from the template. None: it shows no tools, or calls in a form that is not parsed
    here.
    """
    if template is None or "tools" not in template or "<function=" in template:
        return None
    if HERMES.opener in template:
        return HERMES
    if MISTRAL.opener in template:
        return MISTRAL
    return LLAMA if '"parameters"' in template and "ipython" in template else None


def parse_calls(written: str, names: frozenset[str] | None = None) -> list[ParsedToolCall] | None:
    """Parse text that is calls and nothing else, None for other text. `names`: calls of tools that are not
    among these do not count.
    """
    calls: list[ParsedToolCall] = []
    at = 0
    while rest := written[at:].lstrip(_BETWEEN):
        at = len(written) - len(rest)
        try:
            value, at = _DECODER.raw_decode(written, at)
        except (ValueError, RecursionError):
            return None
        for each in value if isinstance(value, list) else [value]:
            call = _call(each)
            if call is None or (names is not None and call.name not in names):
                return None
            calls.append(call)
    return calls or None


def _call(value: Any) -> ParsedToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{written}".encode()  # half a surrogate pair could not be sent
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict):
        return None
    return ParsedToolCall(name, written)


THINK, THOUGHT = "<think>", "</think>"
Thinking = Literal["no", "may", "inside"]
"""Initial reasoning state. `may`: the answer may begin with reasoning. `inside`: the prompt ends with its
opening mark.
"""
_Place = Literal["start", "thoughts", "text", "call"]


@dataclass(slots=True)
class ParsedOutput:
    reasoning: str = ""
    content: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)

    def add(self, later: "ParsedOutput") -> None:
        self.reasoning += later.reasoning
        self.content += later.content
        self.calls += later.calls


def thinking_after(template: str, prompt: str, continued: str | None) -> Thinking:
    """Return how an answer to the rendered `prompt` begins; `continued` is the message that it continues."""
    if THOUGHT not in template:
        return "no"
    if continued is not None:
        return "inside" if continued.rfind(THINK) > continued.rfind(THOUGHT) else "no"
    said = prompt.rstrip()
    return "inside" if said.endswith(THINK) else "no" if said.endswith(THOUGHT) else "may"


class OutputParser:
    """State of one answer. `names` are the tools that were offered; `most_calls` bounds their calls."""

    def __init__(
        self,
        thinking: Thinking,
        tools: ToolSyntax | None = None,
        names: frozenset[str] = frozenset(),
        most_calls: int | None = None,
    ) -> None:
        self.thought = thinking == "inside"
        """True once reasoning was begun."""
        self.called = 0
        """Number of calls returned so far."""
        self._tools = tools
        self._names = names
        self._most = most_calls if tools is None else most_calls or tools.most
        begins: dict[Thinking, _Place] = {"no": "text", "may": "start", "inside": "thoughts"}
        self._place: _Place = begins[thinking]
        self._held = ""
        self._written = ""
        """Beginning of the call that is being read."""
        self._lead = self.thought  # white space at the beginning of this part is layout
        self._first = True

    def push(self, text: str) -> ParsedOutput:
        self._held += text
        parts = ParsedOutput()
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> ParsedOutput:
        """Return the held-back text, at the answer's end."""
        parts = ParsedOutput()
        rest, self._held = self._held, ""
        if self._place == "thoughts":
            parts.reasoning = rest
        elif self._place == "call":
            self._end_call(rest, "", parts)
        else:
            parts.content = rest
        return parts

    def _advance(self, parts: ParsedOutput) -> bool:
        """Parse one step. Returns False when more text is needed."""
        match self._place:
            case "start":
                return self._start()
            case "thoughts":
                return self._think(parts)
            case "text":
                return self._speak(parts)
            case "call":
                return self._call(parts)

    def _start(self) -> bool:
        seen = self._held.lstrip()
        if seen.startswith(THINK):
            self._held = seen[len(THINK) :]
            self._place, self._lead, self.thought = "thoughts", True, True
            return True
        if THINK.startswith(seen):
            return False
        self._place = "text"
        return True

    def _think(self, parts: ParsedOutput) -> bool:
        text, found = self._until(THOUGHT)
        parts.reasoning += text
        if found:
            self._place, self._lead = "text", True
        return found

    def _speak(self, parts: ParsedOutput) -> bool:
        tools = self._tools
        if tools is None:
            text, self._held = self._held.lstrip() if self._lead else self._held, ""
            self._lead = self._lead and not text
            parts.content += text
            return False
        if tools.bare and self._first:
            seen = self._held.lstrip()
            if not seen:
                return False
            self._first = False
            if seen.startswith("{"):
                self._place, self._written = "call", ""
                return True
        text, found = self._until(tools.opener)
        parts.content += text
        if found:
            self._place, self._written = "call", tools.opener
        return found

    def _call(self, parts: ParsedOutput) -> bool:
        assert self._tools is not None
        closer = self._tools.closer
        at = self._held.find(closer) if closer else -1
        if at < 0:
            return False
        raw, self._held = self._held[:at], self._held[at + len(closer) :]
        self._place = "text"
        self._end_call(raw, closer, parts)
        return True

    def _end_call(self, raw: str, closer: str, parts: ParsedOutput) -> None:
        assert self._tools is not None
        calls = parse_calls(raw, self._names if self._tools.bare else None)
        if calls is None:
            parts.content += self._written + raw + closer
            self._lead = False
            return
        wanted = calls if self._most is None else calls[: max(0, self._most - self.called)]
        parts.calls += wanted
        self.called += len(wanted)
        self._lead = True

    def _until(self, mark: str) -> tuple[str, bool]:
        """Return the text before `mark`, without white space around it; without a mark, the text that is
        certain.
        """
        if self._lead:
            self._held = self._held.lstrip()
            self._lead = not self._held
        at = self._held.find(mark)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(mark) :]
            return text, True
        keep = _beginning_of(mark, self._held)
        keep = len(self._held[: len(self._held) - keep].rstrip())
        text, self._held = self._held[:keep], self._held[keep:]
        return text, False


def _beginning_of(mark: str, text: str) -> int:
    """Return the length of the longest beginning of `mark` that `text` ends with."""
    most = min(len(mark) - 1, len(text))
    return next((size for size in range(most, 0, -1) if text.endswith(mark[:size])), 0)
