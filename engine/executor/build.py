"""Build an engine: plan its memory, load the weights of every rank, and connect runner and scheduler.

`load_engine` is the entry point of the engine process, `rank_engine.load_rank` that of every rank.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmbox.kernels.cpu.build import compile_progress, native_obtainable
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.lora import MAX_SLOTS

from ..config import EngineConfig, SchedulerConfig
from ..core.adapter_slots import AdapterSlots
from ..core.engine import Engine
from ..core.images import ImageScheduler
from ..core.kv_cache.block_pool import BlockPool
from ..core.kv_cache.handover import HandoverIntake, HandoverOutlet
from ..core.kv_cache.tiers import CacheMemory
from ..core.scheduler import Scheduler
from ..core.step import Executor, SyncExecutor
from ..device.device import cuda_machine
from ..distributed.communicator import TensorParallel
from ..errors import DeviceError
from ..hardware.machine import Machine, read_machine
from ..ipc.messages import Progress, ToDaemon
from ..kv_store.block_file import HandoverSegment, segment_bytes
from ..model_config.config import parse_config
from ..model_config.parallel_layout import ParallelLayout
from ..planning.disaggregation import decode_config, prefill_config
from ..planning.estimator import MemoryBudget, estimate
from ..planning.memory_model import CUDA_CONTEXT
from ..planning.memory_plan import MemoryPlan
from ..runner.block_memory import DeviceBlockMemory
from ..runner.cpu_runner import CPUModelRunner
from ..runner.encoder_runner import EncoderRunner
from ..runner.gpu_runner import GPUModelRunner
from .expert_load import place_hot_experts
from .expert_moves import count_experts
from .kv_tiers import RankBlockMemory, make_segment, open_tiers
from .load_model import model_info
from .multiproc import RankProcesses
from .rank_engine import RankEngine, load_rank

if TYPE_CHECKING:
    from .prefill_process import EnginePair

log = logging.getLogger("llmbox.engine")


@dataclass(frozen=True, slots=True)
class LoadedRanks:
    """Rank 0 of a loaded model, with the other ranks if there are any."""

    share: RankEngine
    plan: MemoryPlan
    """Memory plan, measured where memory is profiled."""
    executor: Executor
    measured: int | None
    """Bytes that the weights of all ranks took; None where the system does not report it."""
    local: CPUModelRunner | EncoderRunner | GPUModelRunner | None = None
    """Runner of a model on one rank."""
    ranks: RankProcesses | None = None
    """All ranks, where there are several."""

    @property
    def worker_pids(self) -> list[int]:
        return [] if self.ranks is None else self.ranks.worker_pids

    def block_memory(self, config: EngineConfig) -> DeviceBlockMemory | RankBlockMemory | None:
        """Return access to KV blocks by index; None where nothing copies them."""
        if self.ranks is not None:
            return self.ranks.block_memory() if config.prefix_cache else None
        return None if isinstance(self.local, EncoderRunner | None) else self.local.block_memory()


def load_engine(config: EngineConfig, progress: Callable[[ToDaemon], None]) -> Engine:
    """Load a model on one or several ranks and return its engine.

    Raises EngineError; then no memory, process or file of the model is left behind.
    """
    started = time.monotonic()
    progress(Progress(phase="weights", done=0, total=0))
    directory = Path(config.model_path)
    model = parse_config(directory)
    if model.is_bidirectional:
        config = encoder_options(config)
    plan = estimate(model.shape(config.context), memory_budget(resolve_device(config.device)), config)
    pair: EnginePair | None = None
    if config.disaggregate is not None:
        from .prefill_process import start_pair  # noqa: PLC0415 - one engine alone must do without msgspec

        pair = start_pair(config.disaggregate)
        config = decode_config(config)
    elif config.prefill_role is not None:
        os.sched_setaffinity(0, config.prefill_role.cores)
    plan = place_hot_experts(plan, model.experts, directory)
    layout = plan.layout(0)
    loaded = load_ranks(config, plan, layout, weights_progress(progress))
    took = time.monotonic() - started
    kernels, pids = loaded.share, loaded.worker_pids
    info = model_info(
        config, model, loaded.plan, kernels.backend, took, loaded.measured, pids, problem=kernels.problem
    )
    scheduler = make_scheduler(config, loaded.plan, loaded.share)
    if loaded.share.takes_adapters:
        scheduler.kv_cache.adapters = AdapterSlots(MAX_SLOTS, config.lora_bytes)
    memory = loaded.block_memory(config)
    if config.prefill_role is not None:
        assert isinstance(memory, DeviceBlockMemory)
        segment = make_segment(config.prefill_role.segment, config, loaded.plan, loaded.share, memory)
        blocks = CacheMemory(memory, scheduler.kv_cache)
        scheduler.kv_cache.outlet = HandoverOutlet(segment, blocks, progress)
        return Engine(scheduler, loaded.executor, info)
    if pair is not None:
        assert isinstance(memory, DeviceBlockMemory)
        segment = load_prefill_engine(pair, config, loaded, memory, progress)
        blocks = CacheMemory(memory, scheduler.kv_cache)
        scheduler.kv_cache.intake = HandoverIntake(pair.link, segment, blocks)
    if memory is not None:
        answers = open_tiers(config, loaded.plan, loaded.share, memory, scheduler.kv_cache)
        scheduler.drafting.answers.stores.files = answers
    move = None if loaded.ranks is None else loaded.ranks.move_experts
    experts = count_experts(loaded.share.runner, layout, directory, move)
    return Engine(scheduler, loaded.executor, info, experts=experts)


def load_ranks(
    config: EngineConfig, plan: MemoryPlan, layout: ParallelLayout, progress: Callable[[int, int], None]
) -> LoadedRanks:
    """Load the weights of all ranks: in this process, or in worker processes too if there are several."""
    load = partial(load_rank, config, plan)
    if layout.ranks > 1:
        log.info("%s", "; ".join(plan.notes) or f"{layout.ranks} ranks: tp {plan.tp}, pp {plan.pp}")
        ranks = RankProcesses(config, plan, layout)
        share, measured = ranks.load(load, progress)
        executor, plan = ranks.runner(share)
        return LoadedRanks(share, plan, executor, measured, ranks=ranks)
    share = load(TensorParallel(layout), progress)
    local, plan = share.finish()
    if isinstance(local, GPUModelRunner):
        share = replace(share, proposers=local.proposers)
        return LoadedRanks(share, plan, local, share.measured, local)
    executor = SyncExecutor(local, local.prepare if isinstance(local, CPUModelRunner) else bool)
    executor.prepare()  # KV blocks get their first pages while the rest of the load goes on
    return LoadedRanks(share, plan, executor, share.measured, local)


def load_prefill_engine(
    pair: "EnginePair",
    config: EngineConfig,
    loaded: LoadedRanks,
    memory: DeviceBlockMemory,
    progress: Callable[[ToDaemon], None],
) -> HandoverSegment:
    """Load the model in the prefill engine of a pair; return the memory through which its blocks come."""
    os.ftruncate(pair.handle, segment_bytes(max(memory.sizes.values())))
    segment = make_segment(pair.handle, config, loaded.plan, loaded.share, memory)
    assert isinstance(loaded.local, CPUModelRunner)
    loaded.local.populate()  # blocks arrive beside streams, which would wait for pages
    pair.link.load(prefill_config(config, loaded.plan, pair.handle, pair.cores), progress)
    return segment


def encoder_options(config: EngineConfig) -> EngineConfig:
    """Return the options of a model that computes whole texts at once and keeps nothing of them."""
    return replace(
        config,
        device="cpu" if config.device == "auto" else config.device,
        kv_dtype="auto",
        prefix_cache=False,
        chunked_prefill=False,
        speculate="off",
    )


def open_kernels(progress: Callable[[Progress], None]) -> None:
    """Compile or find the native kernels and open them, before `load_engine` has to."""
    compile_progress.set(lambda done, total: progress(Progress(phase="kernels", done=done, total=total)))
    if not torch.cuda.is_available():
        native_ready()


def resolve_device(asked: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`. Raises DeviceError where CUDA is missing."""
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        reason = (
            "PyTorch finds no usable NVIDIA GPU" if torch.version.cuda else "this PyTorch has no CUDA in it"
        )
        raise DeviceError(
            f"device cuda was requested, but {reason}: use --device cpu, or see `llmbox doctor`"
        )
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def memory_budget(device: torch.device) -> MemoryBudget:
    if device.type == "cpu":
        return replace(MemoryBudget.of(read_machine(), "cpu"), native_kernels=native_ready())
    machine = cuda_machine()
    if machine.gpus:  # torch would open the first one, which this engine may not use in the end
        return MemoryBudget.of(machine, "cuda")
    return _without_nvml(device, machine)


