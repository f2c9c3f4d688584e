"""From a plan for several ranks to a runner: workers and rank 0 load side by side, then all join."""

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ..config import EngineConfig
from ..estimator import MemoryPlan
from ..gpu.runner import DeviceRunner
from ..machine import read_machine
from ..pipeline import OverlappingRunner
from .crew import Crew, Over
from .cut import are_joined
from .group import join, leave
from .layout import Layout
from .mesh import Ends, MeshCollective
from .rank import Collective, Rank
from .runner import DeviceRanks, ParallelRunner
from .watch import Watch


class Loaded(Protocol):
    """`loader.Share`."""

    @property
    def measured(self) -> int | None: ...
    def finish(self, agree: Callable[[int], int]) -> tuple[Any, MemoryPlan]: ...


L = TypeVar("L", bound=Loaded)


class Ranks:
    """Rank 0's view of all of them."""

    def __init__(self, config: EngineConfig, plan: MemoryPlan, layout: Layout) -> None:
        self._config = config
        self._plan = plan
        self._crew = Crew(layout)

    def load(self, load: Callable[[Rank], L]) -> tuple[L, int | None]:
        """What rank 0 loaded, and the bytes that the weights of all ranks took. Raises EngineError."""
        crew = self._crew
        try:
            crew.start(self._config, self._plan)
            rank = Rank(crew.layout)
            mine = load(rank)
            told = crew.loaded()
            over = choose(self._plan)
            file = crew.meet(over)
            rank.join(connect(rank.layout, self._config, self._plan, crew.take_ends(), over, file))
            crew.met()
        except BaseException:
            crew.close()
            raise
        measured = [mine.measured, *(each["measured"] for each in told)]
        return mine, None if None in measured else sum(filter(None, measured))

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._crew.workers]

    def runner(self, share: Loaded) -> tuple[OverlappingRunner, MemoryPlan]:
        """And the plan, as measured by all. Raises DoesNotFit."""
        crew, watch = self._crew, Watch(self._crew.workers)
        try:
            with watch.guarding():
                local, plan = share.finish(crew.least)
        except BaseException:
            watch.close()
            crew.close()
            raise
        make = DeviceRanks if isinstance(local, DeviceRunner) else ParallelRunner
        runner = make(local, crew, watch)
        atexit.register(end, runner)
        return runner, plan


def end(runner: ParallelRunner | DeviceRanks) -> None:
    """Of the engine: workers go by themselves, and no library meets a half-gone interpreter."""
    runner.close()
    leave()


def choose(plan: MemoryPlan) -> Over:
    if plan.device == "cuda":
        return "nccl"
    return "gloo" if os.environ.get("LLMBOX_RANKS") == "gloo" else "mesh"


def connect(
    layout: Layout, config: EngineConfig, plan: MemoryPlan, ends: Ends, over: Over, file: Path
) -> Collective:
    """Called by every rank."""
    if over == "mesh":
        return MeshCollective(layout, ends)
    ends.close()
    if over == "gloo":
        return join(layout, torch.device("cpu"), file, ordered=True)
    joined = are_joined([plan.gpus[rank] for rank in layout.stage_ranks], read_machine().nvlink)
    device = torch.device("cuda", plan.gpus[layout.rank])
    return join(layout, device, file, ordered=config.deterministic, joined=joined)
