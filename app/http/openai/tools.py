"""Tools of a chat as its template is shown them, custom tools included.

Templates know functions only. A custom tool is shown as a function with one text, `input`; what the model
writes there is the tool's input.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ...text.grammar.grammars import Grammar, json_input
from ...text.grammar.json_lark import LarkError, lark_in_json
from .request_types import (
    AllowedChoice,
    ChatCompletionRequest,
    CustomFunction,
    CustomReference,
    CustomTool,
    FunctionReference,
    FunctionTool,
    Tool,
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


def input_of(arguments: str) -> str:
    """Return a custom tool's text from `arguments`, a JSON object as the model wrote it.

    Models that miss the name of the field still say one text.
    """
    written: dict[str, Any] = json.loads(arguments)
    texts = [value for value in written.values() if isinstance(value, str)]
    found = written.get(INPUT)
    if isinstance(found, str):
        return found
    return texts[0] if len(texts) == 1 else arguments


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
