"""Runs pieces of work in processes of their own: one that loses the GPU, or hangs, takes only itself along.

A process does one piece after another for as long as its CUDA context works. What it says arrives at once.
"""

import gc
import os
import signal
import subprocess
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from gpu.report import FAILED, Report
from llmbox.engine.hardware.proc import bind_to_parent, family_of

START = 120.0
"""Seconds that a process may take to begin: imports, and a CUDA context."""
LAST = 8.0
"""Seconds after the end that what is under way may take."""
Say = Callable[[object], None]


class Piece(NamedTuple):
    name: str
    run: Callable[[Say], None]


class Ended(NamedTuple):
    """`error`: empty where all went well. `lost`: the process is of no use any more. `late`: out of time."""

    error: str = ""
    details: str = ""
    lost: bool = False
    late: bool = False


class Make(NamedTuple):
    """How the pieces are made: by each process anew, as closures cannot be sent."""

    function: Callable[..., Iterable[Piece]]
    arguments: tuple[Any, ...] = ()

    def pieces(self) -> list[Piece]:
        return list(self.function(*self.arguments))


class Worker:
    """One process, and the piece that it is at."""

    def __init__(self, make: Make) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, os.getpid(), make))
        self._process.start()
        theirs.close()
        self._is_ready = False
        self.number: int | None = None
        self.deadline = self.begun = 0.0

    def begin(self, number: int, limit: float) -> None:
        self.number, self.begun = number, time.monotonic()
        self.deadline = self.begun + (limit if self._is_ready else START)
        with suppress(OSError):  # it has died: what is received says so
            self.connection.send(number)

    def receive(self, limit: float) -> object:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.kill()
            return Ended(f"its process ended with status {self._process.exitcode}", lost=True)
        if message is None:
            self._is_ready, self.begun = True, time.monotonic()
        self.deadline = time.monotonic() + limit
        return message

    def kill(self) -> None:
        """With the compilers that it has started. Its memory is free when this returns."""
        if self._process.pid is not None and self._process.is_alive():
            for pid in family_of(self._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()


def serve(connection: Connection, parent: int, make: Make) -> None:
    """Do the pieces whose numbers come."""
    bind_to_parent(parent)
    pieces = make.pieces()
    connection.send(None)
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        ended = do(pieces[number], connection.send)
        connection.send(ended)
        if ended.lost:
            connection.close()
            os._exit(0)  # tearing down a broken context may hang


def do(piece: Piece, say: Say) -> Ended:
    """A kernel that faults is noticed by the next wait: there is one after each piece."""
    try:
        piece.run(say)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
        problem, details = f"{type(error).__name__}: {str(error)[:300]}", traceback.format_exc()
    else:
        return Ended()
    lost = has_lost_gpu()
    if not lost:
        gc.collect()  # an engine goes with its traceback, and the next one needs its memory
        torch.cuda.empty_cache()
    return Ended(problem, details, lost)


def has_lost_gpu() -> bool:
    """Whether an error has ended the CUDA context: then every call of this process fails."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # noqa: BLE001 - whatever it is, it will be the same for the next piece
        return True
    return False


def run(
    make: Make,
    hear: Callable[[str, object, float], None],
    *,
    end: float,
    limit: float,
    processes: int = 1,
) -> list[str]:
    """Pieces in their order, to whoever is free; the names of those that were not begun.

    `hear`: gets the name, what was said, last an `Ended`, and the seconds since the piece began. `end`: of
    `time.monotonic`, after which nothing is begun. `limit`: seconds without a word after which a piece hangs.
    """
    names = [piece.name for piece in make.pieces()]
    waiting, workers = deque(range(len(names))), list[Worker]()
    try:
        while True:
            while waiting and time.monotonic() < end:
                free = next((worker for worker in workers if worker.number is None), None)
                if free is None and len(workers) == processes:
                    break
                if free is None:
                    workers.append(free := Worker(make))
                free.begin(waiting.popleft(), limit)
            busy = [worker for worker in workers if worker.number is not None]
            if not busy:
                return [names[number] for number in waiting]
            for worker in busy_heard(busy, hear, names, end, limit):
                workers.remove(worker)
    finally:
        for worker in workers:
            worker.kill()


def busy_heard(
    busy: list[Worker], hear: Callable[[str, object, float], None], names: list[str], end: float, limit: float
) -> list[Worker]:
    """Wait until one says something or hangs; those that are gone."""
    soonest = min(*(worker.deadline for worker in busy), end + LAST)
    ready = wait([worker.connection for worker in busy], max(0.0, soonest - time.monotonic()))
    gone = []
    for worker in busy:
        message: object = None
        now = time.monotonic()
        if worker.connection in ready:
            message = worker.receive(limit)
        elif now > end + LAST:
            message = Ended("cut off, out of time", lost=True, late=True)
        elif now > worker.deadline:
            message = Ended(f"did not come back in {limit:.0f} s", lost=True)
        if message is None:
            continue
        assert worker.number is not None
        took = time.monotonic() - worker.begun
        if isinstance(message, Ended):
            number, worker.number = worker.number, None
            if message.lost:
                gone.append(worker)
                worker.kill()
            hear(names[number], message, took)
        else:
            hear(names[worker.number], message, took)
    return gone


def tell_lines(report: Report, make: Make, *, limit: float, spare: float = 0.0, processes: int = 1) -> None:
    """The lines that the pieces say are the report's.

    `spare`: seconds before the end in which nothing is begun.
    """

    def hear(name: str, message: object, _took: float) -> None:
        if isinstance(message, str):
            report.say(message)
            if message.startswith(FAILED):
                report.failures.append(message)
        elif isinstance(message, Ended) and message.late:
            report.say(f"\n{name}: {message.error}.")
        elif isinstance(message, Ended) and message.error:
            report.failed(f"{name}: {message.error}", message.details)

    left_out = run(make, hear, end=time.monotonic() + report.left - spare, limit=limit, processes=processes)
    report.skipped(left_out)


def kill_group(process: "subprocess.Popen[str]") -> None:
    """A process that was started as the first of its group, and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
