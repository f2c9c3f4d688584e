"""All ranks of a model in one process, a thread each: parts and arithmetic, without torch.distributed."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from llmbox.engine.config import EngineConfig
from llmbox.engine.core.engine import Engine
from llmbox.engine.core.step import StepPlan, StepResult, SyncExecutor
from llmbox.engine.distributed.communicator import AsyncWork, CompletedWork, TensorParallel, rows_of_rank
from llmbox.engine.distributed.shm_communicator import PendingReceive
from llmbox.engine.distributed.step_codec import StepDecoder, StepEncoder
from llmbox.engine.distributed.torch_communicator import sum_in_order
from llmbox.engine.errors import RankLost
from llmbox.engine.executor.build import make_scheduler, memory_budget
from llmbox.engine.executor.expert_load import place_hot_experts
from llmbox.engine.executor.expert_moves import ExpertMover, count_experts
from llmbox.engine.executor.load_model import model_info
from llmbox.engine.executor.rank_engine import load_rank
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.model_config.parallel_layout import ParallelLayout
from llmbox.engine.planning.estimator import estimate
from llmbox.kernels.reference import REFERENCE
from support.real_engines import load


class Stage:
    """What the ranks of one stage share."""

    def __init__(self, tp: int) -> None:
        self.barrier = threading.Barrier(tp, timeout=90)
        self.parts: dict[int, Tensor] = {}
        self.inboxes = [Queue() for _ in range(tp)]
        self.returns = [Queue() for _ in range(tp)]
        self.ways: dict[tuple[int, int], Queue] = {}
        """Transfers between two ranks."""
        self._votes: dict[int, bool] = {}
        self._all: threading.Barrier | None = None
        self._lock = threading.Lock()

    def vote(self, rank: int, ranks: int, works: bool) -> bool:
        """Of all ranks, at the first stage."""
        with self._lock:
            self._all = self._all or threading.Barrier(ranks, timeout=90)
        self._votes[rank] = works
        self._all.wait()
        agreed = all(self._votes.values())
        self._all.wait()
        return agreed

    def end(self) -> None:
        """Whoever waits for what another stage will not send hears of it."""
        for queue in (*self.inboxes, *self.returns):
            queue.put(None)


def _taken(queue: Queue) -> Any:
    sent = queue.get(timeout=90)
    if sent is None:
        queue.put(None)  # whoever asks next hears of it too
        raise RankLost("a stage has ended")
    return sent


class ThreadCollective:
    def __init__(self, layout: ParallelLayout, stages: list[Stage], fused_rows: int = 0) -> None:
        """`fused_rows`: up to so many, sums and norms come in one."""
        self._layout = layout
        self._stages = stages
        self._fused_rows = fused_rows
        self.fused = 0

    def all_reduce(self, x: Tensor, out: Tensor | None = None) -> None:
        total = sum_in_order(self.all_gather(x))
        (x if out is None else out).copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        stage = self._stages[self._layout.stage]
        stage.parts[self._layout.tp_rank] = x.clone()
        stage.barrier.wait()
        parts = torch.stack([stage.parts[rank] for rank in range(self._layout.tp)])
        stage.barrier.wait()
        return parts

    def all_to_all_rows(self, x: Tensor) -> Tensor:
        mine = rows_of_rank(len(x), self._layout.tp, self._layout.tp_rank)
        return self.all_gather(x)[:, mine].transpose(0, 1).flatten(1)

    def exchange_rows(self, rows_TKE: Tensor, owners_TK: Tensor) -> None:
        parts, rows_SE = self.all_gather(rows_TKE), rows_TKE.view(owners_TK.numel(), -1)
        for row, owner in enumerate(owners_TK.flatten().tolist()):
            rows_SE[row] = parts[owner].view(rows_SE.shape)[row]

    def send(self, *tensors: Tensor) -> None:
        inbox = self._stages[self._layout.stage + 1].inboxes[self._layout.tp_rank]
        inbox.put([tensor.clone() for tensor in tensors])

    def receive(self, *tensors: Tensor) -> None:
        sent = _taken(self._stages[self._layout.stage].inboxes[self._layout.tp_rank])
        for tensor, content in zip(tensors, sent, strict=True):
            tensor.copy_(content)

    def transfer(self, x: Tensor, source: int, destination: int) -> None:
        stage = self._stages[self._layout.stage]
        way = stage.ways.setdefault((source, destination), Queue())
        if source == self._layout.tp_rank:
            way.put(x.clone())
        else:
            x.copy_(_taken(way))

    def can_fuse(self, rows: int, _width: int, _dtype: torch.dtype) -> bool:
        return rows <= self._fused_rows

    def all_reduce_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, _row_format: Any
    ) -> tuple[Tensor, Any]:
        self.fused += 1
        return REFERENCE.add_rms_norm(sum_in_order(self.all_gather(x_TE)), residual_TE, weight_E, eps), None

    def all_agree(self, works: bool) -> bool:
        return self._stages[0].vote(self._layout.rank, self._layout.ranks, works)

    def transfer_to_first_stage(self, x: Tensor) -> AsyncWork:
        way = self._stages[0].returns[self._layout.tp_rank]
        if self._layout.is_last:
            way.put(x.clone())
            return CompletedWork()
        return PendingReceive(lambda: x.copy_(_taken(way)))


class RankThreads:
    """A `Runner`."""

    def __init__(self, config: EngineConfig, read: Callable[[int, int, int], None]) -> None:
        """`read(rank, done, total)` hears of bytes read."""
        model = parse_config(Path(config.model_path))
        self.plan = estimate(model.shape(), memory_budget(torch.device("cpu")), config)
        tp, pp = self.plan.tp, self.plan.pp
        self._stages = [Stage(tp) for _ in range(pp)]
        self.plan = place_hot_experts(self.plan, model.experts, Path(config.model_path))
        layouts = [self.plan.layout(rank) for rank in range(tp * pp)]
        self._answers = layouts[0].answers
        self._pool = ThreadPoolExecutor(len(layouts))
        self._decoders = [StepDecoder() for _ in layouts]
        self.shares = []
        for layout in layouts:
            rank = TensorParallel(layout)
            share = load_rank(config, self.plan, rank, lambda *told, n=layout.rank: read(n, *told))
            rank.join(ThreadCollective(layout, self._stages))
            self.shares.append(share)
        self.movers = [ExpertMover(share.runner) for share in self.shares]
        self.images = self.shares[0].images
        self._encoder = StepEncoder(None if self.images is None else self.images.pieces)

    def move_experts(self, command: dict[str, Any]) -> bool:
        return all(list(self._pool.map(lambda mover: mover.execute(command), self.movers)))

    def execute(self, plan: StepPlan) -> StepResult:
        frame = self._encoder.encode(plan)
        plans = [decoder.decode(frame) for decoder in self._decoders]
        runners = [share.runner for share in self.shares]
        results = list(self._pool.map(lambda runner, plan: runner.execute(plan), runners, plans))
        stage = results[self._answers :]
        drawn = [replace(result, failed=dict.fromkeys(result.failed, "")) for result in stage]
        assert all(result == drawn[0] for result in drawn), "all ranks of the last stage draw the same"
        return stage[0]


def load_ranks(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    """Ranks as threads on the plain kernels, also for engines that the test loads next.

    Rounded weights need the C++ kernels, whose threads serve one rank a process: there ranks are processes.
    """
    if "quant" in options:
        return load(directory, **options)
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    return load_threads(directory, **options)


def load_threads(
    directory: Path, read: Callable[[int, int, int], None] = lambda *_: None, **options: Any
) -> Engine:
    settings = {"device": "cpu", "threads": 1, "memory_bytes": 256 << 20, **options}
    config = EngineConfig(model_path=str(directory), name="tiny", **settings)
    runner = RankThreads(config, read)
    model = parse_config(directory)
    info = model_info(
        config,
        model,
        runner.plan,
        runner.shares[0].backend,
        0.0,
        measured=None,
        worker_pids=[],
    )
    share = replace(runner.shares[0], draft_rows=(0, 0.0), images=runner.images)
    scheduler = make_scheduler(config, runner.plan, share)
    local = runner.shares[0].runner
    experts = count_experts(local, runner.plan.layout(0), directory, runner.move_experts)
    return Engine(scheduler, SyncExecutor(runner), info, experts=experts)
