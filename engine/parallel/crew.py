"""Rank 0's workers: started, loaded, met, and gone with it."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..config import EngineConfig
from ..errors import EngineError
from ..estimator import MemoryPlan
from .layout import Layout
from .link import Frame, Link, RankLost
from .mesh import Ends, make_ends

_END_SECONDS: Final = 2.0
COMMAND: Final = (sys.executable, "-P", "-m", "llmbox.engine.worker")

Over = Literal["mesh", "gloo", "nccl"]
"""What ranks exchange numbers over."""


class Refused(EngineError):  # noqa: N818 - named for what happened
    """A worker could not load its part, for a reason that it told."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Worker:
    rank: int
    process: "subprocess.Popen[bytes]"
    link: Link


class Crew:
    def __init__(self, layout: Layout) -> None:
        """`layout` is rank 0's."""
        self.layout = layout
        self.workers: list[Worker] = []
        self._ends: Ends | None = None
        """Rank 0's of the mesh, until they are taken."""
        self._folder: Path | None = None

    def start(self, config: EngineConfig, plan: MemoryPlan) -> None:
        """Every worker begins to load its part."""
        self._ends, *others = make_ends(self.layout)
        for rank, ends in enumerate(others, 1):
            worker = spawn(rank, ends)
            self.workers.append(worker)
            body = {"config": asdict(config), "plan": asdict(plan), "rank": rank, "ends": asdict(ends)}
            worker.link.send(Frame("load", body).encode())
            ends.close()

    def take_ends(self) -> Ends:
        ends, self._ends = self._ends, None
        assert ends is not None
        return ends

    def loaded(self) -> list[dict[str, Any]]:
        """What each worker says of its part when it is loaded. Raises EngineError."""
        return [self._answer(worker, "loaded") for worker in self.workers]

    def meet(self, over: Over) -> Path:
        """Tells all to join; returns the file to meet over, which `met` removes."""
        self._folder = Path(tempfile.mkdtemp(prefix="llmbox-ranks-"))  # 0700
        file = self._folder / "store"
        self.send(Frame("join", {"file": str(file), "over": over}))
        return file

    def met(self) -> None:
        for worker in self.workers:
            self._answer(worker, "joined")
        self._forget_folder()

    def least(self, number: int) -> int:
        """Of this rank's number and those that the workers tell by `least_of`; they are told it."""
        told = [worker.link.receive().body["number"] for worker in self.workers]
        number = min([number, *told])
        self.send(Frame("least", {"number": number}))
        return number

    def send(self, frame: Frame) -> None:
        data = frame.encode()
        for worker in self.workers:
            worker.link.send(data)

    def send_to(self, rank: int, frame: Frame) -> None:
        self.workers[rank - 1].link.send(frame.encode())

    def receive(self, rank: int) -> Frame:
        return self.workers[rank - 1].link.receive()

    def close(self) -> None:
        """Ends all of them: those that do not go by themselves are killed. Idempotent."""
        for worker in self.workers:
            worker.link.close()
        for worker in self.workers:
            try:
                worker.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.workers = []
        if self._ends is not None:
            self.take_ends().close()
        self._forget_folder()

    def _answer(self, worker: Worker, wanted: str) -> dict[str, Any]:
        try:
            frame = worker.link.receive()
        except RankLost:
            code = worker.process.wait()
            raise RankLost(f"rank {worker.rank} ended while loading, with code {code}") from None
        if frame.kind == "refused":
            raise Refused(frame.body["code"], f"rank {worker.rank}: {frame.body['message']}")
        assert frame.kind == wanted
        return frame.body

    def _forget_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def spawn(rank: int, ends: Ends) -> Worker:
    """In our process group, so that whoever kills that gets all of us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - the command is ours
            [*COMMAND, "--fd", str(theirs.fileno()), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *ends.all),
        )
    return Worker(rank, process, Link(ours))


def least_of(link: Link, number: int) -> int:
    """A worker's side of `Crew.least`."""
    link.send(Frame("number", {"number": number}).encode())
    return int(link.receive().body["number"])


def share(cores: Iterable[int], layout: Layout) -> list[int]:
    """Of the cores, those of this rank; all where there are fewer than ranks."""
    all_cores = list(cores)
    size = len(all_cores) // layout.ranks
    return all_cores[layout.rank * size : (layout.rank + 1) * size] if size else all_cores
