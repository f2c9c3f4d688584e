"""Load one rank's shard of a model: kernels, weights, and the runner or how to make it.

`load_rank` is the entry point of every rank.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from llmbox.kernels.cpu.isa import pick_cores
from llmbox.kernels.dispatch import QuantUnavailable, UnknownBackend, native_ready, select_ops
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.recurrent import StateShape, make_state
from llmbox.kernels.support import KernelSite

from ..config import EngineConfig
from ..core.speculation.proposer import Proposer
from ..device.device import CudaDevice
from ..device.host_experts import with_host_experts
from ..distributed.communicator import TensorParallel
from ..errors import DeviceError, EngineError
from ..hardware.machine import read_machine
from ..hardware.proc import EXIT_SECONDS, await_exits
from ..model.decoder import Decoder
from ..model.encoder import Encoder
from ..model.rotary import Rotary
from ..model_config.config import ModelConfig, parse_config
from ..model_config.parallel_layout import ParallelLayout
from ..planning.memory_plan import MemoryPlan
from ..planning.runnable import RunnablePlan, check_drafts, not_deterministic, require_runnable
from ..runner.block_memory import ModelCaches
from ..runner.cpu_runner import CPUModelRunner
from ..runner.encoder_runner import EncoderRunner
from ..runner.gpu_runner import GPUModelRunner
from ..runner.image_rows import EncodedImages, load_images
from ..sampling import Sampler
from .drafting import DraftTarget, draft_rows, load_draft_parts, load_proposers
from .load_model import WeightsWanted, cache_shapes, load_weights, read_model_vectors, state_shape
from .profile import Agree, RunnerParts, make_device_runner, select_gpu
from .workers import cores_of_rank

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
    """Images of a model with a vision tower."""
    takes_adapters: bool = False
    """Rows may have a LoRA adapter."""
    problem: str = ""
    """`Ops.problem` of the kernels."""

    def finish(
        self, agree: Agree = int
    ) -> tuple[CPUModelRunner | EncoderRunner | GPUModelRunner, MemoryPlan]:
        """Return the runner and the final plan, after the rendezvous of all ranks. Raises DoesNotFit."""
        runner = self.runner
        if isinstance(runner, CPUModelRunner | EncoderRunner):
            return runner, self.plan
        return runner(agree)


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
    ops = _select_ops(config, plan, model_config, device, threads)
    if plan.expert_bytes:
        config = replace(config, cuda_graphs=False)
    overlaps = config.overlaps_on(device.type)
    rows = draft_rows(config, plan, ops, overlaps=overlaps)
    check_drafts(model_config, config)
    weights = WeightsWanted(directory, ops, dtype, device, plan.quant, rank)
    model, measured = load_weights(model_config, weights, progress)
    rotary = Rotary(model_config, plan.context, device, ops.cos_sin)
    kernels: tuple[str, ...] = (ops.name, "" if ops.packing is None else ops.packing.layout, config.exact)
    if model_config.is_bidirectional:
        encoder = _make_encoder_runner(model, rotary, plan, directory, device)
        return RankEngine(rotary, kernels, encoder, plan, ops.name, measured, problem=ops.problem)
    assert isinstance(model, Decoder)
    kv_shape, window_shape = cache_shapes(model_config, plan, layout, kv_dtype, dtype)
    images = None if plan.image_problem else load_images(model_config, directory, ops, dtype, device, layout)
    states = _stage_states(model_config, plan, layout)
    parts = RunnerParts(model, rotary, kv_shape, window_shape, states, images)
    target = DraftTarget(config, plan, model, ops, threads, kv_dtype, progress, device)
    runner: CPUModelRunner | Callable[[Agree], tuple[GPUModelRunner, MemoryPlan]]
    proposers: Sequence[Proposer] = ()
    head = ""
    takes_adapters = model.adapters is not None
    if overlaps:
        # Recurrent layers verify drafts as they compute prompts.
        drafts, (draft, head) = rows[0] if states is None else 0, load_draft_parts(target)
        parts = replace(parts, draft_rows=drafts, draft=draft)
        runner = partial(make_device_runner, parts, config, plan, device, free_before)
        takes_adapters = model.adapters is not None and model.adapters.takes_tiles
    else:
        await_exits(config.memory_after, EXIT_SECONDS)
        runner = _make_cpu_runner(target, parts, rank)
        if rank.layout.rank == 0:  # it schedules, so it drafts
            proposers, head = load_proposers(replace(target, runner=runner))
    kernels += (head,) if head else ()
    return RankEngine(
        rotary,
        kernels,
        runner,
        plan,
        ops.name,
        measured,
        draft_rows=rows,
        proposers=proposers,
        images=images,
        takes_adapters=takes_adapters,
        problem=ops.problem,
    )


def _select_ops(
    config: EngineConfig, plan: MemoryPlan, model: ModelConfig, device: torch.device, threads: int
) -> Ops:
    """Return the kernels of a rank. Raises DeviceError where they lack what the plan needs."""
    dtype, kv_dtype = TORCH_DTYPES[plan.dtype], KV_DTYPES[plan.kv_dtype]
    wanted = RunnablePlan.of(plan, model)
    ops = backend(device, dtype, kv_dtype, threads, QUANTS.get(plan.quant), config, wanted)
    if plan.expert_bytes:
        ops = with_host_experts(ops, CudaDevice(device), threads, QUANTS.get(plan.expert_quant))
    _require_support(ops, config, plan, model, device)
    return ops


def _require_support(
    ops: Ops, config: EngineConfig, plan: MemoryPlan, model: ModelConfig, device: torch.device
) -> None:
    """Raise DeviceError where the selected kernels lack what the plan, an option or the model needs."""
    if KV_DTYPES[plan.kv_dtype] not in ops.kv_dtypes:
        raise DeviceError(
            f"the kernels that run here ({ops.name} on {device.type}) cannot store keys and values in "
            f"{plan.kv_dtype}: load with --kv-dtype auto"
        )
    if config.deterministic and not ops.row_invariant:
        raise not_deterministic(f"{ops.name} on {device.type}, {plan.dtype}")
    if model.recurrent is not None and ops.recurrent is None:
        raise DeviceError(
            f"the kernels that run here ({ops.name}) do not support recurrent layers: use --device cpu"
        )


def _stage_states(model: ModelConfig, plan: MemoryPlan, layout: ParallelLayout) -> StateShape | None:
    """Return the shape of the recurrent state of this rank's layers; None for a model without."""
    if model.recurrent is None:
        return None
    count = model.layers_with(layout.layers(model.num_layers), state=True)
    return state_shape(model.recurrent, count, plan, layout.tp)


