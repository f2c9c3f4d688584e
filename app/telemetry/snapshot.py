"""Snapshot of the box: the data of a `tick` event, which both dashboards read, and the alerts found in it.

A value that a device does not report is `NA` (in JSON `"n/a"`), never None and never zero. Sizes in bytes,
shares 0 to 1, rates per second, times in seconds.

Alerts are problems that a person should look at. Failures come first; 4xx are the callers' own.
"""

import shlex
from collections.abc import Iterator
from enum import Enum
from typing import Final

from msgspec import Struct

from llmbox.engine.ipc.messages import DraftCounts

from ..store.record import LiveRequest
from ..util.formatting import span


class NotAvailable(Enum):
    NA = "n/a"


NA: Final = NotAvailable.NA
Number = float | NotAvailable


class GpuProcess(Struct, frozen=True, kw_only=True):
    pid: int
    memory: Number
    ours: bool


class GpuReading(Struct, frozen=True, kw_only=True):
    index: int
    name: str
    uuid: str = ""
    problem: str = ""
    """Reason why nothing else is known of it, such as "GPU is lost"."""
    utilisation: Number = NA
    memory_total: Number = NA
    memory_ours: Number = NA
    memory_others: Number = NA
    memory_free: Number = NA
    bandwidth: Number = NA
    """Peak memory bandwidth."""
    temperature: Number = NA
    """Degrees Celsius."""
    power: Number = NA
    power_cap: Number = NA
    """Watts."""
    clock_sm: Number = NA
    clock_memory: Number = NA
    """MHz."""
    pcie: str = "n/a"
    """Current link, such as "gen5 x16"."""
    pcie_in: Number = NA
    pcie_out: Number = NA
    nvlink_in: Number = NA
    nvlink_out: Number = NA
    throttle: tuple[str, ...] = ()
    """Reasons why its clocks are reduced; empty when they are not."""
    processes: tuple[GpuProcess, ...] = ()


class GpuLink(Struct, frozen=True, kw_only=True):
    """Link between two GPUs, in the terms of `nvidia-smi topo -m`."""

    first: int
    second: int
    kind: str


class Gpus(Struct, frozen=True, kw_only=True):
    devices: tuple[GpuReading, ...] = ()
    links: tuple[GpuLink, ...] = ()
    problem: str = ""
    """Reason why there are no readings; also empty where there simply is no GPU."""


class OwnProcess(Struct, frozen=True, kw_only=True):
    pid: int
    role: str
    memory: float
    cpu: Number
    """Cores in use: 1 is one core."""


class Host(Struct, frozen=True, kw_only=True):
    cpu: Number = NA
    cores: int = 0
    memory_total: Number = NA
    memory_available: Number = NA
    disk_total: Number = NA
    disk_free: Number = NA
    processes: tuple[OwnProcess, ...] = ()
    problem: str = ""


class EngineSnapshot(Struct, frozen=True, kw_only=True):
    """One model. `live`, `cached` and free blocks add up to all blocks."""

    model: str
    state: str
    cause: str = ""
    pid: int = 0
    pids: tuple[int, ...] = ()
    """Pids of all its ranks; `pid` is rank 0's."""
    device: str = ""
    """Device of rank 0; sizes are of all ranks together."""
    dtype: str = ""
    kernels: str = ""
    """Running kernel backend, as `Ops.name` says it."""
    context_window: int = 0
    block_size: int = 0
    kv_bytes_per_token: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    workspace_bytes: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_live: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    slots_used: int = 0
    tokens_in: Number = NA
    tokens_out: Number = NA
    prefix_hit: Number = NA
    """Share of the last minute's prompt tokens that the prefix cache saved."""
    prefix_queries: int = 0
    prefix_hits: int = 0
    ttft_p50: Number = NA
    ttft_p95: Number = NA
    tpot_p50: Number = NA
    tpot_p95: Number = NA
    ttft_target: Number = NA
    tpot_target: Number = NA
    """Latency target of the model (`usage.targets`), for its 95th percentiles."""
    target_problem: str = ""
    """Reason why even a request alone misses it, as `limits.admission` found; empty: it may be met."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens that were accepted."""
    draft_methods: dict[str, DraftCounts] = {}
    preemptions: int = 0
    restarts: int = 0
    resumed: int = 0
    roofline: Number = NA
    """Output rate as a share of the maximum that the memory bandwidth allows at this batch."""


