"""The parts of `make gpu-check` that need no GPU."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gpu import beside, check, engine_speed, kernel_speed, little_kernels, sdpa_rule, sections, torch_blocks
from gpu.report import Report
from gpu.shapes import SHAPES
from llmbox.kernels.triton.linear import Blocks8
from llmbox.kernels.triton.quantise import Rows8

ROOT = Path(__file__).parents[2]
FP8 = torch.float8_e4m3fn


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert shutil.which("make")
    done = subprocess.run(
        ["make", "gpu-check", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "needs an NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_and_kernels_need_few_packages() -> None:
    """Of the GPU machine's packages; what the daemon needs beside them is not there."""
    absent = ["msgspec", "litestar", "sqlmodel", "xxhash", "setproctitle", "click", "platformdirs", "uvicorn"]
    absent += ["textual", "zmq"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); "
    code += "import gpu.engine_speed, gpu.kernel_speed, gpu.quality"
    path = f"{ROOT}/packaging/tree:{ROOT}/tests"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_an_engine_of_random_weights_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    shape = SHAPES["0.6B"] | small
    engine = engine_speed.engine(
        shape, device="cpu", threads=1, memory_bytes=1 << 30, context=700, max_running=4
    )
    engine_speed.warm_up(engine)
    done = engine_speed.run(engine, engine_speed.add(engine, 3, 20, 6))
    assert done.tokens == 18
    assert len(done.first) == 3
    assert 0 < done.decode_step < done.wall

    report = Report(100.0)
    report.section("Engine")
    monkeypatch.setattr(sections, "BATCHES", (2,))
    monkeypatch.setattr(sections, "PROMPTS", (64,))
    monkeypatch.setattr(sections, "LATE", 40)
    for name, size in {"REQUESTS": 3, "PROMPT": 20, "OUTPUT": 4}.items():
        monkeypatch.setattr(beside, name, size)
    monkeypatch.setattr(sections, "idle_clocks", lambda _: None)
    peaks = {"bytes": 1e10, "bf16": 1e11}
    sections.figures(report, engine, shape, peaks, full=True, big=False)
    assert not engine.has_work
    rows = [line.split(" | ")[0] for line in report.lines if line.startswith("| ")]
    assert rows[2:4] == ["| decode 2 x 512", "| prompt of 64"]
    assert rows[4] == "| 3 requests of 20 in, 4 out"
    assert rows[5].startswith("| prompt of 40 while")


