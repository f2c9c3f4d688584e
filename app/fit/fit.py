"""Fit of a model: the engine's memory plan (`estimate`), expected speed, and settings that would
make it fit.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, DoesNotFit, ModelError, ParallelError
from llmbox.engine.hardware.machine import Machine
from llmbox.engine.model_config.config import ModelConfig
from llmbox.engine.model_config.shape import ModelShape
from llmbox.engine.planning.estimator import MemoryBudget, MemoryPlan, estimate, show_bytes
from llmbox.engine.planning.performance_model import (
    RankLink,
    decode_scaling,
    decode_tokens_per_second,
    expert_step_bytes,
    step_bytes,
    traffic,
)
from llmbox.engine.planning.runnable import RunnablePlan, check_drafts, kernel_site, require_runnable
from llmbox.kernels.quant_formats import QUANTS

from ..engines.eviction import CUDA_SHARE, Place, total_budget, usable_device
from ..hub.model_info import ModelFacts
from ..hub.transfer import free_space
from .bandwidth import Bandwidth

DISK_RESERVE = 512_000_000
"""Bytes that a download leaves free."""
SUSTAINED = 0.6
"""Share of the typical bandwidth that an engine reaches at least, when nothing else runs on the machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Speed estimate from memory bandwidth: (low, high) in tokens a second."""

    bandwidth: Bandwidth
    one_stream: tuple[float, float]
    all_streams: tuple[float, float]
    streams: int
    """Number of requests that run at once with a share of the pool each."""
    scaling: float = 1.0
    """Speed of several ranks relative to one, all-reduces included. The rates above include it."""
    sums_bytes: int = 0
    """Bytes that each rank sends in all-reduces for one token."""
    host: Bandwidth | None = None
    """Bandwidth of main memory, where that has the experts."""
    host_read: int = 0
    """Bytes of experts in main memory that a token of one stream reads."""

    @property
    def expected(self) -> float:
        """Middle of the range for one stream."""
        return sum(self.one_stream) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    name: str
    device: Place
    budget: int
    """Bytes that models may take together on that device."""
    available: int
    """Bytes free there now; less than the budget when something else runs."""
    plan: MemoryPlan | None
    """Memory plan; None when the model does not fit."""
    reason: str
    """Reason why it does not fit, with numbers; empty when it fits."""
    remedies: tuple[str, ...]
    """Settings with which it would fit, or fit better."""
    notes: tuple[str, ...]
    disk_need: int
    disk_free: int
    kv_disk_bytes: int
    """Size of the KV cache on disk, which all models share; 0: it is off, or this model keeps none."""
    speed: Speed | None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.fits_disk

    @property
    def fits_disk(self) -> bool:
        return self.disk_need == 0 or self.disk_need + DISK_RESERVE <= self.disk_free

    @property
    def kv_disk_tokens(self) -> int:
        """Tokens of this model that the KV cache on disk holds where it has all of it."""
        per_token = 0 if self.plan is None else self.plan.kv_bytes_per_token * self.plan.ranks
        return self.kv_disk_bytes // per_token if per_token else 0

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        extra = (
            {}
            if plan is None
            else {
                "kv_bytes": plan.kv_bytes,
                "total_bytes": plan.total_bytes,
                "max_concurrency": round(plan.max_concurrency, 2),
                "kv_disk_tokens": self.kv_disk_tokens,
            }
        )
        found = asdict(self)
        found["plan"] = None if plan is None else {**found["plan"], **extra}
        return {"fits": self.fits, "fits_disk": self.fits_disk, **found}


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSite:
    """Machine that models are planned for."""

    machine: Machine
    budget_gb: float | None
    """`memory.budget` of the settings."""
    disk: Path
    """Folder that a download would go to."""
    bandwidth: Bandwidth | None
    """Bandwidth of the device's memory; None: no speed is predicted."""
    host_bandwidth: Callable[[], Bandwidth | None] = lambda: None
    """Called for that of main memory, if it has a part of a model beside a GPU."""
    kv_disk: int = 0
    """Size of the KV cache on disk in bytes."""


def fit(facts: ModelFacts, config: EngineConfig, site: FitSite) -> Fit:
    """Plan a model with the options of `config`. Raises DeviceError where there is no such device."""
    model, machine = facts.config, site.machine
    if model.is_bidirectional and config.device == "auto":
        config = replace(config, device="cpu")
    device = usable_device(machine, config.device)
    budget = total_budget(machine, device, site.budget_gb)
    available = MemoryBudget.of(machine, device).available
    plan, reason = plan_within_budget(model, machine, device, budget, config)
    notes = facts.notes + _describe_experts(model) + (plan.notes if plan else ())
    if plan and plan.total_bytes > available:
        notes += (
            f"only {show_bytes(available)} are free now: other programs or models must make room first",
        )
    keeps_kv = not model.is_bidirectional
    result = Fit(
        name=facts.name,
        device=device,
        budget=budget,
        available=available,
        plan=plan,
        reason=reason,
        remedies=_remedies(model, plan, device, budget, config, site),
        notes=notes,
        disk_need=facts.missing_bytes,
        disk_free=free_space(site.disk),
        kv_disk_bytes=site.kv_disk if config.prefix_cache and keeps_kv else 0,
        speed=_speed(model, plan, site.bandwidth, site) if plan and site.bandwidth and keeps_kv else None,
    )
    if not result.fits_disk:
        need = show_bytes(facts.missing_bytes + DISK_RESERVE, up=True)
        lacking = f"the disk has {show_bytes(result.disk_free)} free, {need} are needed"
        result = replace(result, reason=f"{reason}; {lacking}" if reason else lacking)
    return result


