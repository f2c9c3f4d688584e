"""How far a load is, in words."""

import pytest

from llmbox.app.engines.supervisor import Supervisor
from llmbox.app.util.formatting import STARTING, format_load_progress
from llmbox.engine.config import EngineConfig
from llmbox.engine.ipc.messages import Progress


@pytest.mark.parametrize(
    ("phase", "done", "total", "words"),
    [
        ("kernels", 1, 3, "compiling the CPU kernels (once): 1 of 3 steps"),
        ("kernels", 0, 0, "waiting for the CPU kernels, which another process compiles"),
        ("weights", 0, 0, "reading weights"),
        ("weights", 450, 1000, "reading weights: 45%"),
    ],
)
def test_each_phase_has_its_words_and_they_are_why_the_model_is_not_ready(phase, done, total, words):
    progress = Progress(phase=phase, done=done, total=total)
    assert format_load_progress(progress) == words
    supervisor = Supervisor(EngineConfig(model_path="none", name="fake"))
    assert supervisor.readiness() == (False, STARTING)
    supervisor._receive(progress)
    assert supervisor.readiness() == (False, words)


def test_an_engine_that_is_started_again_keeps_the_reason():
    supervisor = Supervisor(EngineConfig(model_path="none", name="fake"))
    supervisor._change("restarting", "the engine died")
    supervisor._receive(Progress(phase="weights", done=1, total=2))
    assert supervisor.cause == "the engine died"
