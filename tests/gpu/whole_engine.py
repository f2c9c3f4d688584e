"""Whole engines on random weights: how fast they decode, read prompts and serve many requests at once."""

import gc
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu import apart, beside
from gpu.bars import BYTES, SGLANG, decode_bar
from gpu.idle import idle_clocks
from gpu.report import Report
from gpu.shapes import SHAPES, prompt_operations, step_floor

BATCHES = (1, 8, 64, 256)
PROMPTS = (2048, 4096, 8192, 16384)
SHORT, LONG, OUTPUT = 512, 8192, 64
"""Tokens of the contexts that decoding is measured after, and of what is decoded."""
CONTEXTS = (17000, 5000, 1200)
"""The first that the card has room for."""
BAR_SECONDS = 40
"""That the load of the bar takes on an H200 which comes near it, and some."""
REQUESTS, HALF = 256, 1024
BAR = f"{REQUESTS} requests of {HALF} in, {HALF} out"
KV_FP8 = "KV fp8"
LATE = 2048
"""Tokens of the prompt that arrives while others decode."""
SILENCE = 120.0
"""Seconds that an engine may take to load or to serve one load."""
SPARE = 10.0
"""Seconds before the end in which no engine is loaded."""


def measure(report: Report, size: str, peaks: dict[str, float]) -> None:
    """Each variant apart: a kernel that faults ends no other engine."""
    report.section(f"Whole engine, {size} shape, random weights")
    make = apart.Make(pieces, (size, peaks, time.monotonic() + report.left))
    apart.tell_lines(report, make, limit=SILENCE, spare=SPARE)


def pieces(size: str, peaks: dict[str, float], end: float) -> list[apart.Piece]:
    return [
        apart.Piece(f"{size} {name}", partial(apart_variant, name, options, size, peaks, end, not place))
        for place, (name, options) in enumerate(engine_variants(size))
    ]


def apart_variant(
    name: str,
    options: dict[str, Any],
    size: str,
    peaks: dict[str, float],
    end: float,
    full: bool,
    say: apart.Say,
) -> None:
    from llmbox.engine.errors import DoesNotFit

    report = Report(end - time.monotonic(), listener=say)
    try:
        one_variant(report, name, options, size, peaks, full=full)
    except DoesNotFit as error:
        report.say(f"\n{name}: left out: {error}.")
    gc.collect()  # the engine is gone by now, and the next one needs its memory
    torch.cuda.empty_cache()


def engine_variants(size: str) -> list[tuple[str, dict[str, Any]]]:
    """Of those that this card computes, the ones that say most first."""
    from llmbox.kernels.triton.linear.tile_config import has_fp8

    variants: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {}),
        (KV_FP8, {"kv_dtype": "fp8"}),
        ("fp8 weights and KV", {"quant": "fp8", "kv_dtype": "fp8"}),
        ("deterministic", {"deterministic": True}),
        ("int8", {"quant": "int8"}),
        ("int4", {"quant": "int4"}),
        ("fp8-block", {"quant": "fp8-block"}),
        ("w8a8", {"quant": "w8a8"}),
    ]
    if "num_experts" in SHAPES[size]:
        variants = [("fp8", {"quant": "fp8"}), ("int8", {"quant": "int8"})]
    floats = has_fp8(torch.device("cuda"))
    return [each for each in variants if floats or "fp8" not in " ".join(map(str, each[1].values()))]


def one_variant(
    report: Report,
    name: str,
    options: dict[str, Any],
    size: str,
    peaks: dict[str, float],
    *,
    full: bool,
) -> None:
    """Raises DoesNotFit where not even a short context has room beside the weights."""
    from gpu import engine_speed

    before = Compiled.count()
    engine = engine_speed.largest(SHAPES[size], CONTEXTS, **options)
    info = engine.info
    report.say(f"\n### {name} ({info.backend}, {info.max_running} rows, context {info.context_window})\n")
    new = Compiled.count().since(before)
    report.say(f"Loaded in {info.load_seconds:.1f} s, of which kernels: {new}.\n")
    engine_speed.warm_up(engine, seconds=min(30.0, report.left / 3))
    with_bar = size == "8B" and name in {"bf16", KV_FP8}
    figures(report, engine, SHAPES[size], peaks, full=full, big=size == "8B", with_bar=with_bar)


class Compiled(NamedTuple):
    """What is in Triton's cache."""

    kernels: int
    launchers: int

    @classmethod
    def count(cls) -> "Compiled":
        folder = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
        return cls(*(sum(1 for _ in folder.glob(f"*/{name}")) for name in ("*.cubin", "*launcher*.so")))

    def since(self, before: "Compiled") -> str:
        kernels, launchers = self.kernels - before.kernels, self.launchers - before.launchers
        return f"{kernels} compiled and {launchers} launchers built by the C compiler, the others were there"


def figures(
    report: Report,
    engine: Any,
    shape: dict[str, Any],
    peaks: dict[str, float],
    *,
    full: bool,
    big: bool,
    with_bar: bool,
) -> None:
    """`full`: all of them. `big`: the 8B shape, of which the bars are."""
    report.table("work", "figure", "note")
    left_out = decoding(report, engine, shape, peaks, full=full, big=big)
    if with_bar:
        left_out += bar(report, engine, shape, peaks)
    left_out += prompts(report, engine, shape, peaks, full=full)
    if full:
        left_out += loads(report, engine)
        idle_clocks(report)
    if left_out:
        report.say(f"\nLeft out for want of memory or time: {', '.join(left_out)}.")