def _make_encoder_runner(
    model: Decoder | Encoder, rotary: Rotary, plan: MemoryPlan, directory: Path, device: torch.device
) -> EncoderRunner:
    vectors = read_model_vectors(model.config, directory)
    context, size = plan.context, plan.block_size
    runner = EncoderRunner(model, rotary, vectors, context=context, block_size=size, device=device)
    if device.type == "cuda":
        runner.warm_up(model.ops.warmup_batch_sizes, plan.token_budget)
    return runner


def _make_cpu_runner(target: DraftTarget, parts: RunnerParts, rank: TensorParallel) -> CPUModelRunner:
    config, plan, ops, device = target.config, target.plan, target.ops, target.device
    assert parts.kv_shape is not None
    caches = ModelCaches(
        ops,
        ops.make_kv_cache(parts.kv_shape, device),
        None if parts.window_shape is None else ops.make_kv_cache(parts.window_shape, device),
        None if parts.state_shape is None else make_state(parts.state_shape, device),
        has_window_blocks=plan.window > 0,
    )
    runner = CPUModelRunner(
        target.model,
        parts.rotary,
        caches,
        Sampler(target.model.config.vocab_size, device, ops, rank),
        block_size=plan.block_size,
        device=device,
        images=parts.images,
        lora_bytes=config.lora_bytes,
    )
    if config.plans_adapters:
        runner.adapters.prepare()
    return runner


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
    if len(mine) < len(cores):
        os.sched_setaffinity(0, mine)
    return max(1, threads // layout.ranks)


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
