"""What `up`, `load` and `restart` say while a model loads."""

import pytest

from llmbox.app.cli import output
from llmbox.app.cli.server import daemon_starter as starter
from llmbox.app.cli.server.daemon_starter import Started, progress_text, wait_for_models
from llmbox.app.errors import CliError, Exit, load_error
from llmbox.app.lifecycle.instance import RunningDaemon
from llmbox.app.lifecycle.program import Program

RUNNING = RunningDaemon(pid=1, host="127.0.0.1", port=1, socket="", started_at=0.0, version="")
READY = {"name": "m", "aliases": [], "state": "ready", "cause": "", "progress": None}


def loading(cause, phase=None, done=0, total=0):
    progress = phase and {"phase": phase, "done": done, "total": total}
    return READY | {"state": "loading", "cause": cause, "progress": progress}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (loading("starting its engine"), "loading m: starting its engine"),
        (loading("compiling: 1 of 3 steps", "kernels", 1, 3), "loading m: compiling: 1 of 3 steps"),
        (loading("reading weights: 45%", "weights", 450, 1000), "loading m: reading weights: 45% of 1.0 kB"),
        (loading("reading weights", "weights"), "loading m: reading weights"),
    ],
)
def test_words_for_a_model_that_loads(model, text):
    assert progress_text(model) == text


def test_a_daemon_that_ends_while_names_are_looked_up_is_no_error_of_the_name(tmp_path):
    """`up` tells why it ended; `quantize`, `fit` and `show` need none."""

    class Client:
        def is_up(self):
            return True

        def get(self, _path):
            raise CliError("lost the daemon", "", "", Exit.UNREACHABLE)

    program = Program(environ={"HOME": str(tmp_path)})
    program.client = Client()
    assert program.resolve("builtin").ref == "builtin"


@pytest.mark.parametrize(
    ("code", "fix", "exit_code"),
    [
        ("engine_error", "llmbox logs", Exit.FAILED),
        ("bad_model", "fix the problem above", Exit.FAILED),
        ("does_not_fit", "--quant auto", Exit.DOES_NOT_FIT),
    ],
)
def test_a_failed_load_says_what_helps(code, fix, exit_code):
    error = load_error("m", "why", code, "")
    assert (fix in error.fix, error.exit) == (True, exit_code)


def test_a_wait_says_what_is_done_and_for_how_long(tmp_path, monkeypatch, capsys):
    """A look every second, of a box whose compiler is slow."""
    now = 100.0
    steps = [loading("starting"), *[loading("compiling: 0 of 3 steps", "kernels", 0, 3)] * 20, READY]

    class Client:
        def get(self, _path):
            return {"models": [steps.pop(0)]}

    def sleep(_seconds):
        nonlocal now
        now += 1

    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    monkeypatch.setattr(starter.time, "sleep", sleep)
    program = Program(environ={"HOME": str(tmp_path)})
    program.client = Client()
    assert wait_for_models(program, Started(RUNNING, None, 0), [], 60.0) == [READY]
    assert capsys.readouterr().err.splitlines() == [
        "loading m: starting",
        "loading m: compiling: 0 of 3 steps (5 s)",
        "loading m: compiling: 0 of 3 steps (15 s)",
    ]
