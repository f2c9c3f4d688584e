"""Where a step's time goes: kernels by name, what the GPU waits for between them, and the host's parts."""

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from gpu import apart, engine_speed, whole_engine
from gpu.report import Report
from gpu.shapes import SHAPES
from llmbox.engine.core.engine import Engine

LOADS = (1, 64, 256)
"""Rows of the decoding steps that are recorded."""
CONTEXT, PROMPT, STEPS = 1024, 8192, 8
SHOWN = 14
"""Kernels of a table; the others are one row."""
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST = "host: "
PARTS = ("schedule", "launch", "collect", "update")
"""Of `Engine.step`, each measured where it is called."""
SPLITS, HEADS, REST = "splits of contexts added", "heads: norm, rotation, cache", "sampler and inputs"
OURS = {
    "attention_kernel": "attention",
    "reduce_kernel": SPLITS,
    "heads_kernel": HEADS,
    "norm_kernel": "norms",
    "gate_kernel": "gates",
    "product_kernel": "linears",
    "add_kernel": "linears",
    "sample_kernel": REST,
    "advance_kernel": REST,
    "maxima_kernel": REST,
    "edit_kernel": REST,
}
"""Triton's kernels have their functions' names. Kinds are rows of `docs/notes/gpu-predictions.md`."""
LINEARS = ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk")
"""Parts of the names that libraries give to products; all others are torch's little kernels."""
PREDICTED = {
    "attention": "14.7 to 15.9 ms",
    "linears": "5.9 to 6.6 ms",
    "norms": "0.2 to 0.3 ms",
    HEADS: "0.1 ms",
    "gates": "0.2 ms",
    SPLITS: "0.2 ms",
    REST: "0.1 to 0.3 ms",
}
"""There, of 256 rows at 1,536 tokens; linears with the head."""


class Kernel(NamedTuple):
    name: str
    calls: float
    us: float


@dataclass
class Trace:
    """Of one step, microseconds: means of those recorded."""

    steps: int
    kernels: list[Kernel] = field(default_factory=list)
    busy: float = 0.0
    idle: float = 0.0
    """Between the first kernel and the last, in which none ran."""
    host: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, steps: int) -> "Trace":
        """What torch.profiler wrote."""
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
        on_gpu = [each for each in events if each.get("cat") in GPU]
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for each in on_gpu:
            sums[each["name"]][0] += 1
            sums[each["name"]][1] += each["dur"]
        kernels = [Kernel(name, calls / steps, us / steps) for name, (calls, us) in sums.items()]
        kernels.sort(key=lambda each: -each.us)
        busy, span = covered((each["ts"], each["ts"] + each["dur"]) for each in on_gpu)
        host: dict[str, float] = defaultdict(float)
        for each in events:
            if each["name"].startswith(HOST) and each.get("cat") in {"user_annotation", "cpu_op"}:
                host[each["name"].removeprefix(HOST)] += each["dur"] / steps
        return cls(steps, kernels, busy / steps, (span - busy) / steps, dict(host))

    def kinds(self) -> dict[str, float]:
        """Microseconds by rows of the predictions."""
        found: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            found[kind_of(kernel.name)] += kernel.us
        return dict(found)


