"""Sections of `make gpu-check`: their time, what breaks in them, and what a card has no room for."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpu import ahead, apart, check, engine_speed, idle, whole_engine
from gpu.report import Report
from gpu.shapes import SHAPES, experts_read, parameters, step_floor
from llmbox.engine.device import device as devices
from llmbox.engine.errors import DoesNotFit
from llmbox.kernels.cpu.isa import cache_folder
from support.broken_groups import is_gone, run_here


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
    monkeypatch.setattr(whole_engine, "engine_variants", lambda _: [("int8", {"quant": "int8"})])
    monkeypatch.setattr(apart, "run", run_here)
    report = Report(100.0)
    whole_engine.measure(report, "8B", {})
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
    assert check.seconds_for("engine-8B", names[place + 1 :], left) > 3 * whole_engine.BAR_SECONDS


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


EIGHT_BILLION = {"quant": "none", "weights_bytes": 16.38e9, "kv_bytes_per_token": 147456}


@pytest.mark.parametrize(
    ("rooms", "says"),
    [
        (300, "256 have room at once, floor 23.7 s (79%), 22.00 ms a step while all decode, 8738 tok/s"),
        (172, "172 have room at once, floor 23.9 s (80%), 8738 tok/s scaled to 4.3 TB/s"),
    ],
)
def test_the_bar_is_measured_before_the_prompts(
    monkeypatch: pytest.MonkeyPatch, rooms: int, says: str
) -> None:
    """On a card of 80 GB some requests wait."""
    said: list[str] = []
    done = SimpleNamespace(tokens=256 * 1024, wall=30.0, decode_step=0.022)
    info = SimpleNamespace(
        max_running=256, num_blocks=rooms * 128, block_size=16, context_window=2048, **EIGHT_BILLION
    )
    monkeypatch.setattr(engine_speed, "run", lambda *_: done)
    monkeypatch.setattr(engine_speed, "add", lambda *_: ["r"])
    for name in ("decoding", "prompts", "loads"):
        monkeypatch.setattr(whole_engine, name, lambda *_, name=name, **__: said.append(name) or [])
    monkeypatch.setattr(whole_engine, "idle_clocks", lambda _: None)
    report = Report(100.0)
    say = report.row
    report.row = lambda cells: (said.append(cells[0]), say(cells))  # type: ignore[method-assign]
    engine, peaks = SimpleNamespace(info=info), {"bytes": 4.3e12, "bf16": 780e12}
    options = {"full": True, "big": True, "with_bar": True}
    whole_engine.figures(report, engine, SHAPES["8B"], peaks, **options)
    assert said[1:] == ["---", "decoding", "256 requests of 1024 in, 1024 out", "prompts", "loads"]
    assert "8738 tok/s | " + says in report.lines[-1]
    assert "123% of SGLang, Triton" in report.lines[-1]


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
    assert ahead.begin(list(check.SECTIONS)) is None, "the smoke section is first"
    process = ahead.begin(list(check.SECTIONS)[1:])
    assert process is not None
    assert process.args == [str(program), "-m", "gpu.ahead", "8B", "0.6B", "30B-A3B"]
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


def test_what_a_section_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It holds the pipe that is read, which would go on for as long as it does."""
    program, child = tmp_path / "section", tmp_path / "child"
    program.write_text(
        f"#!{sys.executable}\nimport subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\nprint('begun', flush=True)\ntime.sleep(600)\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(check.sys, "executable", str(program))
    monkeypatch.setattr(check, "GRACE", 5)
    started = time.monotonic()
    report = Report(100.0)
    check.run_section(report, "kernels", 1.0, [])
    assert report.lines == ["begun", "\nkernels: stopped, out of time."]
    assert time.monotonic() - started < 60
    assert is_gone(int(child.read_text()))


def test_experts_that_no_row_takes_are_not_read() -> None:
    """Qwen3-30B-A3B: 30.5 billion weights, 3.3 of them for a token."""
    shape = SHAPES["30B-A3B"]
    assert parameters(shape) == pytest.approx(30.5e9, rel=0.01)
    assert [round(experts_read(shape, batch), 1) for batch in (1, 8, 256)] == [8.0, 51.6, 128.0]
    assert experts_read(SHAPES["8B"], 64) == 1.0
    peaks = {"bytes": 4.3e12, "bf16": 780e12, "fp8": 1500e12}
    info = SimpleNamespace(quant="fp8", weights_bytes=31e9, kv_bytes_per_token=98304)
    one, many = (step_floor(info, shape, peaks, batch, 512) for batch in (1, 64))
    assert one == pytest.approx((2.72e9 + 0.62e9 + 0.05e9) / 4.3e12, rel=0.01), "layers, head in bf16, KV"
    assert many == pytest.approx(7.8e-3, rel=0.03), "nearly all experts"


def test_all_sections_share_one_cache_and_what_is_left_out_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Engines choose the data folder's cache themselves: kernels that are checked before must be there."""
    begun: list[tuple[str, str | None]] = []

    def run_section(_report: Report, name: str, *_: object) -> None:
        begun.append((name, os.environ.get("TRITON_CACHE_DIR")))

    stand_ins = {"why_not": lambda: None, "versions": lambda: "a GPU", "measured_peaks": lambda _: {}}
    for name, stand_in in {**stand_ins, "run_section": run_section}.items():
        monkeypatch.setattr(check, name, stand_in)
    monkeypatch.setattr(ahead, "begin", lambda _: None)
    monkeypatch.setenv("LLMBOX_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # put back after the test
    monkeypatch.delenv("TRITON_CACHE_DIR")
    out = tmp_path / "check.md"
    monkeypatch.setattr(check.sys, "argv", ["check", "--only", "smoke,kernels,tune", "--out", str(out)])
    assert check.main() == 0
    cache = str(cache_folder() / "triton")
    assert begun == [("smoke", cache), ("kernels", cache), ("tune", cache)]
    assert "Not asked for: correctness, engine-8B, profile, ranks," in out.read_text()
