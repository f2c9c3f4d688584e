"""Conversion of a response's tools to chat tools, and of calls back to items.

A tool inside a namespace is called by both names joined, which no other tool may have.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ...errors import ApiError
from ...text.output.call_parsers import ParsedToolCall
from ..openai.chat_messages import input_of
from ..openai.sampling import invalid
from ..openai.unsupported import refuse_unsupported, unknown_fields
from .items import convert_item
from .request_types import (
    AdditionalToolsItem,
    NamespaceTool,
    ResponsesCustomTool,
    ResponsesFunctionTool,
    ResponseToolChoice,
)

Placed = tuple[str, dict[str, Any]]
"""An item with its place in the request."""
_JOINT: Final = "__"
_DISPENSABLE: Final = ("web_search", "image_generation", "tool_search")
"""Beginnings of tool types that agents offer in every request: a model answers without them."""


@dataclass(frozen=True, slots=True)
class ResponseTool:
    """A tool that the caller runs, by the name that the model is shown."""

    name: str
    namespace: str | None
    custom: bool


@dataclass(slots=True)
class Toolbox:
    chat: list[dict[str, Any]] = field(default_factory=list)
    """Tools in the chat's form."""
    warnings: list[str] = field(default_factory=list)
    _by_name: dict[str, ResponseTool] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]], items: Iterable[Placed]) -> "Toolbox":
        """Collect the tools. `items`: all of the conversation with their places; they may bring tools. Raises
        ApiError 400.
        """
        box = cls()
        box._add_all("tools", tools)
        for at, item in items:
            if item.get("type") == "additional_tools":
                box._add_all(f"{at}.tools", convert_item(at, item, AdditionalToolsItem).tools)
        return box

    def choice(self, asked: str | ResponseToolChoice | None) -> Any:
        """Return the chat's `tool_choice`. Raises ApiError 400."""
        if not isinstance(asked, ResponseToolChoice):
            return None if asked == "auto" and not self.chat else asked
        if asked.type != "allowed_tools":
            return self._reference("tool_choice", asked)
        if asked.mode is None:
            raise invalid("tool_choice.mode", "it is 'auto' or 'required'")
        allowed = [
            self._reference("tool_choice.tools", convert_item("tool_choice.tools", each, ResponseToolChoice))
            for each in asked.tools or ()
            if not _dispensable(each.get("type"))
        ]
        if not allowed:
            raise invalid("tool_choice.tools", "at least one tool of 'tools' must be allowed")
        return {"type": "allowed_tools", "allowed_tools": {"mode": asked.mode, "tools": allowed}}

    def item(self, call_id: str, call: ParsedToolCall) -> dict[str, Any]:
        """Convert the model's call to an item that has no id yet."""
        tool = self._by_name.get(call.name) or ResponseTool(call.name, None, custom=False)
        named = {"call_id": call_id, "name": tool.name}
        if tool.namespace is not None:
            named["namespace"] = tool.namespace
        said = {"input": input_of(call)} if tool.custom else {"arguments": call.arguments}
        kind = "custom_tool_call" if tool.custom else "function_call"
        return {
            "id": "",
            "type": kind,
            "status": "incomplete" if call.is_cut else "completed",
            **named,
            **said,
        }

    def _add_all(self, at: str, tools: Iterable[dict[str, Any]]) -> None:
        for number, tool in enumerate(tools):
            place = f"{at}[{number}]"
            if tool.get("type") != "namespace":
                self._add(place, tool, None)
                continue
            space = convert_item(place, tool, NamespaceTool)
            self._warn(NamespaceTool, tool)
            for inner, each in enumerate(space.tools):
                self._add(f"{place}.tools[{inner}]", each, space.name)

    def _add(self, at: str, tool: dict[str, Any], namespace: str | None) -> None:
        kind = tool.get("type")
        if kind == "function":
            function = convert_item(at, tool, ResponsesFunctionTool)
            refuse_unsupported(function)
            self._warn(ResponsesFunctionTool, tool)
            self._put(at, function.name, namespace, custom=False, fields=_function(function))
        elif kind == "custom":
            custom = convert_item(at, tool, ResponsesCustomTool)
            refuse_unsupported(custom)
            self._warn(ResponsesCustomTool, tool)
            self._put(at, custom.name, namespace, custom=True, fields=_custom(at, custom))
        elif _dispensable(kind):
            self.warnings.append(f"The tool {kind!r} was left out: this server runs no tools of its own.")
        else:
            raise ApiError(
                400,
                f"Tools of type {kind!r} are not supported: only tools that the caller runs"
                " are: types 'function', 'custom' and 'namespace'.",
                code="unsupported_tool",
                param=f"{at}.type",
            )

    def _put(
        self, at: str, name: str, namespace: str | None, *, custom: bool, fields: dict[str, Any]
    ) -> None:
        joined = joined_name(namespace, name)
        if joined in self._by_name:
            raise invalid(f"{at}.name", f"another tool is called {joined!r} already")
        self._by_name[joined] = ResponseTool(name, namespace, custom)
        kind = "custom" if custom else "function"
        self.chat.append({"type": kind, kind: {"name": joined, **fields}})

    def _warn(self, kind: type[msgspec.Struct], tool: dict[str, Any]) -> None:
        known = {name: value for name, value in tool.items() if name != "type"}
        self.warnings += unknown_fields(kind, known, "tools[].")

    def _reference(self, at: str, asked: ResponseToolChoice) -> dict[str, Any]:
        if asked.type not in ("function", "custom"):
            raise ApiError(
                400, f"There is no tool of type {asked.type!r} here.", "unsupported_tool", f"{at}.type"
            )
        if asked.name is None:
            raise invalid(f"{at}.name", "it is missing")
        name = joined_name(asked.namespace, asked.name)
        return {"type": asked.type, asked.type: {"name": name}}


def joined_name(namespace: str | None, name: str) -> str:
    return name if not namespace else f"{namespace}{_JOINT}{name}"


def with_places(at: str, items: Iterable[dict[str, Any]]) -> Iterator[Placed]:
    for number, item in enumerate(items):
        yield f"{at}[{number}]", item


def _dispensable(kind: Any) -> bool:
    return isinstance(kind, str) and kind.startswith(_DISPENSABLE)


def _function(tool: ResponsesFunctionTool) -> dict[str, Any]:
    data = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {name: value for name, value in data.items() if value is not None}


def _custom(at: str, tool: ResponsesCustomTool) -> dict[str, Any]:
    data: dict[str, Any] = {} if tool.description is None else {"description": tool.description}
    if tool.format is None or tool.format.type == "text":
        return data
    if tool.format.syntax is None or tool.format.definition is None:
        raise invalid(f"{at}.format", "the type 'grammar' needs 'syntax' and 'definition'")
    grammar = {"syntax": tool.format.syntax, "definition": tool.format.definition}
    return {**data, "format": {"type": "grammar", "grammar": grammar}}
