"""`llmbox status`, `version`, `down` and `restart`."""

import contextlib
import os
import platform
import select
import shlex
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click

from llmbox import __version__

from ...config.entries import Scalar
from ...errors import CliError, Exit
from ...lifecycle.instance import RunningDaemon, find_running
from ...lifecycle.program import Command, Program, json_option, package_versions, pass_program
from ...util import formatting
from .. import output
from ..models.models import print_models
from ..options import parameter
from .daemon_starter import Started, start_daemon, wait_for_models


@click.command(cls=Command)
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; only set the exit code.")
@pass_program
def status(program: Program, *, as_json: bool, quiet: bool) -> int:
    """Show whether the daemon runs; exit 3 when it does not, 1 when one of its models has failed."""
    running = find_running(program.paths)
    if running is None:
        if as_json:
            output.write_json("status", {"running": False})
        elif not quiet:
            output.write("llmbox does not run. Start it: llmbox up")
        return Exit.UNREACHABLE
    answer = program.client.get("/admin/api/status")
    if as_json:
        output.write_json("status", {"running": True, **answer})
    elif not quiet:
        _print(answer)
    failed = any(model["state"] == "failed" for model in answer["models"])
    return Exit.FAILED if failed else Exit.OK


def _print(answer: dict[str, Any]) -> None:
    state = "ready" if answer["ready"] else "not ready"
    state += f": {answer['cause']}" if answer["cause"] else ""
    output.write(f"llmbox {answer['version']} runs (pid {answer['pid']}), {state}")
    output.write(f"  API     {answer['url']}/v1")
    output.write(f"  Socket  {answer['socket']}")
    output.write(f"  Up      {formatting.span(answer['uptime_s'])}")
    output.write(f"  Log     {answer['log_file']}")
    output.write(f"  Open    {answer['open_requests']} requests")
    for each in answer["error_rates"]:
        if each["failed"]:
            _print_failing(each)
    if answer["request_log_problem"]:
        output.write(formatting.printable(f"  Requests are not logged: {answer['request_log_problem']}"))
    if answer["pending_restart"]:
        output.write(f"  Changed settings wait for a restart: {', '.join(answer['pending_restart'])}")
    output.write("")
    print_models(answer["models"])
    for model in answer["models"]:
        if model["state"] == "failed":
            name = model["name"]
            again = f"llmbox load {shlex.quote(name)} (at once)"
            output.write(formatting.printable(f"\n{name} has failed. Start it again: {again}; or unload it."))


def print_overview(program: Program) -> None:
    """Print the state of the daemon and the next commands to try: `llmbox` without a command."""
    running = find_running(program.paths)
    steps = {"llmbox search": "recommended models, with how each fits this machine"}
    if running is None:
        from ...models.catalog import on_disk

        models = [each.ref.name for each in on_disk(program.environ, program.names) if each.servable]
        output.write(f"The daemon is not running. Models on this disk: {', '.join(models) or 'none'}.")
        first = next((name for name in models if name != "builtin"), models[0] if models else "")
        steps = ({f"llmbox up {shlex.quote(first)}": "start it with a model"} if first else {}) | steps
        if not set(models) - {"builtin"}:
            steps |= _first_runs(program)
    else:
        status = program.client.get("/admin/api/status")
        ready = [model["name"] for model in status["models"] if model["state"] == "ready"]
        output.write(f"The daemon runs (pid {running.pid}). API: {running.url}/v1")
        output.write(f"Models in memory: {', '.join(ready) or 'none'}.")
        if ready:
            steps = {f"llmbox run {shlex.quote(ready[0])}": "chat with it"} | steps
        steps |= {"llmbox top": "watch requests, speed and memory", "llmbox down": "stop it"}
    output.write("")
    wide = max(map(len, steps))
    for command, what in steps.items():
        output.write(formatting.printable(f"  {command:{wide}}  {what}"))
    output.write("\nAll commands: llmbox --help")


