"""What `make gpu-check` does, one section a process: a kernel that faults takes its process's GPU with it.

python -m gpu.sections NAME --seconds S --seed N --peaks JSON
"""

import argparse
import gc
import importlib.util
import json
import os
import runpy
import statistics
import traceback
from pathlib import Path
from typing import Any

import torch

from gpu import beside, pictures
from gpu.bars import SGLANG, decode_bar
from gpu.idle import idle_clocks
from gpu.report import Report
from gpu.shapes import SHAPES, prompt_operations, step_floor

TWO_RANKS = Path(__file__).parents[1] / "engine/distributed/two_ranks_one_gpu.py"
BATCHES = (1, 8, 64, 256)
PROMPTS = (2048, 4096, 8192, 16384)
SHORT, LONG, OUTPUT = 512, 8192, 64
"""Tokens of the contexts that decoding is measured after, and of what is decoded."""
CONTEXTS = (17000, 5000, 1200)
"""The first that the card has room for."""
BAR_SECONDS = 40
"""That the load of the bar takes on an H200 which comes near it, and some."""
LATE = 2048
"""Tokens of the prompt that arrives while others decode."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peaks", type=json.loads, default={})
    options = parser.parse_args()
    report = Report(options.seconds)
    match options.name.split("-"):
        case ["correctness"]:
            correctness(report, options.seed)
        case ["ranks"]:
            ranks(report)
        case ["kernels"]:
            kernels(report, options.peaks)
        case ["engine", size]:
            whole_engine(report, size, options.peaks)
        case ["pictures"]:
            pictures.report_times(report, torch.device("cuda"))
        case ["quality"]:
            quality(report)
        case ["transformers" | "continuous" as which]:
            beside_it(report, which)
        case _:
            parser.error(f"no section {options.name}")


def correctness(report: Report, seed: int) -> None:
    """In several processes: most of it is compiling, and a kernel that faults takes only its own with it."""
    from gpu import checking
    from gpu.checks import Setting

    report.section(f"Correctness (seed {seed})")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    setting = Setting(torch.device("cuda"), dtypes, tiny=False, seed=seed)
    checking.in_processes(report, setting, max(1, min(8, (os.cpu_count() or 1) // 2)))


def ranks(report: Report) -> None:
    """A section of its own: should they wait for each other in vain, only this process is stopped."""
    report.section("Sum, residual and norm in one kernel")
    runpy.run_path(str(TWO_RANKS), run_name="__main__")
    report.say("Two ranks on this GPU, 200 turns from graphs: bit by bit the ordered sum, and its norm.")


def kernels(report: Report, peaks: dict[str, float]) -> None:
    from gpu import adapters, kernel_speed, little_kernels, recurrent, sdpa_rule

    report.section("Kernels against their rooflines")
    try:
        sdpa_rule.report_rule(report)
    except Exception as error:  # noqa: BLE001 - the kernels themselves say more
        traceback.print_exc()
        report.failed(f"long prompts through SDPA: {type(error).__name__}: {str(error)[:300]}")
    report.say("")
    report.table("kernel", "ms", "floor ms", "reached", "torch, ms")
    recurrent_work = recurrent.all_work(kernel_speed.DEVICE)
    work = [*kernel_speed.all_work(), *recurrent_work, *little_kernels.all_work(), *adapters.all_work()]
    for number, make in enumerate(work):
        if report.left < 0:
            report.skipped(len(work) - number)
            return
        try:
            speed = kernel_speed.measure(make(), peaks)
        except torch.cuda.OutOfMemoryError:
            report.say("| (does not fit this card) | | | | |")
            continue
        except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
            traceback.print_exc()
            report.failed(f"kernel {number}: {type(error).__name__}: {str(error)[:300]}")
            continue
        cells = speed.name, f"{speed.ms:.4f}", f"{speed.floor_ms:.4f}", f"{speed.reached:.0%}", speed.other
        report.row(cells)
        torch.cuda.empty_cache()


def quality(report: Report) -> None:
    """Of what is no part of the kernels' code, it needs files and packages that may not be there."""
    report.section("Quality of the built-in model")
    try:
        from gpu import quality as formats
    except (ImportError, OSError) as error:
        report.say(f"Left out: {error}.")
        return
    if not formats.is_here():
        report.say("Left out: the model's files are not there.")
        return
    formats.table(report, formats.on_gpu, formats.of_gpu())


