"""Build an engine: plan its memory, load the weights of every rank, and connect runner and scheduler.

`load_engine` is the entry point of the engine process, `load_rank` that of every rank.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from llmbox.kernels.cpu.build import compile_progress, native_obtainable
from llmbox.kernels.cpu.isa import pick_cores
from llmbox.kernels.dispatch import QuantUnavailable, UnknownBackend, native_ready, select_ops
from llmbox.kernels.lora import MAX_SLOTS
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.recurrent import make_state
from llmbox.kernels.support import KernelSite

from ..config import EngineConfig, SchedulerConfig
from ..core.adapter_slots import AdapterSlots
from ..core.engine import Engine
from ..core.executor_interface import Executor, SyncExecutor
from ..core.images import ImageScheduler
from ..core.kv_cache.block_pool import BlockPool
from ..core.kv_cache.handover import HandoverIntake, HandoverOutlet
from ..core.kv_cache.tiers import CacheMemory
from ..core.scheduler import Scheduler
from ..core.speculation.proposer import Proposer
from ..device.device import CudaDevice, cuda_machine
from ..device.host_experts import with_host_experts
from ..distributed.communicator import TensorParallel
from ..errors import DeviceError, EngineError
from ..hardware.machine import Machine, read_machine
from ..ipc.messages import Progress, ToDaemon
from ..kv_store.block_file import segment_bytes
from ..model.decoder import Decoder
from ..model.rotary import Rotary
from ..model_config.config import parse_config
from ..model_config.parallel_layout import ParallelLayout
from ..planning.disaggregation import decode_config, prefill_config
from ..planning.estimator import MemoryBudget, estimate
from ..planning.memory_model import CUDA_CONTEXT
from ..planning.memory_plan import MemoryPlan
from ..planning.runnable import RunnablePlan, check_drafts, require_runnable
from ..runner.block_memory import DeviceBlockMemory
from ..runner.cpu_runner import CPUModelRunner
from ..runner.encoder_runner import EncoderRunner
from ..runner.gpu_runner import GPUModelRunner
from ..runner.image_rows import EncodedImages, load_images
from ..sampling import Sampler
from .drafting import DraftTarget, draft_rows, load_draft_parts, load_proposers
from .expert_load import place_hot_experts
from .expert_moves import count_experts
from .kv_tiers import make_segment, open_tiers
from .load_model import WeightsWanted, cache_shapes, load_weights, model_info, read_model_vectors, state_shape
from .multiproc import RankProcesses
from .profile import Agree, GPUEngineParts, make_device_runner, select_gpu
from .rank_blocks import RankBlockMemory
from .workers import cores_of_rank

log = logging.getLogger("llmbox.engine")

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = TORCH_DTYPES | {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class RankEngine:
    """One rank's loaded shard of the model."""

    rotary: Rotary
    kernels: tuple[str, ...]
    """Names of the kernels, of their layout and of a draft head, by which the bits of blocks may differ."""
    runner: CPUModelRunner | EncoderRunner | Callable[[Agree], tuple[GPUModelRunner, MemoryPlan]]
    """Runner on a CPU, or a callable that creates the GPU runner after the rendezvous of all ranks."""
    plan: MemoryPlan
    """Memory plan: measured where memory is profiled, else estimated."""
    backend: str
    measured: int | None
    """Bytes of memory that the weights took; None where the system does not report it."""
    draft_rows: tuple[int, float] = (0, 0.0)
    """Rows and their price, see `SchedulerConfig`."""
    proposers: Sequence[Proposer] = ()
    """Proposers of draft tokens that run a model."""
    images: EncodedImages | None = None
    """Pictures of a model with a vision tower."""
    takes_adapters: bool = False
    """Rows may have a LoRA adapter."""

    def finish(
        self, agree: Agree = int
    ) -> tuple[CPUModelRunner | EncoderRunner | GPUModelRunner, MemoryPlan]:
        """Return the runner and the final plan, after the rendezvous of all ranks. Raises DoesNotFit."""
        runner = self.runner
        if isinstance(runner, CPUModelRunner | EncoderRunner):
            return runner, self.plan
        return runner(agree)