def _first_runs(program: Program) -> dict[str, str]:
    """Return the commands that fetch and run each of a newcomer's choices, with what to expect of it."""
    from ...fit.recommendations import first_choices
    from ..models.fit import recommendations

    steps = {}
    with contextlib.suppress(CliError):
        for label, each in first_choices(recommendations(program)).items():
            speed = each.fit.speed
            rate = f", {formatting.rate_range(*speed.one_stream)} tokens/s" if speed else ""
            size = formatting.size(each.fit.disk_need)
            steps[f"llmbox run {each.model.name}"] = f"{label.lower()}: fetch {size} and chat{rate}"
    return steps


def _print_failing(rate: Mapping[str, Any]) -> None:
    """Print a model's share of failed requests, in the words of the alerts of `llmbox top` and the panel."""
    from ...telemetry.snapshot import errors_command

    model, reason = rate["model"], f" ({rate['reason']})" if rate["reason"] else ""
    share = f"{rate['failed']} of {rate['finished']} requests of the last 5 minutes"
    output.write(formatting.printable(f"  Failed  {model or 'no model'}: {share}{reason}"))
    output.write(f"          {errors_command(model)}")


HURRY = 5.0
"""Seconds that a daemon has after the second SIGTERM; then it is killed."""


@click.command(cls=Command)
@click.option("--check", is_flag=True, help="Ask the package index for a newer version.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with the versions of the main parts.")
@pass_program
def version(program: Program, *, check: bool, as_json: bool) -> None:
    """Print the version.

    Without --check, no network is used. With it, the package index that pip uses is asked for a newer
    version, and the command that upgrades this installation is printed; nothing is installed.
    """
    data = {"version": __version__, "python": platform.python_version(), "packages": package_versions()}
    if not check:
        if as_json:
            output.write_json("version", data)
        else:
            output.write(f"llmbox {__version__}")
        return

    from ...diagnostics.updates import check_for_update

    update = check_for_update(program.environ)
    if as_json:
        output.write_json("version", {**data, "update": asdict(update)})
    elif update.is_newer:
        output.write(f"llmbox {update.latest} is available; {update.installed} is installed.")
        output.write(f"Upgrade: {update.command}")
        output.write("Then: llmbox restart")
    else:
        output.write(f"llmbox {update.installed} is the newest version on {update.index}.")


@click.command(cls=Command)
@click.option("--now", is_flag=True, help="Do not wait for open requests; they end with an error.")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    metavar="S",
    help="Maximum time to wait for open requests, in seconds.",
)
@pass_program
def down(program: Program, *, now: bool, timeout: float | None) -> None:
    """Let open requests finish, then stop the daemon."""
    running = find_running(program.paths)
    if running is None:
        output.say("The daemon is not running.")
        return
    stop(program, running, now=now, timeout=timeout)
    output.say(f"The daemon (pid {running.pid}) has stopped.")


def stop(program: Program, running: RunningDaemon, *, now: bool, timeout: float | None) -> None:
    """Stop the daemon and return when its process is gone: SIGTERM drains, a second one hurries, SIGKILL
    comes last.
    """
    if timeout is None:
        timeout = program.settings().settings.server.drain_timeout + HURRY
    try:
        process = os.pidfd_open(running.pid)  # names this process even if its pid is used again
    except ProcessLookupError:
        return
    try:
        _stop(running, process, 0.0 if now else timeout, program)
    except PermissionError as error:
        raise CliError(
            f"no permission to stop pid {running.pid}",
            "it belongs to another user",
            "stop it as that user",
            Exit.DENIED,
        ) from error
    finally:
        os.close(process)


def _stop(running: RunningDaemon, process: int, timeout: float, program: Program) -> None:
    for number, patience in (
        (signal.SIGTERM, timeout),
        (signal.SIGTERM, HURRY),
        (signal.SIGKILL, HURRY),
    ):
        if number == signal.SIGKILL:
            output.say(f"pid {running.pid} does not end; killing it.")
        try:
            signal.pidfd_send_signal(process, number)
        except ProcessLookupError:
            return
        if _wait_for_end(running, process, patience):
            return
    raise CliError(
        f"pid {running.pid} does not end",
        "not even after SIGKILL",
        f"look at it: ps -o pid,stat,wchan,cmd {running.pid}",
        Exit.FAILED,
        str(program.paths.log_file),
    )


