"""`llmbox serve`."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from . import output
from .lazy import Command
from .options import checked_alias, daemon_options, given, model_options
from .program import Program, pass_program

if TYPE_CHECKING:
    from ..control.running import Running


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@daemon_options
@model_options
@click.option("--background", is_flag=True, hidden=True, help="Log to the file only; set by `up`.")
@pass_program
def serve(
    program: Program, /, models: tuple[str, ...], alias: str | None, *, background: bool, **flags: Any
) -> None:
    """Run the daemon in the foreground, for systemd, containers and debugging.

    A MODEL is builtin, a directory, or org/name from the Hugging Face cache. SIGTERM lets open requests
    finish, a second one stops at once, SIGHUP reads the configuration again.
    """
    from ..daemon.instance import already_running, find_running
    from ..daemon.run import Plan, run_daemon

    if (other := find_running(program.paths)) is not None:  # before complaints about models
        raise already_running(other)
    given_flags = given(flags)
    plan = Plan(
        paths=program.paths,
        loaded=program.settings(given_flags),
        models=program.wanted(models, checked_alias(alias), given_flags),
        begun_with={"flags": given_flags, "models": list(models), "alias": alias},
        reload=lambda: program.settings(given_flags),
        checks=partial(_checks, program),
        parts=program.parts,
        on_up=(lambda *_: None) if background else partial(_tell, program),
        background=background,
    )
    run_daemon(plan)


def _checks(program: Program) -> list[dict[str, str]]:
    from dataclasses import asdict

    from .checks import run_checks

    return [asdict(finding) for finding in run_checks(program)]


def _tell(program: Program, running: "Running", sign_in_link: Callable[[], str]) -> None:
    output.write(f"{running.url}/v1")
    if not _is_journal():
        output.write(sign_in_link())
        return
    from ..files import write_whole

    # Others may read the journal, and it is kept: a link in it would be a key under the mat.
    write_whole(program.paths.sign_in_file, f"{sign_in_link()}\n".encode())
    output.write(f"The link that signs one browser in, within 15 minutes: {program.paths.sign_in_file}")


def _is_journal() -> bool:
    """Whether a service manager keeps what we print."""
    started_by_systemd = "NOTIFY_SOCKET" in os.environ or "JOURNAL_STREAM" in os.environ
    return started_by_systemd and not sys.stdout.isatty()