def _remedies(
    model: ModelConfig,
    plan: MemoryPlan | None,
    device: Place,
    budget: int,
    config: EngineConfig,
    site: FitSite,
) -> tuple[str, ...]:
    """Return settings with which a model would fit, or would have its experts on the GPU."""
    if plan is not None and not (plan.expert_bytes and config.cpu_experts == "auto"):
        return ()
    on_device = config if plan is None else replace(config, cpu_experts="off")
    found = alternatives(model, site.machine, device, budget, on_device)
    if device == "cuda":
        if plan is None and config.cpu_experts == "off":
            found += _with_host_experts(model, site.machine, budget, config)
        found += _in_main_memory(model, site.machine, site.budget_gb, config)
    return found


def plan_within_budget(
    config: ModelConfig, machine: Machine, device: Place, budget: int, engine: EngineConfig
) -> tuple[MemoryPlan | None, str]:
    """Return the plan with the whole budget (or `engine.memory_bytes` of it), or None and the reason."""
    have = replace(MemoryBudget.of(machine, device), available=budget)
    if device == "cuda":
        have = replace(have, more_gpus=tuple(int(gpu.total * CUDA_SHARE) for gpu in machine.gpus[1:]))
    asked = replace(
        engine,
        memory_bytes=min(budget, engine.memory_bytes or budget),
        memory_is_limit=engine.memory_bytes is None,
    )
    try:
        plan = estimate(config.shape(engine.context), have, asked)
        wanted = RunnablePlan.of(plan, config)
        require_runnable(wanted, kernel_site(have, plan), engine)
        if Path(engine.model_path).is_dir():
            check_drafts(config, engine)
    except (DoesNotFit, DeviceError, ParallelError, ModelError) as error:
        return None, str(error)
    return plan, ""


def plan_alone(
    config: ModelConfig, machine: Machine, engine: EngineConfig, budget_gb: float | None
) -> tuple[MemoryPlan | None, str]:
    """Return the plan of a model that is alone on the device that `engine` asks for, or None and
    the reason.
    """
    try:
        device = usable_device(machine, engine.device)
    except DeviceError as error:
        return None, str(error)
    return plan_within_budget(config, machine, device, total_budget(machine, device, budget_gb), engine)


def alternatives(
    config: ModelConfig, machine: Machine, device: Place, budget: int, engine: EngineConfig
) -> tuple[str, ...]:
    """Return settings with which the model would fit. Each is a small change, named by its flags."""
    tries = {
        "--ctx auto": replace(engine, context=None),
        "--dtype bfloat16": replace(engine, dtype="bfloat16"),
        "--dtype bfloat16 --ctx auto": replace(engine, dtype="bfloat16", context=None),
        "--quant int8": replace(engine, quant="int8"),
        "--quant int4": replace(engine, quant="int4"),
        "--kv-dtype int8": replace(engine, kv_dtype="int8"),
        "--max-running 1": replace(engine, max_running=1),
        "--tp 2": replace(engine, tp=2),
        "--tp 4": replace(engine, tp=4),
        "without --memory": replace(engine, memory_bytes=None),
    }
    found = []
    for words, changed in tries.items():
        if changed == engine:
            continue
        plan, _ = plan_within_budget(config, machine, device, budget, changed)
        if plan is not None:
            size = show_bytes(plan.total_bytes) + (f" on each of {plan.ranks}" if plan.ranks > 1 else "")
            found.append(f"{words}: {size} with a context of {plan.context} tokens")
    return tuple(found)


def _with_host_experts(
    config: ModelConfig, machine: Machine, budget: int, engine: EngineConfig
) -> tuple[str, ...]:
    """Return how a mixture runs with its experts in main memory, where that was turned off."""
    plan, _ = plan_within_budget(config, machine, "cuda", budget, replace(engine, cpu_experts="on"))
    if plan is None:
        return ()
    sizes = f"{show_bytes(plan.total_bytes)} of the GPU and {show_bytes(plan.expert_bytes)} of main memory"
    return (f"--cpu-experts on: {sizes} with a context of {plan.context} tokens",)