def load_engine(config: EngineConfig, progress: Callable[[ToDaemon], None]) -> Engine:
    """Load a model on one or several ranks and return its engine.

    Raises EngineError; then no memory, process or file of the model is left behind.
    """
    started = time.monotonic()
    progress(Progress(phase="weights", done=0, total=0))
    model = parse_config(Path(config.model_path))
    if model.is_bidirectional:
        config = encoder_options(config)
    device = resolve_device(config.device)
    plan = estimate(model.shape(config.context), memory_budget(device), config)
    pair = None
    if config.disaggregate is not None:
        from .prefill_process import start_pair  # noqa: PLC0415 - one engine alone must do without msgspec

        pair = start_pair(config.disaggregate)
        config = decode_config(config)
    elif config.prefill_role is not None:
        os.sched_setaffinity(0, config.prefill_role.cores)
    plan = place_hot_experts(plan, model.experts, Path(config.model_path))
    layout = plan.layout(0)
    runner: Executor
    local: object = None
    worker_pids: list[int] = []
    ranks: RankProcesses | None = None
    if layout.ranks == 1:
        share = load_rank(config, plan, TensorParallel(layout), weights_progress(progress))
        local, plan = share.finish()
        if isinstance(local, GPUModelRunner):
            runner, share = local, replace(share, proposers=local.proposers)
        else:
            runner = SyncExecutor(local, local.prepare if isinstance(local, CPUModelRunner) else bool)
        measured = share.measured
    else:
        log.info("%s", "; ".join(plan.notes) or f"{layout.ranks} ranks: tp {plan.tp}, pp {plan.pp}")
        ranks = RankProcesses(config, plan, layout)
        load = partial(load_rank, config, plan)
        share, measured = ranks.load(load, weights_progress(progress))
        (runner, plan), worker_pids = ranks.runner(share), ranks.worker_pids
    info = model_info(config, model, plan, share.backend, time.monotonic() - started, measured, worker_pids)
    scheduler = make_scheduler(config, plan, share)
    if share.takes_adapters:
        scheduler.kv_cache.adapters = AdapterSlots(MAX_SLOTS, config.lora_bytes)
    memory: DeviceBlockMemory | RankBlockMemory | None = None
    if isinstance(local, CPUModelRunner | GPUModelRunner):
        memory = local.block_memory()
        if config.prefill_role is not None:
            segment = make_segment(config.prefill_role.segment, config, plan, share, memory)
            blocks = CacheMemory(memory, scheduler.kv_cache)
            scheduler.kv_cache.outlet = HandoverOutlet(segment, blocks, progress)
            return Engine(scheduler, runner, info)
        if pair is not None:
            os.ftruncate(pair.handle, segment_bytes(max(memory.sizes.values())))
            segment = make_segment(pair.handle, config, plan, share, memory)
            if isinstance(local, CPUModelRunner):
                local.populate()  # blocks arrive beside streams, which would wait for pages
            pair.link.load(prefill_config(config, plan, pair.handle, pair.cores), progress)
            blocks = CacheMemory(memory, scheduler.kv_cache)
            scheduler.kv_cache.intake = HandoverIntake(pair.link, segment, blocks)
    elif ranks is not None and config.prefix_cache:
        memory = ranks.block_memory()
    if memory is not None:
        answers = open_tiers(config, plan, share, memory, scheduler.kv_cache)
        scheduler.drafting.answers.stores.files = answers
    move = None if ranks is None else ranks.move_experts
    experts = count_experts(share.runner, layout, Path(config.model_path), move)
    return Engine(scheduler, runner, info, experts=experts)


