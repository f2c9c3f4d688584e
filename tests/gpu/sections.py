"""What `make gpu-check` does, one section a process: a kernel that faults takes its process's GPU with it.

python -m gpu.sections NAME --seconds S --seed N --peaks JSON
"""

import argparse
import gc
import json
import runpy
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from gpu import beside
from gpu.report import Report
from gpu.shapes import SHAPES, parameters, prompt_operations

TWO_RANKS = Path(__file__).parents[1] / "engine/parallel/two_ranks_one_gpu.py"
BATCHES = (1, 8, 64, 256)
PROMPTS = (2048, 4096, 8192, 16384)
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
        case ["quality"]:
            quality(report)
        case ["transformers"]:
            beside.generate(report)
        case ["continuous"]:
            beside.continuous_batching(report)
        case _:
            parser.error(f"no section {options.name}")


def correctness(report: Report, seed: int) -> None:
    from gpu.checks import Setting
    from gpu.correctness import all_checks

    report.section(f"Correctness (seed {seed})")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    setting = Setting(torch.device("cuda"), dtypes, tiny=False, seed=seed)
    passed, worst = 0, ("", 0.0)
    groups = list(all_checks(setting))
    for number, group in enumerate(groups):
        if report.left < 0:
            report.skipped(len(groups) - number)
            break
        try:
            checks = group()
        except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
            traceback.print_exc()
            report.failed(f"group {number}: {type(error).__name__}: {str(error)[:300]}")
            continue
        for check in checks:
            if not check.passed:
                report.failed(f"{check.name}: error {check.error:.2e}, allowed {check.limit:.2e}")
                continue
            passed += 1
            if check.limit and check.error / check.limit > worst[1]:
                worst = (check.name, check.error / check.limit)
    report.say(f"\n{passed} checks passed; closest to its limit: {worst[0]} ({worst[1]:.0%} of it).")


def ranks(report: Report) -> None:
    """A section of its own: should they wait for each other in vain, only this process is stopped."""
    report.section("Sum, residual and norm in one kernel")
    runpy.run_path(str(TWO_RANKS), run_name="__main__")
    report.say("Two ranks on this GPU, 200 turns from graphs: bit by bit the ordered sum, and its norm.")


def kernels(report: Report, peaks: dict[str, float]) -> None:
    from gpu import kernel_speed, little_kernels, sdpa_rule

    report.section("Kernels against their rooflines")
    try:
        sdpa_rule.report_rule(report)
    except Exception as error:  # noqa: BLE001 - the kernels themselves say more
        traceback.print_exc()
        report.failed(f"long prompts through SDPA: {type(error).__name__}: {str(error)[:300]}")
    report.say("")
    report.table("kernel", "ms", "floor ms", "reached", "torch, ms")
    work = [*kernel_speed.all_work(), *little_kernels.all_work()]
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


def whole_engine(report: Report, size: str, peaks: dict[str, float]) -> None:

    shape = SHAPES[size]
    report.section(f"Whole engine, {size} shape, random weights")
    count = parameters(shape)
    if 2 * count * 1.3 > torch.cuda.mem_get_info()[0]:
        report.say("Left out: this card's memory is too small.")
        return
    variants: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {}),
        ("fp8 weights and KV", {"quant": "fp8", "kv_dtype": "fp8"}),
        ("deterministic", {"deterministic": True}),
        ("int8", {"quant": "int8"}),
        ("int4", {"quant": "int4"}),
        ("fp8-block", {"quant": "fp8-block"}),
        ("w8a8", {"quant": "w8a8"}),
    ]
    for name, options in variants:
        if report.left < 10:
            report.say(f"\n{name}: out of time.")
            continue
        try:
            one_variant(report, name, options, shape, peaks, big=size == "8B")
        except Exception as error:  # noqa: BLE001 - the other variants still say something
            traceback.print_exc()
            report.failed(f"{size} {name}: {type(error).__name__}: {str(error)[:300]}")
        gc.collect()  # the engine is gone by now, and the next one needs its memory
        torch.cuda.empty_cache()


def one_variant(
    report: Report,
    name: str,
    options: dict[str, Any],
    shape: dict[str, Any],
    peaks: dict[str, float],
    *,
    big: bool,
) -> None:
    from gpu import engine_speed

    engine = engine_speed.engine(shape, context=17000, **options)
    report.say(f"\n### {name} ({engine.info.backend}, {engine.info.max_running} rows)\n")
    report.say(f"Loaded in {engine.info.load_seconds:.1f} s, kernels compiled or found in Triton's cache.\n")
    engine_speed.warm_up(engine, seconds=min(30.0, report.left / 3))
    figures(report, engine, shape, peaks, full=name == "bf16", big=big)


def figures(
    report: Report,
    engine: Any,
    shape: dict[str, Any],
    peaks: dict[str, float],
    *,
    full: bool,
    big: bool,
) -> None:
    from gpu.engine_speed import add, first_token_under_load, run

    report.table("work", "figure", "note")
    for batch in BATCHES if full else (1, 64):
        if batch > engine.info.max_running or report.left < 5:
            continue
        done = run(engine, add(engine, batch, 512, 64, f"d{batch}"))
        kv = batch * 544 * engine.info.kv_bytes_per_token
        floor = (engine.info.weights_bytes + kv) / peaks["bytes"]
        step = done.decode_step
        note = f"{step * 1e3:.2f} ms a step, floor {floor * 1e3:.2f} ms ({floor / step:.0%})"
        report.row((f"decode {batch} x 512", f"{batch / done.decode_step:.0f} tok/s", note))
    for tokens in PROMPTS if full else (4096,):
        if report.left < 5:
            continue
        walls = [run(engine, add(engine, 1, tokens, 1, f"p{tokens}-{n}")).wall for n in range(3)]
        wall = statistics.median(walls)
        rate = prompt_operations(shape, tokens) / wall
        note = f"{rate / 1e12:.0f} TFLOP/s ({rate / peaks['bf16']:.0%} of the measured bf16 peak)"
        report.row((f"prompt of {tokens}", f"{tokens / wall:.0f} tok/s", note))
    if full and report.left > 10 and engine.info.max_running >= beside.REQUESTS:
        done = run(engine, add(engine, beside.REQUESTS, beside.PROMPT, beside.OUTPUT, "beside"))
        what = f"{beside.REQUESTS} requests of {beside.PROMPT} in, {beside.OUTPUT} out"
        report.row((what, f"{done.tokens / done.wall:.0f} tok/s", "as continuous batching below"))
    if full and report.left > 10:
        busy = min(64, engine.info.max_running - 1)
        took = first_token_under_load(engine, busy, LATE)
        report.row((f"prompt of {LATE} while {busy} decode", f"{took * 1e3:.0f} ms", "to the first token"))
    if full and big and report.left > 60 and engine.info.max_running >= 256:
        done = run(engine, add(engine, 256, 1024, 1024, "bar"))
        report.row(
            ("256 requests of 1024 in, 1024 out", f"{done.tokens / done.wall:.0f} tok/s", "the first bar")
        )
    if full:
        idle_clocks(report)


def idle_clocks(report: Report) -> None:
    """With the engine loaded and nothing to do."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        time.sleep(4)
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3
        used = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        report.row(("idle for 4 s", f"{clock} MHz, {watts:.0f} W", f"utilisation {used} %"))
    except Exception as error:  # noqa: BLE001 - a driver may refuse any of these
        report.row(("idle for 4 s", "not available", str(error)[:80]))


if __name__ == "__main__":
    main()
