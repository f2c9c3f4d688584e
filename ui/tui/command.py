"""Command `llmbox top`. Textual is imported only after the terminal has been checked."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import click

from llmbox.app.admin_client import Client
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.program import Command, Program, pass_program


@click.command(cls=Command)
@click.option("--read-only", is_flag=True, help="Disable every action that changes something.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Record what is shown to FILE.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="Replay a recording instead of watching the daemon.",
)
@click.option("--remote", metavar="URL", help="Watch the daemon of another machine.")
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with an admin key of that machine.",
)
@pass_program
def top(
    program: Program,
    *,
    read_only: bool,
    record: Path | None,
    replay: Path | None,
    remote: str | None,
    key_file: Path | None,
) -> None:
    """Watch this machine: devices, requests, models, memory, log. `?` shows the keys."""
    if (remote is None) != (key_file is None):
        raise CliError(
            "--remote and --key-file go together",
            "the admin API of another box takes an admin key",
            "over there: llmbox key add top --scope admin > FILE",
            Exit.USAGE,
        )
    if record is not None and replay is not None:
        raise CliError("--record and --replay exclude each other", "", "give one of them", Exit.USAGE)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError(
            "llmbox top needs a terminal", "stdin or stdout is not one", "llmbox stats --watch", Exit.USAGE
        )
    if remote is not None and key_file is not None:
        from .data.api import RemoteClient  # noqa: PLC0415

        _run(RemoteClient(program.paths, remote, key_file), read_only, record, replay)
    else:
        _run(program.client, read_only, record, replay)


def _run(client: Client, read_only: bool, record: Path | None, replay: Path | None) -> None:
    plain = os.environ.get("TERM") == "dumb"
    if plain:
        os.environ["NO_COLOR"] = "1"
    from .app import Dashboard  # noqa: PLC0415
    from .data.api import Api, LiveApi, Recorder, Replay  # noqa: PLC0415 - imports Textual: a quarter of a second

    with ExitStack() as stack:
        api: Api = LiveApi(client) if replay is None else Replay(replay)
        url = "" if replay is not None else _url(client)
        if record is not None:
            api = Recorder(api, stack.enter_context(_writable(record)))
        Dashboard(
            api,
            read_only=read_only or replay is not None,
            ascii_only=plain or "utf" not in (sys.stdout.encoding or "").lower(),
            source="replay" if replay is not None else "recording" if record is not None else "",
            url=url,
            once=replay is not None,
        ).run()


def _url(client: Client) -> str:
    """Return the daemon's URL. The daemon has to run at the start; later it may go and come back."""
    return str(client.get("/admin/api/status")["url"])


def _writable(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"{path} cannot be written", str(error), "--record another file", Exit.USAGE
        ) from error