class ErrorRate(Struct, frozen=True, kw_only=True):
    """Failure rate of one model over the last five minutes, without callers' errors and cancelled
    requests.
    """

    model: str
    finished: int
    failed: int
    """Finished requests that failed by the server's fault: 5xx, engine errors included."""
    rate: float
    """`failed` as a share of `finished`."""
    reason: str = ""
    """Message of the newest failure."""


class Totals(Struct, frozen=True, kw_only=True):
    """Totals over all models."""

    running: int = 0
    waiting: int = 0
    open_requests: int = 0
    tokens_in: Number = NA
    tokens_out: Number = NA
    ttft_p50: Number = NA
    ttft_p95: Number = NA
    tpot_p50: Number = NA
    tpot_p95: Number = NA
    kv_used: Number = NA
    prefix_hit: Number = NA
    requests: int = 0
    """Requests ended since the daemon started."""
    failed: int = 0
    """Requests that failed by the server's fault (5xx); a 4xx is the caller's."""
    error_rate: Number = NA
    """Failed share of the requests of the last five minutes, see `ErrorRate`."""


class Alert(Struct, frozen=True, kw_only=True):
    """Problem that a person should look at. Failures come first."""

    level: str
    """`failure` or `warning`."""
    text: str
    fix: str = ""


class Tick(Struct, frozen=True, kw_only=True):
    time: float
    """Unix seconds."""
    ready: bool = True
    cause: str = ""
    gpus: Gpus = Gpus()
    host: Host = Host()
    engines: tuple[EngineSnapshot, ...] = ()
    totals: Totals = Totals()
    error_rates: tuple[ErrorRate, ...] = ()
    """Models with requests in the last five minutes."""
    attention: tuple[Alert, ...] = ()
    requests: tuple[LiveRequest, ...] = ()
    """Open requests, oldest first; at most `MOST_REQUESTS`."""


MOST_REQUESTS = 500


DISK_LOW = 1_000_000_000
MEMORY_LOW = 0.05
HOT = 90.0
KV_FULL = 0.95
FAILING = 0.5
"""Failed share of requests from which a model is called failing; below it is a warning."""
SLOW_KERNELS = {"onednn", "reference"}
"""Name of PyTorch's own kernels."""


def find_alerts(tick: Tick) -> tuple[Alert, ...]:
    """Alerts of one tick, failures first."""
    found = [*_engines(tick), *_errors(tick), *_gpus(tick), *_host(tick)]
    return tuple(sorted(found, key=lambda each: each.level != "failure"))


def _engines(tick: Tick) -> Iterator[Alert]:
    if tick.cause and not any(e.state in {"failed", "restarting"} for e in tick.engines):
        level = "warning" if "loading" in tick.cause or "shutting" in tick.cause else "failure"
        yield Alert(level=level, text=tick.cause, fix="llmbox logs" if level == "failure" else "")
    for engine in tick.engines:
        if engine.state == "failed":
            yield Alert(
                level="failure",
                text=f"{engine.model}: {engine.cause}",
                fix=f"llmbox load {shlex.quote(engine.model)}",
            )
        elif engine.state == "restarting":
            yield Alert(level="failure", text=f"{engine.model}: {engine.cause}")
        elif _is_full(engine):
            yield Alert(
                level="warning",
                text=f"{engine.model}: KV cache full, {engine.waiting} waiting",
                fix="load it with a smaller --ctx or more --memory",
            )
        if engine.state == "ready" and engine.kernels in SLOW_KERNELS:
            yield _slow(engine)
        yield from _targets(engine)


