"""Runs the checks of all kernels, in several processes at once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from gpu import apart
from gpu.checks import Check, Group, Setting
from gpu.correctness import all_checks
from gpu.report import Report

SILENCE = 60.0
"""Seconds that a group may take to its first check, or to the next one."""
Groups = Callable[[Setting], Iterator[Group]]


@dataclass
class Found:
    """`worst`: the check that came closest to its limit, and how close. `last`: the one that ended last."""

    passed: int = 0
    worst: tuple[str, float] = ("none", 0.0)
    last: str = ""
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, check: Check) -> None:
        self.last = check.name
        if not check.passed:
            self.failures.append(f"{check.name}: error {check.error:.2e}, allowed {check.limit:.2e}")
            return
        self.passed += 1
        closeness = check.error / check.limit if check.limit else 0.0
        self.worst = max(self.worst, (check.name, closeness), key=lambda each: each[1])
        if check.note:
            self.notes.append(f"{check.name}: {check.note}")


def pieces(groups: Groups, setting: Setting) -> list[apart.Piece]:
    return [apart.Piece(group.name, partial(say_each, group)) for group in groups(setting)]


def say_each(group: Group, say: apart.Say) -> None:
    for check in group.run():
        say(check)


def in_processes(
    report: Report,
    setting: Setting,
    processes: int,
    groups: Groups = all_checks,
    silence: float = SILENCE,
) -> None:
    """Groups in their order, to whoever is free; a line for each as it ends."""
    by_group: dict[str, Found] = {}

    def hear(name: str, message: object, took: float) -> None:
        found = by_group.setdefault(name, Found())
        if isinstance(message, Check):
            found.add(message)
        elif isinstance(message, apart.Ended):
            tell(report, name, found, message, took)

    make = apart.Make(pieces, (groups, setting))
    end = time.monotonic() + report.left
    left_out = apart.run(make, hear, end=end, limit=silence, processes=processes)
    report.skipped(left_out)
    worst = (found.worst for found in by_group.values())
    name, closeness = max(worst, key=lambda each: each[1], default=Found().worst)
    passed = sum(found.passed for found in by_group.values())
    report.say(f"\n{passed} checks passed; closest to its limit: {name} ({closeness:.0%} of it).")


def tell(report: Report, name: str, found: Found, ended: apart.Ended, took: float) -> None:
    """One group, when it is done."""
    for failure in found.failures:
        report.failed(failure)
    if ended.error:
        after = f", after {found.last}" if found.last else ""
        if ended.late:
            report.say(f"\n{name}: {ended.error}{after}.\n")
        else:
            report.failed(f"{name}: {ended.error}{after}", ended.details)
    for note in found.notes:
        report.say(f"- {note}")
    if found.passed:
        report.say(f"- {name}: {found.passed} passed, {took:.0f} s, worst {found.worst[1]:.0%} of its limit")
