"""Runs the checks of all kernels, in several processes at once."""

import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context

from gpu.checks import Setting
from gpu.correctness import all_checks
from gpu.report import Report
from llmbox.engine.hardware.proc import bind_to_parent


@dataclass
class Found:
    """`worst`: the check that came closest to its limit, and how close. `left_out`: groups."""

    passed: int = 0
    worst: tuple[str, float] = ("none", 0.0)
    failures: list[str] = field(default_factory=list)
    left_out: int = 0

    def add(self, other: "Found") -> None:
        self.passed += other.passed
        self.worst = max(self.worst, other.worst, key=lambda each: each[1])
        self.failures += other.failures
        self.left_out += other.left_out


def in_processes(report: Report, setting: Setting, processes: int) -> None:
    """Groups in their order, to whoever is free. What dies takes the checks that are left with it."""
    end = time.monotonic() + report.left
    numbers = range(len(list(all_checks(setting))))
    total = Found()
    context, me = get_context("spawn"), os.getpid()
    with ProcessPoolExecutor(processes, context, bind_to_parent, (me,)) as pool:
        futures = [pool.submit(run, setting, number, end) for number in numbers]
        for number, future in enumerate(futures):
            try:
                total.add(future.result())
            except BrokenProcessPool as error:
                total.add(Found(failures=[f"a process died: {error}"], left_out=len(numbers) - number))
                break
    tell(report, total)


def run(setting: Setting, number: int, end: float) -> Found:
    """One group of checks, unless it is too late to begin."""
    if time.monotonic() > end:
        return Found(left_out=1)
    try:
        checks = list(all_checks(setting))[number]()
    except Exception as error:  # noqa: BLE001 - one broken kernel must not hide the others
        traceback.print_exc()
        return Found(failures=[f"group {number}: {type(error).__name__}: {str(error)[:300]}"])
    found = Found()
    for check in checks:
        if check.passed:
            found.add(Found(1, (check.name, check.error / check.limit if check.limit else 0.0)))
        else:
            found.failures.append(f"{check.name}: error {check.error:.2e}, allowed {check.limit:.2e}")
    return found


def tell(report: Report, found: Found) -> None:
    for failure in found.failures:
        report.failed(failure)
    report.skipped(found.left_out)
    name, closeness = found.worst
    report.say(f"\n{found.passed} checks passed; closest to its limit: {name} ({closeness:.0%} of it).")
