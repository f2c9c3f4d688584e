"""Threads that wait for work take no processor time."""

import time

import torch

from llmbox.kernels.cpu.library import load_backend
from support.cli_box import until

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
