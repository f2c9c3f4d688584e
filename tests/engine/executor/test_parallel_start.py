"""What rank 0 finds out before it lets ranks meet."""

from types import SimpleNamespace

import pytest
import torch.distributed

from llmbox.engine.config import EngineConfig
from llmbox.engine.distributed.shm_communicator import PeerSockets
from llmbox.engine.errors import DeviceError
from llmbox.engine.executor import multiproc as start
from llmbox.engine.executor import workers
from llmbox.engine.model_config.parallel_layout import ParallelLayout


class FakeGroup:
    """Workers that have loaded with kernels of these names."""

    layout = ParallelLayout(2, 1, 0)
    closed = 0
    processes = ()

    def __init__(self, *backends):
        self._told = [{"backend": backend, "measured": None} for backend in backends]

    def start(self, *_):
        return SimpleNamespace(poll=lambda: None, wait=lambda: self._told)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(
    ("device", "backend", "refused"),
    [("cuda", "reference", True), ("cuda", "triton", False), ("cpu", "reference", False)],
)
def test_ranks_on_gpus_that_run_other_kernels_do_not_meet(monkeypatch, device, backend, refused):
    """They would exchange other things to draw a token."""
    group, met = FakeGroup(backend), []
    monkeypatch.setattr(start, "WorkerGroup", lambda _: group)
    monkeypatch.setattr(start, "at_exit", lambda _: None)
    monkeypatch.setattr(start, "WorkerWatchdog", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(start.RankProcesses, "_connect", lambda *_: met.append(True))
    config = EngineConfig(model_path="none", name="m")
    ranks = start.RankProcesses(config, SimpleNamespace(device=device), group.layout)
    mine = SimpleNamespace(backend="triton", measured=None)
    if refused:
        with pytest.raises(DeviceError, match=r"rank 1 can run other kernels \(reference\) than rank 0"):
            ranks.load(lambda *_: mine, lambda *_: None)
    else:
        assert ranks.load(lambda *_: mine, lambda *_: None) == (mine, None)
    assert (bool(met), group.closed) == (not refused, int(refused))


@pytest.fixture
def two_gpus(monkeypatch):
    """-> what `join` was asked for; it raises what is in `failing`."""
    told = SimpleNamespace(options=None, failing=None)

    def join(*_, **options):
        told.options = options
        if told.failing is not None:
            raise told.failing
        return "collective"

    monkeypatch.setattr(start, "join", join)
    monkeypatch.setattr(start, "cuda_machine", lambda: SimpleNamespace(nvlink=(frozenset({0, 1}),)))
    return told


def connect():
    config, plan = EngineConfig(model_path="none", name="m"), SimpleNamespace(gpus=(1, 0))
    return start.connect(
        ParallelLayout(2, 1, 1), config, plan, SimpleNamespace(close=lambda: None), "nccl", "file"
    )


@pytest.mark.parametrize(("chosen", "joined"), [(None, True), ("gloo", True), ("nccl", False)])
def test_kernels_between_peers_can_be_left_out(two_gpus, monkeypatch, chosen, joined):
    monkeypatch.delenv("LLMBOX_RANKS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("LLMBOX_RANKS", chosen)
    assert connect() == "collective"
    assert two_gpus.options == {"ordered": False, "joined": joined}


def test_what_nccl_says_is_told_in_one_line_with_what_to_do(two_gpus):
    two_gpus.failing = torch.distributed.DistBackendError("unhandled system error\nLast error:\nno /dev/shm")
    with pytest.raises(DeviceError) as failed:
        connect()
    told = str(failed.value)
    assert told.startswith(
        "rank 1 cannot connect to the other ranks over nccl: unhandled system error Last error: no /dev/shm. "
        "NCCL_DEBUG"
    )
    assert "--shm-size" in told


@pytest.mark.parametrize(
    ("device", "chosen", "over"),
    [("cuda", None, "nccl"), ("cuda", "gloo", "nccl"), ("cpu", "gloo", "gloo"), ("cpu", "nccl", "mesh")],
)
def test_what_ranks_exchange_numbers_over(monkeypatch, device, chosen, over):
    monkeypatch.delenv("LLMBOX_RANKS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("LLMBOX_RANKS", chosen)
    assert start.choose_transport(SimpleNamespace(device=device)) == over


@pytest.mark.parametrize(
    ("can_fork", "threads", "how"), [(True, 1, "fork"), (True, 2, "spawn"), (False, 1, "spawn")]
)
def test_ranks_are_forked_from_a_process_that_can_be(monkeypatch, can_fork, threads, how):
    """Not where there is a GPU, where threads are pinned, or beside another thread."""
    told = []
    monkeypatch.setattr(workers, "can_fork", lambda: can_fork)
    monkeypatch.setattr(workers, "num_threads", lambda: threads)
    for name in ("fork", "spawn"):
        monkeypatch.setattr(workers, f"_{name}", lambda link, *files, name=name: told.append((name, files)))
    worker = workers.start_worker(1, PeerSockets(7, {0: 8}), (9,))
    worker.link.close()
    assert told == [(how, (7, 8, 9))]
