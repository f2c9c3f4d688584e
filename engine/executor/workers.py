"""Worker processes of rank 0: start, load, rendezvous, shut down."""

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal

from ..config import EngineConfig
from ..distributed.shm_communicator import PeerSockets, make_ends
from ..distributed.step_codec import Frame, Link
from ..errors import EngineError, RankLost
from ..hardware.proc import can_fork, fork_child, num_threads, read_state
from ..ipc.spawn import ForkedProcess
from ..model_config.parallel_layout import ParallelLayout
from ..planning.memory_plan import MemoryPlan

ARENA_BYTES: Final = 1 << 30
"""Address space of the memory that ranks share for KV blocks (`SharedBuffers`); the system gives pages when
they are first used."""
STOPPED_SECONDS: Final = 5.0
"""Time after which a worker that was stopped (SIGSTOP) while others wait for it counts as lost."""
_TICK: Final = 1.0
_END_SECONDS: Final = 2.0

log = logging.getLogger("llmbox.engine")


class WorkerLoadFailed(EngineError):  # noqa: N818 - named for what happened
    """A worker could not load its shard and reported why."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Worker:
    rank: int
    process: ForkedProcess | subprocess.Popen[bytes]
    link: Link


class WorkerBarrier:
    """Barrier: rank 0 waits for one frame from every worker and fails as soon as one worker does."""

    def __init__(self, workers: Sequence[Worker], wanted: str) -> None:
        """`wanted`: the kind of frame that each worker sends once."""
        self._workers = workers
        self._wanted = wanted
        self._missing = {worker.link.fileno(): worker for worker in workers}
        self._answers: dict[int, dict[str, Any]] = {}
        self._poll = select.poll()
        for fd in self._missing:
            self._poll.register(fd, select.POLLIN)

    def poll(self, seconds: float = 0.0) -> None:
        """Receive the frames that arrive within `seconds`.

        Raises WorkerLoadFailed, or RankLost for a worker that is gone.
        """
        for fd, _ in self._poll.poll(seconds * 1000):
            worker = self._missing.pop(fd)
            self._poll.unregister(fd)
            self._answers[worker.rank] = self._answer(worker)

    def wait(self) -> list[dict[str, Any]]:
        """Return the bodies of all workers' frames, in the order of ranks.

        Raises as `poll` does, and RankLost for a worker that was stopped.
        """
        stopped_since: float | None = None
        while self._missing:
            self.poll(_TICK)
            stopped = self._stopped()
            if not stopped:
                stopped_since = None
            elif stopped_since is None:
                stopped_since = time.monotonic()
            elif time.monotonic() - stopped_since >= STOPPED_SECONDS:
                raise RankLost(
                    f"rank {', '.join(map(str, stopped))} was stopped before it was {self._wanted}"
                )
        return [self._answers[worker.rank] for worker in self._workers]

    def _stopped(self) -> list[int]:
        """Return the stopped ranks among those that are missing."""
        states = {worker.rank: read_state(worker.process.pid) for worker in self._missing.values()}
        return [rank for rank, state in states.items() if state is not None and state.is_stopped]

    def _answer(self, worker: Worker) -> dict[str, Any]:
        try:
            frame = worker.link.receive()
        except RankLost:
            raise RankLost(f"rank {worker.rank} {_end_of(worker.process)}") from None
        if frame.kind == "refused":
            raise WorkerLoadFailed(frame.body["code"], f"rank {worker.rank}: {frame.body['message']}")
        assert frame.kind == self._wanted
        return frame.body


def _end_of(process: ForkedProcess | subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its end while loading"
    if code == -signal.SIGKILL:
        return (
            "was killed while loading, by the kernel if memory ran out: load with less "
            "--memory, a shorter --ctx or quantized weights (--quant int8)"
        )
    return (
        f"was ended by signal {-code} while loading" if code < 0 else f"ended while loading, with code {code}"
    )


MODULE: Final = "llmbox.engine.process.worker_main"
COMMAND: Final = (sys.executable, "-P", "-m", MODULE)

Transport = Literal["mesh", "gloo", "nccl"]
"""Transport of the collectives: shared memory, gloo or NCCL."""


class WorkerGroup:
    """All workers of an engine, owned by rank 0."""

    def __init__(self, layout: ParallelLayout) -> None:
        """`layout` is rank 0's."""
        self.layout = layout
        self.processes: list[Worker] = []
        self._ends: PeerSockets | None = None
        """Rank 0's ends of the shared-memory transport, until they are taken."""
        self.shared_blocks = -1
        """Memory for KV blocks on their way to and from disk."""
        self.block_events: list[int] = []
        """Eventfd of each worker, for its copies of KV blocks."""
        self._folder: Path | None = None
        self._shut_down_at: float | None = None

    def start(self, config: EngineConfig, plan: MemoryPlan) -> WorkerBarrier:
        """Start every worker on loading its shard; the barrier collects their `loaded` frames."""
        self._ends, *others = make_ends(self.layout)
        self.shared_blocks = os.memfd_create("llmbox-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.shared_blocks, ARENA_BYTES)
        for rank, ends in enumerate(others, 1):
            self.block_events.append(os.eventfd(0, os.EFD_CLOEXEC))
            blocks = self.shared_blocks, self.block_events[-1]
            worker = start_worker(rank, ends, blocks)
            self.processes.append(worker)
            body = {"config": asdict(config), "plan": asdict(plan), "rank": rank, "ends": asdict(ends)}
            body["blocks"] = blocks
            worker.link.send(Frame("load", body).encode())
            ends.close()
        return WorkerBarrier(self.processes, "loaded")

    def take_sockets(self) -> PeerSockets:
        ends, self._ends = self._ends, None
        assert ends is not None
        return ends

    def start_rendezvous(self, over: Transport) -> Path:
        """Ask all workers to join; return the file store of the rendezvous, which `finish_rendezvous`
        removes.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="llmbox-ranks-"))  # 0700
        file = self._folder / "store"
        self.send(Frame("join", {"file": str(file), "over": over}))
        return file

    def finish_rendezvous(self) -> None:
        """Wait until all workers have joined and remove the file store."""
        WorkerBarrier(self.processes, "joined").wait()
        self._forget_folder()

    def all_min(self, number: int) -> int:
        """Return the minimum of `number` over all ranks, and send it to every worker."""
        numbers = [worker.link.receive().body["number"] for worker in self.processes]
        number = min([number, *numbers])
        self.send(Frame("least", {"number": number}))
        return number

    def send(self, frame: Frame) -> None:
        data = frame.encode()
        for worker in self.processes:
            worker.link.send(data)

    def receive(self, rank: int) -> Frame:
        return self.processes[rank - 1].link.receive()

    def shut_down(self) -> None:
        """Ask all workers to end, without waiting: each finishes what it is writing. Idempotent."""
        if self._shut_down_at is None:
            self._shut_down_at = time.monotonic()
            for worker in self.processes:
                worker.link.close()

    def close(self) -> None:
        """Wait until all workers have ended; kill those that take longer than `_END_SECONDS`. Idempotent."""
        self.shut_down()
        assert self._shut_down_at is not None
        for worker in self.processes:
            try:
                worker.process.wait(max(0.0, self._shut_down_at + _END_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.processes = []
        for handle in (*self.block_events, *([self.shared_blocks] if self.shared_blocks >= 0 else [])):
            os.close(handle)
        self.shared_blocks, self.block_events = -1, []
        if self._ends is not None:
            self.take_sockets().close()
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def start_worker(rank: int, ends: PeerSockets, blocks: tuple[int, ...] = ()) -> Worker:
    """Start a worker in this process group, so that a signal to the group reaches all ranks. `blocks`:
    descriptors for KV blocks. It is forked where it can be, as importing torch takes half a second.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        start = _fork if can_fork() and num_threads() == 1 else _spawn
        process = start(theirs.fileno(), *ends.all, *blocks)
    return Worker(rank, process, Link(ours))


def _fork(link: int, *files: int) -> ForkedProcess:
    main = import_module(MODULE).main
    arguments = _arguments(link)
    return ForkedProcess(fork_child(lambda: main(arguments), (link, *files)))


def _spawn(link: int, *files: int) -> "subprocess.Popen[bytes]":
    command = [*COMMAND, *_arguments(link)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(link, *files))  # noqa: S603 - ours


def _arguments(link: int) -> list[str]:
    return ["--fd", str(link), "--parent", str(os.getpid())]


def all_min_on_worker(link: Link, number: int) -> int:
    """Worker side of `WorkerGroup.all_min`."""
    link.send(Frame("number", {"number": number}).encode())
    return int(link.receive().body["number"])


def cores_of_rank(cores: Iterable[int], layout: ParallelLayout) -> list[int]:
    """Return the cores of this rank; all of them where there are fewer cores than ranks."""
    all_cores = list(cores)
    size = len(all_cores) // layout.ranks
    return all_cores[layout.rank * size : (layout.rank + 1) * size] if size else all_cores
