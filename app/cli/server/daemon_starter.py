"""Start of a background daemon, and the wait for it and its models: shared by `up`, `restart` and `run`."""

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config.entries import Scalar
from ...errors import CliError, Exit, load_error
from ...lifecycle.instance import RunningDaemon, find_running
from ...lifecycle.program import Program
from ...util import formatting
from ...util.formatting import size
from .. import output
from ..options import as_arguments
from ..output import ProgressLine
from .logs import error_in, last_lines

POLL = 0.1
"""Seconds between two looks at a daemon that starts."""
ENDING = 10.0
"""Seconds that a daemon whose API is gone gets to end."""
SILENT_S = 2.0
"""Seconds of waiting that are not counted aloud."""
START_TIMEOUT = 30.0
"""Seconds until a daemon that neither answers nor ends counts as failed."""


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that was started: `process` is None when it ran before."""

    running: RunningDaemon
    process: "subprocess.Popen[bytes] | None"
    log_offset: int


def start_daemon(
    program: Program, models: Sequence[str], alias: str | None, flags: Mapping[str, Scalar]
) -> Started:
    """Start a daemon and return once its API answers. Mistakes in settings and names are found before
    anything is started; Ctrl-C before the API answers ends what was started.
    """
    program.settings(flags)
    wanted = program.find_models(models, alias, flags)
    program.paths.create()
    command = [*program.command, *program.location_flags, "serve", "--background", *as_arguments(flags)]
    command += [] if alias is None else ["--alias", alias]
    command += [model.ref.load_ref for model in wanted] if models else []
    offset = program.paths.log_file.stat().st_size if program.paths.log_file.exists() else 0
    log = os.open(program.paths.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(  # noqa: S603 - our own program
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
        )
    finally:
        os.close(log)
    try:
        return Started(_wait_for_api(program, process, offset), process, offset)
    except KeyboardInterrupt:
        _end(process)
        raise


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(ENDING)


def _wait_for_api(program: Program, process: "subprocess.Popen[bytes]", offset: int) -> RunningDaemon:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise startup_error(program, process.returncode, offset)
        running = find_running(program.paths, patience=START_TIMEOUT)
        if running is not None and running.pid == process.pid and program.client.is_up():
            return running
        time.sleep(POLL / 4)
    raise CliError(
        "the daemon does not answer",
        f"pid {process.pid} started {START_TIMEOUT:.0f} s ago and its API is not up",
        "llmbox logs, then llmbox down --now",
        Exit.UNREACHABLE,
        str(program.paths.log_file),
    )


def startup_error(program: Program, code: int, offset: int) -> CliError:
    """Build the error of a daemon that ended while starting, from its log: its own error, else its last
    lines.
    """
    log_file = str(program.paths.log_file)
    exit_code = Exit(code) if code in set(Exit) and code != 0 else Exit.FAILED
    lines = last_lines(program.paths.log_file, offset, 12)
    error = error_in(lines)
    if error is not None:
        return CliError(error.what, error.why, error.fix, exit_code, log_file)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return CliError(
        "the daemon ended while starting",
        f"{how}" + ("; its last log lines:\n" + "\n".join(f"    {line}" for line in lines) if lines else ""),
        "fix the cause, then llmbox up",
        exit_code,
        log_file,
    )


def wait_for_models(
    program: Program, started: Started, names: Sequence[str], timeout: float
) -> list[dict[str, Any]]:
    """Return the models in `names` (all there are, when empty) once they are ready. Raises CliError when one
    cannot be loaded.
    """
    began = time.monotonic()
    line = ProgressLine()
    try:
        while True:
            models = _look(program, started, names)
            for model in models:
                if model["state"] == "failed":
                    log_file = str(program.paths.log_file)
                    raise load_error(model["name"], model["cause"], model["error_code"], log_file)
            if all(model["state"] == "ready" for model in models):
                line.close()
                _print_warnings(models)
                return models
            waited = time.monotonic() - began
            text = ", ".join(progress_text(model) for model in models if model["state"] != "ready")
            line.update(f"{text} ({waited:.0f} s)" if waited > SILENT_S else text)
            if waited > timeout:
                raise CliError(
                    "not ready yet",
                    f"waited {timeout:g} s; the daemon continues loading",
                    "check with llmbox ps, or wait longer: --timeout S",
                    Exit.FAILED,
                    str(program.paths.log_file),
                )
            time.sleep(POLL / 2)
    finally:
        line.close()


def _print_warnings(models: Sequence[Mapping[str, Any]]) -> None:
    for model in models:
        for warning in model.get("warnings", ()):
            output.say(formatting.printable(f"Warning: {model['name']}: {warning}"))


def _look(program: Program, started: Started, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the models as they are now. Raises CliError with the cause if the daemon that we started is
    gone.
    """
    try:
        models: list[dict[str, Any]] = program.client.get("/admin/api/models")["models"]
    except CliError as error:
        if started.process is None or error.exit != Exit.UNREACHABLE:
            raise
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.process.wait(ENDING)
        if started.process.returncode is None:
            raise
        raise startup_error(program, started.process.returncode, started.log_offset) from error
    if not names:
        return models
    found = [model for model in models if {model["name"], *model["aliases"]} & set(names)]
    if not found:
        raise CliError(
            f"{', '.join(names)} is gone",
            "it was unloaded meanwhile",
            "llmbox ps",
            Exit.FAILED,
            str(program.paths.log_file),
        )
    return found


def progress_text(model: Mapping[str, Any]) -> str:
    progress = model.get("progress")
    of = (
        f" of {size(progress['total'])}"
        if progress and progress["phase"] == "weights" and progress["total"]
        else ""
    )
    return f"{model['state']} {model['name']}: {model['cause']}{of}"
