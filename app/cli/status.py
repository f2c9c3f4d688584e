"""`llmbox status`."""

import shlex
from collections.abc import Mapping
from typing import Any

import click

from ..daemon.instance import find_running
from ..errors import Exit
from . import output
from .lazy import Command
from .models import print_models
from .program import Program, pass_program


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
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
    output.write(f"  Up      {output.span(answer['uptime_s'])}")
    output.write(f"  Log     {answer['log_file']}")
    output.write(f"  Open    {answer['open_requests']} requests")
    for each in answer["error_rates"]:
        if each["failed"]:
            _print_failing(each)
    if answer["pending_restart"]:
        output.write(f"  Changed settings wait for a restart: {', '.join(answer['pending_restart'])}")
    output.write("")
    print_models(answer["models"])
    for model in answer["models"]:
        if model["state"] == "failed":
            name = model["name"]
            again = f"llmbox load {shlex.quote(name)} (at once)"
            output.write(output.printable(f"\n{name} has failed. Start it again: {again}; or unload it."))


def _print_failing(rate: Mapping[str, Any]) -> None:
    """As the alerts of `llmbox top` and the panel say it."""
    from ..telemetry.attention import errors_command

    model, reason = rate["model"], f" ({rate['reason']})" if rate["reason"] else ""
    share = f"{rate['failed']} of {rate['finished']} requests of the last 5 minutes"
    output.write(output.printable(f"  Failed  {model or 'no model'}: {share}{reason}"))
    output.write(f"          {errors_command(model)}")
