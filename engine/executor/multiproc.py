"""Multi-process executors on rank 0: send every step to all ranks and execute rank 0's own shard of it.

`SyncMultiprocExecutor` drives synchronous runners (CPU): a launch executes the first pipeline stage.
`AsyncMultiprocExecutor` drives asynchronous runners (GPU), which launch steps ahead of their results.
"""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ..config import EngineConfig
from ..core.step import Executor, ModelRunner, ProfiledRunner, StepPlan, StepResult
from ..device.device import cuda_machine
from ..distributed.communicator import Communicator, TensorParallel
from ..distributed.shm_communicator import PeerSockets, ShmCommunicator
from ..distributed.step_codec import Frame, StepEncoder, decode_result
from ..distributed.torch_communicator import join, leave
from ..errors import DeviceError
from ..hardware.proc import at_exit
from ..model_config.parallel_layout import ParallelLayout
from ..planning.memory_plan import MemoryPlan
from ..planning.placement import are_nvlink_peers
from ..runner.cpu_runner import CPUModelRunner
from ..runner.cuda_graphs import GraphSize
from ..runner.gpu_runner import GPUModelRunner
from ..runner.image_rows import EncodedImages
from ..runner.prompt_results import LaunchedStep
from .expert_moves import ExpertMover
from .kv_tiers import RankBlockMemory
from .rank_engine import RankEngine
from .watchdog import WorkerWatchdog
from .workers import Transport, WorkerGroup

log = logging.getLogger("llmbox.engine")


class MultiprocExecutor:
    """Base of the executors: sends steps to the workers and receives results from the answering rank.

    All ranks run the same steps and get the same tokens; the results of one rank are used.
    """

    def __init__(
        self, workers: WorkerGroup, watchdog: WorkerWatchdog, images: EncodedImages | None = None
    ) -> None:
        """`images`: embeddings of images, which rank 0 sends, as it has the vision tower."""
        self._workers = workers
        self._watchdog = watchdog
        self._encoder = StepEncoder(None if images is None else images.pieces)

    def shut_down(self) -> None:
        """Ask the workers to end and stop watching them, without waiting."""
        self._watchdog.close()
        self._workers.shut_down()

    def close(self) -> None:
        self.shut_down()
        self._workers.close()


class SyncMultiprocExecutor(MultiprocExecutor):
    """`Executor` over synchronous runners.

    Pipeline stages overlap: the first stage executes the next step while later stages work on this one. With
    one stage a step is done when `launch` returns; with several, up to one step per stage is in flight.
    """

    def __init__(
        self,
        local: ModelRunner,
        workers: WorkerGroup,
        watchdog: WorkerWatchdog,
        images: EncodedImages | None = None,
    ) -> None:
        super().__init__(workers, watchdog, images)
        self.stages = workers.layout.pp
        self.depth = self.stages - 1
        self._local = local

    def launch(self, plan: StepPlan) -> StepResult | None:
        with self._watchdog.guarding():
            self._workers.send(self._encoder.encode(plan))
            result = self._local.execute(plan)
            return result if self._workers.layout.answers == 0 else None

    def collect(self, handle: StepResult | None) -> StepResult:
        if handle is not None:
            return handle
        with self._watchdog.guarding():
            return decode_result(self._workers.receive(self._workers.layout.answers))

    def prepare(self) -> bool:
        return False

    def profiled(self) -> ProfiledRunner:
        return self._local.profiled()


class AsyncMultiprocExecutor(MultiprocExecutor):
    """`Executor` over asynchronous runners. Rank 0 decides; every rank launches the same steps, padded to the
    same size, in the same order, and captures the same CUDA graphs between them. So collectives match up.
    """

    def __init__(self, local: GPUModelRunner, workers: WorkerGroup, watchdog: WorkerWatchdog) -> None:
        super().__init__(workers, watchdog, local.images)
        self.depth, self.stages = local.depth, workers.layout.pp
        self._local = local

    def launch(self, plan: StepPlan) -> LaunchedStep:
        with self._watchdog.guarding():
            size = self._local.size_for(plan)
            self._workers.send(self._encoder.encode(plan, size))
            launched = self._local.launch_sized(plan, size)
            if (urgent := self._local.urgent_capture) is not None:
                self._capture(urgent)
            return launched

    def collect(self, handle: LaunchedStep) -> StepResult:
        answers = self._workers.layout.answers
        with self._watchdog.guarding():
            if answers == 0:
                return self._local.collect(handle)
            handle.wait()
            return decode_result(self._workers.receive(answers))

    def prepare(self) -> bool:
        size = self._local.next_capture
        if size is not None:
            with self._watchdog.guarding():
                self._capture(size)
        return size is not None

    def profiled(self) -> ProfiledRunner:
        return self._local.profiled()

    def _capture(self, size: GraphSize) -> None:
        self._workers.send(Frame("capture", size._asdict()))
        self._local.capture(size)


_CHOICE: Final = "LLMBOX_RANKS"
"""Environment variable. gloo: torch.distributed between CPU ranks instead of shared memory. nccl: only NCCL
between GPUs, without one-shot and fused all-reduce kernels."""
_NCCL_HINT: Final = (
    ". NCCL_DEBUG=INFO in the daemon's environment tells more in the log; a container needs shared memory "
    "(--shm-size 1g)"
)

Progress = Callable[[int, int], None]


