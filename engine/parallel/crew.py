"""Rank 0's workers: started, loaded, met, and gone with it."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final, Literal

from ..config import EngineConfig
from ..estimator import MemoryPlan
from .layout import Layout
from .link import Frame, Link
from .mesh import Ends, make_ends
from .roll_call import RollCall, Worker

_END_SECONDS: Final = 2.0
COMMAND: Final = (sys.executable, "-P", "-m", "llmbox.engine.worker")

Over = Literal["mesh", "gloo", "nccl"]
"""What ranks exchange numbers over."""


class Crew:
    def __init__(self, layout: Layout) -> None:
        """`layout` is rank 0's."""
        self.layout = layout
        self.workers: list[Worker] = []
        self._ends: Ends | None = None
        """Rank 0's of the mesh, until they are taken."""
        self._folder: Path | None = None
        self._dismissed_at: float | None = None

    def start(self, config: EngineConfig, plan: MemoryPlan) -> RollCall:
        """Every worker begins to load its part, and says when it has it."""
        self._ends, *others = make_ends(self.layout)
        for rank, ends in enumerate(others, 1):
            worker = spawn(rank, ends)
            self.workers.append(worker)
            body = {"config": asdict(config), "plan": asdict(plan), "rank": rank, "ends": asdict(ends)}
            worker.link.send(Frame("load", body).encode())
            ends.close()
        return RollCall(self.workers, "loaded")

    def take_ends(self) -> Ends:
        ends, self._ends = self._ends, None
        assert ends is not None
        return ends

    def meet(self, over: Over) -> Path:
        """Tells all to join; returns the file to meet over, which `met` removes."""
        self._folder = Path(tempfile.mkdtemp(prefix="llmbox-ranks-"))  # 0700
        file = self._folder / "store"
        self.send(Frame("join", {"file": str(file), "over": over}))
        return file

    def met(self) -> None:
        RollCall(self.workers, "joined").all()
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

    def receive(self, rank: int) -> Frame:
        return self.workers[rank - 1].link.receive()

    def dismiss(self) -> None:
        """They begin to end: each finishes what it is about to write. Idempotent."""
        if self._dismissed_at is None:
            self._dismissed_at = time.monotonic()
            for worker in self.workers:
                worker.link.close()

    def close(self) -> None:
        """Waits for their end; those that take long are killed. Idempotent."""
        self.dismiss()
        assert self._dismissed_at is not None
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, self._dismissed_at + _END_SECONDS - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self.workers = []
        if self._ends is not None:
            self.take_ends().close()
        self._forget_folder()

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
