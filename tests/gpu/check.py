"""Is every GPU kernel right, how fast is it, how fast is the whole engine? Run by `make gpu-check`.

Needs torch and triton, and of this project nothing but the tree. Ends within --minutes: later parts are left
out if they must be. Writes a table. Exit status 1 if anything is wrong, 2 without a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu import ahead, apart
from gpu.bars import BARS
from gpu.report import FAILED, Report, versions
from llmbox.kernels.cpu.isa import cache_folder

SECTIONS = {
    "smoke": (50, 120),
    "correctness": (60, 160),
    "engine-8B": (150, 230),
    "profile": (20, 50),
    "ranks": (20, 40),
    "kernels": (60, 190),
    "engine-0.6B": (40, 100),
    "engine-30B-A3B": (35, 80),
    "transformers": (30, 70),
    "continuous": (25, 60),
    "pictures": (15, 40),
    "quality": (25, 70),
}
"""Seconds: what is kept for each whatever those before it take, and what it may take while others follow."""
SECOND_CALL = ("tune",)
"""Sections that only --only runs: they find constants, and need the time of a call of their own."""
GRACE = 20
"""Seconds of these, the last ones, in which nothing new is begun."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas (all: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.md"))
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs; printed")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - {*SECTIONS, *SECOND_CALL}:
        parser.error(f"no section {', '.join(unknown)}")
    problem = why_not()
    if problem:
        print(f"gpu-check: {problem}", file=sys.stderr)
        return 2
    # One cache for kernels that are checked, timed and loaded with engines, which would choose this one.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))
    options.out.write_text("")
    report = Report(60 * options.minutes, options.out)
    report.say("# GPU check\n")
    report.say(versions())
    peaks = measured_peaks(report)
    compiling = None
    for place, name in enumerate(names, 1):
        compiling = compiling or ahead.begin(names[place - 1 :])
        arguments = ["--seed", str(options.seed), "--peaks", json.dumps(peaks)]
        run_section(report, name, seconds_for(name, names[place:], report.left), arguments)
        ahead.end(compiling, report)
        compiling = None
    left_out = [name for name in SECTIONS if name not in names]
    if left_out:
        report.say(f"\nNot asked for: {', '.join(left_out)}.")
    report.say("\n## Bars, of one H200 and the 8B shape in bf16\n")
    for what, bar in BARS.items():
        report.say(f"- {what}: {bar}")
    print(f"\nwritten to {options.out}; {len(report.failures)} failures")
    return 1 if report.failures else 0


def seconds_for(name: str, later: Sequence[str], left: float) -> float:
    """In which this section may begin something, so that those after it have theirs. The last has all."""
    if not later:
        return left - GRACE
    least, most = SECTIONS.get(name, (left, left))
    kept = sum(SECTIONS[other][0] for other in later if other in SECTIONS)
    return min(most, max(least, left - kept), left) - GRACE


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU that torch can use; torch.cuda.is_available() says there is none here"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "needs the triton package"
    return None


def measured_peaks(report: Report) -> dict[str, float]:
    from gpu.timing import peaks

    found = peaks()
    torch.cuda.empty_cache()
    moved = f"copy {found['bytes'] / 1e12:.2f} TB/s, reading {found['read'] / 1e12:.2f} TB/s"
    rates = (f"{name} {found[name] / 1e12:.0f} TFLOP/s" for name in ("bf16", "fp8") if name in found)
    report.say(f"\nMeasured peaks: {moved}; {', '.join(rates)}.")
    return found


def run_section(report: Report, name: str, seconds: float, arguments: list[str]) -> None:
    """Its lines as they come; what it says failed has failed, and so has a section that breaks."""
    if seconds <= 0:
        report.say(f"\n{name}: out of time.")
        return
    command = [sys.executable, "-m", "gpu.sections", name, "--seconds", str(seconds), *arguments]
    # A group of its own: what it has started holds the pipe too, and is ended with it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    stopped = threading.Event()

    def stop() -> None:
        """Also what says nothing any more."""
        stopped.set()
        apart.kill_group(process)

    timer = threading.Timer(seconds + GRACE, stop)
    timer.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            report.say(line.rstrip("\n"))
            if line.startswith(FAILED):
                report.failures.append(line)
    except BaseException:
        apart.kill_group(process)
        raise
    finally:
        status = process.wait()
        timer.cancel()
    if stopped.is_set():
        report.say(f"\n{name}: stopped, out of time.")
    elif status:
        report.failed(f"{name} ended with status {status}: see its messages above")


if __name__ == "__main__":
    sys.exit(main())
