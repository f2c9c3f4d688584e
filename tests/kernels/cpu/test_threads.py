"""The pool: fewer threads while others take the cores, and the same bits whatever their number."""

import subprocess
import time
from pathlib import Path

import pytest
import torch

from llmbox.kernels.dispatch import load_backend
from llmbox.kernels.quant_formats import QUANTS
from support.cli_box import until
from support.compiled_programs import compile_program


@pytest.mark.parametrize("subject", ["thread_throttle", "work_partition", "barriers"])
def test_how_work_is_shared_among_threads(subject: str) -> None:
    program = compile_program(Path(__file__).with_name(f"{subject}.cpp"), ("-std=c++20", "-pthread"))
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "right\n"


def test_threads_come_and_go_between_jobs() -> None:
    backend = load_backend("cpu")
    ops = backend.ops(QUANTS["int4"])
    packed = ops.pack_linear(torch.randn(300, 200), None)
    x = torch.randn(21, 200)
    expected = None
    for cores in ([0], [0, 1, 0, 1], [0, 1], [0, 1, 0], [0]):
        backend.use_threads(cores)
        for _ in range(50):
            got = ops.linear(packed, x)
            expected = got if expected is None else expected
            assert torch.equal(got, expected)
        assert 1 <= backend.library.llmbox_threads_running() <= len(cores)


IDLE_S = 0.5


def test_nobody_spins_while_there_is_nothing_to_do() -> None:
    backend = load_backend("cpu")
    backend.use_threads([0, 1, 0, 1])
    ops = backend.ops()
    packed = ops.pack_linear(torch.randn(300, 200), None)
    ops.linear(packed, torch.randn(50, 200))

    def rests() -> bool:
        before = time.process_time()
        time.sleep(IDLE_S)
        return time.process_time() - before < 0.1 * IDLE_S

    until(rests)  # they spin for 50 microseconds of their own time; what other tests left may take longer