class RankProcesses:
    """All ranks of an engine, from rank 0: load them, connect them, create their executor, end them."""

    def __init__(self, config: EngineConfig, plan: MemoryPlan, layout: ParallelLayout) -> None:
        self._config = config
        self._plan = plan
        self._workers = WorkerGroup(layout)
        self._watchdog: WorkerWatchdog | None = None
        """Set once all have loaded: until then a rank that fails can still report why."""
        self._local: object = None
        self._mover: ExpertMover | None = None

    def load(
        self, load: Callable[[TensorParallel, Progress], RankEngine], progress: Progress
    ) -> tuple[RankEngine, int | None]:
        """Load all ranks; return rank 0's shard and the bytes that the weights of all ranks took.

        Raises EngineError.
        """
        at_exit(self._end)
        try:
            barrier = self._workers.start(self._config, self._plan)

            def report(done: int, total: int) -> None:
                barrier.poll()  # a rank that cannot load ends the load of all
                progress(done, total)

            rank = TensorParallel(self._workers.layout)
            mine = load(rank, report)
            others = barrier.wait()
            if self._plan.device == "cuda":
                refuse_other_kernels([mine.backend, *(each["backend"] for each in others)])
            self._watchdog = WorkerWatchdog(self._workers.processes)
            self._connect(rank)
        except BaseException:
            self._close()
            raise
        measured = [mine.measured, *(each["measured"] for each in others)]
        return mine, None if None in measured else sum(filter(None, measured))

    def _connect(self, rank: TensorParallel) -> None:
        over = choose_transport(self._plan)
        file = self._workers.start_rendezvous(over)
        rank.join(connect(rank.layout, self._config, self._plan, self._workers.take_sockets(), over, file))
        self._workers.finish_rendezvous()

    @property
    def worker_pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.processes]

    def runner(self, share: RankEngine) -> tuple[Executor, MemoryPlan]:
        """Return the executor and the plan as measured by all ranks. Raises DoesNotFit."""
        assert self._watchdog is not None
        try:
            with self._watchdog.guarding():
                local, plan = share.finish(self._workers.all_min)
        except BaseException:
            self._close()
            raise
        runner: SyncMultiprocExecutor | AsyncMultiprocExecutor
        if isinstance(local, GPUModelRunner):
            runner = AsyncMultiprocExecutor(local, self._workers, self._watchdog)
        else:
            images = local.images if isinstance(local, CPUModelRunner) else None
            runner = SyncMultiprocExecutor(local, self._workers, self._watchdog, images)
        self._local = local
        # Before what `load` left to finish, so that all ranks finish that in parallel; `_end` comes last.
        at_exit(runner.shut_down)
        return runner, plan

    def block_memory(self) -> RankBlockMemory | None:
        """Return access to the KV blocks of all ranks; None on GPUs. Called before the first step."""
        if not isinstance(self._local, CPUModelRunner) or self._watchdog is None:
            return None
        try:
            return RankBlockMemory(self._local.block_memory(), self._workers, self._watchdog.guarding)
        except OSError as error:
            log.warning("the KV cache on disk is left out: ranks cannot share memory: %s", error)
            return None

    def move_experts(self, command: dict[str, Any]) -> bool:
        """Have all ranks execute a command of `ExpertBalancer`, between two steps. Return rank 0's answer."""
        assert isinstance(self._local, CPUModelRunner)
        assert self._watchdog is not None
        self._mover = self._mover or ExpertMover(self._local)
        with self._watchdog.guarding():
            self._workers.send(Frame("move_experts", command))
            return self._mover.execute(command)

    def _close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        self._workers.close()

    def _end(self) -> None:
        """Shut down workers and process group while the interpreter is still whole."""
        self._close()
        leave()


def refuse_other_kernels(backends: Sequence[str]) -> None:
    """Check that all ranks selected the same kernels. Raises DeviceError.

    Ranks compute parts of the same rows and sample different rows of a step: kernels that round differently
    would break the promise that a request's tokens depend on the request alone.
    """
    for rank, name in enumerate(backends):
        if name != backends[0]:
            raise DeviceError(
                f"rank {rank} can run other kernels ({name}) than rank 0 ({backends[0]}): the log says why, "
                "and LLMBOX_KERNELS=reference selects the same on all"
            )


def choose_transport(plan: MemoryPlan) -> Transport:
    if plan.device == "cuda":
        return "nccl"
    return "gloo" if os.environ.get(_CHOICE) == "gloo" else "mesh"


def connect(
    layout: ParallelLayout,
    config: EngineConfig,
    plan: MemoryPlan,
    ends: PeerSockets,
    over: Transport,
    file: Path,
) -> Communicator:
    """Connect this rank to the others; every rank calls this. Raises DeviceError."""
    if over == "mesh":
        return ShmCommunicator(layout, ends)
    ends.close()
    try:
        return join_gpus(layout, config, plan, file) if over == "nccl" else join_cpus(layout, file)
    except RuntimeError as error:  # from torch.distributed, the library below it, or CUDA
        words = " ".join(str(error).split())
        hint = _NCCL_HINT if over == "nccl" else ""
        raise DeviceError(
            f"rank {layout.rank} cannot connect to the other ranks over {over}: {words}{hint}"
        ) from error


def join_cpus(layout: ParallelLayout, file: Path) -> Communicator:
    return join(layout, torch.device("cpu"), file, ordered=True)


def join_gpus(layout: ParallelLayout, config: EngineConfig, plan: MemoryPlan, file: Path) -> Communicator:
    peers = are_nvlink_peers([plan.gpus[rank] for rank in layout.stage_ranks], cuda_machine().nvlink)
    joined = peers and os.environ.get(_CHOICE) != "nccl"
    device = torch.device("cuda", plan.gpus[layout.rank])
    return join(layout, device, file, ordered=config.deterministic, joined=joined)
