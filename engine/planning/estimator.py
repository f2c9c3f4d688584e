"""Memory estimator: does a model fit, and with what context and concurrency.

The engine allocates exactly what `estimate` returns, and `llmbox fit` shows it. It is one function, so that a
model that fits never runs out of memory later.

    total = weights + workspace + KV, those of a draft model or head included
    weights   = parameters · bytes of the weights' dtype, or see `weights_bytes` when quantized
    KV        = blocks · block size · 2 · layers · kv_heads · (head_dim · bytes of the KV dtype, or
                head_dim + 4 with a scale per head); head_dim as the C++ kernels pad it
    workspace = see `Workspace` in memory_model.py
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from llmbox.kernels.quant_formats import QUANTS, with_rounded_head
from llmbox.kernels.support import KernelSite, is_row_invariant, why_no_quant

from ..config import EngineConfig, QuantChoice
from ..errors import DeviceError, DoesNotFit, EngineError
from ..hardware.machine import show_bytes
from ..model_config.config import parse_config
from ..model_config.draft_heads import Eagle3Config, read_draft_head
from ..model_config.shape import DTYPE_BYTES, ModelShape
from ..model_config.vision.config import NO_TOWER, USUAL_SIDE
from .disaggregation import check_disaggregation, decode_config, describe_pair
from .memory_model import image_cache_bytes
from .memory_plan import DraftModelSizes, MemoryBudget, MemoryPlan, resolve_dtypes
from .performance_model import rank_shape
from .placement import (
    HOST_MOST,
    Placement,
    add_host_experts,
    candidate_placements,
    device_options,
    why_no_host_experts,
)
from .planner import Planner
from .runnable import why_no_draft_model, why_no_drafts

__all__ = ["MemoryBudget", "MemoryPlan", "ModelShape", "estimate", "plans", "resolve_dtypes", "show_bytes"]


_HOST_SHARE = 0.2
# Fraction of the free main memory for blocks that a GPU evicts, by default; at most `HOST_MOST`.


def estimate(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> MemoryPlan:
    """Return the best plan within the budget. Raises `DoesNotFit`, which states the need, the available
    memory and what would fit; DeviceError; ParallelError.
    """
    return plans(shape, budget, config)[0]


def plans(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> list[MemoryPlan]:
    """Return equally good plans, each on other GPUs. The first is that of `estimate`; raises as it does.

    A mixture that fits on no GPUs has its experts in main memory, unless `config.cpu_experts` is off.
    """
    if config.host_bytes_limit is not None:
        host = min(budget.host_available, config.host_bytes_limit)
        budget = replace(budget, host_available=host)
    refusal = why_no_host_experts(shape, budget, config)
    if config.cpu_experts == "on":
        if refusal is not None:
            raise refusal
        return _plans(shape, budget, config, on_host=True)
    try:
        return _plans(shape, budget, config)
    except DoesNotFit as error:
        if config.cpu_experts == "off" or refusal is not None:
            raise
        try:
            return _plans(shape, budget, config, on_host=True)
        except EngineError as other:
            raise DoesNotFit(f"{error}. With --cpu-experts on: {other}") from None


def _plans(
    shape: ModelShape, budget: MemoryBudget, config: EngineConfig, *, on_host: bool = False
) -> list[MemoryPlan]:
    """Return the plans with all weights on the device, or with experts in main memory."""
    notes: tuple[str, ...] = ()
    whole, asked = shape, config
    if on_host:
        config = replace(device_options(shape, config), kv_host_bytes=0)
    if config.disaggregate is not None:
        check_disaggregation(config, shape, budget.device, budget.cores)
        config = decode_config(config)
        notes = (describe_pair(config.disaggregate),)
    if shape.stored is not None or shape.quant is not None:
        shape, config, stored = _resolve_stored(shape, budget, config)
        notes += stored
    if on_host:
        shape = shape.without_routed()
    found: list[MemoryPlan] = []
    refusal: DoesNotFit | None = None
    for cut in candidate_placements(shape, budget.nvlink, 1 + len(budget.more_gpus), config, budget.device):
        if found and not found[0].is_lowered and (cut.tp, cut.pp) != (found[0].tp, found[0].pp):
            break
        if on_host and cut.ranks > 1:
            break
        try:
            plan = _plan_cut(shape, budget, config, cut)
        except DoesNotFit as error:
            refusal = refusal or error
            continue
        if found and _rank(plan) > _rank(found[0]):
            found.clear()
        found.append(plan)
    if not found:
        assert refusal is not None
        raise refusal
    if on_host:
        found = [_with_host_part(plan, whole, budget, asked) for plan in found]
    best = found[0]
    notes += note_head(config, best.quant)
    equal = [plan for plan in found if (_rank(plan), plan.tp, plan.pp) == (_rank(best), best.tp, best.pp)]
    return [replace(plan, notes=notes + plan.notes) for plan in equal] if notes else equal


def _with_host_part(
    plan: MemoryPlan, whole: ModelShape, budget: MemoryBudget, config: EngineConfig
) -> MemoryPlan:
    """Return the plan with experts in main memory, and evicted KV blocks in what they leave of it."""
    plan = add_host_experts(plan, whole, budget, config)
    left = replace(budget, host_available=max(0, budget.host_available - plan.expert_bytes))
    host, lowered = host_bytes(whole, left, config, 1)
    return replace(plan, host_bytes=host, notes=plan.notes + lowered)


def _rank(plan: MemoryPlan) -> tuple[bool, int]:
    """Return the sort key of a plan; greater is better."""
    return not plan.is_lowered, plan.context


def _plan_cut(shape: ModelShape, budget: MemoryBudget, config: EngineConfig, cut: Placement) -> MemoryPlan:
    """Plan each rank of a placement. On a CPU all ranks share one memory, on GPUs each has its own."""
    rank_budget, rank_config = _share_of_rank(budget, config, cut)
    ranks_in_memory = cut.ranks if budget.device == "cpu" else 1
    problem = why_no_images(shape, config)
    if problem:
        shape = replace(shape, vision=None)
    whole, copies = config.expert_parallel, config.redundant_experts
    part = rank_shape(shape, cut.tp, cut.pp, expert_parallel=whole, redundant_experts=copies)
    if part.vision is not None and ranks_in_memory > 1:
        part = replace(part, vision=part.vision.share(ranks_in_memory))

    def plan_with(options: EngineConfig) -> MemoryPlan:
        make = partial(Planner, part, rank_budget, options, cut.pp, ranks_in_memory)
        return _plan_with_drafts(shape, rank_budget, options, cut.ranks, make)

    if config.quant == "auto":
        plan, choice = _choose_quant(plan_with, rank_config)
    else:
        plan, choice = plan_with(rank_config), ()
    notes = ((cut.reason,) if cut.reason else ()) + plan.notes + choice
    if budget.device == "cpu" and 1 < budget.cores < cut.ranks:
        notes += (f"{cut.ranks} ranks share {budget.cores} cores and wait for each other: ask for fewer",)
    images = describe_images(shape, plan, problem)
    notes += note_images(shape, images, problem)
    notes += note_factors(shape, plan.context)
    host, lowered = host_bytes(shape, budget, config, cut.ranks)
    plan = replace(plan, host_bytes=host, **images)
    plan = replace(plan, tp=cut.tp, pp=cut.pp, gpus=cut.gpus, notes=notes + lowered)
    return replace(plan, expert_parallel=whole, redundant_experts=copies)


def _share_of_rank(
    budget: MemoryBudget, config: EngineConfig, cut: Placement
) -> tuple[MemoryBudget, EngineConfig]:
    """Return the budget and the options of one rank."""
    if budget.device == "cuda":
        free = (budget.available, *budget.more_gpus)
        return replace(budget, available=min(free[gpu] for gpu in cut.gpus)), config
    if cut.ranks == 1:
        return budget, config
    asked, cores = config.memory_bytes, max(1, budget.cores // cut.ranks)
    config = replace(config, memory_bytes=None if asked is None else asked // cut.ranks)
    return replace(budget, available=budget.available // cut.ranks, cores=cores), config


def _choose_quant(
    plan_with: Callable[[EngineConfig], MemoryPlan], config: EngineConfig
) -> tuple[MemoryPlan, tuple[str, ...]]:
    """Return the plan with the least quantization that fits, and a note on the choice. Raises DoesNotFit."""
    reason = ""
    tries = [replace(config, quant=quant) for quant in ("none", "int8", "int4")]
    for options in tries:
        try:
            plan = plan_with(options)
            break
        except DoesNotFit as error:
            if options is tries[-1]:
                raise
            reason = reason or str(error).partition(" (")[0]
    choice = f"{plan.quant}, as without rounding {reason}" if reason else "none: it fits"
    return plan, (f"quant auto took {choice}",)


def host_bytes(
    shape: ModelShape, budget: MemoryBudget, config: EngineConfig, ranks: int
) -> tuple[int, tuple[str, ...]]:
    """Return the main memory for KV blocks that a GPU evicts, and a note where it is less than was asked for.
    Several GPUs keep none there: each has a part of every block.
    """
    free, asked = budget.host_available, config.kv_host_bytes
    if budget.device != "cuda" or ranks > 1 or not config.prefix_cache or shape.is_bidirectional:
        return 0, ()
    if asked is None:
        return int(_HOST_SHARE * free), ()
    most = int(HOST_MOST * free)
    if asked <= most:
        return asked, ()
    note = f"main memory for evicted KV blocks lowered from {show_bytes(asked)} to {show_bytes(most)}"
    return most, (f"{note}, as {show_bytes(free)} are free",)


def why_no_images(shape: ModelShape, config: EngineConfig) -> str:
    """Return why a model would read no images; empty if it would."""
    if shape.vision is None:
        return shape.image_problem
    if config.batching == "static":
        return "images need continuous batching: load it without --batching static"
    if not config.chunked_prefill:
        return "images need chunked prefill: load it without --no-chunked-prefill"
    return ""


def describe_images(shape: ModelShape, plan: MemoryPlan, problem: str) -> dict[str, Any]:
    """Return the fields of a plan about images."""
    vision = 0 if shape.vision is None else shape.vision.params * DTYPE_BYTES[plan.dtype]
    kept = image_cache_bytes(shape, plan.dtype)
    return {"image_problem": problem, "vision_bytes": vision, "image_cache_bytes": kept}


def _plan_with_drafts(
    shape: ModelShape,
    budget: MemoryBudget,
    config: EngineConfig,
    ranks: int,
    make: Callable[[DraftModelSizes | None], Planner],
) -> MemoryPlan:
    """Plan a rank with the draft model or head that is asked for. An MTP layer that nobody asked for must not
    take memory that the model needs.
    """
    if config.draft_path is not None:
        return make(draft_sizes(shape, budget, config)).plan()
    if shape.mtp is None or config.mtp == "off" or config.speculate == "off":
        return make(None).plan()
    if reason := why_no_mtp(shape, budget, config, ranks):
        plan = make(None).plan()
        return replace(plan, notes=(*plan.notes, f"the MTP layer drafts no tokens: {reason}"))
    sizes = DraftModelSizes(shape.mtp, config.quant, "mtp", "MTP layer", shape.hidden)
    if config.mtp == "on":
        return make(sizes).plan()
    with suppress(DoesNotFit):
        plan = make(sizes).plan()
        if not plan.is_lowered:
            return plan
    plan = make(None).plan()
    return replace(plan, notes=(*plan.notes, "the MTP layer drafts no tokens: the model needs its memory"))


def why_no_mtp(shape: ModelShape, budget: MemoryBudget, config: EngineConfig, ranks: int) -> str:
    """Return why drafts of the checkpoint's MTP layer cannot be verified; empty if they can."""
    dtype, kv_dtype = resolve_dtypes(shape, budget.device, config, native_kernels=budget.native_kernels)
    site = KernelSite(device=budget.device, has_native=budget.native_kernels, capability=None)
    invariant = is_row_invariant(dtype, kv_dtype, site, deterministic=config.deterministic)
    overlaps = config.overlaps_on(budget.device)
    reason = why_no_draft_model("mtp", ranks, budget.device)
    return reason or why_no_drafts(1, overlaps=overlaps, row_invariant=invariant)