def decoding(
    report: Report, engine: Any, shape: dict[str, Any], peaks: dict[str, float], *, full: bool, big: bool
) -> list[str]:
    """What was left out."""
    from gpu.engine_speed import add, run

    loads = [(batch, SHORT) for batch in (BATCHES if full else (1, 64))] + [(1, LONG)] * full
    left_out = []
    for batch, context in loads:
        if not has_room(engine, batch, context + OUTPUT) or report.left < 5:
            left_out.append(f"decode {batch} x {context}")
            continue
        done = run(engine, add(engine, batch, context, OUTPUT, f"d{batch}-{context}-"))
        middle = context + OUTPUT // 2
        floor = step_floor(engine.info, shape, peaks, batch, middle)
        step = done.decode_step
        note = f"{step * 1e3:.2f} ms a step, floor {floor * 1e3:.2f} ms ({floor / step:.0%})"
        if big and batch == 1:
            note += f", bar {decode_bar(middle):.2f} ms"
        report.row((f"decode {batch} x {context}", f"{batch / step:.0f} tok/s", note))
    return left_out


def has_room(engine: Any, requests: int, tokens: int) -> bool:
    """To run so many at once, of so many tokens each."""
    info = engine.info
    blocks = requests * -(-tokens // info.block_size)
    return bool(requests <= info.max_running and tokens <= info.context_window and blocks <= info.num_blocks)


def prompts(
    report: Report, engine: Any, shape: dict[str, Any], peaks: dict[str, float], *, full: bool
) -> list[str]:
    """What was left out."""
    from gpu.engine_speed import add, run

    left_out = []
    for tokens in PROMPTS if full else (4096,):
        if not has_room(engine, 1, tokens + 1) or report.left < 5:
            left_out.append(f"prompt of {tokens}")
            continue
        walls = [run(engine, add(engine, 1, tokens, 1, f"p{tokens}-{n}")).wall for n in range(3)]
        wall = statistics.median(walls)
        rate = prompt_operations(shape, tokens) / wall
        note = f"{rate / 1e12:.0f} TFLOP/s ({rate / peaks['bf16']:.0%} of the measured bf16 peak)"
        report.row((f"prompt of {tokens}", f"{tokens / wall:.0f} tok/s", note))
    return left_out


def bar(report: Report, engine: Any, shape: dict[str, Any], peaks: dict[str, float]) -> list[str]:
    """What was left out. Before all that takes longer to say less. Where there is no room for all requests at
    once, some wait.
    """
    from gpu.engine_speed import add, run

    info = engine.info
    at_once = min(REQUESTS, info.max_running, info.num_blocks // -(-2 * HALF // info.block_size))
    seconds = BAR_SECONDS * max(1.0, BYTES / peaks["bytes"])
    if not at_once or info.context_window < 2 * HALF or report.left < seconds:
        return [BAR]
    done = run(engine, add(engine, REQUESTS, HALF, HALF, "bar"))
    rate = done.tokens / done.wall
    steps = HALF * REQUESTS / at_once
    prompts_floor = REQUESTS * prompt_operations(shape, HALF) / peaks["bf16"]
    floor = prompts_floor + steps * step_floor(info, shape, peaks, at_once, HALF * 3 // 2)
    notes = [f"{at_once} have room at once", f"floor {floor:.1f} s ({floor / done.wall:.0%})"]
    if at_once == REQUESTS:
        notes.append(f"{done.decode_step * 1e3:.2f} ms a step while all decode")
    scaled = rate * BYTES / peaks["bytes"]
    notes.append(f"{scaled:.0f} tok/s scaled to {BYTES / 1e12:.1f} TB/s")
    notes += [f"{rate / figure:.0%} of {name}" for name, figure in SGLANG.items()]
    report.row((BAR, f"{rate:.0f} tok/s", ", ".join(notes)))
    return []


def loads(report: Report, engine: Any) -> list[str]:
    """Of many requests; what was left out. Where there is no room for all at once, some wait: the figure says
    how many rows.
    """
    from gpu.engine_speed import add, first_token_under_load, run

    left_out = []
    what = f"{beside.REQUESTS} requests of {beside.PROMPT} in, {beside.OUTPUT} out"
    if report.left > 10:
        done = run(engine, add(engine, beside.REQUESTS, beside.PROMPT, beside.OUTPUT, "beside"))
        report.row((what, f"{done.tokens / done.wall:.0f} tok/s", "as continuous batching below"))
    else:
        left_out.append(what)
    busy = min(64, engine.info.max_running - 1)
    what = f"prompt of {LATE} while {busy} decode"
    if report.left > 10 and has_room(engine, busy, 256 + 400) and has_room(engine, 1, LATE + 2):
        took = first_token_under_load(engine, busy, LATE)
        report.row((what, f"{took * 1e3:.0f} ms", "to the first token"))
    else:
        left_out.append(what)
    return left_out
