"""MCP servers as the chat uses them: connected on demand, left when idle.

Each wait has a limit, and an error says which server failed and why.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from llmbox import __version__

from ..errors import ApiError
from ..store.conversations import ChatToolServer
from .channels import HttpChannel, McpChannel, ServerProblem, StdioChannel
from .protocol import VERSIONS, RpcError

START_SECONDS: Final = 20.0
CALL_SECONDS: Final = 120.0
IDLE_SECONDS: Final = 900.0
"""Time without a call after which the connection to a server is closed. The next call opens it again."""
MOST_PAGES: Final = 20
MOST_TEXT: Final = 100_000
"""Characters of a result that reach the model."""


class ServerTool(msgspec.Struct, kw_only=True):
    """Tool of a server, as the chat offers it to a model."""

    name: str
    title: str
    description: str
    parameters: dict[str, Any]
    """JSON schema."""
    changes: bool
    """True unless the server says that it only reads."""


class ServerResult(msgspec.Struct):
    text: str
    failed: bool


class McpClient:
    """Connection to one server, after its handshake."""

    def __init__(self, spec: ChatToolServer, channel: McpChannel, tools: list[ServerTool]) -> None:
        self.spec, self.channel, self.tools = spec, channel, tools

    @classmethod
    async def connect(cls, spec: ChatToolServer) -> "McpClient":
        """Raises ServerProblem."""
        channel: McpChannel = (
            HttpChannel(spec.url, spec.headers)
            if spec.url
            else await StdioChannel.start(spec.command, spec.environment)
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                return cls(spec, channel, await _begin(channel))
        except TimeoutError:
            await channel.close()
            raise ServerProblem(f"it did not answer within {START_SECONDS:g} s") from None
        except RpcError as error:
            await channel.close()
            raise ServerProblem(f"it refused the connection: {error}") from None
        except BaseException:
            await channel.close()
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ServerResult:
        """Call a tool. Raises ServerProblem if the server cannot be used any further."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                found = await self.channel.request("tools/call", {"name": tool, "arguments": arguments})
        except TimeoutError:
            raise ServerProblem(f"{tool} did not end within {CALL_SECONDS:g} s") from None
        except RpcError as error:
            return ServerResult(str(error), failed=True)
        if not isinstance(found, dict):
            return ServerResult("The server sent a result without content.", failed=True)
        return ServerResult(_as_text(found), failed=bool(found.get("isError")))


async def _begin(channel: McpChannel) -> list[ServerTool]:
    me = {"name": "llmbox", "version": __version__}
    hello = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": me}
    begun = await channel.request("initialize", hello)
    version = begun.get("protocolVersion") if isinstance(begun, dict) else None
    if version not in VERSIONS and version != "2024-11-05":
        raise ServerProblem(f"it speaks MCP {version}; llmbox speaks {', '.join(VERSIONS)}")
    await channel.notify("notifications/initialized", {})
    tools: list[ServerTool] = []
    cursor: Any = None
    for _ in range(MOST_PAGES):
        page = await channel.request("tools/list", {} if cursor is None else {"cursor": cursor})
        rows = page.get("tools") if isinstance(page, dict) else None
        if not isinstance(rows, list):
            raise ServerProblem("its list of tools is not a list")
        tools += [tool for each in rows if (tool := _read_tool(each)) is not None]
        cursor = page.get("nextCursor")
        if cursor is None:
            return tools
    raise ServerProblem(f"its list of tools has more than {MOST_PAGES} pages")


def _read_tool(entry: Any) -> ServerTool | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    schema, hints = entry.get("inputSchema"), entry.get("annotations")
    hints = hints if isinstance(hints, dict) else {}
    return ServerTool(
        name=entry["name"],
        title=str(entry.get("title") or hints.get("title") or entry["name"]),
        description=str(entry.get("description") or ""),
        parameters=schema if isinstance(schema, dict) else {"type": "object"},
        changes=hints.get("readOnlyHint") is not True,
    )


def _as_text(result: dict[str, Any]) -> str:
    """Return a result as the model reads it: its texts, and a note for other content."""
    parts = []
    content = result.get("content")
    for each in content if isinstance(content, list) else []:
        kind = each.get("type") if isinstance(each, dict) else None
        resource = each.get("resource") if kind == "resource" else None
        if kind == "text":
            parts.append(str(each.get("text", "")))
        elif isinstance(resource, dict) and "text" in resource:
            parts.append(str(resource["text"]))
        elif kind == "resource_link":
            parts.append(f"{each.get('name', '')} {each.get('uri', '')}".strip())
        else:
            parts.append(f"[{kind or 'content'}, not shown to the model]")
    if not parts and "structuredContent" in result:
        parts = [msgspec.json.encode(result["structuredContent"]).decode()]
    text = "\n".join(parts)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n[cut at {MOST_TEXT:,} characters]"


class McpClients:
    """Open connections by owner and name. Use it only from the daemon's event loop."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], McpClient] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def tools(self, owner: str, name: str, spec: ChatToolServer) -> list[ServerTool]:
        """Return a server's tools, connecting to it if needed. Raises ApiError 502."""
        return (await self._client(owner, name, spec)).tools

    async def call(
        self, owner: str, name: str, spec: ChatToolServer, tool: str, arguments: Mapping[str, Any]
    ) -> ServerResult:
        """Call a tool. Raises ApiError 502; the next call then starts the server again."""
        client = await self._client(owner, name, spec)
        if tool not in {each.name for each in client.tools}:
            raise ApiError(404, f"The MCP server {name} has no tool {tool[:64]!r}.", "tool_not_found", "tool")
        try:
            return await client.call(tool, arguments)
        except ServerProblem as problem:
            self.leave(owner, name)
            raise _failed(name, problem) from None

    def leave(self, owner: str, name: str) -> None:
        """Close a connection, if there is one, in the background."""
        if (timer := self._timers.pop((owner, name), None)) is not None:
            timer.cancel()
        if (client := self._open.pop((owner, name), None)) is not None:
            task = asyncio.create_task(client.channel.close())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        for owner, name in list(self._open):
            self.leave(owner, name)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _client(self, owner: str, name: str, spec: ChatToolServer) -> McpClient:
        key = owner, name
        async with self._locks.setdefault(key, asyncio.Lock()):
            client = self._open.get(key)
            if client is None or _origin(client.spec) != _origin(spec):
                self.leave(owner, name)
                try:
                    client = self._open[key] = await McpClient.connect(spec)
                except ServerProblem as problem:
                    raise _failed(name, problem) from None
        if (timer := self._timers.get(key)) is not None:
            timer.cancel()
        self._timers[key] = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.leave, owner, name)
        return client


def _origin(spec: ChatToolServer) -> tuple[Any, ...]:
    return spec.url, spec.headers, list(spec.command), spec.environment


def _failed(name: str, problem: ServerProblem) -> ApiError:
    message = f"The MCP server {name} failed: {problem}. Check its settings, then call it again."
    return ApiError(502, message, "mcp_server_failed", None, "server_error")
