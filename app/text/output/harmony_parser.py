"""Parser of answers in harmony: messages, each with a header that says what it is."""

from typing import Final, Literal

from .output_formats import OutputFormat, Thinking
from .output_parser import OutputParser, ParsedOutput

_HEADER_END: Final = "<|message|>"
_LONGEST_HEADER: Final = 256
"""Characters of a header; longer text is not a header."""
_HEADER_STARTS: Final = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "assistant", "to=")
_MESSAGE_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class HarmonyParser(OutputParser):
    """State of one answer in harmony."""

    def _begin(self, format_: OutputFormat, thinking: Thinking) -> None:  # noqa: ARG002 - one format
        self._place: Literal["header", "thoughts", "text", "call"] = "header" if thinking == "may" else "text"

    @property
    def _is_in_call(self) -> bool:
        return self._place == "call"

    def _end(self, parts: ParsedOutput) -> None:
        rest, self._held = self._held, ""
        match self._place:
            case "thoughts":
                parts.reasoning += rest
            case "text":
                parts.content += rest
            case "call":
                self._end_call(rest, parts, rest)

    def _advance(self, parts: ParsedOutput) -> bool:
        match self._place:
            case "header":
                return self._read_header()
            case "call":
                return self._read_call(parts)
            case _:
                return self._read_message(parts)

    def _read_header(self) -> bool:
        seen = self._held.lstrip()
        at = self._held.find(_HEADER_END)
        begins = seen.startswith(_HEADER_STARTS) or any(each.startswith(seen) for each in _HEADER_STARTS)
        if not begins or (at < 0 and len(self._held) > _LONGEST_HEADER) or at > _LONGEST_HEADER:
            self._place = "text"
            return True
        if at < 0:
            return False
        header, self._held = self._held[:at], self._held[at + len(_HEADER_END) :]
        self._place, self._lead = "text", True
        if "to=functions." in header and self._tools is not None:
            self._place, self._written = "call", header + _HEADER_END
        elif "analysis" in header:
            self._place, self.thought = "thoughts", True
        return True

    def _read_call(self, parts: ParsedOutput) -> bool:
        found = [(at, mark) for mark in _MESSAGE_ENDS if (at := self._held.find(mark)) >= 0]
        if not found:
            return False
        at, mark = min(found)
        raw, self._held = self._held[:at], self._held[at + len(mark) :]
        self._end_call(raw, parts, raw)
        self._begin_header(mark)
        return True

    def _read_message(self, parts: ParsedOutput) -> bool:
        text, mark = self._take_until(_MESSAGE_ENDS)
        if self._place == "thoughts":
            parts.reasoning += text
        else:
            parts.content += text
        if not mark:
            return False
        self._begin_header(mark)
        return True

    def _begin_header(self, mark: str) -> None:
        """Begin the next message, after the mark that ended one. Some marks are part of the next header."""
        if mark in {"<|start|>", "<|channel|>"}:
            self._held = mark + self._held
        self._place = "header"
