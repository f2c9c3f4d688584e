"""Resources of llmbox's MCP server: what an assistant reads without calling a tool, and the documentation.

The state of the box comes from the API's own routes, whose guard decides once more.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

import llmbox

from ..security.keys import Scope
from .tool import ToolApi

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


async def _models(api: ToolApi) -> Any:
    return await api.get("/v1/models")


async def _memory(api: ToolApi) -> Any:
    return await api.get("/admin/api/models")


async def _settings(api: ToolApi) -> Any:
    return (await api.get("/admin/api/config"))["settings"]


async def _requests(api: ToolApi) -> Any:
    return await api.caller.own_requests({"limit": ROWS, "errors": False})


_STATE: Final = (
    Resource(
        uri=f"{SCHEME}models",
        title="Models",
        description="Models that requests may name, with their context windows.",
        read=_models,
        scope=None,
    ),
    Resource(
        uri=f"{SCHEME}models/memory",
        title="Models in memory",
        description="Models in memory with state, options, memory and open requests.",
        read=_memory,
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
        read=_requests,
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
