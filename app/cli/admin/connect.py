"""`llmbox connect` and `llmbox mcp`: settings of programs that use this daemon, and its MCP server."""

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import click

from ...errors import CliError, Exit
from ...integrations.guides import GUIDES, KEY_VARIABLE, MCP_PROGRAMS, Endpoint, Guide, McpProgram
from ...lifecycle.instance import find_running
from ...lifecycle.program import Command, Program, json_option, pass_program
from ...util import formatting
from .. import output

if TYPE_CHECKING:
    from ...mcp.protocol import McpServer


class ClientChoice(click.Choice[str]):
    """Choice of a client. For an assistant that is connected by MCP alone, the error names that command."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in MCP_PROGRAMS and value not in self.choices:
            title = MCP_PROGRAMS[value].title
            self.fail(f"{title} is connected by MCP: llmbox connect mcp {value}", param, ctx)
        return super().convert(value, param, ctx)


@click.command(cls=Command)
@click.argument("client", required=False, metavar="[CLIENT]", type=ClientChoice([*GUIDES, "mcp"]))
@click.argument("assistant", required=False, metavar="[ASSISTANT]", type=click.Choice(list(MCP_PROGRAMS)))
@click.option("--model", metavar="NAME", help="Model to use; default is the first that is loaded.")
@click.option(
    "--write", is_flag=True, help="Merge them into the client's file; a copy of the old file is kept."
)
@json_option
@click.option(
    "-q", "--quiet", is_flag=True, help="Without CLIENT, print names only; with CLIENT, print no hints."
)
@pass_program
def connect(
    program: Program,
    client: str | None,
    assistant: str | None,
    *,
    model: str | None,
    write: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the settings that make CLIENT use this daemon; without CLIENT, list the clients.

    llmbox connect mcp ASSISTANT prints the settings that let an assistant manage this machine's models by
    MCP; without ASSISTANT, it lists the assistants.
    """
    if client == "mcp":
        if model is not None:
            raise CliError(
                "--model does not apply to mcp", "the assistant names the model", "leave it out", Exit.USAGE
            )
        _connect_mcp(program, assistant, write=write, as_json=as_json, quiet=quiet)
        return
    if assistant is not None:
        text = f"{client} takes no further name"
        raise CliError(text, "only mcp does", f"llmbox connect mcp {assistant}", Exit.USAGE)
    if client is None:
        if write or model is not None:
            given = "--write" if write else f"--model {model}"
            raise CliError(
                "no client is named", f"{given} needs one", f"llmbox connect CLIENT {given}", Exit.USAGE
            )
        _list(as_json=as_json, quiet=quiet)
        return
    guide = GUIDES[client]
    endpoint = _endpoint(program, model)
    if write:
        _write(program, client, guide, endpoint, as_json=as_json)
    elif as_json:
        output.write_json("connect", _as_dict(program, client, guide, endpoint))
    else:
        _print(program, guide, endpoint, quiet=quiet)


def _list(*, as_json: bool, quiet: bool) -> None:
    if as_json:
        rows = [
            {"name": name, "title": guide.title, "needs": guide.needs, "writes": guide.file is not None}
            for name, guide in GUIDES.items()
        ]
        output.write_json("clients", {"clients": rows})
    elif quiet:
        for name in GUIDES:
            output.write(name)
    else:
        output.table(
            ("CLIENT", "WHAT", "USES"), [(n, guide.title, guide.needs) for n, guide in GUIDES.items()]
        )
        output.say("Their settings: llmbox connect CLIENT")
        output.say("Assistants that manage this box by MCP: llmbox connect mcp")


