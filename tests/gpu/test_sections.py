"""Sections of `make gpu-check`: their time, what breaks in them, and what a card has no room for."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpu import ahead, check, checking, engine_speed, idle, sections
from gpu.checks import Check, Setting
from gpu.report import Report
from gpu.shapes import SHAPES, step_floor
from llmbox.engine.device import device as devices
from llmbox.engine.errors import DoesNotFit


def test_every_section_has_time_left_whatever_those_before_it_take() -> None:
    left, names = 9.5 * 60 - 10 - ahead.PATIENCE, list(check.SECTIONS)
    for place, name in enumerate(names, 1):
        seconds = check.seconds_for(name, names[place:], left)
        assert seconds + check.GRACE >= check.SECTIONS[name][0]
        assert seconds + check.GRACE <= check.SECTIONS[name][1] or place == len(names)
        left -= seconds + check.GRACE
    assert left >= 0
    assert check.seconds_for("kernels", ["ranks"], 1000.0) == check.SECTIONS["kernels"][1] - check.GRACE
    assert check.seconds_for("kernels", [], 1000.0) == 1000.0 - check.GRACE, "nobody else wants it"
    assert check.seconds_for("kernels", [], 30.0) == 30.0 - check.GRACE


def group_of(*errors: float) -> Callable[[], list[Check]]:
    return lambda: [Check(f"check {error}", error, 0.5) for error in errors]


def broken() -> list[Check]:
    raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize(
    ("seconds", "failures", "last"),
    [
        (100.0, 2, "3 checks passed; closest to its limit: check 0.4 (80% of it)."),
        (-1.0, 0, "0 checks passed; closest to its limit: none (0% of it)."),
    ],
)
def test_checks_run_apart_and_one_that_breaks_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, seconds: float, failures: int, last: str
) -> None:
    groups = [group_of(0.1, 0.4), broken, group_of(0.3, 0.7)]
    monkeypatch.setattr(checking, "all_checks", lambda _: iter(groups))
    monkeypatch.setattr(checking, "ProcessPoolExecutor", lambda count, *_: ThreadPoolExecutor(count))
    report = Report(seconds)
    setting = Setting(torch.device("cpu"), (torch.float32,), tiny=True, seed=1)
    checking.in_processes(report, setting, 2)
    assert len(report.failures) == failures
    assert report.lines[-1] == f"\n{last}"
    assert (f"\nNot measured, out of time: {len(groups)} more." in report.lines) == (seconds < 0)


def test_a_process_of_checks_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> checking.Found:
        raise BrokenProcessPool("terminated abruptly")

    monkeypatch.setattr(checking, "run", dies)
    monkeypatch.setattr(checking, "ProcessPoolExecutor", lambda count, *_: ThreadPoolExecutor(count))
    report = Report(100.0)
    setting = Setting(torch.device("cpu"), (torch.float32,), tiny=True, seed=1)
    checking.in_processes(report, setting, 1)
    assert report.failures == ["a process died: terminated abruptly"]
    assert any("out of time" in line for line in report.lines)


def test_a_card_without_room_gets_a_shorter_context_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def make(_shape: object, context: int, **options: object) -> str:
        asked.append(context)
        if context > 5000 or options:
            raise DoesNotFit("a context of 5000 tokens would fit")
        return "engine"

    monkeypatch.setattr(engine_speed, "engine", make)
    assert engine_speed.largest({}, (17000, 5000, 1200)) == "engine"
    assert asked == [17000, 5000]
    monkeypatch.setattr(sections, "engine_variants", lambda: [("int8", {"quant": "int8"})])
    report = Report(100.0)
    sections.whole_engine(report, "8B", {})
    assert report.lines[-1] == "\nint8: left out: a context of 5000 tokens would fit."
    assert not report.failures


@pytest.mark.parametrize(
    ("code", "failures"),
    [
        ("print('| fine |')", 0),
        ("print('**FAILED**: wrong')", 1),
        ("raise SystemExit(3)", 1),
        ("import os; os.abort()", 1),
    ],
)
def test_a_section_that_breaks_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, failures: int
) -> None:
    program = tmp_path / "section"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(check.sys, "executable", str(program))
    report = Report(100.0)
    check.run_section(report, "kernels", 60.0, [])
    assert len(report.failures) == failures


def test_the_bar_has_its_time_even_where_everything_is_compiled_first() -> None:
    """All sections before it take the most that they may."""
    left, names = 9.5 * 60 - 10, list(check.SECTIONS)
    place = names.index("engine-8B")
    left -= sum(check.SECTIONS[name][1] for name in names[:place]) + ahead.PATIENCE
    assert check.seconds_for("engine-8B", names[place + 1 :], left) > 3 * sections.BAR_SECONDS


def test_the_floor_of_a_step_is_what_takes_longer() -> None:
    """The 8B shape at the rates that docs/gpu-engine.md presumes: its table, without the small kernels."""
    peaks = {"bytes": 4.3e12, "bf16": 780e12, "fp8": 1500e12}
    info = SimpleNamespace(quant="none", weights_bytes=16.38e9, kv_bytes_per_token=147456)
    one = step_floor(info, SHAPES["8B"], peaks, 1, 512)
    assert one == pytest.approx(3.54e-3, rel=0.01)
    many = step_floor(info, SHAPES["8B"], peaks, 256, 1536)
    assert many == pytest.approx(13.5e-3 + 4.97e-3, rel=0.01)
    info.quant, info.weights_bytes = "fp8", 8.8e9
    assert step_floor(info, SHAPES["8B"], peaks, 256, 1536) == pytest.approx(16.07e-3, rel=0.01)


def test_what_was_said_is_in_the_file_before_the_end(tmp_path: Path) -> None:
    report = Report(100.0, tmp_path / "check.md")
    report.section("Kernels")
    report.row(("one", "two"))
    assert (tmp_path / "check.md").read_text() == "\n## Kernels\n\n| one | two |\n"


def test_the_bar_is_measured_before_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    done = SimpleNamespace(tokens=256 * 1024, wall=30.0, decode_step=0.022)
    monkeypatch.setattr(engine_speed, "run", lambda *_: done)
    monkeypatch.setattr(engine_speed, "add", lambda *_: ["r"])
    monkeypatch.setattr(sections, "has_room", lambda *_: True)
    for name in ("decoding", "prompts", "loads"):
        monkeypatch.setattr(sections, name, lambda *_, name=name, **__: said.append(name) or [])
    monkeypatch.setattr(sections, "idle_clocks", lambda _: None)
    report = Report(100.0)
    say = report.row
    report.row = lambda cells: (said.append(cells[0]), say(cells))  # type: ignore[method-assign]
    sections.figures(report, None, {}, {}, full=True, big=True)
    assert said[1:] == ["---", "decoding", "256 requests of 1024 in, 1024 out", "prompts", "loads"]
    assert "8738 tok/s | 22.00 ms a step while all decode; 123% of SGLang, Triton" in report.lines[-1]


def test_a_section_that_says_nothing_more_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "section"
    program.write_text(f"#!{sys.executable}\nimport time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    program.chmod(0o700)
    monkeypatch.setattr(check.sys, "executable", str(program))
    monkeypatch.setattr(check, "GRACE", 1)
    report = Report(100.0)
    check.run_section(report, "continuous", 1.0, [])
    assert report.lines == ["begun", "\ncontinuous: stopped, out of time."]
    assert not report.failures


def test_idle_clocks_are_those_of_the_gpu_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts along the bus, CUDA as it likes."""
    asked: list[str] = []
    driver = SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=asked.append,
        nvmlDeviceGetClockInfo=lambda *_: 345,
        nvmlDeviceGetPowerUsage=lambda _: 72_000,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=0),
    )
    gpus = [SimpleNamespace(uuid=uuid) for uuid in ("GPU-a", "GPU-b")]
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(devices, "cuda_machine", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(idle.time, "sleep", lambda _: None)
    report = Report(100.0)
    idle.idle_clocks(report)
    assert asked == ["GPU-b"]
    assert "345 MHz, 72 W" in report.lines[-1]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('8B bf16 in 50 s'); print('8B int8 in 60 s')", "for 8B bf16 in 50 s, 8B int8 in 60 s."),
        ("raise SystemExit(1)", "for no engine."),
        ("print('8B bf16 in 50 s', flush=True); open(READY, 'w'); time.sleep(600)", "for 8B bf16 in 50 s."),
    ],
)
def test_engines_are_compiled_beside_the_checks_and_not_beside_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, says: str
) -> None:
    program = tmp_path / "ahead"
    ready = tmp_path / "ready"
    program.write_text(f"#!{sys.executable}\nimport time\nREADY = {str(ready)!r}\n{code}\n")
    program.chmod(0o700)
    monkeypatch.setattr(ahead.sys, "executable", str(program))
    assert ahead.begin(["engine-8B", "kernels"]) is None
    assert ahead.begin(["correctness", "kernels"]) is None
    process = ahead.begin(list(check.SECTIONS))
    assert process is not None
    assert process.args == [str(program), "-m", "gpu.ahead", "8B", "0.6B"]
    if "sleep" in code:
        while not ready.exists():
            assert process.poll() is None
        monkeypatch.setattr(ahead, "PATIENCE", 0.1)
    else:
        monkeypatch.setattr(ahead, "PATIENCE", 600.0)
    report = Report(100.0)
    ahead.end(process, report)
    assert process.poll() is not None
    assert report.lines[-1].endswith(says)


def test_small_cards_compile_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ahead.at_once(gib << 30, 16) for gib in (7, 23, 79, 139)] == [0, 1, 4, 7]
    assert ahead.at_once(139 << 30, 2) == 1

    def none(*_: object, **__: object) -> None:
        raise DoesNotFit("no room")

    monkeypatch.setattr(engine_speed, "engine", none)
    assert ahead.load("8B", "bf16", {}) == "8B bf16 not at all (DoesNotFit)"