def _wait_for_end(running: RunningDaemon, process: int, seconds: float) -> bool:
    end = select.poll()
    end.register(process, select.POLLIN)
    line = output.ProgressLine()
    deadline = time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            if end.poll(min(left, 1.0) * 1000):
                return True
            line.update(f"Waiting for pid {running.pid} to end ({left:.0f} s at most)…")
    finally:
        line.close()
    return bool(end.poll(0))


Row = Mapping[str, Any]
"""A model as the admin API describes it."""


@click.command(cls=Command)
@click.option("--now", is_flag=True, help="Do not wait for open requests; they end with an error.")
@click.option(
    "--timeout",
    type=click.FloatRange(0),
    default=600.0,
    metavar="S",
    help="Maximum time to wait for models, in seconds.",
)
@pass_program
def restart(program: Program, *, now: bool, timeout: float) -> None:
    """Restart the daemon as it was: with its flags, its loaded models, their pins and aliases."""
    started = restart_daemon(program, now=now, timeout=timeout)
    output.say(f"The daemon (pid {started.running.pid}) is up: {started.running.url}/v1")


def restart_daemon(program: Program, *, now: bool, timeout: float, without: Collection[str] = ()) -> Started:
    """Restart the daemon, or start it. Flags of its start that set one of the settings `without` are dropped:
    the file has them now.
    """
    before = SavedState()
    running = find_running(program.paths)
    if running is not None:
        before = SavedState.of(program.client.get("/admin/api/status"), without)
        program.settings(before.flags)  # a mistake in the file must not be found when nothing runs any more
        program.find_models(before.models, before.alias, before.flags)
        stop(program, running, now=now, timeout=None)
    started = start_daemon(program, before.models, before.alias, before.flags)
    for row in before.later:
        _load(program, row)
    wait_for_models(program, started, [], timeout)
    for name in before.pinned:
        _pin(program, name)
    return started


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """State to restore after a restart. `models` go on the command line, `later` are loaded once the API is
    up.
    """

    flags: dict[str, Scalar] = field(default_factory=dict)
    models: list[str] = field(default_factory=list)
    alias: str | None = None
    later: list[Row] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, status: Row, without: Collection[str] = ()) -> "SavedState":
        begun = status["begun_with"]
        rows = [row for row in status["models"] if row["state"] != "failed"]
        common = {
            parameter(name): value for name, value in begun["flags"].items() if name.startswith("model.")
        }
        first = [row for row in rows if _is_plain(row, common)]
        if begun["alias"] is not None or not first:
            # With an alias the command line names one model: the others are loaded later.
            first = [row for row in rows if row["name"] in _names(begun)]
            models = list(begun["models"])
        else:
            models = [str(row["ref"]) for row in first]
        return cls(
            flags={name: value for name, value in begun["flags"].items() if name not in without},
            models=models,
            alias=begun["alias"],
            later=[row for row in rows if row not in first],
            pinned=[str(row["name"]) for row in rows if row["pinned"]],
        )


def _is_plain(row: Row, common: Mapping[str, Scalar]) -> bool:
    """Return True if the model can be loaded by its name alone, with the flags of the start."""
    is_default = row["asked"] == common and row["ttl_s"] is None
    return is_default and not row["aliases"] and not _is_renamed(row)


def _is_renamed(row: Row) -> bool:
    """Return True for a directory that is served under another name than its own."""
    return str(row["ref"]).startswith("/") and Path(row["ref"]).name != row["name"]


def _names(begun: Row) -> set[str]:
    """Return the names under which the model of a start with `--alias` may be served."""
    return {str(begun["alias"]), *map(str, begun["models"])}


def _load(program: Program, row: Row) -> None:
    """Load a model again. A failure is reported and does not stop the loads of others."""
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
