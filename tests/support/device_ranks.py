"""Ranks of runners for devices, a thread each: their own devices that are late, told over real links."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.step import StepPlan
from llmbox.engine.distributed.communicator import TensorParallel
from llmbox.engine.distributed.step_codec import Frame, Link
from llmbox.engine.errors import RankLost
from llmbox.engine.executor.build import make_scheduler, memory_budget
from llmbox.engine.executor.load_model import model_info
from llmbox.engine.executor.multiproc import AsyncMultiprocExecutor
from llmbox.engine.executor.profile import build
from llmbox.engine.executor.rank_engine import RankEngine, load_rank
from llmbox.engine.executor.watchdog import WorkerWatchdog
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.planning.estimator import MemoryPlan, estimate
from llmbox.engine.process.worker_main import serve_launches
from llmbox.engine.runner.gpu_runner import GPUModelRunner
from llmbox.engine.runner.prompt_results import LaunchedStep
from llmbox.kernels.dispatch import load_backend
from support.late_device import FakeCapture, LateDevice
from support.no_questions import NoQuestions
from support.rank_threads import Stage, ThreadCollective


@dataclass(slots=True)
class OneRank:
    runner: GPUModelRunner
    device: LateDevice
    collective: ThreadCollective
    capture: FakeCapture | None
    share: RankEngine
    errors: list[Exception] = field(default_factory=list)
    drawn: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Of the steps it launched."""

    def __post_init__(self) -> None:
        launch = self.runner.launch_sized

        def noting(plan: StepPlan, size: int) -> LaunchedStep:
            self.sizes.append(size)
            launched = launch(plan, size)
            if launched.sampled is not None:
                self.drawn.append(launched.sampled.ids_S.clone())
            return launched

        self.runner.launch_sized = noting

    def work_apart(self, pool: Executor, before: Callable[[int], None]) -> None:
        """From now on steps are computed by the only thread of `pool`, as by a device: a launch returns at
        once. For requests without rules, as those look at the host's state. `before(n)` begins the step n.
        """
        launch, collect = self.runner.launch_sized, self.runner.collect

        def late(plan: StepPlan, size: int) -> LaunchedStep:
            before(len(self.sizes))
            return launch(plan, size)

        self.runner.launch_sized = lambda plan, size: Computing(pool.submit(late, plan, size))
        self.runner.collect = lambda handle: collect(handle.future.result())

    def forbid_questions(self) -> None:
        """From now on a launch may not look at what is on the device, but for the forward pass, whose
        attention is the reference's: it looks.
        """
        runner, questions = self.runner, NoQuestions()
        runner.launch_sized = questions.during(runner.launch_sized)
        runner._forward = questions.but_for(runner._forward)
        runner._model.hidden = questions.but_for(runner._model.hidden)


@dataclass(frozen=True, slots=True)
class Computing:
    future: Future[LaunchedStep]

    def wait(self) -> None:
        self.future.result().wait()


class ThreadCrew:
    """Stands for `Crew`: workers are threads that end with their links."""

    def __init__(self, layout: ParallelLayout, ranks: list[OneRank], stages: list[Stage]) -> None:
        self.layout = layout
        self._stages = stages
        self._links: list[Link] = []
        self._threads: list[threading.Thread] = []
        for number, rank in enumerate(ranks[1:], 1):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            self._links.append(Link(ours))
            thread = threading.Thread(target=self._serve, args=(number, Link(theirs), rank))
            self._threads.append(thread)
            thread.start()

    def send(self, frame: Frame) -> None:
        data = frame.encode()
        for link in self._links:
            link.send(data)

    def receive(self, rank: int) -> Frame:
        return self._links[rank - 1].receive()

    def shut_down(self) -> None:
        for link in self._links:
            link.close()
        for stage in self._stages:
            stage.end()

    def close(self) -> None:
        self.shut_down()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()

    def _serve(self, number: int, link: Link, rank: OneRank) -> None:
        try:
            serve_launches(link, rank.runner, answers=number == self.layout.answers)
        except RankLost:
            pass
        except Exception as error:  # noqa: BLE001 - told by the test
            rank.errors.append(error)
            for stage in self._stages:
                stage.barrier.abort()
                stage.end()
        finally:
            link.close()


@contextmanager
def device_ranks(
    directory: Path,
    graphs: bool = False,
    fail_at: dict[int, int] | None = None,
    fused_rows: int = 0,
    **options: Any,
) -> Iterator[tuple[Engine, list[OneRank]]]:
    """`fail_at`: by rank the capture that fails there. `fused_rows`: see `ThreadCollective`."""
    settings = {"device": "cpu", "threads": 1, "memory_bytes": 256 << 20, "overlap": True, **options}
    config = EngineConfig(model_path=str(directory), name="tiny", **settings)
    model = parse_config(directory)
    plan = estimate(model.shape(), memory_budget(torch.device("cpu")), config)
    stages = [Stage(plan.tp) for _ in range(plan.pp)]
    layouts = [plan.layout(rank) for rank in range(plan.ranks)]
    failing = fail_at or {}
    ranks = []
    for layout in layouts:
        capture = FakeCapture(fail_at=failing.get(layout.rank)) if graphs else None
        ranks.append(make_rank(config, plan, layout, ThreadCollective(layout, stages, fused_rows), capture))
    crew = ThreadCrew(layouts[0], ranks, stages)
    runner = AsyncMultiprocExecutor(ranks[0].runner, crew, WorkerWatchdog([]))
    info = model_info(config, model, plan, "reference", 0.0, measured=None, worker_pids=[])
    try:
        share = replace(ranks[0].share, draft_rows=(0, 0.0), images=ranks[0].runner.images)
        scheduler = make_scheduler(config, plan, share)
        yield Engine(scheduler, runner, info), ranks
    finally:
        runner.close()
        if errors := [error for rank in ranks for error in rank.errors]:
            raise errors[0]
    last = [rank for rank, layout in zip(ranks, layouts, strict=True) if layout.is_last]
    for rank in last[1:]:
        assert all(map(torch.equal, rank.drawn, last[0].drawn)), "all ranks of the last stage draw the same"
    lengths = [len(rank.sizes) for rank in ranks]
    shared = min(lengths)  # one may have been lost
    assert all(rank.sizes[:shared] == ranks[0].sizes[:shared] for rank in ranks)


def make_rank(
    config: EngineConfig,
    plan: MemoryPlan,
    layout: ParallelLayout,
    collective: ThreadCollective,
    capture: FakeCapture | None,
) -> OneRank:
    load_backend.cache_clear()  # ranks are threads here: each gets a command recorder of its own
    rank = TensorParallel(layout)
    share = load_rank(config, plan, rank, lambda *_: None)
    rank.join(collective)
    device = LateDevice()
    return OneRank(
        build(share.runner.args[0], plan, device, capture and (lambda: capture), 1 << 30),
        device,
        collective,
        capture,
        share,
    )
