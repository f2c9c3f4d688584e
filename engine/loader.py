"""From a model directory to an engine that is ready: parse, plan the memory, load, wire."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from llmbox.kernels.dispatch import QuantUnavailable, UnknownBackend, native_ready, select_ops
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant import QUANTS, Quant
from llmbox.kernels.ragged import KVShape

from .block_pool import BlockPool
from .config import EngineConfig
from .core import Engine
from .errors import DeviceError, EngineError
from .estimator import MemoryBudget, MemoryPlan, estimate
from .footprint import grown, memory_in_use
from .layers.rotary import Rotary
from .machine import read_machine
from .messages import ModelInfo, Progress
from .model_config import ModelConfig, parse_config
from .models import build_model
from .runner import ModelRunner
from .sampler import Sampler
from .scheduler import Scheduler
from .scheduler_config import SchedulerConfig
from .weights import Source

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_engine(config: EngineConfig, progress: Callable[[Progress], None]) -> Engine:
    """Raises ModelError, DoesNotFit or DeviceError; then nothing of the model is left behind."""
    started = time.monotonic()
    directory = Path(config.model_path)
    model_config = parse_config(directory)
    device = resolve_device(config.device)
    threads = config.threads or read_machine().cpu.cores
    torch.set_num_threads(threads)
    plan = estimate(model_config.shape(config.context), memory_budget(device), config)
    dtype, kv_dtype = TORCH_DTYPES[plan.dtype], TORCH_DTYPES[plan.kv_dtype]
    ops = backend(device, dtype, kv_dtype, threads, QUANTS.get(plan.quant))
    if config.deterministic and not ops.row_invariant:
        raise DeviceError(
            f"deterministic was asked for, but the kernels that run here ({ops.name} on {device.type}, "
            f"{plan.dtype}) may compute a row differently in another batch. It needs the C++ kernels: on a "
            "CPU, in bfloat16 or float32; see `llmbox doctor`"
        )

    before = memory_in_use(device)
    source = Source(directory, ops, dtype, device, weights_progress(progress))
    model = build_model(model_config, source)
    measured = grown(before, memory_in_use(device))
    kv_shape = KVShape(
        num_layers=model_config.num_layers,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=kv_dtype,
        compute_dtype=dtype,
    )
    rotary = Rotary(model_config, plan.context, device)
    cache = ops.make_kv_cache(kv_shape, device)
    sampler = Sampler(model_config.vocab_size, device)
    runner = ModelRunner(model, rotary, cache, sampler, block_size=plan.block_size, device=device)
    info = model_info(config, model_config, plan, ops, time.monotonic() - started, measured)
    return Engine(make_scheduler(config, plan), runner, info)


def resolve_device(asked: str) -> torch.device:
    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        reason = (
            "PyTorch finds no usable NVIDIA GPU" if torch.version.cuda else "this PyTorch has no CUDA in it"
        )
        raise DeviceError(
            f"device cuda was asked for, but {reason}: use --device cpu, or see `llmbox doctor`"
        )
    return torch.device("cuda" if available and asked != "cpu" else "cpu")


def memory_budget(device: torch.device) -> MemoryBudget:
    machine = read_machine()
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return MemoryBudget(device="cuda", available=free, cores=machine.cpu.cores)
    return replace(MemoryBudget.of(machine, "cpu"), native_kernels=native_ready())


def backend(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, threads: int, quant: Quant | None
) -> Ops:
    try:
        return select_ops(device, dtype, kv_dtype, threads, quant)
    except QuantUnavailable as error:
        raise DeviceError(f"{error}: load with --quant none") from None
    except UnknownBackend as error:
        raise EngineError(str(error)) from None


def weights_progress(progress: Callable[[Progress], None]) -> Callable[[int, int], None]:
    return lambda done, total: progress(Progress(phase="weights", done=done, total=total))


def make_scheduler(config: EngineConfig, plan: MemoryPlan) -> Scheduler:
    pool = BlockPool(plan.num_blocks, plan.block_size, enable_prefix_cache=config.prefix_cache)
    settings = SchedulerConfig(
        context=plan.context,
        max_running=plan.max_running,
        token_budget=plan.token_budget,
        batching=config.batching,
        chunked_prefill=config.chunked_prefill,
        premium_share=config.premium_share,
        watermark=config.watermark,
    )
    return Scheduler(settings, pool)


def model_info(
    config: EngineConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    ops: Ops,
    load_seconds: float,
    measured: int | None,
) -> ModelInfo:
    return ModelInfo(
        name=config.name,
        architecture=model.model_type,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        backend=ops.name,
        context_window=plan.context,
        vocab_size=model.vocab_size,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        weights_bytes=plan.weights_bytes,
        kv_bytes=plan.kv_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        workspace_bytes=plan.workspace_bytes,
        max_running=plan.max_running,
        max_concurrency=plan.max_concurrency,
        load_seconds=load_seconds,
        measured_weights_bytes=measured,
    )
