"""Profile memory with warm-up steps and size the KV cache of a GPU runner to fit the budget."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final, Protocol

import torch

from llmbox.kernels.op_types import KVShape
from llmbox.kernels.recurrent import StateShape, make_state

from ..config import EngineConfig
from ..core.request import Request
from ..core.step import ScheduledRequest, StepPlan
from ..device.device import CudaDevice, Device, HostDevice, cuda_machine
from ..errors import DoesNotFit
from ..ipc.messages import PreparedImage
from ..model.decoder import Decoder
from ..model.rotary import Rotary
from ..model_config.vision.config import VisionConfig
from ..model_config.vision.shape import PICTURE_ROWS, lay_out_image
from ..planning.memory_model import CUDA_CONTEXT, capture_sizes, graphs_reserve
from ..planning.memory_plan import MemoryPlan
from ..runner.cuda_graphs import CudaCapture, GraphCapture
from ..runner.gpu_runner import DeviceSizes, GPUModelRunner
from ..runner.image_rows import EncodedImages
from ..sampling_params import SamplingParams
from ..units import show_bytes

SHORT = 20
"""Tokens of a context that no attention kernel splits into chunks, as it does with long ones."""
MEDIUM: Final = 300
"""Tokens of a context that is split into a few chunks."""
DRAWS: Final[tuple[dict[str, Any], ...]] = ({}, {"top_k": 20}, {"top_p": 0.9})
"""Sampling parameters that take different code paths where ranks share the logits."""
RULED: Final[dict[str, Any]] = {"top_p": 0.9, "repetition_penalty": 1.1}
"""Penalties use other sampling kernels."""
TOLD: Final[dict[str, Any]] = {"prompt_logprobs": 20}
"""Parameters of a prompt with as many alternatives as a request may ask for over HTTP."""


def warmup_steps(plan: MemoryPlan, row_counts: Sequence[int]) -> Iterator[StepPlan]:
    """Yield the warm-up steps; the largest come last, when all kernels are compiled.

    `row_counts`: `Ops.warmup_batch_sizes`.
    """
    for count in counts_up_to(_most_sequences(plan), row_counts):
        yield decoding(plan, count)
    if row_counts:
        yield from (decoding(plan, 1, **draws) for draws in DRAWS)
    for count in counts_up_to(plan.step_tokens, [count for count in row_counts if count > 1]):
        yield StepPlan(prompts(plan, count))
    if row_counts and plan.max_running > 1:
        # Contexts of a step with prompts in it are as long as the longest one there.
        for context in (SHORT, MEDIUM, plan.context):
            decoding_one = sequence(plan, min(context, plan.context - 1), 1, "decodes")
            yield StepPlan([decoding_one, *prompts(plan, 2)], [(0, 1)])
    yield long_prompt(plan)
    yield largest_step(plan)


def num_warmup_blocks(plan: MemoryPlan) -> int:
    """Return how many KV blocks the sequences share: at least two, as one is copied to another."""
    return max(2, -(-_sequence_length(plan) // plan.block_size))


def counts_up_to(most: int, row_counts: Sequence[int]) -> list[int]:
    return [*(count for count in row_counts if count < most), most] if row_counts else []


def largest_step(plan: MemoryPlan) -> StepPlan:
    """Build the largest step: the most tokens in the most sequences, sampled with top-p and penalties."""
    length = _sequence_length(plan)
    return StepPlan([sequence(plan, length, length, str(n), **RULED) for n in range(_most_sequences(plan))])


def _most_sequences(plan: MemoryPlan) -> int:
    return min(plan.max_running, plan.step_tokens)


def _sequence_length(plan: MemoryPlan) -> int:
    """Return the length of the equal sequences that fill a step."""
    return min(-(-plan.step_tokens // _most_sequences(plan)), plan.context - 1)


def long_prompt(plan: MemoryPlan) -> StepPlan:
    """Build a step with the end of the longest prompt: attention may take memory for its whole context.

    It asks for log-probabilities of all its tokens, for which their final hidden states are kept.
    """
    end = plan.context - 1
    return StepPlan([sequence(plan, end, min(end, plan.step_tokens), "long", **TOLD)])


def decoding(plan: MemoryPlan, count: int, **draws: Any) -> StepPlan:
    end = min(SHORT, plan.context - 1)
    return StepPlan([sequence(plan, end, 1, str(number), **draws) for number in range(count)])


def prompts(plan: MemoryPlan, tokens: int) -> list[ScheduledRequest]:
    """Build rows of `tokens` tokens in as few prompts as the context allows."""
    rows: list[ScheduledRequest] = []
    while tokens > 0:
        length = min(tokens, plan.context - 1)
        rows.append(sequence(plan, length, length, f"prompt {len(rows)}"))
        tokens -= length
    return rows


def sequence(plan: MemoryPlan, end: int, tokens: int, name: str, **draws: Any) -> ScheduledRequest:
    """Build the row of the last `tokens` of a context that ends at `end`."""
    params = SamplingParams(max_tokens=1, temperature=0.9, **draws)
    request = Request(request_id=f"trial {name}", prompt_ids=[0] * end, params=params)
    shared = num_warmup_blocks(plan)
    request.block_table = [number % shared for number in range(-(-end // plan.block_size))]
    return ScheduledRequest(request, end - tokens, tokens, samples=True)


log = logging.getLogger("llmbox.engine")


class MemoryMeter(Protocol):
    """Memory of one GPU, in bytes."""

    def allocated(self) -> int:
        """Return the bytes of tensors."""
        ...

    def peak(self) -> int:
        """Return the maximum of `allocated` since `reset_peak`."""
        ...

    def reset_peak(self) -> None: ...

    def runtime(self) -> int:
        """Return what this process took beside tensors: CUDA context, kernels, memory of libraries."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device, free_before: int) -> None:
        """`free_before`: result of `select_gpu`. What other processes take meanwhile counts as this
        process's: better too little KV memory than too much.
        """
        self._device = device
        self._free_before = free_before

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def runtime(self) -> int:
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
class GPUEngineParts:
    """Parts of a runner, all but the KV cache."""

    model: Decoder
    rotary: Rotary
    kv_shape: KVShape
    """`num_blocks` as estimated."""
    window_shape: KVShape | None
    """Shape of the sliding-window layers, if they have a cache of their own."""
    state_shape: StateShape | None
    """For a model with recurrent layers."""
    images: EncodedImages | None = None
    """For a model with a vision tower."""
    draft_rows: int = 0
    """See `DeviceSizes`."""


