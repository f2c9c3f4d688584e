"""Calls of tools as models write them, by what their chat templates show them."""

import json
from dataclasses import dataclass
from typing import Any

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_BETWEEN = " \t\r\n;,"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Calls stand between `opener` and `closer`; without a closer they go on to the answer's end."""

    opener: str
    closer: str = ""
    bare: bool = False
    """A call may also be an answer that is JSON from its first character, without the opener."""
    most: int | None = None
    """Calls in one answer; a template that takes no more back would refuse the conversation."""


HERMES = ToolSyntax("<tool_call>", "</tool_call>")
"""Hermes, Qwen2.5, Qwen3: one JSON object between the marks."""
MISTRAL = ToolSyntax("[TOOL_CALLS]")
"""A list of JSON objects after the mark."""
LLAMA = ToolSyntax("<|python_tag|>", bare=True, most=1)
"""Llama 3.1 and later: one JSON object, mostly without the mark."""


def tool_syntax(template: str | None) -> ToolSyntax | None:
    """None: the template shows no tools, or calls in a form that is not read here."""
    if template is None or "tools" not in template or "<function=" in template:
        return None
    if HERMES.opener in template:
        return HERMES
    if MISTRAL.opener in template:
        return MISTRAL
    return LLAMA if '"parameters"' in template and "ipython" in template else None


def parse_calls(written: str, names: frozenset[str] | None = None) -> list[ToolCall] | None:
    """None where it is not calls and nothing else; `names`: those of other tools are not calls either."""
    calls: list[ToolCall] = []
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


def _call(value: Any) -> ToolCall | None:
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
    return ToolCall(name, written)