def _in_main_memory(
    config: ModelConfig, machine: Machine, budget_gb: float | None, engine: EngineConfig
) -> tuple[str, ...]:
    """Return how a mixture larger than the GPUs runs on the CPU, which reads few weights for a token."""
    if config.experts is None:
        return ()
    asked = replace(engine, device="cpu", tp=None, pp=None, expert_parallel=False, cpu_experts="auto")
    plan, _ = plan_within_budget(config, machine, "cpu", total_budget(machine, "cpu", budget_gb), asked)
    if plan is None:
        return ()
    quant, types = QUANTS.get(plan.quant), (plan.dtype, plan.kv_dtype)
    read = show_bytes(int(step_bytes(config.shape(), *types, rows=1, context=0, quant=quant)))
    size = f"{show_bytes(plan.total_bytes)} of main memory with a context of {plan.context} tokens"
    return (f"--device cpu: {size}; a token reads {read} of weights",)


def _describe_experts(config: ModelConfig) -> tuple[str, ...]:
    if (experts := config.experts) is None:
        return ()
    shape = config.shape()
    share = shape.active_params / shape.matmul_params
    text = (
        f"{experts.per_token} of {experts.count} experts in a layer work for a token: all must be in memory, "
        f"{share:.0%} of the weights are read for one stream, more for several"
    )
    return (text,)


def _slowest(plan: MemoryPlan, machine: Machine, bandwidth: Bandwidth) -> Bandwidth:
    """Return the lowest bandwidth among the ranks' GPUs, which wait for each other: GPUs of one box may
    differ.
    """
    known = [machine.gpus[gpu].bandwidth for gpu in plan.gpus]
    least = min(filter(None, known), default=None)
    return bandwidth if least is None else Bandwidth.exact(least)


def _speed(
    config: ModelConfig,
    plan: MemoryPlan,
    bandwidth: Bandwidth,
    site: FitSite,
) -> Speed | None:
    machine = site.machine
    shape, bandwidth = config.shape(), _slowest(plan, machine, bandwidth)
    if plan.expert_bytes:
        host = site.host_bandwidth()
        return None if host is None else _host_speed(shape, plan, bandwidth, host)
    streams = max(1, min(plan.max_running, int(plan.max_concurrency * 4)))
    context = plan.context // 4
    quant = QUANTS.get(plan.quant)

    def rates(rows: int) -> tuple[float, float]:
        alone = decode_tokens_per_second(
            shape, plan.dtype, plan.kv_dtype, 1.0, rows=rows, context=context, quant=quant
        )
        alone *= _scaling(shape, plan, machine, bandwidth.best, rows, context)
        return alone * SUSTAINED * bandwidth.typical, alone * bandwidth.best

    return Speed(
        bandwidth=bandwidth,
        one_stream=rates(1),
        all_streams=rates(streams),
        streams=streams,
        scaling=_scaling(shape, plan, machine, bandwidth.best, 1, context),
        sums_bytes=traffic(shape, plan.tp, plan.pp, plan.dtype, results=plan.exchanges_results).sums,
    )


def _host_speed(whole: ModelShape, plan: MemoryPlan, bandwidth: Bandwidth, host: Bandwidth) -> Speed:
    """Return the speed with experts in main memory: the GPU and the CPU read in turns. Copies between them,
    and the time until each notices that the other is done, are not counted.
    """
    rest, context = whole.without_routed(), plan.context // 4
    streams = max(1, min(plan.max_running, int(plan.max_concurrency * 4)))
    quant, expert_quant = QUANTS.get(plan.quant), QUANTS.get(plan.expert_quant)

    def experts(rows: int) -> float:
        return expert_step_bytes(whole, plan.dtype, rows=rows, quant=expert_quant)

    def rates(rows: int) -> tuple[float, float]:
        read = step_bytes(rest, plan.dtype, plan.kv_dtype, rows=rows, context=context, quant=quant)
        slow = read / bandwidth.typical + experts(rows) / host.typical
        return rows * SUSTAINED / slow, rows / (read / bandwidth.best + experts(rows) / host.best)

    return Speed(
        bandwidth=bandwidth,
        one_stream=rates(1),
        all_streams=rates(streams),
        streams=streams,
        host=host,
        host_read=int(experts(1)),
    )


def _scaling(
    shape: ModelShape, plan: MemoryPlan, machine: Machine, bandwidth: float, rows: int, context: int
) -> float:
    """Return the speed of all ranks relative to one."""
    if plan.ranks == 1:
        return 1.0
    link = link_of(plan, machine, bandwidth)
    expected = decode_scaling(shape, plan, link, rows=rows, context=context)
    return expected.all_ranks / (expected.one_rank * bandwidth / link.memory)


def link_of(plan: MemoryPlan, machine: Machine, bandwidth: float) -> RankLink:
    """Return the assumed link, on the low side of common hardware: no driver reports it."""
    if plan.device == "cpu":  # ranks share one memory, and its bandwidth
        return RankLink(bandwidth / 2, 20e-6, bandwidth / plan.ranks)
    peers = any(set(plan.gpus) <= peers for peers in machine.nvlink)
    return RankLink(200e9, 15e-6, bandwidth) if peers else RankLink(20e9, 40e-6, bandwidth)
