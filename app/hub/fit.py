"""Does a model fit, how well, and what would make it fit: the engine's arithmetic (`estimate`) in words."""

import ctypes
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import DeviceError, DoesNotFit, ParallelError
from llmbox.engine.estimator import MemoryBudget, MemoryPlan, estimate, show_bytes
from llmbox.engine.machine import Machine
from llmbox.engine.model_config import ModelConfig
from llmbox.engine.parallel.shares import decode_scaling, traffic
from llmbox.engine.roofline import decode_tokens_per_second
from llmbox.kernels.quant import QUANTS

from ..engines.budget import CUDA_SHARE, Place, device_of, total_budget
from .facts import Facts
from .transfer import free_space

DISK_RESERVE = 512_000_000
"""Bytes that a download leaves free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What the memory's bandwidth allows: a bound, not a promise. Tokens a second."""

    bandwidth: float
    """Bytes a second."""
    one_stream: float
    all_streams: float
    streams: int
    """As many as run at once with a share of the pool each."""
    scaling: float = 1.0
    """Of several ranks against one, sums over the links counted; the numbers above have it."""
    sums_bytes: int = 0
    """That each rank sends for one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    name: str
    device: Place
    budget: int
    """Bytes that models may take together on that device."""
    available: int
    """Bytes free there now; less than the budget when something else runs."""
    plan: MemoryPlan | None
    """None when it does not fit."""
    reason: str
    """Why not, with numbers; empty when it fits."""
    remedies: tuple[str, ...]
    """What would make it fit, or fit better."""
    notes: tuple[str, ...]
    disk_need: int
    disk_free: int
    speed: Speed | None

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.fits_disk

    @property
    def fits_disk(self) -> bool:
        return self.disk_need == 0 or self.disk_need + DISK_RESERVE <= self.disk_free

    def as_dict(self) -> dict[str, Any]:
        plan = self.plan
        extra = (
            {}
            if plan is None
            else {
                "kv_bytes": plan.kv_bytes,
                "total_bytes": plan.total_bytes,
                "max_concurrency": round(plan.max_concurrency, 2),
            }
        )
        found = asdict(self)
        found["plan"] = None if plan is None else {**found["plan"], **extra}
        return {"fits": self.fits, "fits_disk": self.fits_disk, **found}


def fit(
    facts: Facts,
    machine: Machine,
    config: EngineConfig,
    *,
    budget_gb: float | None,
    disk: Path,
    bandwidth: float | None,
) -> Fit:
    """`config` holds what was asked for; `disk` is where a download would go; `bandwidth` of the device."""
    device = device_of(machine, config.device)
    budget = total_budget(machine, device, budget_gb)
    now = MemoryBudget.of(machine, device)
    plan, reason = planned(facts.config, machine, device, budget, config)
    remedies = () if plan else alternatives(facts.config, machine, device, budget, config)
    notes = facts.notes + _told_of_experts(facts.config) + (plan.notes if plan else ())
    if plan and plan.total_bytes > now.available:
        notes += (
            f"only {show_bytes(now.available)} are free now: other programs or models must make room first",
        )
    disk_free = free_space(disk)
    result = Fit(
        name=facts.name,
        device=device,
        budget=budget,
        available=now.available,
        plan=plan,
        reason=reason,
        remedies=remedies,
        notes=notes,
        disk_need=facts.missing_bytes,
        disk_free=disk_free,
        speed=_speed(facts.config, plan, machine, bandwidth) if plan and bandwidth else None,
    )
    if not result.fits_disk:
        need = show_bytes(facts.missing_bytes + DISK_RESERVE, up=True)
        told = f"the disk has {show_bytes(disk_free)} free, {need} are needed"
        result = replace(result, reason=f"{reason}; {told}" if reason else told)
    return result


def planned(
    config: ModelConfig, machine: Machine, device: Place, budget: int, engine: EngineConfig
) -> tuple[MemoryPlan | None, str]:
    """The plan with the whole budget (or what `engine.memory_bytes` leaves of it), or why there is none."""
    have = replace(MemoryBudget.of(machine, device), available=budget)
    if device == "cuda":
        have = replace(have, more_gpus=tuple(int(gpu.total * CUDA_SHARE) for gpu in machine.gpus[1:]))
    asked = replace(engine, memory_bytes=min(budget, engine.memory_bytes or budget))
    try:
        return estimate(config.shape(engine.context), have, asked), ""
    except (DoesNotFit, DeviceError, ParallelError) as error:
        return None, str(error)


def alternatives(
    config: ModelConfig, machine: Machine, device: Place, budget: int, engine: EngineConfig
) -> tuple[str, ...]:
    """Each changes one thing, by its flag."""
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
        plan, _ = planned(config, machine, device, budget, changed)
        if plan is not None:
            size = show_bytes(plan.total_bytes) + (f" on each of {plan.ranks}" if plan.ranks > 1 else "")
            found.append(f"{words}: {size} with a context of {plan.context} tokens")
    return tuple(found)


def _told_of_experts(config: ModelConfig) -> tuple[str, ...]:
    if (experts := config.experts) is None:
        return ()
    shape = config.shape()
    share = shape.active_params / shape.matmul_params
    told = (
        f"{experts.per_token} of {experts.count} experts in a layer work for a token: all must be in memory, "
        f"{share:.0%} of the weights are read for one stream, more for several"
    )
    return (told,)


def _slowest(plan: MemoryPlan, machine: Machine, bandwidth: float) -> float:
    """Of the memories that the ranks are in, which wait for each other: GPUs of one box may differ."""
    told = (machine.gpus[gpu].bandwidth for gpu in plan.gpus)
    return min(filter(None, told), default=bandwidth)


def _speed(config: ModelConfig, plan: MemoryPlan, machine: Machine, bandwidth: float) -> Speed:
    shape, bandwidth = config.shape(), _slowest(plan, machine, bandwidth)
    streams = max(1, min(plan.max_running, int(plan.max_concurrency * 4)))
    context = plan.context // 4

    def scaling(rows: int) -> float:
        if plan.ranks == 1:
            return 1.0
        link = _link_of(plan, machine, bandwidth)
        expected = decode_scaling(
            shape,
            plan.tp,
            plan.pp,
            dtype=plan.dtype,
            kv_dtype=plan.kv_dtype,
            bandwidth=link.memory,
            link_bandwidth=link.bandwidth,
            sum_seconds=link.seconds,
            rows=rows,
            context=context,
        )
        return expected.all_ranks / (expected.one_rank * bandwidth / link.memory)

    def rate(rows: int) -> float:
        quant = QUANTS.get(plan.quant)
        alone = decode_tokens_per_second(
            shape, plan.dtype, plan.kv_dtype, bandwidth, rows=rows, context=context, quant=quant
        )
        return alone * scaling(rows)

    return Speed(
        bandwidth=bandwidth,
        one_stream=rate(1),
        all_streams=rate(streams),
        streams=streams,
        scaling=scaling(1),
        sums_bytes=traffic(shape, plan.tp, plan.pp, plan.dtype).sums,
    )


@dataclass(frozen=True, slots=True)
class _Link:
    """Bytes a second one way between two ranks, the seconds of an empty sum, and each rank's memory."""

    bandwidth: float
    seconds: float
    memory: float