def test_floors_of_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of work can be made, its variants are there, and its floor is that of its shape."""
    monkeypatch.setattr(kernel_speed, "DEVICE", torch.device("cpu"))
    for name, size in {"HIDDEN": 128, "FFN": 128, "VOCAB": 500, "SETS_BYTES": 1 << 12}.items():
        monkeypatch.setattr(kernel_speed, name, size)
    timed = []
    monkeypatch.setattr(kernel_speed, "times", lambda variants: timed.append(list(variants)) or {"ours": 1.0})
    works = [
        kernel_speed.decode(2, 64, torch.int8),
        kernel_speed.prefill(32, 0),
        kernel_speed.linear(3, "int4"),
        kernel_speed.linear(3, "fp8"),
        kernel_speed.linear(3, "w8a8"),
        kernel_speed.linear(3, "fp8-block"),
        kernel_speed.linear(kernel_speed.MANY + 1, "int8"),
        kernel_speed.norm(3),
        kernel_speed.gates(3),
        kernel_speed.norm_in_8_bits(3, "w8a8"),
        kernel_speed.gates_in_8_bits(3, "fp8-block"),
        kernel_speed.heads(3),
        kernel_speed.sampling(3, "top-p"),
        little_kernels.embedding(3, None),
        little_kernels.embedding(3, "int8"),
        little_kernels.advance(3),
    ]
    peaks = {"bytes": 1e12, "bf16": 1e14, "fp8": 2e14}
    speeds = [kernel_speed.measure(work, peaks) for work in works]
    assert all(variants[0] == "ours" for variants in timed)
    assert "SDPA, gathered" in timed[1]
    assert "made wide, cuBLAS" in timed[6]
    decode = 2 * 2 * 64 * 8 * (128 + 4)
    assert speeds[0].floor_ms == pytest.approx(decode / 1e12 * 1e3)
    assert all(0 < speed.floor_ms < 1 for speed in speeds)


@pytest.mark.parametrize(("error", "offered"), [(None, 2), (RuntimeError("Invalid scaling"), 0), (0.1, 0)])
def test_blocks_by_torch_are_measured_where_it_has_them(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError | float | None, offered: int
) -> None:
    """As its checks of shapes and strides want them; refused, or wrong, they are no figure."""
    rows = Rows8((8 * torch.randn(3, 256)).to(FP8), torch.rand(3, 2) + 0.5)
    packed = [Blocks8((8 * torch.randn(256, 256)).to(FP8), torch.rand(2, 2) + 0.5, None) for _ in "ab"]

    def scaled_mm(
        x: Tensor, weight: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: object
    ) -> Tensor:
        if isinstance(error, RuntimeError):
            raise error
        assert weight.t().is_contiguous()
        assert (scale_a.shape, scale_a.stride()) == ((3, 2), (1, 3))
        assert scale_b.t().is_contiguous()
        wide_x = x.float() * scale_a.repeat_interleave(128, 1)
        wide_w = weight.t().float() * scale_b.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (wide_x @ wide_w.T * (1 + (error or 0))).to(torch.bfloat16)

    def ours(x: Rows8, weight: Tensor, scales: Tensor, _bias: None, _dtype: object) -> Tensor:
        wide_x = x.numbers.float() * x.scales.repeat_interleave(128, 1)
        return wide_x @ (weight.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).T

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch_blocks, "fp8_product", ours)
    assert len(torch_blocks.products(rows, packed)) == offered


def test_a_section_out_of_time_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(0.0)
    monkeypatch.setattr(kernel_speed, "all_work", lambda: iter([None, None]))
    monkeypatch.setattr(sdpa_rule, "pair", None)  # not called
    sections.kernels(report, {})
    left = 2 + len(list(little_kernels.all_work()))
    assert f"out of time: {left} more" in report.lines[-1]


def test_two_ranks_are_run_as_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sections.TWO_RANKS.is_file()
    program = tmp_path / "ranks.py"
    program.write_text("assert __name__ != '__main__', 'ranks differ'\n")
    monkeypatch.setattr(sections, "TWO_RANKS", program)
    report = Report(100.0)
    with pytest.raises(AssertionError, match="ranks differ"):
        sections.ranks(report)
    program.write_text("")
    sections.ranks(report)
    assert report.lines[-1].startswith("Two ranks on this GPU")


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


@pytest.mark.parametrize(
    ("times", "says"),
    [
        ({512: [(1, 2)], 1024: [(2, 1), (2, 1.5)], 2048: [(4, 1), (4, 3)]}, "LLMBOX_SDPA_FROM=1024"),
        ({512: [(1, 0.5)], 1024: [(2, 1), (2, 3)], 2048: [(4, 1)]}, "LLMBOX_SDPA_FROM=2048"),
        ({512: [(1, 0.5)], 1024: [(2, 1.99)]}, "leave LLMBOX_SDPA_FROM unset"),
        ({}, "leave LLMBOX_SDPA_FROM unset"),
    ],
)
def test_the_rule_for_long_prompts(times: sdpa_rule.Pairs, says: str) -> None:
    assert says in sdpa_rule.rule(times)


def test_what_was_measured_of_long_prompts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def pair(tokens: int, past: int) -> tuple[float, float]:
        if tokens == 4096:
            raise torch.cuda.OutOfMemoryError
        return tokens / 100, (tokens + past) / 200

    monkeypatch.setattr(sdpa_rule, "pair", pair)
    report = Report(100.0)
    sdpa_rule.report_rule(report)
    (line,) = (line for line in report.lines if line.startswith("- attention of 2048"))
    assert line.endswith("ms: 20.480 / 10.240 after 0, 20.480 / 51.200 after 8192")
    assert "unset" in report.lines[-1]


class Batching:
    """A model of transformers whose continuous batching gives `tokens` a request."""

    def __init__(self, tokens: int, error: Exception | None = None) -> None:
        self._tokens, self._error = tokens, error

    def generate_batch(self, inputs: list[list[int]], generation_config: object) -> dict[str, object]:
        assert generation_config
        if self._error is not None:
            raise self._error
        return {str(n): SimpleNamespace(generated_tokens=[5] * self._tokens) for n in range(len(inputs))}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Batching(4), "tok/s"),
        (Batching(3), "gave 9 of 12 tokens"),
        (Batching(4, ValueError("no paged attention")), "not available: ValueError: no paged attention"),
        (object(), "does not offer it"),
    ],
)
def test_continuous_batching_of_any_version_is_a_line(model: object, says: str) -> None:
    assert says in beside.batched_figure(model, 3, 8, 4)
