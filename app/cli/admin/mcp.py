"""`llmbox mcp`: MCP server over stdin and stdout, for programs that start it themselves."""

import asyncio
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from ...errors import CliError
from ...lifecycle.program import Command, Program, pass_program
from .. import output

if TYPE_CHECKING:
    from ...mcp.protocol import McpServer

LONGEST_LINE = 4_000_000
"""Bytes of one message."""


@click.command(cls=Command)
@click.option("--print", "prints", is_flag=True, help="Print the entry for an assistant's configuration.")
@pass_program
def mcp(program: Program, *, prints: bool) -> None:
    """Serve MCP on stdin and stdout, for an assistant that manages this machine's models.

    Programs start it themselves: llmbox connect mcp writes it into their settings. It acts as the local
    user: it needs no key and has every tool. While no daemon runs, the tools answer how to start one.
    """
    from llmbox import __version__

    if prints:
        from ...integrations.guides import MCP_PROGRAMS, as_text, mcp_command

        guide = MCP_PROGRAMS["cursor"]  # the form that most assistants share
        command = mcp_command(program.command, program.environ, program.location_flags)
        output.write(as_text(guide, guide.settings(command)).rstrip("\n"))
        return

    from ...mcp.protocol import McpServer

    server = McpServer(_SocketCaller(program), __version__, lambda _: True)
    asyncio.run(_serve(server))


class _SocketCaller:
    """Calls the daemon over its unix socket."""

    def __init__(self, program: Program) -> None:
        self._client = program.client

    async def request(
        self, method: str, path: str, query: Mapping[str, Any], body: Any, seconds: float | None
    ) -> Any:
        from ...mcp.tool import ToolError
        from ...util.threads import in_thread

        texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in query.items()}
        where = f"{path}?{urlencode(texts)}" if texts else path
        try:
            return await in_thread(lambda: self._client.call(method, where, body, seconds), "mcp call")
        except CliError as error:
            fix = f"Run: {error.fix}" if error.fix else ""
            told = [f"{error.what}: {error.why}" if error.why else error.what, fix]
            raise ToolError(". ".join(text for text in told if text)) from None

    async def own_requests(self, query: Mapping[str, Any]) -> Any:
        return await self.request("GET", "/admin/api/requests", query, None, 60.0)


async def _serve(server: "McpServer") -> None:
    """Answer messages until stdin ends; requests that are still open then get a last moment."""
    from ...mcp.protocol import RpcError, decode_message, error_response

    lines = _read_lines()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        if (response := await server.answer(message, _write)) is not None:
            await _write(response)

    while (line := await lines.get()) is not None:
        try:
            message = decode_message(line)
        except RpcError as error:
            await _write(error_response(None, error))
            continue
        task = asyncio.create_task(answer(message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks, timeout=10)


def _read_lines() -> "asyncio.Queue[bytes | None]":
    """Read stdin in a daemon thread, which does not delay the exit. None is the end."""
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        while line := sys.stdin.buffer.readline(LONGEST_LINE):
            if line.strip():
                loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="mcp stdin", daemon=True).start()
    return lines


async def _write(message: dict[str, Any]) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