def make_device_runner(
    parts: GPUEngineParts,
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
    sizes = len(capture_sizes(max(plan.step_rows, parts.draft_rows)))
    graphs = graphs_reserve(kinds * sizes) if config.cuda_graphs else 0
    row_counts = parts.model.ops.warmup_batch_sizes
    make = partial(build, parts, device=on_device, capture=None, graphs_bytes=0)
    plan = profile_kv_blocks(config, plan, meter, graphs, make, row_counts, agree)
    capture = CudaCapture(device) if config.cuda_graphs else None
    runner = build(parts, plan, on_device, capture, graphs)
    runner.prepare()  # captures the largest graph; the others follow between requests
    return runner, plan


def build(
    parts: GPUEngineParts, plan: MemoryPlan, device: Device, capture: GraphCapture | None, graphs_bytes: int
) -> GPUModelRunner:
    shape = replace(parts.kv_shape, num_blocks=plan.num_blocks + 1)
    ops, where = parts.model.ops, device.torch_device
    window_cache = None
    if parts.window_shape is not None:
        blocks = plan.window_blocks if plan.window else plan.num_blocks
        window_cache = ops.make_kv_cache(replace(parts.window_shape, num_blocks=blocks + 1), where)
    counts = plan.block_size, plan.num_blocks, plan.context, plan.max_running
    return GPUModelRunner(
        parts.model,
        parts.rotary,
        ops.make_kv_cache(shape, where),
        device,
        DeviceSizes(*counts, plan.window_blocks, parts.draft_rows),
        capture,
        graphs_bytes,
        window_cache=window_cache,
        states=None if parts.state_shape is None else make_state(parts.state_shape, where),
        images=parts.images,
    )


def profile_kv_blocks(
    config: EngineConfig,
    plan: MemoryPlan,
    meter: MemoryMeter,
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
    tried = plan
    if not config.chunked_prefill:  # a whole prompt comes on top of a step that has room for one token
        tried = replace(plan, token_budget=plan.token_budget + plan.pp * plan.context)
    needed = num_warmup_blocks(tried)
    meter.reset_peak()
    started = time.monotonic()
    # Requests of these steps have one block table for all layers.
    runner = make(replace(plan, num_blocks=needed, window_blocks=needed if plan.window else 0))
    steps = run_warmup(runner, tried, row_counts)
    log.info("kernels ready: %d trial steps took %.1f s", steps, time.monotonic() - started)
    block_bytes = plan.block_size * plan.kv_bytes_per_token
    window_bytes = plan.block_size * plan.window_bytes_per_token
    caches = (needed + 1) * (block_bytes + window_bytes) + plan.state_bytes
    workspace = max(0, meter.peak() - weights - caches)
    pictures = measure_pictures(runner, plan, meter)
    workspace += config.lora_bytes if config.plans_adapters else 0
    del runner
    meter.reset_peak()
    measured = MemoryProfile(weights, workspace + pictures, meter.runtime(), graphs, plan.state_bytes)
    per_context = -(-plan.context // plan.block_size)
    wanted = plan.max_running * per_context
    if config.kv_tokens is not None:
        wanted = -(-config.kv_tokens // plan.block_size)
    windows = (plan.window_blocks + 1) * window_bytes
    blocks = agree(measured.blocks(plan.budget_bytes - windows, block_bytes, wanted))
    if blocks < min(per_context, wanted):
        raise DoesNotFit(_refusal(measured, plan, blocks, per_context, block_bytes))
    log.info(
        "memory measured: weights %s, a step %s, pictures %s, CUDA %s, graphs at most %s, %sKV %s "
        "(estimated %s)",
        *map(show_bytes, (weights, workspace, pictures, measured.runtime, graphs)),
        _show_states(measured),
        show_bytes(blocks * block_bytes + windows),
        show_bytes(plan.kv_bytes),
    )
    return replace(plan, num_blocks=blocks, workspace_bytes=measured.total - weights - measured.states)


def run_warmup(runner: GPUModelRunner, plan: MemoryPlan, row_counts: Sequence[int]) -> int:
    """Run the warm-up steps and return their number. Requests end after each: no runner row stays taken."""
    count = 0
    steps = warmup_steps(plan, row_counts)
    if runner.images is not None:
        steps = chain(steps, picture_steps(plan, runner.images))
    for step in steps:
        runner.collect(runner.launch(step))
        for row in step.rows:
            row.request.admissions += 1
        count += 1
    return count


def picture_steps(plan: MemoryPlan, images: EncodedImages) -> Iterator[StepPlan]:
    """Yield a step with a small picture, whose embeddings are zeros."""
    image = trial_picture(images.config, 1)
    if image.num_rows + 1 < plan.context:
        row = sequence(plan, image.num_rows + 1, image.num_rows + 1, "picture")
        row.request.images = [image]
        piece = image.content_hash, 0, image.num_rows
        yield StepPlan([row], embeddings={piece: bytes(image.num_rows * images.row_bytes)})


def measure_pictures(runner: GPUModelRunner, plan: MemoryPlan, meter: MemoryMeter) -> int:
    """Return the bytes that it takes to encode the largest picture that memory is planned for, and to keep
    embeddings. A small one is encoded too, so that its kernels are compiled.
    """
    if runner.images is None:
        return 0
    meter.reset_peak()
    before = meter.allocated()
    for side in (1, math.isqrt(PICTURE_ROWS)):
        runner.images.try_out(trial_picture(runner.images.config, side))
    return plan.image_cache_bytes + max(0, meter.peak() - before)


def trial_picture(vision: VisionConfig, side: int) -> PreparedImage:
    """Return a black picture of `side` x `side` embeddings, or of the nearest size that the model takes."""
    layout = lay_out_image(vision, side * vision.processor.unit, side * vision.processor.unit)
    return PreparedImage(
        content_hash=b"trial",
        tiles=list(layout.tiles),
        pixels=bytes(3 * sum(height * width for height, width in layout.tiles)),
        grid=layout.grid,
        num_tokens=layout.num_rows,
        num_rows=layout.num_rows,
    )


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