def note_images(shape: ModelShape, images: dict[str, Any], problem: str) -> tuple[str, ...]:
    """Return the note on what images cost, or why a model with a tower reads none."""
    if shape.vision is None:
        return () if problem == NO_TOWER else (f"no images are read: {problem}",)
    tower, kept = show_bytes(images["vision_bytes"]), show_bytes(images["image_cache_bytes"])
    cost = f"one of {USUAL_SIDE} x {USUAL_SIDE} takes {shape.vision.usual_rows:,} tokens"
    return (f"images: {cost}; the vision tower is {tower} of the weights, kept embeddings {kept}",)


def note_factors(shape: ModelShape, context: int) -> tuple[str, ...]:
    """Return the note on answers that outgrow the short factors of LongRoPE."""
    if not 0 < shape.short_context < context:
        return ()
    longer = f"texts of more than {shape.short_context:,} tokens have LongRoPE's long factors"
    return (f"{longer}: an answer that grows beyond is computed again once",)


def note_head(config: EngineConfig, quant: str) -> tuple[str, ...]:
    """Return the note on an option for the output head that does nothing with weights of this format."""
    is_unquantized = quant not in QUANTS or QUANTS[quant].has_unquantized_head
    if config.quant_head == "none" or not is_unquantized:
        return ()
    asked = f"--quant-head {config.quant_head} changes nothing"
    return (f"{asked}: it is for checkpoints of 4-bit and 8-bit integers in safetensors, on a CPU",)


