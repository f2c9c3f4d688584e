"""From loaded weights to a runner whose KV memory fits the budget as measured."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from llmbox.kernels.ragged import KVShape

from ..config import EngineConfig
from ..errors import DoesNotFit
from ..estimator import MemoryPlan, show_bytes
from ..layers.decoder import Decoder
from ..layers.rotary import Rotary
from ..memory_use import graphs_reserve
from .cuda_graphs import CudaCapture
from .device import CudaDevice, Device, HostDevice
from .graphs import GraphCapture, capture_sizes
from .memory import CudaMeter, Measured, MemoryMeter
from .runner import DeviceRunner, DeviceSizes
from .trial import trial_blocks, trial_steps

log = logging.getLogger("llmbox.engine")

Agree = Callable[[int], int]
"""Of several ranks: from the blocks that one has room for to those that all have. The same result on all."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner is made of, but the KV memory."""

    model: Decoder
    rotary: Rotary
    kv_shape: KVShape
    """`num_blocks` as estimated."""


def make_device_runner(
    parts: Parts,
    config: EngineConfig,
    plan: MemoryPlan,
    device: torch.device,
    free_before: int,
    agree: Agree = int,
) -> tuple[DeviceRunner, MemoryPlan]:
    """The runner, and the plan as the measurements changed it. Raises DoesNotFit."""
    if device.type != "cuda":
        return build(parts, plan, HostDevice(), None, 0), plan
    meter = CudaMeter(device, free_before)
    on_device = CudaDevice(device)
    graphs = graphs_reserve(len(capture_sizes(plan.step_rows))) if config.cuda_graphs else 0
    row_counts = parts.model.ops.row_counts
    make = partial(build, parts, device=on_device, capture=None, graphs_bytes=0)
    plan = fit_pool(config, plan, meter, graphs, make, row_counts, agree)
    capture = CudaCapture(device) if config.cuda_graphs else None
    runner = build(parts, plan, on_device, capture, graphs)
    runner.prepare()  # the largest; the others between requests
    return runner, plan


def build(
    parts: Parts, plan: MemoryPlan, device: Device, capture: GraphCapture | None, graphs_bytes: int
) -> DeviceRunner:
    shape = replace(parts.kv_shape, num_blocks=plan.num_blocks + 1)
    cache = parts.model.ops.make_kv_cache(shape, device.torch_device)
    sizes = DeviceSizes(plan.block_size, plan.num_blocks, plan.context, plan.max_running)
    return DeviceRunner(parts.model, parts.rotary, cache, device, sizes, capture, graphs_bytes)


def fit_pool(
    config: EngineConfig,
    plan: MemoryPlan,
    meter: MemoryMeter,
    graphs: int,
    make: Callable[[MemoryPlan], DeviceRunner],
    row_counts: Sequence[int] = (),
    agree: Agree = int,
) -> MemoryPlan:
    """The plan with the workspace and the KV blocks that trial steps leave room for. Raises DoesNotFit.

    Those steps compile all kernels too (`row_counts`: `Ops.row_counts`), before the memory of a process with
    its kernels is measured: the first request then finds them, and so does Triton's cache at the next load.
    """
    weights = meter.allocated()
    tried = plan
    if not config.chunked_prefill:  # a whole prompt comes on top of a step that has room for one token
        tried = replace(plan, token_budget=plan.token_budget + plan.pp * plan.context)
    needed = trial_blocks(tried)
    meter.reset_peak()
    started = time.monotonic()
    runner = make(replace(plan, num_blocks=needed))
    steps = run_trials(runner, tried, row_counts)
    log.info("kernels ready: %d trial steps took %.1f s", steps, time.monotonic() - started)
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    workspace = max(0, meter.peak() - weights - (needed + 1) * block_bytes)
    del runner
    meter.reset_peak()
    measured = Measured(weights, workspace, meter.runtime(), graphs)
    per_context = -(-plan.context // plan.block_size)
    wanted = plan.max_running * per_context
    if config.kv_tokens is not None:
        wanted = -(-config.kv_tokens // plan.block_size)
    blocks = agree(measured.blocks(plan.budget_bytes, block_bytes, wanted))
    if blocks < min(per_context, wanted):
        raise DoesNotFit(_refusal(measured, plan, blocks, per_context, block_bytes))
    log.info(
        "memory measured: weights %s, a step %s, CUDA %s, graphs at most %s, KV %s (estimated %s)",
        *(show_bytes(size) for size in (weights, workspace, measured.runtime, graphs, blocks * block_bytes)),
        show_bytes(plan.kv_bytes),
    )
    return replace(plan, num_blocks=blocks, workspace_bytes=measured.total - weights)


def run_trials(runner: DeviceRunner, plan: MemoryPlan, row_counts: Sequence[int]) -> int:
    """How many steps there were. Each is a life of its own: no row of the runner stays taken."""
    count = 0
    for step in trial_steps(plan, row_counts):
        runner.collect(runner.launch(step))
        for row in step.rows:
            row.request.admissions += 1
        count += 1
    return count


def _refusal(measured: Measured, plan: MemoryPlan, blocks: int, wanted: int, block_bytes: int) -> str:
    need = measured.total + (wanted + 1) * block_bytes
    fits = max(0, blocks) * plan.block_size
    remedy = f"a context of {fits} tokens would fit" if fits else "a smaller model or quant is needed"
    return (
        f"the model needs {show_bytes(need)} as measured and has {show_bytes(plan.budget_bytes)} "
        f"(weights {show_bytes(measured.weights)}, workspace {show_bytes(measured.workspace)}, "
        f"CUDA and graphs {show_bytes(measured.runtime + measured.graphs)}, KV for a context of "
        f"{plan.context} tokens {show_bytes(wanted * block_bytes)}); {remedy}"
    )
