"""From loaded weights to a runner whose KV memory fits the budget as measured."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llmbox.kernels.ragged import KVShape

from ..config import EngineConfig
from ..errors import DoesNotFit
from ..estimator import MemoryPlan, show_bytes
from ..layers.decoder import Decoder
from ..layers.rotary import Rotary
from ..request import Request
from ..runner import Picker
from ..sampling import SamplingParams
from ..step import ScheduledRequest, StepPlan
from .cuda_graphs import CudaCapture
from .device import CudaDevice, Device, HostDevice
from .graphs import GraphCapture, capture_sizes
from .memory import CudaMeter, Measured, MemoryMeter, graphs_reserve
from .runner import DeviceRunner, DeviceSizes

log = logging.getLogger("llmbox.engine")


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner is made of, but the KV memory."""

    model: Decoder
    rotary: Rotary
    sampler: Picker
    kv_shape: KVShape
    """`num_blocks` as estimated."""


def make_device_runner(
    parts: Parts, config: EngineConfig, plan: MemoryPlan, device: torch.device, free_before: int
) -> tuple[DeviceRunner, MemoryPlan]:
    """The runner, and the plan as the measurements changed it. Raises DoesNotFit."""
    if device.type != "cuda":
        return build(parts, plan, HostDevice(), None, 0), plan
    meter = CudaMeter(device, free_before)
    on_device = CudaDevice(device)
    graphs = graphs_reserve(len(capture_sizes(plan.max_running))) if config.cuda_graphs else 0
    plan = fit_pool(config, plan, meter, graphs, lambda trial: build(parts, trial, on_device, None, 0))
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
    return DeviceRunner(parts.model, parts.rotary, cache, parts.sampler, device, sizes, capture, graphs_bytes)


def fit_pool(
    config: EngineConfig,
    plan: MemoryPlan,
    meter: MemoryMeter,
    graphs: int,
    make: Callable[[MemoryPlan], DeviceRunner],
) -> MemoryPlan:
    """The plan with the workspace and the KV blocks that a trial step leaves room for. Raises DoesNotFit."""
    weights = meter.allocated()
    trial = trial_step(plan)
    needed = max(len(row.request.block_table) for row in trial.rows)
    meter.reset_peak()
    runner = make(replace(plan, num_blocks=needed))
    runner.collect(runner.launch(trial))
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    workspace = max(0, meter.peak() - weights - (needed + 1) * block_bytes)
    del runner
    meter.reset_peak()
    measured = Measured(weights, workspace, meter.runtime(), graphs)
    per_context = -(-plan.context // plan.block_size)
    wanted = plan.max_running * per_context
    if config.kv_tokens is not None:
        wanted = -(-config.kv_tokens // plan.block_size)
    blocks = measured.blocks(plan.budget_bytes, block_bytes, wanted)
    if blocks < min(per_context, wanted):
        raise DoesNotFit(_refusal(measured, plan, blocks, per_context, block_bytes))
    log.info(
        "memory measured: weights %s, a step %s, CUDA %s, graphs at most %s, KV %s (estimated %s)",
        *(show_bytes(size) for size in (weights, workspace, measured.runtime, graphs, blocks * block_bytes)),
        show_bytes(plan.kv_bytes),
    )
    return replace(plan, num_blocks=blocks, workspace_bytes=measured.total - weights)


def trial_step(plan: MemoryPlan) -> StepPlan:
    """As many tokens as a step may have, in as many sequences as may run, all drawn with top-p.

    They share one set of blocks: what they write is of no interest.
    """
    sequences = min(plan.max_running, plan.token_budget)
    length = min(-(-plan.token_budget // sequences), plan.context - 1)
    blocks = list(range(-(-length // plan.block_size)))
    params = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.9)
    requests = [
        Request(request_id=f"trial {number}", prompt_ids=[0] * length, params=params)
        for number in range(sequences)
    ]
    for request in requests:
        request.block_table = blocks
    return StepPlan([ScheduledRequest(request, 0, length, samples=True) for request in requests])


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