def _connect_mcp(program: Program, name: str | None, *, write: bool, as_json: bool, quiet: bool) -> None:
    from ...integrations.guides import mcp_command
    from ...integrations.settings_file import as_text

    if name is None:
        if write:
            fix = "llmbox connect mcp ASSISTANT --write"
            raise CliError("no assistant is named", "--write needs one", fix, Exit.USAGE)
        _list_assistants(program, as_json=as_json, quiet=quiet)
        return
    guide = MCP_PROGRAMS[name]
    file = guide.file(program.environ)
    settings = guide.settings(mcp_command(program.command, program.environ, program.location_flags))
    data = {"client": "mcp", "assistant": name, "file": str(file), "settings": settings, "run": guide.run}
    if write:
        data |= _merge_file(guide, file, settings, show=not as_json)
    if as_json:
        output.write_json("connect", data)
        return
    if not write:
        if not quiet:
            output.say(f"In {file} (--write merges it there):")
        output.write(as_text(guide, settings).rstrip("\n"))
    if not quiet:
        output.say(f"Then: {guide.run}")


def _list_assistants(program: Program, *, as_json: bool, quiet: bool) -> None:
    rows = [(name, guide.title, str(guide.file(program.environ))) for name, guide in MCP_PROGRAMS.items()]
    if as_json:
        entries = [{"name": name, "title": title, "file": file} for name, title, file in rows]
        output.write_json("assistants", {"assistants": entries})
    elif quiet:
        for row in rows:
            output.write(row[0])
    else:
        output.table(("ASSISTANT", "WHAT", "FILE"), rows)
        output.say("Their settings: llmbox connect mcp ASSISTANT; --write merges them into the file")


def needs_key(program: Program) -> bool:
    """Return whether the daemon asks clients on this machine for a key."""
    loopback = program.client.get("/admin/api/status")["host"] in {"127.0.0.1", "::1", "localhost"}
    settings = program.client.get("/admin/api/config")["settings"]
    return not loopback or bool(settings["server.require_key"]["value"])


def _endpoint(program: Program, wanted: str | None) -> Endpoint:
    status = program.client.get("/admin/api/status")
    listed = program.client.get("/v1/models")["data"]
    names = [each["id"] for each in listed]
    if wanted is not None and wanted not in names:
        raise CliError(
            f"no model {wanted}", f"the models are: {', '.join(names) or 'none'}", "llmbox ls", Exit.NOT_FOUND
        )
    if not names:
        raise CliError("there is no model to use", "none is loaded", "llmbox load MODEL", Exit.NOT_FOUND)
    model = wanted or names[0]
    models = (wanted,) if wanted else tuple(names)
    return Endpoint(
        root=status["url"],
        model=model,
        models=models,
        needs_key=needs_key(program),
        certificate=running.certificate if (running := find_running(program.paths)) else "",
        contexts={
            each["id"]: each["context_window"]
            for each in listed
            if each["id"] in models and each.get("context_window")
        },
    )


def _as_dict(program: Program, client: str, guide: Guide, at: Endpoint) -> dict[str, Any]:
    file = guide.file(program.environ) if guide.file else None
    return {
        "client": client,
        "url": at.url,
        "model": at.model,
        "needs_key": at.needs_key,
        "file": None if file is None else str(file),
        "settings": guide.settings(at) if guide.settings else {},
        "environment": {**guide.environment(at), **at.trust},
        "run": guide.run(at),
    }


def _print(program: Program, guide: Guide, at: Endpoint, *, quiet: bool) -> None:
    from ...integrations.settings_file import as_text

    if guide.settings is not None and guide.file is not None:
        if not quiet:
            output.say(f"In {guide.file(program.environ)} (--write merges it there):")
        output.write(as_text(guide, guide.settings(at)).rstrip("\n"))
    for line in _exports(guide, at):
        output.write(line)
    if not quiet:
        _hint(guide, at)


def _exports(guide: Guide, at: Endpoint) -> list[str]:
    return [f'export {name}="{value}"' for name, value in {**guide.environment(at), **at.trust}.items()]


