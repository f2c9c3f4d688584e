"""Kind of a tool of llmbox's MCP server: schema, scope, annotations, and its way to the API."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import Struct

from ..security.keys import Scope

PATIENCE: Final = 120.0
"""Seconds for an answer that may need the hub."""

Report = Callable[[float, float | None, str], Awaitable[None]]
"""Callback of progress: amount done, total where it is known, and a line of text."""


class ToolError(Exception):
    """Failure of a tool, with what to do next. The model that called the tool reads it."""


class ToolCaller(Protocol):
    """Way to the daemon's API. Each method raises ToolError."""

    async def request(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, seconds: float | None
    ) -> Any:
        """Return the decoded answer: JSON, or a text where it is none."""

    async def own_requests(self, query: Mapping[str, Any]) -> Any:
        """Return the page of the request log that the caller may see."""


@dataclass(frozen=True, slots=True)
class ToolApi:
    """Convenience methods over a `ToolCaller`."""

    caller: ToolCaller

    async def get(self, path: str, seconds: float | None = PATIENCE, **query: Any) -> Any:
        return await self.caller.request("GET", path, query, None, seconds)

    async def post(self, path: str, body: Any, seconds: float | None = PATIENCE) -> Any:
        return await self.caller.request("POST", path, {}, body, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    title: str
    description: str
    arguments: type[Struct]
    run: Callable[[ToolApi, Any, Report], Awaitable[Any]]
    scope: Scope | Literal["key"] | None = "admin"
    """Scope that a key needs; `key`: any key; None: open to every client of the API."""
    changes: bool = False
    destructive: bool = False
    reaches_out: bool = False
    """True if the hub is asked."""

    def describe(self) -> dict[str, Any]:
        """Return the entry of `tools/list`."""
        return {
            "name": self.name,
            "title": self.title,
            "description": self.description,
            "inputSchema": _schema(self.arguments),
            "annotations": {
                "title": self.title,
                "readOnlyHint": not self.changes,
                "destructiveHint": self.destructive,
                "idempotentHint": not self.destructive,
                "openWorldHint": self.reaches_out,
            },
        }

    async def call(self, caller: ToolCaller, arguments: Any, report: Report) -> Any:
        """Run the tool. Raises ToolError, also for arguments that its schema refuses."""
        try:
            typed = msgspec.convert(arguments, self.arguments)
        except msgspec.ValidationError as error:
            fields = ", ".join(self.arguments.__struct_fields__) or "none"
            raise ToolError(
                f"{error}. The arguments of {self.name} are: {fields}.".replace("`", "")
            ) from None
        return await self.run(ToolApi(caller), typed, report)


def _schema(kind: type[Struct]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components([kind])
    found = components[kind.__name__]
    found.pop("title", None)
    return {"type": "object", **found}
