"""Profile memory with warm-up steps and size the KV cache of a GPU runner to fit the budget."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch

from llmbox.kernels.op_types import KVShape
from llmbox.kernels.recurrent import StateShape, make_state

from ..config import DRAFT_MODEL_ROWS, EngineConfig
from ..core.speculation.proposer import DraftMethod
from ..device.device import CudaDevice, Device, HostDevice, cuda_machine
from ..errors import DoesNotFit
from ..hardware.machine import show_bytes
from ..model.decoder import Decoder
from ..model.draft_heads import DraftHead
from ..model.rotary import Rotary
from ..model_config.vision.config import IMAGE_ROWS
from ..planning.memory_model import CUDA_CONTEXT, capture_sizes, graphs_reserve
from ..planning.memory_plan import MemoryPlan
from ..runner.block_memory import ModelCaches
from ..runner.cuda_graphs import CudaCapture, GraphSize
from ..runner.draft_head import DeviceHeadRunner
from ..runner.draft_model import DraftModel
from ..runner.gpu_inputs import DeviceSizes
from ..runner.gpu_runner import GPUModelRunner
from ..runner.image_rows import EncodedImages
from .warmup import num_warmup_blocks, run_warmup, trial_image

log = logging.getLogger("llmbox.engine")

EARLY_SECONDS: Final = 3.0
"""Time that captures may add to a load."""


class CudaMeter:
    """Memory of one GPU, in bytes."""

    def __init__(self, device: torch.device, free_before: int) -> None:
        """`free_before`: result of `select_gpu`. What other processes take meanwhile counts as this
        process's: better too little KV memory than too much.
        """
        self._device = device
        self._free_before = free_before

    def allocated(self) -> int:
        """Return the bytes of tensors."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Return the maximum of `allocated` since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reserved_peak(self) -> int:
        """Return the maximum since `reset_peak` of what the allocator holds: also what it cannot use, as free
        pieces of its blocks are too small.
        """
        return torch.cuda.max_memory_reserved(self._device)

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def runtime(self) -> int:
        """Return what this process took beside tensors: CUDA context, kernels, memory of libraries."""
        taken = self._free_before - torch.cuda.mem_get_info(self._device)[0]
        return max(0, taken - torch.cuda.memory_reserved(self._device))


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Measured bytes without the KV cache."""

    weights: int
    workspace: int
    runtime: int
    graphs: int
    """Reserve for CUDA graphs: capturing ends when it is used up."""
    states: int = 0
    """Slots of recurrent state, all of them."""

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.runtime + self.graphs + self.states

    def blocks(self, budget: int, block_bytes: int, wanted: int) -> int:
        """Return how many KV blocks fit, the padding block not counted; below 1: none.

        Blocks of a model without attention only count tokens.
        """
        if not block_bytes:
            return wanted if self.total <= budget else 0
        return min(wanted, (budget - self.total) // block_bytes - 1)


Agree = Callable[[int], int]
"""Reduction over ranks: from the blocks that one rank has room for to the minimum of all, known to all."""


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """Parts of a runner, all but the KV cache."""

    model: Decoder | DraftHead
    rotary: Rotary
    kv_shape: KVShape | None
    """`num_blocks` as estimated; None for a head without keys."""
    window_shape: KVShape | None = None
    """Shape of the sliding-window layers, if they have a cache of their own."""
    state_shape: StateShape | None = None
    """For a model with recurrent layers."""
    images: EncodedImages | None = None
    """For a model with a vision tower."""
    draft_rows: int = 0
    """See `DeviceSizes`."""
    draft: "RunnerParts | None" = None
    """Draft model or head beside it."""
    method: DraftMethod = "draft_model"
    """Method of a draft model or head."""
    taps: tuple[int, ...] = ()
    """Layers of the target whose inputs a head reads; empty: it reads the last hidden states."""


def make_device_runner(
    parts: RunnerParts,
    config: EngineConfig,
    plan: MemoryPlan,
    device: torch.device,
    free_before: int,
    agree: Agree = int,
) -> tuple[GPUModelRunner, MemoryPlan]:
    """Return the runner and the plan as the measurements changed it. Raises DoesNotFit."""
    if device.type != "cuda":
        return build(parts, plan, HostDevice(), None, 0), plan
    meter = CudaMeter(device, free_before)
    on_device = CudaDevice(device)
    kinds = 1 + config.plans_adapters  # steps with adapters have graphs of their own
    most = max(plan.step_rows, parts.draft_rows)
    graphs = graphs_reserve(kinds * len(capture_sizes(most))) if config.cuda_graphs else 0
    if graphs and parts.model.rank.layout.ranks == 1:  # graphs that draw hold logits, float32 at most
        graphs += 4 * most * parts.model.config.vocab_size
    row_counts = parts.model.ops.warmup_batch_sizes
    make = partial(build, parts, device=on_device, make_capture=None, graphs_bytes=0)
    models = 1 if parts.draft is None or parts.draft.kv_shape is None else 2  # Medusa heads have no graphs
    plan = profile_kv_blocks(config, plan, meter, models * graphs, make, row_counts, agree)
    make_capture = partial(CudaCapture, device) if config.cuda_graphs else None
    runner = build(parts, plan, on_device, make_capture, graphs)
    for each in (runner, *(proposer.executor for proposer in runner.proposers)):
        assert isinstance(each, GPUModelRunner)
        capture_early(each, agree)
    return runner, plan


def capture_early(
    runner: GPUModelRunner, agree: Agree = int, clock: Callable[[], float] = time.monotonic
) -> None:
    """Capture the graphs that most steps run from, for at most `EARLY_SECONDS`. The others follow while the
    engine is idle. All ranks capture the same sizes: one that none is left for, or no time, ends it for all.
    """
    end = clock() + EARLY_SECONDS
    while True:
        early = runner.early_capture if clock() < end else None
        rows = agree(0 if early is None else early.rows)
        if not rows:
            return
        runner.capture(GraphSize(rows, is_adapted=False))


def build(
    parts: RunnerParts,
    plan: MemoryPlan,
    device: Device,
    make_capture: Callable[[], CudaCapture] | None,
    graphs_bytes: int,
    vocab_size: int = 0,
) -> GPUModelRunner:
    """Build the runner, with that of the draft model. `graphs_bytes`: of each. `vocab_size`: see
    `DeviceSizes`.
    """
    ops, where = parts.model.ops, device.torch_device
    cache = window_cache = None
    if parts.kv_shape is not None:
        cache = ops.make_kv_cache(replace(parts.kv_shape, num_blocks=plan.num_blocks + 1), where)
    if parts.window_shape is not None:
        blocks = plan.window_blocks if plan.window else plan.num_blocks
        window_cache = ops.make_kv_cache(replace(parts.window_shape, num_blocks=blocks + 1), where)
    counts = plan.block_size, plan.num_blocks, plan.context, plan.max_running
    sizes = DeviceSizes(*counts, plan.window_blocks, parts.draft_rows, vocab_size)
    capture = None if make_capture is None else make_capture()
    if isinstance(parts.model, DraftHead):
        caches = ModelCaches(ops, cache)
        return DeviceHeadRunner(parts.model, parts.rotary, caches, device, sizes, capture, graphs_bytes)
    states = None if parts.state_shape is None else make_state(parts.state_shape, where)
    caches = ModelCaches(ops, cache, window_cache, states, has_window_blocks=sizes.window_blocks > 0)
    runner = GPUModelRunner(
        parts.model, parts.rotary, caches, device, sizes, capture, graphs_bytes, images=parts.images
    )
    if parts.draft is not None:
        whole = replace(plan, window=0, window_blocks=0)
        sampled = parts.model.config.vocab_size
        beside = build(parts.draft, whole, device, make_capture, graphs_bytes, sampled)
        if isinstance(beside, DeviceHeadRunner):
            beside.follow(runner, parts.draft.method, parts.draft.taps)
        else:
            runner.proposers.append(DraftModel(beside, plan.num_blocks, plan.block_size))
    return runner


def profile_kv_blocks(
    config: EngineConfig,
    plan: MemoryPlan,
    meter: CudaMeter,
    graphs: int,
    make: Callable[[MemoryPlan], GPUModelRunner],
    row_counts: Sequence[int] = (),
    agree: Agree = int,
) -> MemoryPlan:
    """Return the plan with the workspace and the KV blocks that warm-up steps leave room for.

    The warm-up steps also compile all kernels before memory is measured; `row_counts` are the backend's
    `Ops.warmup_batch_sizes`. The first request finds them compiled, and the next load finds them in Triton's
    cache. Raises DoesNotFit.
    """
    weights = meter.allocated()
    meter.reset_peak()
    runner, needed = _try_out(config, plan, make, row_counts)
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    window_bytes = plan.block_size * plan.window_bytes_per_token
    caches = (needed + 1) * (block_bytes + window_bytes) + plan.state_bytes
    workspace, reserved = (max(0, peak - weights - caches) for peak in (meter.peak(), meter.reserved_peak()))
    images = measure_images(runner, plan, meter)
    workspace += config.lora_bytes if config.plans_adapters else 0
    del runner
    meter.reset_peak()
    measured = MemoryProfile(weights, workspace + images, meter.runtime(), graphs, plan.state_bytes)
    per_context = -(-plan.context // plan.block_size)
    wanted = plan.max_running * per_context
    if config.kv_tokens is not None:
        wanted = -(-config.kv_tokens // plan.block_size)
    windows = (plan.window_blocks + 1) * window_bytes
    blocks = agree(measured.blocks(plan.budget_bytes - windows, block_bytes, wanted))
    if blocks < min(per_context, wanted):
        raise DoesNotFit(_refusal(measured, plan, blocks, per_context, block_bytes))
    log.info(
        "memory measured: weights %s, a step %s (%s with unused pieces), images %s, CUDA %s, "
        "graphs at most %s, %sKV %s (estimated %s)",
        *map(show_bytes, (weights, workspace, reserved, images, measured.runtime, graphs)),
        _show_states(measured),
        show_bytes(blocks * block_bytes + windows),
        show_bytes(plan.kv_bytes),
    )
    return replace(plan, num_blocks=blocks, workspace_bytes=measured.total - weights - measured.states)


def _try_out(
    config: EngineConfig,
    plan: MemoryPlan,
    make: Callable[[MemoryPlan], GPUModelRunner],
    row_counts: Sequence[int],
) -> tuple[GPUModelRunner, int]:
    """Run the warm-up steps of the model and of its proposers. Returns their runner and its KV blocks."""
    tried = plan
    if not config.chunked_prefill:  # a whole prompt comes on top of a step that has room for one token
        tried = replace(plan, token_budget=plan.token_budget + plan.pp * plan.context)
    needed, drafting = num_warmup_blocks(tried), replace(plan, token_budget=DRAFT_MODEL_ROWS)
    if plan.draft_method is not None:
        needed = max(needed, num_warmup_blocks(drafting))
    started = time.monotonic()
    # Requests of these steps have one block table for all layers.
    runner = make(replace(plan, num_blocks=needed, window_blocks=needed if plan.window else 0))
    steps = run_warmup(runner, tried, row_counts)
    for proposer in runner.proposers:
        assert isinstance(proposer.executor, GPUModelRunner)
        steps += run_warmup(proposer.executor, drafting, row_counts)
    log.info("kernels ready: %d trial steps took %.1f s", steps, time.monotonic() - started)
    return runner, needed


def measure_images(runner: GPUModelRunner, plan: MemoryPlan, meter: CudaMeter) -> int:
    """Return the bytes that it takes to encode the largest image that memory is planned for, and to keep
    embeddings. A small one is encoded too, so that its kernels are compiled.
    """
    if runner.images is None:
        return 0
    meter.reset_peak()
    before = meter.allocated()
    for side in (1, math.isqrt(IMAGE_ROWS)):
        runner.images.try_out(trial_image(runner.images.config, side))
    return plan.image_cache_bytes + max(0, meter.peak() - before)


def _show_states(measured: MemoryProfile) -> str:
    return f"recurrent state {show_bytes(measured.states)}, " if measured.states else ""


def _refusal(measured: MemoryProfile, plan: MemoryPlan, blocks: int, wanted: int, block_bytes: int) -> str:
    kv = wanted * block_bytes + plan.block_size * plan.window_blocks * plan.window_bytes_per_token
    need = measured.total + kv + block_bytes
    fits = max(0, blocks) * plan.block_size
    remedy = f"a context of {fits} tokens would fit" if fits else "a smaller model or quant is needed"
    return (
        f"the model needs {show_bytes(need)} as measured and has {show_bytes(plan.budget_bytes)} "
        f"(weights {show_bytes(measured.weights)}, workspace {show_bytes(measured.workspace)}, "
        f"CUDA and graphs {show_bytes(measured.runtime + measured.graphs)}, {_show_states(measured)}"
        f"KV for a context of {plan.context} tokens {show_bytes(kv)}); {remedy}"
    )


def select_gpu(number: int) -> int:
    """Select a GPU for this process and return the bytes that were free before its CUDA context existed.

    Without NVML: what is free now, plus `CUDA_CONTEXT`. For a GPU that was opened long before (by a benchmark
    that loads several models): what is free now, as its context is no part of this load.
    """
    before = next((gpu.free for gpu in cuda_machine().gpus if gpu.index == number), None)
    torch.cuda.set_device(number)
    free, _total = torch.cuda.mem_get_info(number)
    if before is None:
        return free + CUDA_CONTEXT
    log.info("the CUDA context takes %s of GPU %d", show_bytes(max(0, before - free)), number)
    return max(before, free)
