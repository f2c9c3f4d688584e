"""Plan of a mixture with experts in main memory, which the CPU computes, and all else on one GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from llmbox.kernels.quant_formats import QUANTS
from llmbox.kernels.support import NATIVE_DTYPES

from ..config import EngineConfig, QuantChoice
from ..errors import DeviceError, DoesNotFit, EngineError, ParallelError, show_bytes
from ..model_config.shape import DTYPE_BYTES, ModelShape
from .memory_model import EXPERT_ROWS, weights_bytes
from .memory_plan import MemoryBudget, MemoryPlan, resolve_dtypes
from .placement import asks_for_experts

HOST_MOST = 0.8
"""Fraction of the free main memory that a model on a GPU may take."""
_AUTO: tuple[QuantChoice, ...] = ("none", "int8", "int4")


def why_no_host_experts(shape: ModelShape, budget: MemoryBudget, config: EngineConfig) -> EngineError | None:
    """Return the error of a request for experts in main memory that cannot be followed; None: it can be."""
    ask = "--cpu-experts on was asked for, but "
    if shape.experts is None:
        return DeviceError(f"{ask}this model has no experts: load it without --cpu-experts")
    if budget.device == "cpu":
        return DeviceError(
            f"{ask}the model runs on the CPU, and its experts too: load it without --cpu-experts"
        )
    if (config.tp or 1) * (config.pp or 1) > 1 or asks_for_experts(config):
        return ParallelError(
            f"{ask}experts in main memory are for a model on one GPU: load it without --tp, --pp and "
            "--expert-parallel, or with --cpu-experts off"
        )
    if config.gpus is not None and len(config.gpus) > 1:
        return ParallelError(f"{ask}the model was given {len(config.gpus)} GPUs: choose one")
    if config.draft_path is not None or config.mtp == "on":
        return DeviceError(
            f"{ask}no drafts are verified beside experts in main memory: load it without --draft, or with "
            "--cpu-experts off"
        )
    if not budget.host_native:
        return DeviceError(
            f"{ask}the CPU computes experts with the C++ kernels, and there is no compiler for them: see "
            "`llmbox doctor`"
        )
    if config.dtype == "float16":
        return DeviceError(f"{ask}the CPU computes experts in bfloat16 or float32: use --dtype bfloat16")
    return None


@dataclass(frozen=True, slots=True)
class HostPart:
    """Experts of a model in main memory."""

    quant: QuantChoice
    nbytes: int
    """Bytes of their weights."""


def device_options(shape: ModelShape, config: EngineConfig) -> EngineConfig:
    """Return the options of the part on the GPU: no graphs, as a step waits for the host, and no drafts."""
    options = replace(config, cuda_graphs=False, mtp="off")
    dtype, _ = resolve_dtypes(shape, "cuda", config, native_kernels=False)
    return options if dtype in NATIVE_DTYPES else replace(options, dtype="bfloat16")


def add_host_experts(
    plan: MemoryPlan, whole: ModelShape, budget: MemoryBudget, config: EngineConfig
) -> MemoryPlan:
    """Return the plan of the part on a GPU with the experts of `whole`, the shape as the checkpoint stores
    it, in main memory. Raises DoesNotFit and DeviceError.
    """
    experts = whole.experts
    assert experts is not None
    have = int(HOST_MOST * budget.host_available)
    workspace = _workspace(plan, whole)
    parts = list(_formats(whole, plan.dtype, config))
    part = next((each for each in parts if each.nbytes + workspace <= have), None)
    if part is None:
        need, form = parts[-1].nbytes + workspace, _show_format(parts[-1].quant, plan.dtype)
        remedy = "more main memory is needed"
        if parts[-1].quant == "none":
            remedy = f"--quant {'auto' if whole.quant else 'int8 or int4'} takes less"
        raise DoesNotFit(
            f"experts in main memory need {show_bytes(need, up=True)} as {form} and have {show_bytes(have)}, "
            f"{HOST_MOST:.0%} of what is free: {remedy}"
        )
    told = (
        f"experts are in main memory, where the CPU computes them: {show_bytes(part.nbytes)} as "
        f"{_show_format(part.quant, plan.dtype)}; all else is on the GPU, and CUDA graphs are off"
    )
    return replace(
        plan,
        expert_bytes=part.nbytes + workspace,
        expert_quant=part.quant,
        notes=(*plan.notes, told),
    )


def _formats(whole: ModelShape, dtype: str, config: EngineConfig) -> Iterator[HostPart]:
    """Yield the formats to try: the checkpoint's own where the C++ kernels have it, or what was asked for."""
    stored = whole.quant
    keeps_blocks = whole.blocks is None or config.quant in {"none", "auto", "gguf"}
    if stored is not None and QUANTS[stored].on_cpu and keeps_blocks:
        tries: tuple[str, ...] = (stored,)
    else:
        whole = replace(whole, quant=None, blocks=None, wide_params=0)
        tries = _AUTO if config.quant == "auto" else (config.quant if config.quant != stored else "none",)
    for name in tries:
        quant = QUANTS.get(name)
        if quant is not None and not quant.on_cpu:
            raise DeviceError(
                f"experts in main memory cannot be {name}, which runs on GPUs only: load with --quant "
                "int8 or int4, or with --cpu-experts off"
            )
        nbytes = weights_bytes(whole, dtype, quant) - weights_bytes(whole.without_routed(), dtype, quant)
        yield HostPart(cast("QuantChoice", name), nbytes)


def _show_format(quant: str, dtype: str) -> str:
    return dtype if quant == "none" else quant


def _workspace(plan: MemoryPlan, whole: ModelShape) -> int:
    """Return the bytes of rows, logits and results on their way (float32 logits), and of the copies of rows
    that the C++ kernels make: see `workspace_bytes`.
    """
    experts = whole.experts
    assert experts is not None
    size, rows, width = DTYPE_BYTES[plan.dtype], plan.step_tokens, experts.latent or whole.hidden
    copies = rows * experts.per_token + EXPERT_ROWS * experts.count
    results = rows * experts.per_token * width if experts.shared else 0
    moved = rows * (4 * width * size + 4 * (experts.count + 1))
    return moved + (results + copies * (2 * width + 3 * experts.inner)) * size
