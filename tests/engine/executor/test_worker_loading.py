"""Ranks that fail while they load: told in words, at once, and nobody is left. And what they pack is kept."""

import sys

import psutil
import pytest
from torch.distributed import distributed_c10d

from llmbox.engine.errors import DeviceError, EngineError, RankLost
from llmbox.engine.executor import workers as worker_group
from llmbox.engine.hardware.proc import finish
from llmbox.engine.weights.packed_cache import source
from llmbox.engine.weights.packed_cache.cache import cache_variables
from llmbox.kernels.dispatch import native_ready
from support.cli_box import until
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow

WORKER = """
import os, runpy, signal, sys, time
from llmbox.engine.light_torch import import_torch
import_torch()
import torch
import llmbox.engine.executor.rank_engine as loader
from llmbox.engine.weights.packed_cache import cache, source

source.END_S = 60.0
load_rank, write = loader.load_rank, cache.write

def failing(config, plan, rank, progress):
    {failure}
    return load_rank(config, plan, rank, progress)

def slow(*args, **named):
    write(*args, **named)
    time.sleep({write_seconds})

loader.load_rank, cache.write = failing, slow
runpy.run_module("llmbox.engine.process.worker_main", run_name="__main__")
"""


@pytest.fixture
def children():
    """-> those that this test has now; other tests of this process may have left some."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "model", tokenizer=False)


@pytest.fixture
def workers(monkeypatch):
    """-> workers_that(failure): runs it in each worker before it loads."""

    def change(failure="pass", write_seconds=0.0):
        program = WORKER.format(failure=failure, write_seconds=write_seconds)
        monkeypatch.setattr(worker_group, "COMMAND", (sys.executable, "-P", "-c", program))
        monkeypatch.setattr(worker_group, "can_fork", lambda: False)

    return change


@pytest.mark.parametrize(
    ("cut", "failure", "words"),
    [
        (
            {"tp": 2, "pp": 2},
            "raise MemoryError('no room for 5 GB')",
            "rank 1: MemoryError: no room for 5 GB",
        ),
        ({"pp": 2}, "torch.empty(1 << 50)", "rank 1: RuntimeError: .*can't allocate memory"),
        ({"tp": 2}, "os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed while loading"),
    ],
)
def test_a_rank_that_fails_is_told_and_takes_the_load_with_it(model, workers, children, cut, failure, words):
    workers(f"if rank.layout.rank == 1: {failure}\n    else: time.sleep(30)")
    with pytest.raises(EngineError, match=words) as failed:
        load(model, **cut)
    assert failed.value.code == RankLost.code
    assert not children()


def test_ranks_that_cannot_meet_say_why(model, children, monkeypatch):
    """torch.distributed fails on all of them, as NCCL does where there is too little shared memory."""
    # It counts the group that failed, and by another name the next one of this process would meet nobody.
    monkeypatch.setattr(distributed_c10d, "_group_count", distributed_c10d._group_count)
    monkeypatch.setenv("LLMBOX_RANKS", "gloo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(DeviceError, match=r"rank 0 cannot connect to the other ranks over gloo: .*none0"):
        load(model, tp=2)
    assert not children()


def test_a_worker_that_cannot_meet_the_others_says_why(model, workers, children):
    workers(
        "from llmbox.engine.errors import DeviceError; from llmbox.engine.executor import multiproc; "
        "multiproc.ShmCommunicator = lambda *_: (_ for _ in ()).throw(DeviceError('no way to rank 0'))"
    )
    with pytest.raises(EngineError, match="rank 1: no way to rank 0") as failed:
        load(model, tp=2)
    assert failed.value.code == DeviceError.code
    assert not children()


def test_rank_0_does_not_finish_its_own_load_for_nothing(model, workers, children, monkeypatch):
    """It looks whenever it has read something."""
    workers("raise MemoryError('none')")
    read = []

    def slowly(done, total):
        read.append(done)
        (worker,) = children()
        until(lambda: worker.status() == psutil.STATUS_ZOMBIE)

    monkeypatch.setattr("llmbox.engine.executor.build.weights_progress", lambda _: slowly)
    with pytest.raises(EngineError, match="rank 1: MemoryError: none"):
        load(model, tp=2)
    assert len(read) == 1


def test_a_rank_that_is_stopped_is_not_waited_for(model, workers, children, monkeypatch):
    monkeypatch.setattr(worker_group, "STOPPED_SECONDS", 0.5)
    monkeypatch.setattr(worker_group, "_TICK", 0.1)
    workers("os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(RankLost, match="rank 1 was stopped before it was loaded"):
        load(model, pp=2)
    assert not children()


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=str)
def test_all_ranks_finish_writing_what_they_packed_before_they_end(
    model, workers, children, monkeypatch, tmp_path, cut
):
    """A first run that is shorter than the write; the second load reads no checkpoint."""
    monkeypatch.setattr(worker_group, "_END_SECONDS", 60.0)
    monkeypatch.setattr(source, "END_S", 60.0)
    folder = tmp_path / "repacked"
    for name, value in cache_variables(folder, 1.0).items():
        monkeypatch.setenv(name, value)
    workers(write_seconds=0.8)
    asked = [ask("a", range(5, 25), 12)]
    first = tokens(load(model, **cut), asked)
    finish()
    assert len(list(folder.glob("*.weights"))) == 2
    assert not list(folder.glob("*.part"))
    workers("sys.modules['llmbox.engine.weights.checkpoint'].Checkpoint.take_into = None")
    monkeypatch.setattr("llmbox.engine.weights.checkpoint.Checkpoint.take_into", None)
    assert tokens(load(model, **cut), asked) == first
    finish()
    assert not children()