def _hint(guide: Guide, at: Endpoint) -> None:
    if at.needs_key:
        output.say(f"It needs a key: export {KEY_VARIABLE}=$(llmbox key add NAME)")
    if guide.agent:
        output.say(f"{guide.title} needs a model that calls tools, with a context of some 30,000 tokens:")
        output.say("Qwen2.5, Qwen3, Llama 3.1 and later, Mistral Instruct can; choose with --model NAME")
    output.say(f"Then: {guide.run(at)}")


def _write(program: Program, client: str, guide: Guide, at: Endpoint, *, as_json: bool) -> None:
    if guide.file is None or guide.settings is None:
        raise CliError(
            f"{guide.title} has no file to write",
            "it reads environment variables",
            f"llmbox connect {client} prints them",
            Exit.USAGE,
        )
    result = _merge_file(guide, guide.file(program.environ), guide.settings(at), show=not as_json)
    if as_json:
        output.write_json("connect", {**_as_dict(program, client, guide, at), **result})
        return
    for line in _exports(guide, at):
        output.say(line)
    _hint(guide, at)


def _merge_file(
    guide: Guide | McpProgram, file: Path, settings: Mapping[str, Any], *, show: bool
) -> dict[str, Any]:
    """Merge settings into a client's file. Returns whether it changed, and the path of the copy kept."""
    from ...integrations.settings_file import difference, merge_settings, replace

    old, new = merge_settings(guide, file, settings)
    backup = replace(file, new) if new != old else None
    if show and new == old:
        output.say(f"{file} has these settings already.")
    elif show:
        output.write(formatting.printable(difference(file, old, new)).rstrip("\n"))
        output.say(f"{file} is written" + (f"; backup: {backup}" if backup else "."))
    return {"changed": new != old, "backup": None if backup is None else str(backup)}


LONGEST_LINE = 4_000_000
"""Bytes of one message."""


@click.command(cls=Command)
@click.option("--print", "prints", is_flag=True, help="Print the entry for an assistant's configuration.")
@pass_program
def mcp(program: Program, *, prints: bool) -> None:
    """Serve MCP on stdin and stdout, for an assistant that manages this machine's models.

    Programs start it themselves: llmbox connect mcp writes it into their settings. It acts as the local user:
    it needs no key and has every tool. While no daemon runs, the tools say how to start one.
    """
    from llmbox import __version__

    if prints:
        from ...integrations.guides import MCP_PROGRAMS, mcp_command
        from ...integrations.settings_file import as_text

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
        from ...mcp.features import ToolError
        from ...util.threads import in_thread

        texts = {n: str(v).lower() if isinstance(v, bool) else v for n, v in query.items()}
        where = f"{path}?{urlencode(texts)}" if texts else path
        try:
            return await in_thread(lambda: self._client.call(method, where, body, seconds), "mcp call")
        except CliError as error:
            fix = f"Run: {error.fix}" if error.fix else ""
            sentences = [f"{error.what}: {error.why}" if error.why else error.what, fix]
            raise ToolError(". ".join(text for text in sentences if text)) from None

    async def own_requests(self, query: Mapping[str, Any]) -> Any:
        return await self.request("GET", "/admin/api/requests", query, None, 60.0)


async def _serve(server: "McpServer") -> None:
    """Answer messages until stdin ends; requests that are still open then get a last moment."""
    from ...mcp.protocol import RpcError, decode_message, error_response

    lines = _read_lines()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(message: dict[str, Any]) -> None:
        if (response := await server.answer(message, _write_message)) is not None:
            await _write_message(response)

    while (line := await lines.get()) is not None:
        try:
            message = decode_message(line)
        except RpcError as error:
            await _write_message(error_response(None, error))
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
        # A file of its own: the interpreter aborts at its end if a thread holds the lock of sys.stdin.
        with open(0, "rb", closefd=False) as stdin:
            while line := stdin.readline(LONGEST_LINE):
                if line.strip():
                    loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="mcp stdin", daemon=True).start()
    return lines


async def _write_message(message: dict[str, Any]) -> None:
    import msgspec

    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
