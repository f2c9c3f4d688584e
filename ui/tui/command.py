"""Command `llmbox top`. Textual takes a quarter of a second to import: only after the options are checked."""

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

import click

from llmbox.app.admin_client import Client
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.program import Command, Program, pass_program
from llmbox.app.util.formatting import did_you_mean

if TYPE_CHECKING:
    from .data.api import Api


SEED = 7


@click.command(cls=Command)
@click.option("--once", is_flag=True, help="Print an overview as plain text and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --once: print a JSON snapshot instead.")
@click.option("--mock", is_flag=True, help="Show a demonstration with invented data; needs no daemon.")
@click.option(
    "--seed", type=int, metavar="N", help=f"With --mock: seed of the invented events (default {SEED})."
)
@click.option("--theme", metavar="NAME", help="Color theme, remembered; `t` chooses one on the screen.")
@click.option("--read-only", is_flag=True, help="Disable every action that changes something, and the chat.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Record the received data to FILE.",
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
    once: bool,
    as_json: bool,
    mock: bool,
    seed: int | None,
    theme: str | None,
    read_only: bool,
    record: Path | None,
    replay: Path | None,
    remote: str | None,
    key_file: Path | None,
) -> int:
    """Watch this machine: devices, models, requests, memory, log, and a chat. `?` shows the keys."""
    given = {"--once": once, "--mock": mock, "--record": record, "--replay": replay, "--remote": remote}
    _check_options({**given, "--json": as_json, "--seed": seed, "--key-file": key_file})
    if remote is not None and key_file is not None:
        from .data.api import RemoteClient  # noqa: PLC0415

        client: Client = RemoteClient(program.paths, remote, key_file)
    else:
        client = program.client
    with ExitStack() as stack:
        api, url = _open(
            client, SEED if seed is None else seed, mock=mock, record=record, replay=replay, stack=stack
        )
        if once:
            _print_once(api, as_json=as_json)
            return Exit.OK
        source = "demo" if mock else "replay" if replay else "recording" if record else ""
        return _run(api, program.paths.state_dir / "top.json", theme, source, url, read_only=read_only)


_EXCLUSIVE: Final = (
    ("--record", "--replay"),
    ("--mock", "--record"),
    ("--mock", "--replay"),
    ("--mock", "--remote"),
    ("--once", "--record"),
    ("--once", "--replay"),
    ("--replay", "--remote"),
)
"""Options of `llmbox top` that exclude each other."""


def _check_options(given: Mapping[str, object]) -> None:
    """Raise CliError for options that exclude each other, and without a terminal. `given`: by option."""
    if (given["--remote"] is None) != (given["--key-file"] is None):
        raise CliError(
            "--remote and --key-file go together",
            "the admin API of another box needs an admin key",
            "over there: llmbox key add top --scope admin > FILE",
            Exit.USAGE,
        )
    for pair in _EXCLUSIVE:
        if all(given[name] for name in pair):
            raise CliError(f"{pair[0]} and {pair[1]} exclude each other", "", "give one of them", Exit.USAGE)
    if given["--json"] and not given["--once"]:
        raise CliError(
            "--json goes with --once",
            "",
            "llmbox top --once --json, or llmbox stats --watch --json",
            Exit.USAGE,
        )
    if given["--seed"] is not None and not given["--mock"]:
        raise CliError("--seed goes with --mock", "", "llmbox top --mock --seed 3", Exit.USAGE)
    if not given["--once"] and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError(
            "llmbox top needs a terminal",
            "stdin or stdout is not one",
            "llmbox top --once, or llmbox stats --watch",
            Exit.USAGE,
        )


def _open(
    client: Client, seed: int, *, mock: bool, record: Path | None, replay: Path | None, stack: ExitStack
) -> "tuple[Api, str]":
    """Return the API to read from, and the daemon's URL. The daemon has to run at the start; later it may go
    and come back.
    """
    if os.environ.get("TERM") == "dumb":
        os.environ["NO_COLOR"] = "1"  # read by Textual and Rich
    from .data.api import LiveApi, Recorder, Replay  # noqa: PLC0415 - imports Textual

    if mock:
        from .data.mock import MockApi  # noqa: PLC0415

        return MockApi(seed), ""
    if replay is not None:
        return Replay(replay), ""
    api: Api = LiveApi(client)
    url = str(api.get("status")["url"])
    if record is not None:
        api = Recorder(api, stack.enter_context(_writable(record)))
    return api, url


def _run(api: "Api", file: Path, theme: str | None, source: str, url: str, *, read_only: bool) -> int:
    from .app import Dashboard  # noqa: PLC0415
    from .rendering import NAMES, read_choice, remember_choice  # noqa: PLC0415

    if theme is not None:
        if theme not in NAMES:
            raise CliError(
                f"there is no theme {theme}",
                did_you_mean(theme, NAMES).rstrip(),
                f"one of {', '.join(NAMES)}",
                Exit.USAGE,
            )
        remember_choice(file, theme)
    dashboard = Dashboard(
        api,
        read_only=read_only or source == "replay",
        ascii_only=_is_ascii(),
        source=source,
        url=url,
        once=source == "replay",
        theme=theme or read_choice(file),
        remember=lambda name: remember_choice(file, name),
    )
    dashboard.run()
    return dashboard.return_code or Exit.OK


def _is_ascii() -> bool:
    return os.environ.get("TERM") == "dumb" or "utf" not in (sys.stdout.encoding or "").lower()


def _print_once(api: "Api", *, as_json: bool) -> None:
    from .snapshot import read_snapshot, snapshot_json, snapshot_lines  # noqa: PLC0415

    state = read_snapshot(api)
    if as_json:
        sys.stdout.write(snapshot_json(state) + "\n")
        return
    for line in snapshot_lines(state, ascii_only=_is_ascii()):
        sys.stdout.write(line + "\n")


def _writable(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"{path} cannot be written", str(error), "--record another file", Exit.USAGE
        ) from error
