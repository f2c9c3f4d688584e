"""`llmbox down`, and how a daemon is stopped."""

import os
import select
import signal
import time

import click

from ..control.running import Running
from ..daemon.instance import find_running
from ..errors import CliError, Exit
from . import output
from .lazy import Command
from .program import Program, pass_program

HURRY = 5.0
"""Seconds that a daemon gets to end after it was told to end at once; then it is killed."""


@click.command(cls=Command)
@click.option("--now", is_flag=True, help="Do not wait for open requests; they end with an error.")
@click.option("--timeout", type=click.FloatRange(0), metavar="S", help="Longest wait for open requests.")
@pass_program
def down(program: Program, *, now: bool, timeout: float | None) -> None:
    """Let open requests finish, then stop the daemon."""
    running = find_running(program.paths)
    if running is None:
        output.say("The daemon does not run.")
        return
    stop(program, running, now=now, timeout=timeout)
    output.say(f"The daemon (pid {running.pid}) has stopped.")


def stop(program: Program, running: Running, *, now: bool, timeout: float | None) -> None:
    """SIGTERM drains, a second one hurries, SIGKILL is the end. Returns when the process is gone."""
    if timeout is None:
        timeout = program.settings().settings.server.drain_timeout + HURRY
    try:
        process = os.pidfd_open(running.pid)  # stays this process, whatever happens to the number
    except ProcessLookupError:
        return
    try:
        _stop(running, process, 0.0 if now else timeout, program)
    except PermissionError as error:
        raise CliError(
            f"may not stop pid {running.pid}",
            "it belongs to another user",
            "stop it as that user",
            Exit.DENIED,
        ) from error
    finally:
        os.close(process)


def _stop(running: Running, process: int, timeout: float, program: Program) -> None:
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


def _wait_for_end(running: Running, process: int, seconds: float) -> bool:
    end = select.poll()
    end.register(process, select.POLLIN)
    line = output.ProgressLine()
    deadline = time.monotonic() + seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            if end.poll(min(left, 1.0) * 1000):
                return True
            line.update(f"Waiting for open requests of pid {running.pid} ({left:.0f} s at most)…")
    finally:
        line.close()
    return bool(end.poll(0))
