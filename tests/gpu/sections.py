"""What `make gpu-check` does, one section a process, and what may break apart from it (`apart.py`).

python -m gpu.sections NAME --seconds S --seed N --peaks JSON
"""

import argparse
import importlib.util
import json
import os
import runpy
import time
from pathlib import Path

import torch

from gpu import apart, beside, pictures, whole_engine
from gpu.report import Report
from llmbox.engine.hardware.proc import bind_to_parent

TWO_RANKS = Path(__file__).parents[1] / "engine/distributed/two_ranks_one_gpu.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peaks", type=json.loads, default={})
    options = parser.parse_args()
    bind_to_parent(os.getppid())
    report = Report(options.seconds)
    match options.name.split("-"):
        case ["smoke"]:
            smoke(report)
        case ["correctness"]:
            correctness(report, options.seed)
        case ["profile"]:
            profile(report)
        case ["tune"]:
            tune(report)
        case ["ranks"]:
            ranks(report)
        case ["kernels"]:
            kernels(report, options.peaks)
        case ["engine", *size]:
            whole_engine.measure(report, "-".join(size), options.peaks)
        case ["pictures"]:
            pictures.report_times(report, torch.device("cuda"))
        case ["quality"]:
            quality(report)
        case ["transformers" | "continuous" as which]:
            beside_it(report, which)
        case _:
            parser.error(f"no section {options.name}")


def smoke(report: Report) -> None:
    from gpu import smoke as tokens

    tokens.report_smoke(report)


def correctness(report: Report, seed: int) -> None:
    """In several processes, as most of it is compiling."""
    from gpu import checking
    from gpu.checks import Setting

    report.section(f"Correctness (seed {seed})")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    setting = Setting(torch.device("cuda"), dtypes, tiny=False, seed=seed)
    checking.in_processes(report, setting, max(1, min(8, (os.cpu_count() or 1) // 2)))


def profile(report: Report) -> None:
    from gpu import profiling

    profiling.report_profile(report)


def tune(report: Report) -> None:
    from gpu import tuning

    tuning.report_best(report)


def ranks(report: Report) -> None:
    """A section of its own: should they wait for each other in vain, only this process is stopped."""
    report.section("Sum, residual and norm in one kernel")
    runpy.run_path(str(TWO_RANKS), run_name="__main__")
    report.say("Two ranks on this GPU, 200 turns from graphs: bit by bit the ordered sum, and its norm.")


def kernels(report: Report, peaks: dict[str, float]) -> None:
    from gpu import kernel_pieces

    report.section("Kernels against their rooflines")
    report.table("kernel", "ms", "floor ms", "reached", "others, ms")
    end = time.monotonic() + report.left
    make = apart.Make(kernel_pieces.pieces, (peaks, end))
    apart.tell_lines(report, make, limit=kernel_pieces.SILENCE)


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


if __name__ == "__main__":
    main()
