"""From a plan for several ranks to a runner: workers and rank 0 load side by side, then all join."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch

from ..config import EngineConfig
from ..cuda_order import cuda_machine
from ..ending import before_end
from ..errors import DeviceError
from ..estimator import MemoryPlan
from ..gpu.runner import DeviceRunner
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
    def backend(self) -> str: ...
    @property
    def measured(self) -> int | None: ...
    def finish(self, agree: Callable[[int], int]) -> tuple[Any, MemoryPlan]: ...


_CHOICE: Final = "LLMBOX_RANKS"
"""gloo: torch.distributed between CPUs. nccl: no kernels of ours between GPUs, nor torch's."""
_NCCL_HINT: Final = (
    ". NCCL_DEBUG=INFO in the daemon's environment tells more in the log; a container needs shared memory "
    "(--shm-size 1g)"
)

L = TypeVar("L", bound=Loaded)
Progress = Callable[[int, int], None]


class Ranks:
    """Rank 0's view of all of them."""

    def __init__(self, config: EngineConfig, plan: MemoryPlan, layout: Layout) -> None:
        self._config = config
        self._plan = plan
        self._crew = Crew(layout)
        self._watch: Watch | None = None
        """Once all have loaded: until then whoever fails may say why."""

    def load(self, load: Callable[[Rank, Progress], L], progress: Progress) -> tuple[L, int | None]:
        """What rank 0 loaded, and the bytes that the weights of all ranks took. Raises EngineError."""
        before_end(self._end)
        try:
            roll_call = self._crew.start(self._config, self._plan)

            def told(done: int, total: int) -> None:
                roll_call.hear()  # one that cannot load ends it for all
                progress(done, total)

            rank = Rank(self._crew.layout)
            mine = load(rank, told)
            others = roll_call.all()
            if self._plan.device == "cuda":
                refuse_other_kernels([mine.backend, *(each["backend"] for each in others)])
            self._watch = Watch(self._crew.workers)
            self._meet(rank)
        except BaseException:
            self._close()
            raise
        measured = [mine.measured, *(each["measured"] for each in others)]
        return mine, None if None in measured else sum(filter(None, measured))

    def _meet(self, rank: Rank) -> None:
        over = choose(self._plan)
        file = self._crew.meet(over)
        rank.join(connect(rank.layout, self._config, self._plan, self._crew.take_ends(), over, file))
        self._crew.met()

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._crew.workers]

    def runner(self, share: Loaded) -> tuple[OverlappingRunner, MemoryPlan]:
        """And the plan, as measured by all. Raises DoesNotFit."""
        assert self._watch is not None
        try:
            with self._watch.guarding():
                local, plan = share.finish(self._crew.least)
        except BaseException:
            self._close()
            raise
        make = DeviceRanks if isinstance(local, DeviceRunner) else ParallelRunner
        runner = make(local, self._crew, self._watch)
        # Before what `load` left to finish, so that all ranks do that side by side; `_end` comes last.
        before_end(runner.dismiss)
        return runner, plan

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._crew.close()

    def _end(self) -> None:
        """Of the engine: no library meets a half-gone interpreter."""
        self._close()
        leave()


def refuse_other_kernels(backends: Sequence[str]) -> None:
    """Of all ranks. What is exchanged to draw a token follows from the kernels that draw: with others a rank
    would wait for what nobody sends. Raises DeviceError.
    """
    for rank, name in enumerate(backends):
        if name != backends[0]:
            raise DeviceError(
                f"rank {rank} can run other kernels ({name}) than rank 0 ({backends[0]}): the log says why, "
                "and LLMBOX_KERNELS=reference takes the same on all"
            )


def choose(plan: MemoryPlan) -> Over:
    if plan.device == "cuda":
        return "nccl"
    return "gloo" if os.environ.get(_CHOICE) == "gloo" else "mesh"


def connect(
    layout: Layout, config: EngineConfig, plan: MemoryPlan, ends: Ends, over: Over, file: Path
) -> Collective:
    """Called by every rank. Raises DeviceError."""
    if over == "mesh":
        return MeshCollective(layout, ends)
    ends.close()
    try:
        return join_gpus(layout, config, plan, file) if over == "nccl" else join_cpus(layout, file)
    except RuntimeError as error:  # of torch.distributed, what is below it, or CUDA
        words = " ".join(str(error).split())
        hint = _NCCL_HINT if over == "nccl" else ""
        raise DeviceError(f"rank {layout.rank} cannot meet the others over {over}: {words}{hint}") from error


def join_cpus(layout: Layout, file: Path) -> Collective:
    return join(layout, torch.device("cpu"), file, ordered=True)


def join_gpus(layout: Layout, config: EngineConfig, plan: MemoryPlan, file: Path) -> Collective:
    peers = are_joined([plan.gpus[rank] for rank in layout.stage_ranks], cuda_machine().nvlink)
    joined = peers and os.environ.get(_CHOICE) != "nccl"
    device = torch.device("cuda", plan.gpus[layout.rank])
    return join(layout, device, file, ordered=config.deterministic, joined=joined)
