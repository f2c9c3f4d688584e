"""Alerts: problems found in one tick that a person should look at. Failures come first; 4xx are the callers'
own.
"""

import shlex
from collections.abc import Iterator

from ..util.formatting import span
from .snapshot import NA, Alert, EngineSnapshot, GpuReading, Tick

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
        return f"clocks held down ({', '.join(held)})"
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
