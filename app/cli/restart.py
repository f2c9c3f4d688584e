"""`llmbox restart`: the same daemon again, with what was in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ..daemon.instance import find_running
from ..errors import CliError
from ..settings import Scalar
from . import output
from .lazy import Command
from .lifecycle import stop
from .options import parameter
from .program import Program, pass_program
from .starter import start_daemon, wait_for_models

Row = Mapping[str, Any]
"""A model as the admin API describes it."""


@click.command(cls=Command)
@click.option("--now", is_flag=True, help="Do not wait for open requests; they end with an error.")
@click.option(
    "--timeout", type=click.FloatRange(0), default=600.0, metavar="S", help="Longest wait for models."
)
@pass_program
def restart(program: Program, *, now: bool, timeout: float) -> None:
    """Stop the daemon and start it as it was: its flags, the models in memory, their pins and aliases."""
    before = Before()
    running = find_running(program.paths)
    if running is not None:
        before = Before.of(program.client.get("/admin/api/status"))
        program.settings(before.flags)  # a mistake in the file must not be found when nothing runs any more
        program.wanted(before.models, before.alias, before.flags)
        stop(program, running, now=now, timeout=None)
    started = start_daemon(program, before.models, before.alias, before.flags)
    for row in before.later:
        _load(program, row)
    wait_for_models(program, started, [], timeout)
    for name in before.pinned:
        _pin(program, name)
    output.say(f"The daemon (pid {started.running.pid}) is up: {started.running.url}/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What to bring back. `models` go on the command line, `later` are loaded once the API is up."""

    flags: dict[str, Scalar] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    alias: str | None = None
    later: list[Row] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, status: Row) -> "Before":
        begun = status["begun_with"]
        rows = [row for row in status["models"] if row["state"] != "failed"]
        common = {
            parameter(name): value for name, value in begun["flags"].items() if name.startswith("model.")
        }
        first = [row for row in rows if _is_plain(row, common)]
        if begun["alias"] is not None or not first:
            # With an alias the command line names one model: whatever else there is comes later.
            first = [row for row in rows if row["name"] in _names(begun)]
            models = list(begun["models"])
        else:
            models = [str(row["ref"]) for row in first]
        return cls(
            flags=begun["flags"],
            models=models,
            alias=begun["alias"],
            later=[row for row in rows if row not in first],
            pinned=[str(row["name"]) for row in rows if row["pinned"]],
        )


def _is_plain(row: Row, common: Mapping[str, Scalar]) -> bool:
    """Whether it can be loaded by its name alone, with the flags of the start."""
    is_default = row["asked"] == common and row["ttl_s"] is None
    return is_default and not row["aliases"] and not _is_renamed(row)


def _is_renamed(row: Row) -> bool:
    """A directory that is served under another name than its own."""
    return str(row["ref"]).startswith("/") and Path(row["ref"]).name != row["name"]


def _names(begun: Row) -> set[str]:
    """Under which the model of a start with `--alias` may be served."""
    return {str(begun["alias"]), *map(str, begun["models"])}


def _load(program: Program, row: Row) -> None:
    """One that cannot be loaded again does not keep the others away."""
    body = {"model": row["ref"], "options": row["asked"], "ttl": row["ttl_s"]}
    names = [row["name"]] if _is_renamed(row) else row["aliases"] or [None]
    for name in names:
        try:
            program.client.post("/admin/api/models/load", {**body, "alias": name})
        except CliError as error:
            output.say(f"{row['name']} is not loaded again: {error.what}")
            return


def _pin(program: Program, name: str) -> None:
    try:
        program.client.post("/admin/api/models/pin", {"model": name, "pinned": True})
    except CliError as error:
        output.say(f"{name} is not pinned again: {error.what}")