def load_rank(
    config: EngineConfig, plan: MemoryPlan, rank: TensorParallel, progress: Callable[[int, int], None]
) -> RankEngine:
    """Load this rank's shard of the model. Raises ModelError or DeviceError."""
    layout, directory = rank.layout, Path(config.model_path)
    rank.sums_in_shares = config.exact == "portable"
    model_config = parse_config(directory)
    device, free_before = rank_device(plan, layout)
    threads = take_cores(config.threads or read_machine().cpu.cores, layout, device)
    torch.set_num_threads(threads)
    dtype, kv_dtype = TORCH_DTYPES[plan.dtype], KV_DTYPES[plan.kv_dtype]
    wanted = RunnablePlan.of(plan, model_config)
    ops = backend(device, dtype, kv_dtype, threads, QUANTS.get(plan.quant), config, wanted)
    if plan.expert_bytes:
        ops = with_host_experts(ops, CudaDevice(device), threads, QUANTS.get(plan.expert_quant))
        config = replace(config, cuda_graphs=False)
    if kv_dtype not in ops.kv_dtypes:
        raise DeviceError(
            f"the kernels that run here ({ops.name} on {device.type}) keep no keys and values in "
            f"{plan.kv_dtype}: load with --kv-dtype auto"
        )
    if config.deterministic and not ops.row_invariant:
        raise DeviceError(
            f"deterministic was asked for, but the kernels that run here ({ops.name} on {device.type}, "
            f"{plan.dtype}) may compute a row differently in another batch. It needs the Triton kernels on a "
            "GPU, or the C++ kernels on a CPU, in bfloat16 or float32; see `llmbox doctor`"
        )
    overlaps = config.overlaps_on(device.type)
    rows = draft_rows(config, plan, ops, overlaps=overlaps)
    if model_config.recurrent is not None and ops.recurrent is None:
        raise DeviceError(f"the kernels that run here ({ops.name}) lack recurrent layers: use --device cpu")
    check_drafts(model_config, config)
    weights = WeightsWanted(directory, ops, dtype, device, plan.quant, rank)
    model, measured = load_weights(model_config, weights, progress)
    rotary = Rotary(model_config, plan.context, device, ops.cos_sin)
    kernels: tuple[str, ...] = (ops.name, "" if ops.packing is None else ops.packing.layout, config.exact)
    if model_config.is_bidirectional:
        vectors = read_model_vectors(model_config, directory)
        context, size = plan.context, plan.block_size
        encoder = EncoderRunner(model, rotary, vectors, context=context, block_size=size, device=device)
        if device.type == "cuda":
            encoder.warm_up(ops.warmup_batch_sizes, plan.token_budget)
        return RankEngine(rotary, kernels, encoder, plan, ops.name, measured)
    assert isinstance(model, Decoder)
    kv_shape, window_shape = cache_shapes(model_config, plan, layout, kv_dtype, dtype)
    states = None
    if model_config.recurrent is not None:
        count = model_config.layers_with(layout.layers(model_config.num_layers), state=True)
        states = state_shape(model_config.recurrent, count, plan, layout.tp)
    images = None if plan.image_problem else load_images(model_config, directory, ops, dtype, device, layout)
    target = DraftTarget(config, plan, model, ops, threads, kv_dtype, progress, device)
    if overlaps:
        # Recurrent layers verify drafts as they compute prompts.
        drafts, (draft, head) = rows[0] if states is None else 0, load_draft_parts(target)
        parts = GPUEngineParts(model, rotary, kv_shape, window_shape, states, images, drafts, draft)
        make = partial(make_device_runner, parts, config, plan, device, free_before)
        takes = model.adapters is not None and model.adapters.takes_tiles
        kernels += (head,) if head else ()
        return RankEngine(
            rotary, kernels, make, plan, ops.name, measured, rows, images=images, takes_adapters=takes
        )
    sampler = Sampler(model_config.vocab_size, device, ops, rank)
    cache = ops.make_kv_cache(kv_shape, device)
    window_cache = None if window_shape is None else ops.make_kv_cache(window_shape, device)
    runner = CPUModelRunner(
        model,
        rotary,
        cache,
        sampler,
        block_size=plan.block_size,
        device=device,
        window_cache=window_cache,
        has_window_blocks=plan.window > 0,
        states=None if states is None else make_state(states, device),
        images=images,
        lora_bytes=config.lora_bytes,
    )
    if config.plans_adapters:
        runner.adapters.prepare()
    proposers, head = load_proposers(replace(target, runner=runner))
    kernels += (head,) if head else ()
    takes = model.adapters is not None
    return RankEngine(rotary, kernels, runner, plan, ops.name, measured, rows, proposers, images, takes)


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
            f"device cuda was asked for, but {reason}: use --device cpu, or see `llmbox doctor`"
        )
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def rank_device(plan: MemoryPlan, layout: ParallelLayout) -> tuple[torch.device, int]:
    """Return this rank's device and the bytes that were free on a GPU before this process used it."""
    if plan.device == "cpu":
        return torch.device("cpu"), 0
    gpu = plan.gpus[layout.rank]
    return torch.device("cuda", gpu), select_gpu(gpu)


def take_cores(threads: int, layout: ParallelLayout, device: torch.device) -> int:
    """Return this rank's share of `threads`. On a CPU, pin the rank to its own cores if there are enough."""
    if layout.ranks == 1 or device.type != "cpu":
        return threads
    cores = pick_cores(threads)
    mine = cores_of_rank(cores, layout)
    if len(mine) < len(cores) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, mine)
    return max(1, threads // layout.ranks)


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


def backend(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    threads: int,
    quant: Quant | None,
    config: EngineConfig,
    plan: RunnablePlan,
) -> Ops:
    """Select the kernels of this device. Raises DeviceError, with the reasons that `fit` gives."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    has_native = device.type == "cpu" and native_ready()
    place: Literal["cpu", "cuda"] = "cpu" if device.type == "cpu" else "cuda"
    require_runnable(plan, KernelSite(device=place, has_native=has_native, capability=capability), config)
    try:
        portable = config.exact == "portable"
        return select_ops(
            device, dtype, kv_dtype, threads, quant, deterministic=config.deterministic, portable=portable
        )
    except QuantUnavailable as error:
        raise DeviceError(f"{error}: load with --quant none, or another checkpoint") from None
    except UnknownBackend as error:
        raise EngineError(str(error)) from None


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
        draft_constrained=plan.ranks == 1,
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
