"""Features of llmbox's MCP server: the kind of its tools (schema, scope, annotations, way to the API), and
its resources, which an assistant reads without calling a tool, the documentation among them.

The state of the box comes from the API's own routes, whose guard decides once more.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import Struct

import llmbox

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

    async def get(self, path: str, **query: Any) -> Any:
        return await self.caller.request("GET", path, query, None, PATIENCE)

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


DOCS: Final = Path(llmbox.__file__).parent / "docs"
"""Pages of the documentation: in the wheel, and by a link in a checkout."""
SCHEME: Final = "llmbox://"
ROWS: Final = 50
"""Requests in the resource of the request log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    uri: str
    title: str
    description: str
    read: Callable[[ToolApi], Awaitable[Any]]
    """Returns a text, or a value that is sent as JSON."""
    scope: Scope | Literal["key"] | None = "admin"
    """Scope that a key needs; `key`: any key; None: open to every client of the API."""
    kind: str = "application/json"

    def describe(self) -> dict[str, Any]:
        """Return the entry of `resources/list`."""
        name = self.uri.removeprefix(SCHEME)
        texts = {"name": name, "title": self.title, "description": self.description}
        return {"uri": self.uri, **texts, "mimeType": self.kind}

    async def contents(self, api: ToolApi) -> dict[str, Any]:
        """Return the result of `resources/read`. Raises ToolError."""
        found = await self.read(api)
        text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
        return {"contents": [{"uri": self.uri, "mimeType": self.kind, "text": text}]}


async def _settings(api: ToolApi) -> Any:
    return (await api.get("/admin/api/config"))["settings"]


_STATE: Final = (
    Resource(
        uri=f"{SCHEME}models",
        title="Models",
        description="Models that requests may name, with their context windows.",
        read=lambda api: api.get("/v1/models"),
        scope=None,
    ),
    Resource(
        uri=f"{SCHEME}models/memory",
        title="Models in memory",
        description="Models in memory with state, options, memory and open requests.",
        read=lambda api: api.get("/admin/api/models"),
    ),
    Resource(
        uri=f"{SCHEME}settings",
        title="Settings",
        description="All settings of the running daemon, and where each value comes from.",
        read=_settings,
    ),
    Resource(
        uri=f"{SCHEME}requests",
        title="Recent requests",
        description=f"The last {ROWS} requests and those in flight: model, status, tokens and times, no "
        "prompts. A key without the scope admin sees its own.",
        read=lambda api: api.caller.own_requests({"limit": ROWS, "errors": False}),
        scope="key",
    ),
)


def resources() -> dict[str, Resource]:
    """Return all resources by URI: the state of the box, then the pages of the documentation."""
    return {each.uri: each for each in (*_STATE, *_pages())}


def _pages() -> list[Resource]:
    return [_page(file) for file in sorted(DOCS.glob("*.md"))]


def _page(file: Path) -> Resource:
    with file.open(encoding="utf-8") as lines:
        title = re.sub(r"^#+\s*|`", "", next(lines, file.stem)).strip()

    async def read(_: ToolApi) -> str:
        return await asyncio.to_thread(file.read_text, "utf-8")

    return Resource(
        uri=f"{SCHEME}docs/{file.stem}",
        title=title,
        description=f"llmbox's documentation: {title}.",
        read=read,
        scope=None,
        kind="text/markdown",
    )