def draft_sizes(target: ModelShape, budget: MemoryBudget, config: EngineConfig) -> DraftModelSizes:
    """Return the sizes of the draft model or head beside a target. A quantized checkpoint keeps its format,
    another is quantized as the target is. Raises ModelError and DeviceError.
    """
    assert config.draft_path is not None
    quant: QuantChoice = "none" if target.quant is not None else config.quant
    head = read_draft_head(Path(config.draft_path))
    if isinstance(head, Eagle3Config):
        return DraftModelSizes(head.shape(), quant, "eagle3", "EAGLE-3 head", 3 * target.hidden)
    if head is not None:
        return DraftModelSizes(head.shape(), quant, "medusa", "Medusa heads", target.hidden)
    shape = replace(parse_config(config.draft_path).shape(), vision=None)
    if shape.stored is not None or shape.quant is not None:
        shape, resolved, _ = _resolve_stored(shape, budget, replace(config, quant="none"))
        quant = resolved.quant
    return DraftModelSizes(shape, quant)


def _resolve_stored(
    shape: ModelShape, budget: MemoryBudget, config: EngineConfig
) -> tuple[ModelShape, EngineConfig, tuple[str, ...]]:
    """Resolve how a quantized checkpoint runs: in its own numbers where the kernels have them, else
    dequantized at load, as if it were unquantized. Returns a note on the latter. Raises DeviceError for
    another format than that of weights that can run.
    """
    reason = "no kernel has such weights"
    if shape.blocks is not None and config.quant not in {"none", "auto", "gguf"}:
        reason = f"{config.quant} was asked for"
    elif shape.quant is not None:
        reason = _why_not_stored(shape, budget, config)
        if not reason:
            name = _stored_format(shape.quant, config.quant)
            if config.quant_head != "none" and budget.device == "cpu":
                name = cast("QuantChoice", with_rounded_head(name))
            running = replace(config, quant=name)
            own = f"{shape.stored} weights stay in their own numbers, as {shape.quant}"
            if QUANTS[name].rounds_head:
                own += f", and the output head is rounded to {config.quant_head}"
            if shape.blocks is not None:
                own = f"{shape.stored} weights are computed in the blocks of the file"
                if shape.blocks.has_dequantized:
                    own += ", but for NVFP4, which no kernel has: these are dequantized once, at load"
            return shape, running, (own,) if shape.stored not in {None, shape.quant} else ()
    stored = shape.stored or shape.quant
    note = f"{stored} weights are dequantized at load: {reason}"
    return replace(shape, quant=None, wide_params=0, blocks=None), config, (note,)


def _why_not_stored(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> str:
    assert shape.quant is not None
    dtype, kv_dtype = resolve_dtypes(shape, budget.device, config, native_kernels=budget.native_kernels)
    known = [each for each in budget.capabilities if each is not None]
    site = KernelSite(
        device=budget.device, has_native=budget.native_kernels, capability=min(known, default=None)
    )
    return why_no_quant(QUANTS[shape.quant], dtype, kv_dtype, site)


def _stored_format(stored: str, asked: QuantChoice) -> QuantChoice:
    """Return the format of a quantized checkpoint: its own, or w8a8 for int8 weights. Raises DeviceError for
    any other requested format.
    """
    if (stored, asked) == ("int8", "w8a8"):
        return asked
    if asked not in {"none", "auto", stored}:
        raise DeviceError(
            f"this checkpoint holds {stored} weights, but {asked} was requested: use --quant auto"
        )
    return cast("QuantChoice", stored)
