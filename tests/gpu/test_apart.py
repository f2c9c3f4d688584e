"""Pieces of work apart from each other: what faults, hangs or dies is named, and takes no other with it."""

import time
from pathlib import Path

import pytest
import torch

from gpu import apart, checking
from gpu.checks import Setting
from gpu.report import Report
from support import broken_groups
from support.broken_groups import is_gone

SETTING = Setting(torch.device("cpu"), (torch.float32,), tiny=True, seed=1)


def checked(groups: checking.Groups, processes: int = 2, seconds: float = 300.0, **options: float) -> Report:
    report = Report(seconds)
    checking.in_processes(report, SETTING, processes, groups, **options)
    return report


def told(report: Report) -> list[str]:
    """Lines of groups that were done."""
    return sorted(line.split(":")[0].removeprefix("- ") for line in report.lines if " passed, " in line)


@pytest.mark.process
def test_a_fault_takes_only_its_own_group() -> None:
    """The process that has lost its context ends, and a new one takes the next group."""
    report = checked(broken_groups.faulty)
    (failure,) = report.failures
    assert failure.startswith("group 2: RuntimeError: CUDA error: an illegal memory access was encountered")
    assert failure.endswith("after check before the fault")
    passed = sorted(f"group {number}" for number in range(broken_groups.GROUPS))
    assert told(report) == passed, "of the third group one check passed before"
    assert report.lines[-1].startswith("\n23 checks passed; closest to its limit: other check")
    assert any("in fault" in line for line in report.lines), "a traceback, in the file"


@pytest.mark.process
def test_a_group_that_hangs_is_named_and_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    monkeypatch.setenv("GROUPS_CHILD", str(child))
    report = checked(broken_groups.hanging, processes=1, silence=5.0)
    assert report.failures == ["hanging: did not come back in 5 s, after before"]
    assert told(report) == ["group 3", "group 4", "group 5", "hanging"]
    assert is_gone(int(child.read_text()))


@pytest.mark.process
def test_what_hangs_as_time_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GROUPS_CHILD", str(tmp_path / "child"))
    monkeypatch.setattr(apart, "LAST", 0.5)
    started = time.monotonic()
    report = checked(broken_groups.hanging, processes=1, seconds=1.0)
    assert time.monotonic() - started < checking.SILENCE
    assert not report.failures
    assert any(line.startswith("\nhanging: cut off, out of time") for line in report.lines)
    assert "out of time: 3 more, group 3, group 4, group 5." in report.lines[-2]


@pytest.mark.process
def test_a_process_that_dies_is_a_failure_of_its_group() -> None:
    report = checked(broken_groups.dying, processes=1)
    assert report.failures == ["dying: its process ended with status -6, after before"]
    assert told(report) == ["dying", "group 3", "group 4", "group 5"]


def test_groups_that_break_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word about the GPU the same process goes on."""
    monkeypatch.setattr(apart, "run", broken_groups.run_here)
    report = checked(broken_groups.wrong)
    assert report.failures == [
        "broken: ValueError: out of shared memory, after first",
        "bad: error 7.00e-01, allowed 5.00e-01",
    ]
    assert "- near: differs in the bits of 2 numbers" in report.lines
    assert report.lines[-1] == "\n3 checks passed; closest to its limit: near (80% of it)."
    late = checked(broken_groups.wrong, seconds=-1.0)
    assert late.lines == [
        "\nNot measured, out of time: 3 more, broken, wrong, noted.",
        "\n0 checks passed; closest to its limit: none (0% of it).",
    ]


def test_lines_of_pieces_are_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(say: apart.Say) -> None:
        Report(10.0, listener=say).failed("tokens differ")

    pieces = [apart.Piece("one", lambda say: say("| row |")), apart.Piece("two", failing)]
    monkeypatch.setattr(apart, "run", broken_groups.run_here)
    report = Report(10.0)
    apart.tell_lines(report, apart.Make(lambda: pieces), limit=1.0)
    assert report.lines == ["| row |", "", "**FAILED**: tokens differ"]
    assert report.failures == ["**FAILED**: tokens differ"]
    late = Report(5.0)
    apart.tell_lines(late, apart.Make(lambda: pieces), limit=1.0, spare=6.0)
    assert late.lines == ["\nNot measured, out of time: 2 more, one, two."]


def test_a_context_that_works_is_not_lost() -> None:
    assert not apart.has_lost_gpu()