def _link_of(plan: MemoryPlan, machine: Machine, bandwidth: float) -> _Link:
    """No driver tells them: what common hardware reaches, on the low side."""
    if plan.device == "cpu":  # ranks share one memory, and its bandwidth
        return _Link(bandwidth / 2, 20e-6, bandwidth / plan.ranks)
    peers = any(set(plan.gpus) <= peers for peers in machine.nvlink)
    return _Link(200e9, 15e-6, bandwidth) if peers else _Link(20e9, 40e-6, bandwidth)


def device_bandwidth(machine: Machine, device: Place, threads: int | None = None) -> float | None:
    """Bytes a second: told by the GPU, measured on a CPU (0.1 s)."""
    if device == "cuda":
        return machine.gpus[0].bandwidth
    return measure_bandwidth(threads or machine.cpu.cores)


def measure_bandwidth(threads: int, size: int = 1 << 26, rounds: int = 2) -> float:
    """Copies between buffers larger than caches, reading and writing counted; the best of some rounds."""
    share = size // threads
    buffers = [
        (ctypes.create_string_buffer(share), ctypes.create_string_buffer(share)) for _ in range(threads)
    ]
    best = 0.0
    for _ in range(rounds + 1):  # the first round faults the pages in
        workers = [threading.Thread(target=ctypes.memmove, args=(a, b, share)) for a, b in buffers]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, 2 * share * threads / (time.perf_counter() - began))
    return best