def beside_it(report: Report, which: str) -> None:
    if importlib.util.find_spec("transformers") is None:
        report.section(f"transformers beside it: {which}")
        report.say("Left out: the transformers package is not installed.")
        return
    (beside.generate if which == "transformers" else beside.continuous_batching)(report)


def whole_engine(report: Report, size: str, peaks: dict[str, float]) -> None:
    from llmbox.engine.errors import DoesNotFit

    report.section(f"Whole engine, {size} shape, random weights")
    for name, options in engine_variants():
        if report.left < 10:
            report.say(f"\n{name}: out of time.")
            continue
        try:
            one_variant(report, name, options, SHAPES[size], peaks, big=size == "8B")
        except DoesNotFit as error:
            report.say(f"\n{name}: left out: {error}.")
        except Exception as error:  # noqa: BLE001 - the other variants still say something
            traceback.print_exc()
            report.failed(f"{size} {name}: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()  # the engine is gone by now, and the next one needs its memory
        torch.cuda.empty_cache()


def engine_variants() -> list[tuple[str, dict[str, Any]]]:
    """Of those that this card computes, the ones that say most first."""
    from llmbox.kernels.triton.linear.tile_config import has_fp8

    variants: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {}),
        ("fp8 weights and KV", {"quant": "fp8", "kv_dtype": "fp8"}),
        ("deterministic", {"deterministic": True}),
        ("int8", {"quant": "int8"}),
        ("int4", {"quant": "int4"}),
        ("fp8-block", {"quant": "fp8-block"}),
        ("w8a8", {"quant": "w8a8"}),
    ]
    floats = has_fp8(torch.device("cuda"))
    return [each for each in variants if floats or not each[1].get("quant", "").startswith("fp8")]


def one_variant(
    report: Report,
    name: str,
    options: dict[str, Any],
    shape: dict[str, Any],
    peaks: dict[str, float],
    *,
    big: bool,
) -> None:
    """Raises DoesNotFit where not even a short context has room beside the weights."""
    from gpu import engine_speed

    engine = engine_speed.largest(shape, CONTEXTS, **options)
    info = engine.info
    report.say(f"\n### {name} ({info.backend}, {info.max_running} rows, context {info.context_window})\n")
    report.say(f"Loaded in {info.load_seconds:.1f} s, kernels compiled or found in Triton's cache.\n")
    engine_speed.warm_up(engine, seconds=min(30.0, report.left / 3))
    figures(report, engine, shape, peaks, full=name == "bf16", big=big)


def figures(
    report: Report, engine: Any, shape: dict[str, Any], peaks: dict[str, float], *, full: bool, big: bool
) -> None:
    """`full`: all of them. `big`: the 8B shape, of which the bars are."""
    report.table("work", "figure", "note")
    left_out = decoding(report, engine, shape, peaks, full=full, big=big)
    if full and big:
        left_out += bar(report, engine)
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


def bar(report: Report, engine: Any) -> list[str]:
    """What was left out. Before all that takes longer to say less."""
    from gpu.engine_speed import add, run

    what = "256 requests of 1024 in, 1024 out"
    if report.left < BAR_SECONDS or not has_room(engine, 256, 2048):
        return [what]
    done = run(engine, add(engine, 256, 1024, 1024, "bar"))
    rate = done.tokens / done.wall
    reached = ", ".join(f"{rate / figure:.0%} of {name}" for name, figure in SGLANG.items())
    note = f"{done.decode_step * 1e3:.2f} ms a step while all decode; {reached}"
    report.row((what, f"{rate:.0f} tok/s", note))
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


if __name__ == "__main__":
    main()
