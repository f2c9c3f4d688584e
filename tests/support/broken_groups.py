"""Groups of checks that fault, hang or die, as kernels do; and pieces that run in this process."""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu import apart
from gpu.checks import Check, Checks, Group, Setting

GROUPS = 12


def faulty(setting: Setting) -> Iterator[Group]:
    """The third loses this process's CUDA context: whatever else the process does fails from then on."""
    stand_in_for_cuda()
    for number in range(GROUPS):
        yield Group(f"group {number}", lambda number=number: passing(number) if number != 2 else fault())
    del setting


def hanging(setting: Setting) -> Iterator[Group]:
    stand_in_for_cuda()
    yield Group("hanging", hang)
    yield from list(faulty(setting))[3:6]


def dying(setting: Setting) -> Iterator[Group]:
    stand_in_for_cuda()
    yield Group("dying", die)
    yield from list(faulty(setting))[3:6]


def wrong(setting: Setting) -> Iterator[Group]:
    """One breaks and leaves the GPU as it was; one is wrong; one has something to tell."""
    stand_in_for_cuda()
    yield Group("broken", broken)
    yield Group("wrong", lambda: iter([Check("good", 0.1, 0.5), Check("bad", 0.7, 0.5)]))
    yield Group("noted", lambda: iter([Check("near", 0.4, 0.5, "differs in the bits of 2 numbers")]))
    del setting


def passing(number: int) -> Checks:
    torch.cuda.synchronize()
    yield Check(f"check {number}", 0.1, 0.5)
    yield Check(f"other check {number}", 0.4, 0.5)


def fault() -> Checks:
    def gone(_device: object = None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    yield Check("check before the fault", 0.2, 0.5)
    torch.cuda.synchronize = gone
    torch.cuda.synchronize()


def broken() -> Checks:
    yield Check("first", 0.1, 0.5)
    raise ValueError("out of shared memory")


def hang() -> Checks:
    """As a compiler that does not end, in a process of its own."""
    yield Check("before", 0.1, 0.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["GROUPS_CHILD"]).write_text(str(child.pid))
    time.sleep(600)


def die() -> Checks:
    yield Check("before", 0.1, 0.5)
    os.abort()


def stand_in_for_cuda() -> None:
    """In a process of checks, not in the one that only asks for names: CUDA seems to work."""
    if multiprocessing.parent_process() is not None:
        torch.cuda.is_initialized = lambda: True
        torch.cuda.synchronize = lambda _device=None: None
        torch.cuda.empty_cache = lambda: None


def is_gone(pid: int) -> bool:
    """Whether a process that was killed has ended: its parent may not have heard of it yet."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def run_here(
    make: apart.Make,
    hear: Callable[[str, object, float], None],
    *,
    end: float,
    limit: float,
    processes: int = 1,
) -> list[str]:
    """In place of `apart.run` where nothing can be replaced in other processes."""
    del limit, processes
    pieces = make.pieces()
    for place, piece in enumerate(pieces):
        if time.monotonic() > end:
            return [each.name for each in pieces[place:]]

        def say(message: Any, name: str = piece.name) -> None:
            hear(name, message, 0.0)

        say(apart.do(piece, say))
    return []