def _without_nvml(device: torch.device, machine: Machine) -> MemoryBudget:
    """Build the budget from CUDA alone, as in a container without the driver's `utility` capability.

    Plans include the CUDA context, so it is added to the free memory. Others than the first GPU count with
    their total memory, as asking what is free takes a context.
    """
    free, _total = torch.cuda.mem_get_info(device)
    sizes_of = torch.cuda.get_device_properties
    more = tuple(int(sizes_of(number).total_memory) for number in range(1, torch.cuda.device_count()))
    return MemoryBudget(
        device="cuda",
        available=free + CUDA_CONTEXT,
        cores=machine.cpu.cores,
        more_gpus=more,
        host_available=machine.memory.available,
        host_native=native_obtainable(),
    )


def weights_progress(progress: Callable[[Progress], None]) -> Callable[[int, int], None]:
    return lambda done, total: progress(Progress(phase="weights", done=done, total=total))


def make_scheduler(config: EngineConfig, plan: MemoryPlan, share: RankEngine) -> Scheduler:
    """Build the scheduler of an engine; `share` is rank 0's."""
    most_drafts, draft_price = share.draft_rows
    pool = BlockPool(plan.num_blocks, plan.block_size, enable_prefix_cache=config.prefix_cache)
    settings = SchedulerConfig(
        context=plan.context,
        max_running=plan.max_running,
        token_budget=plan.token_budget,
        mixed_budget=plan.mixed_budget,
        batching=config.batching,
        chunked_prefill=config.chunked_prefill,
        premium_share=config.premium_share,
        watermark=config.watermark,
        draft_rows=most_drafts,
        draft_row_price=draft_price,
        state_slots=plan.state_slots,
        short_context=share.rotary.short_context,
        window=plan.window,
        window_blocks=plan.window_blocks,
    )
    images, encoded = None, share.images
    if encoded is not None:
        images = ImageScheduler(
            encoded,
            row_bytes=encoded.row_bytes,
            cache_bytes=plan.image_cache_bytes,
            is_bidirectional=encoded.config.is_bidirectional,
        )
    return Scheduler(settings, pool, proposers=share.proposers, images=images)
