"""Command `llmbox top`, and its plain overview (`--once`). Textual is imported only on a checked terminal."""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import click
import msgspec
from msgspec.structs import replace

from llmbox.app.admin_client import Client
from llmbox.app.errors import CliError, Exit
from llmbox.app.lifecycle.program import Command, Program, pass_program
from llmbox.app.store.record import LiveRequest
from llmbox.app.telemetry.snapshot import Tick
from llmbox.app.util.formatting import did_you_mean

from .data.api import Api
from .messages import SPARKS, DashboardState, count_requests
from .rendering import ASCII, UNICODE, Glyphs, Line, clean, count, fit, heading, percent, seconds
from .screens.overview import device_lines, event_lines, model_rows
from .screens.requests import request_rows
from .widgets.charts import chart_lines
from .widgets.lines import Row

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
) -> None:
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
            return
        source = "demo" if mock else "replay" if replay else "recording" if record else ""
        _run(api, program.paths.state_dir / "top.json", theme, source, url, read_only=read_only)


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
        os.environ["NO_COLOR"] = "1"  # before Textual is imported
    from .data.api import LiveApi, Recorder, Replay  # noqa: PLC0415 - imports Textual: a quarter of a second

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


def _run(api: "Api", file: Path, theme: str | None, source: str, url: str, *, read_only: bool) -> None:
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
    Dashboard(
        api,
        read_only=read_only or source == "replay",
        ascii_only=_is_ascii(),
        source=source,
        url=url,
        once=source == "replay",
        theme=theme or read_choice(file),
        remember=lambda name: remember_choice(file, name),
    ).run()


def _is_ascii() -> bool:
    return os.environ.get("TERM") == "dumb" or "utf" not in (sys.stdout.encoding or "").lower()


def _print_once(api: "Api", *, as_json: bool) -> None:
    from .command import read_snapshot, snapshot_json, snapshot_lines  # noqa: PLC0415

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


SCHEMA: Final = "llmbox.top/1"
LAST: Final = 10
WIDTHS: Final = (72, 120)
"""Minimum and maximum width of the text."""


def read_snapshot(api: Api) -> DashboardState:
    """Read the current state. Raises CliError."""
    state = DashboardState()
    tick = msgspec.convert(api.get("tick"), Tick)
    history = api.get("requests?limit=300")
    live = msgspec.convert(history["in_flight"], tuple[LiveRequest, ...])
    totals = replace(tick.totals, open_requests=len(live))
    state.take_answer("downloads", api.get("downloads"))
    state.take_tick(replace(tick, requests=live, totals=totals))
    state.take_answer("history", history)
    state.take_answer("past", api.get(f"telemetry?step=1&series={','.join(SPARKS)}"))
    state.take_answer("marks", api.get("marks?since=0&limit=50"))
    return state


def snapshot_json(state: DashboardState) -> str:
    """Return the snapshot as one JSON object; docs/top.md has its fields."""
    tick = state.tick
    assert tick is not None
    known = msgspec.to_builtins(tick)
    counts = count_requests(tick)
    models = []
    for engine in known["engines"]:
        own = count_requests(tick, engine["model"])
        models.append(engine | {"running": own.running, "waiting": own.queued})
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "time": tick.time,
        "ready": tick.ready,
        "cause": tick.cause,
        "alerts": msgspec.to_builtins(state.alerts),
        "requests": {"in_flight": counts.in_flight, "running": counts.running, "queued": counts.queued,
                     "live": known["requests"], "last": list(state.ended)[:LAST]},
        "totals": known["totals"] | {"running": counts.running, "waiting": counts.queued},
        "error_rates": known["error_rates"],
        "models": models,
        "gpus": known["gpus"],
        "host": known["host"],
        "history": {"step": 1, "series": {
            name: [None if value < 0 else value for value in values] for name, values in state.sparks.items()
        }},
    }  # fmt: skip
    return json.dumps(answer, ensure_ascii=False)


def snapshot_lines(state: DashboardState, *, ascii_only: bool = False) -> list[str]:
    """Return the overview as lines of plain text, as wide as the terminal within `WIDTHS`."""
    tick, glyphs = state.tick, ASCII if ascii_only else UNICODE
    assert tick is not None
    width = max(WIDTHS[0], min(WIDTHS[1], shutil.get_terminal_size((100, 40)).columns))
    totals = tick.totals
    status = "ready" if tick.ready else f"not ready: {tick.cause}"
    lines: list[Line] = [((f" llmbox: {clean(status)}; {count_requests(tick)}", ""),)]
    figures = (
        f" {count(totals.tokens_out)} tok/s out, {count(totals.tokens_in)} tok/s in; "
        f"TTFT p50 {seconds(totals.ttft_p50)}, p95 {seconds(totals.ttft_p95)}; "
        f"TPOT p50 {seconds(totals.tpot_p50)}, p95 {seconds(totals.tpot_p95)}; "
        f"failed {percent(totals.error_rate)}"
    )
    lines += [((figures, ""),), (), heading(" Alerts", width - 1, glyphs, "" if state.alerts else "none")]
    for alert in state.alerts:
        lines.append(((f" {alert.level}: {clean(alert.text)}", ""),))
        if alert.fix:
            lines.append(((f"     do: {clean(alert.fix)}", ""),))
    lines += [(), *device_lines(tick, width, glyphs, tall=60), ()]
    lines.append(heading(" Models", width - 1, glyphs, f"{len(tick.engines)} loaded"))
    lines += _table(
        model_rows(tick, glyphs), (0, 1, 3, 4, 5, 6, 8),
        ("MODEL", "STATE", "RUN", "QUEUE", "TOK/S", "TTFT P95", "KV"), width, glyphs,
    ) or [((" no model is loaded: llmbox load builtin", ""),)]  # fmt: skip
    lines += [(), *chart_lines(state, width, 2, 8, glyphs, 1), ()]
    lines.append(heading(" Requests", width - 1, glyphs, str(count_requests(tick))))
    live = tick.requests[:LAST]
    rows = request_rows(live, list(state.ended)[:LAST], tick.time)
    lines += _table(
        rows, (0, 1, 3, 4, 6, 7, 8, 9),
        ("ID", "AGE", "MODEL", "STATE", "OUTPUT", "TOK/S", "TTFT", "END"), width, glyphs,
    ) or [((" none yet", ""),)]  # fmt: skip
    lines += [(), *event_lines(state, width, 8, glyphs)]
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def _table(
    rows: list[Row], columns: tuple[int, ...], titles: tuple[str, ...], width: int, glyphs: Glyphs
) -> list[Line]:
    """Format some columns of the rows; the model's name takes the remaining width."""
    if not rows:
        return []
    texts = [[row.cells[index][0] for index in columns] for row in rows]
    sizes = [max(len(title), *(len(line[at]) for line in texts)) for at, title in enumerate(titles)]
    model = titles.index("MODEL")
    sizes[model] = max(8, min(sizes[model], width - 2 - sum(sizes) + sizes[model] - 2 * len(sizes)))
    made: list[Line] = []
    for line in [list(titles), *texts]:
        cells = [fit(text, cells, glyphs, middle=True) for text, cells in zip(line, sizes, strict=True)]
        made.append(((" " + "  ".join(cells), ""),))
    return made
