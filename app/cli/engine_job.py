"""Work on weights in a process of its own, as the command line imports no torch (`engine/job.py`)."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from llmbox.engine.spawn import Launch

from ..daemon.launching import with_caches
from ..engines.load_words import compile_words
from ..errors import CliError, Exit
from ..settings import CacheSettings
from . import output
from .program import Program

EXITS = {"does_not_fit": Exit.DOES_NOT_FIT, "bad_model": Exit.FAILED}

Words = Callable[[str, int, int], str]
"""(what is told, how much is done, of how much) -> a line for people."""


def run_job(
    program: Program, module: str, arguments: Sequence[str], *, failed: str, words: Words
) -> dict[str, Any]:
    """The report. It ends when we are interrupted. Raises CliError, which begins with `failed`."""
    launch = with_caches(Launch(), program.paths, CacheSettings(repacked_gb=0))
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **launch.env},
        text=True,
    )
    line = output.ProgressLine()
    try:
        assert process.stdout is not None
        for message in _messages(process.stdout):
            if "error" in message:
                code, why = message["error"]["code"], message["error"]["message"]
                raise CliError(failed, why, "llmbox ls", EXITS.get(code, Exit.FAILED))
            if "report" in message:
                report: dict[str, Any] = message["report"]
                return report
            for what, (done, total) in message.items():
                line.update((compile_words if what == "compiling" else partial(words, what))(done, total))
    finally:
        line.close()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, told = process.communicate()
    last = told.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    raise CliError(failed, last[0], "llmbox doctor", Exit.FAILED)


def _messages(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("{"):
            message: dict[str, Any] = json.loads(line)
            yield message