def _errors(tick: Tick) -> Iterator[Alert]:
    """Alerts of models that fail requests. Models whose engine is down have an alert already."""
    down = {engine.model for engine in tick.engines if engine.state in {"failed", "restarting"}}
    for each in tick.error_rates:
        if each.failed and each.model not in down:
            share = f"{each.failed} of {each.finished} requests of the last 5 minutes failed"
            reason = f" ({each.reason.rstrip('.')})" if each.reason else ""
            yield Alert(
                level="failure" if each.rate >= FAILING else "warning",
                text=f"{each.model or 'no model'}: {share}{reason}",
                fix=errors_command(each.model),
            )


def errors_command(model: str) -> str:
    """Command that lists a model's failed requests."""
    return f"llmbox requests --errors --model {shlex.quote(model)}" if model else "llmbox requests --errors"


def _slow(engine: EngineSnapshot) -> Alert:
    """Alert about slow CPU kernels. Float16 has no fast kernels; `doctor` reports other reasons."""
    half = engine.dtype == "float16"
    return Alert(
        level="warning",
        text=f"{engine.model}: PyTorch's slower kernels ({engine.kernels}) run",
        fix="load it with --dtype bfloat16" if half and engine.device == "cpu" else "llmbox doctor",
    )


def _targets(engine: EngineSnapshot) -> Iterator[Alert]:
    """Alerts of latency targets that the last two minutes' requests missed."""
    model = shlex.quote(engine.model)
    if engine.target_problem:
        yield Alert(
            level="warning",
            text=f"{engine.model}: {engine.target_problem}",
            fix=f"llmbox bench {model} --find, then usage.targets",
        )
    for name, value, target, fix in (
        ("TTFT", engine.ttft_p95, engine.ttft_target, "send fewer or shorter prompts at once"),
        ("TPOT", engine.tpot_p95, engine.tpot_target, "run fewer requests at once"),
    ):
        if value is not NA and target is not NA and value > target:
            yield Alert(
                level="warning",
                text=f"{engine.model}: {name} p95 is {span(value)}, its target {span(target)}",
                fix=f"{fix}; who asks: llmbox requests --model {model}",
            )


def _is_full(engine: EngineSnapshot) -> bool:
    total = engine.blocks_total
    return bool(total) and engine.waiting > 0 and engine.blocks_live / total >= KV_FULL


def _gpus(tick: Tick) -> Iterator[Alert]:
    if tick.gpus.problem:
        yield Alert(level="warning", text=tick.gpus.problem, fix="nvidia-smi")
    for gpu in tick.gpus.devices:
        if gpu.problem:
            yield Alert(level="failure", text=f"GPU {gpu.index}: {gpu.problem}", fix="dmesg | grep NVRM")
        elif (text := _describe_strain(gpu)) != "":
            yield Alert(level="warning", text=f"GPU {gpu.index}: {text}")


def _describe_strain(gpu: GpuReading) -> str:
    held = [reason for reason in gpu.throttle if reason not in {"power cap", "sync boost"}]
    if held:
        return f"clocks throttled ({', '.join(held)})"
    if gpu.temperature is not NA and gpu.temperature >= HOT:
        return f"{gpu.temperature:.0f} °C"
    return ""


def _host(tick: Tick) -> Iterator[Alert]:
    host = tick.host
    if host.problem:
        yield Alert(level="warning", text=host.problem)
    if host.disk_free is not NA and host.disk_free < DISK_LOW:
        yield Alert(
            level="warning",
            text=f"disk: {host.disk_free / 1e6:.0f} MB free",
            fix="remove models: llmbox ls",
        )
    total, available = host.memory_total, host.memory_available
    if total is not NA and available is not NA and total and available / total < MEMORY_LOW:
        yield Alert(
            level="warning", text=f"memory: {available / 1e9:.1f} GB available", fix="llmbox unload --all"
        )