def covered(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """In which at least one runs, and from the first begin to the last end."""
    total, begun, end = 0.0, None, 0.0
    for start, stop in sorted(spans):
        if begun is None:
            begun = end = start
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total, end - (begun or 0.0)


def kind_of(name: str) -> str:
    is_linear = any(part in name.lower() for part in LINEARS)
    return OURS.get(name, "linears" if is_linear else REST)


def tell(report: Report, title: str, trace: Trace, moved: dict[str, float], *, predicted: bool) -> None:
    """`moved`: bytes of a step by kind, where they are known."""
    if not trace.kernels:
        report.failed(f"{title}: the profiler saw no kernels")
        return
    whole = trace.busy + trace.idle
    report.say(
        f"\n### {title}\n\nA step of {whole / 1e3:.2f} ms: GPU busy {trace.busy / 1e3:.2f} ms, idle between "
        f"kernels {trace.idle / 1e3:.2f} ms ({trace.idle / whole:.0%}).\n"
    )
    parts = ", ".join(f"{name} {trace.host[name]:.0f} us" for name in PARTS if name in trace.host)
    report.say(f"Host, of one step: {parts}.\n")
    report.table("kernel", "calls", "us", "of busy")
    for kernel in trace.kernels[:SHOWN]:
        cells = f"{kernel.calls:.1f}", f"{kernel.us:.1f}", f"{kernel.us / trace.busy:.1%}"
        report.row((shorten(kernel.name), *cells))
    if rest := trace.kernels[SHOWN:]:
        us = sum(each.us for each in rest)
        cells = f"{sum(each.calls for each in rest):.1f}", f"{us:.1f}", f"{us / trace.busy:.1%}"
        report.row((f"{len(rest)} others", *cells))
    report.say("")
    report.table("kind", "ms", "TB/s", "predicted")
    for kind, us in sorted(trace.kinds().items(), key=lambda each: -each[1]):
        rate = f"{moved[kind] / us / 1e6:.2f}" if kind in moved else ""
        report.row((kind, f"{us / 1e3:.3f}", rate, PREDICTED.get(kind, "") if predicted else ""))


def shorten(name: str) -> str:
    name = name.replace("|", "/")
    return name if len(name) <= 60 else f"{name[:57]}..."


def report_profile(report: Report) -> None:
    report.section("Where a step's time goes: 8B shape, bf16, torch.profiler")
    make = apart.Make(pieces, (time.monotonic() + report.left,))
    apart.tell_lines(report, make, limit=whole_engine.SILENCE, spare=whole_engine.SPARE)


def pieces(end: float) -> list[apart.Piece]:
    return [apart.Piece("profile of the 8B shape", partial(profiled, end))]


def profiled(end: float, say: apart.Say) -> None:
    """One engine for all loads."""
    report = Report(end - time.monotonic(), listener=say)
    engine = engine_speed.largest(SHAPES["8B"], whole_engine.CONTEXTS)
    engine_speed.warm_up(engine, seconds=min(20.0, report.left / 3))
    left_out = []
    for rows in LOADS:
        if not whole_engine.has_room(engine, rows, CONTEXT + 4 * STEPS) or report.left < 3:
            left_out.append(f"decode {rows}")
            continue
        trace = record_decoding(engine, rows)
        title = f"Decode {rows} x {CONTEXT}"
        tell(report, title, trace, bytes_of(engine, rows), predicted=rows == LOADS[-1])
    if whole_engine.has_room(engine, 1, PROMPT + 1) and report.left > 3:
        engine_speed.run(engine, engine_speed.add(engine, 1, PROMPT, 1, "compiled"))
        engine_speed.add(engine, 1, PROMPT, 1, "prompt")
        tell(report, f"Prompt of {PROMPT}", record(engine, None), {}, predicted=False)
    else:
        left_out.append(f"prompt of {PROMPT}")
    if left_out:
        report.say(f"\nLeft out for want of memory or time: {', '.join(left_out)}.")


def bytes_of(engine: Engine, rows: int) -> dict[str, float]:
    shape, info = SHAPES["8B"], engine.info
    table = 2 * shape["vocab_size"] * shape["hidden_size"]
    read = {"linears": float(info.weights_bytes - table)}
    return read | {"attention": float(rows * CONTEXT * info.kv_bytes_per_token)}


def record_decoding(engine: Engine, rows: int) -> Trace:
    """Once all requests decode, and each step is as the one before."""
    names = engine_speed.add(engine, rows, CONTEXT, 4 * STEPS, f"profile{rows}-")
    seen: set[str] = set()
    while len(seen) < rows:
        seen |= {output.request_id for output in engine.step().outputs if output.token_ids}
    for _ in range(STEPS):
        engine.step()
    trace = record(engine, STEPS)
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return trace


def record(engine: Engine, steps: int | None) -> Trace:
    """So many steps, or all that there are. A prompt's steps count as one."""
    torch.cuda.synchronize()
    kinds = torch.profiler.ProfilerActivity
    with marked_parts(engine), torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        if steps is None:
            while engine.has_work:
                engine.step()
        else:
            for _ in range(steps):
                engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return Trace.read(path, steps or 1)


@contextmanager
def marked_parts(engine: Engine) -> Iterator[None]:
    """The parts of `Engine.step` have names in the trace."""
    scheduler, executor = engine.scheduler, engine.executor
    places = zip(PARTS, (scheduler, executor, executor, scheduler), strict=True)
    with ExitStack() as stack:
        for name, owner in places:
            stack.enter_context(mock.patch.object(owner, name, marked(name, getattr(owner, name))))
        yield


def marked(name: str, call: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(HOST + name):
            return call(*args, **kwargs)

    return run
