"""The parts of `make gpu-check` that need no GPU."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpu import (
    adapters,
    apart,
    beside,
    engine_speed,
    fp8_products,
    kernel_pieces,
    kernel_speed,
    linear_shapes,
    little_kernels,
    recurrent,
    sampler_speed,
    sdpa_rule,
    sections,
    whole_engine,
)
from gpu.report import Report
from gpu.shapes import SHAPES
from support.broken_groups import run_here
from support.builtin_model import IN_SCOPE

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert shutil.which("make")
    done = subprocess.run(
        ["make", "gpu-check", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "needs an NVIDIA GPU" in done.stderr
    assert "Traceback" not in done.stderr


ALLOWED = ["torch", "triton", "functorch", "torchgen", "numpy", "gpu", "support", "llmbox"]
ALLOWED += ["filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing_extensions"]
ALLOWED += ["setuptools", "_distutils_hack"]
"""PyTorch, Triton and what those bring along; of this project the tree."""


def with_these_alone(code: str, *also: str) -> "subprocess.CompletedProcess[str]":
    """Run code in a process that finds these packages and no others."""
    forbid = f"""
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder

class Only:
    allowed = set(sys.stdlib_module_names) | set({[*ALLOWED, *also]})

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in self.allowed or top.startswith("_sysconfigdata")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Only()]
"""
    environment = {"PYTHONPATH": f"{ROOT}/packaging/tree:{ROOT}/tests", "LLMBOX_KERNELS": "reference"}
    command = [sys.executable, "-P", "-c", forbid + code]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_torch_and_triton_are_all_it_needs() -> None:
    """An engine is loaded and run, and what is left out for want of packages says so."""
    modules = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "test" not in path.stem)
    modules.remove("quality")
    code = f"""
import {", ".join(f"gpu.{name}" for name in modules)}
from gpu import engine_speed, sections
from gpu.report import Report
from gpu.shapes import SHAPES

shape = SHAPES["0.6B"] | dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=300)
options = dict(device="cpu", threads=1, memory_bytes=1 << 30, max_running=4)
engine = engine_speed.largest(shape, (700,), **options)
print(engine_speed.run(engine, engine_speed.add(engine, 2, 20, 3)).tokens)
report = Report(100.0)
sections.quality(report)
sections.beside_it(report, "continuous")
"""
    done = with_these_alone(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "6"
    assert "Left out: No module named 'tokenizers'" in done.stdout
    assert "Left out: the transformers package is not installed" in done.stdout


def test_quality_needs_tokenizers_and_nothing_more() -> None:
    """A machine with a GPU has few packages; a section that needs another one would be left out there."""
    done = with_these_alone("from gpu import quality; print(len(quality.prompts()))", "tokenizers")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(IN_SCOPE)}\n"


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
    for name, sizes in {"BATCHES": (2,), "PROMPTS": (64, 2000), "SHORT": 60, "LONG": 200, "LATE": 40}.items():
        monkeypatch.setattr(whole_engine, name, sizes)
    for name, size in {"REQUESTS": 3, "PROMPT": 20, "OUTPUT": 4}.items():
        monkeypatch.setattr(beside, name, size)
    monkeypatch.setattr(whole_engine, "idle_clocks", lambda _: None)
    peaks = {"bytes": 1e10, "bf16": 1e11}
    whole_engine.figures(report, engine, shape, peaks, full=True, big=True, with_bar=True)
    assert not engine.has_work
    rows = [line.split(" | ")[0] for line in report.lines if line.startswith("| ")]
    assert rows[2:] == [
        "| decode 2 x 60",
        "| decode 1 x 200",
        "| prompt of 64",
        "| 3 requests of 20 in, 4 out",
        "| prompt of 40 while 3 decode",
    ]
    assert report.lines[-1] == (
        "\nLeft out for want of memory or time: 256 requests of 1024 in, 1024 out, prompt of 2000."
    )
    notes = [line for line in report.lines if ", bar 4.5" in line]
    assert [note.split(" | ")[0] for note in notes] == ["| decode 1 x 200"]


def test_floors_of_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of work can be made, its variants are there, and its floor is that of its shape."""
    monkeypatch.setattr(kernel_speed, "DEVICE", torch.device("cpu"))
    for name, size in {"HIDDEN": 128, "FFN": 128, "VOCAB": 500, "SETS_BYTES": 1 << 12}.items():
        monkeypatch.setattr(kernel_speed, name, size)
    small = dict.fromkeys(linear_shapes.PRODUCTS, (96, 128))
    monkeypatch.setattr(linear_shapes, "PRODUCTS", small)
    timed = []
    monkeypatch.setattr(kernel_speed, "times", lambda variants: timed.append(list(variants)) or {"ours": 1.0})
    works = [
        kernel_speed.decode(2, 64, torch.int8),
        kernel_speed.prefill(32, 0),
        linear_shapes.product("o", 3),
        linear_shapes.product("down", linear_shapes.FEW + 1),
        kernel_speed.linear(3, "int4"),
        kernel_speed.linear(3, "fp8"),
        kernel_speed.linear(3, "w8a8"),
        kernel_speed.linear(3, "fp8-block"),
        kernel_speed.linear(3, "fp8-static"),
        kernel_speed.linear(kernel_speed.MANY + 1, "int8"),
        kernel_speed.norm(3),
        kernel_speed.gates(3),
        kernel_speed.norm_in_8_bits(3, "w8a8"),
        kernel_speed.gates_in_8_bits(3, "fp8-block"),
        kernel_speed.heads(3),
        sampler_speed.sampling(3, "top-p"),
        sampler_speed.penalties(3),
        little_kernels.embedding(3, None),
        little_kernels.embedding(3, "int8"),
        little_kernels.advance(3),
    ]
    peaks = {"bytes": 1e12, "bf16": 1e14, "fp8": 2e14}
    speeds = [kernel_speed.measure(work, peaks) for work in works]
    assert timed[2:4] == [["cuBLAS", "Triton", "GEMV"], ["cuBLAS", "Triton"]]
    assert all(variants[0] == "ours" for variants in timed[:2] + timed[4:])
    assert "SDPA, gathered" in timed[1]
    assert "made wide, cuBLAS" in timed[9]
    decode = 2 * 2 * 64 * 8 * (128 + 4)
    assert speeds[0].floor_ms == pytest.approx(decode / 1e12 * 1e3)
    assert all(0 < speed.floor_ms < 1 for speed in speeds)


@pytest.mark.parametrize("reason", [None, "torch._scaled_mm: RuntimeError: Invalid scaling"])
def test_products_by_torch_are_measured_where_it_has_them(
    monkeypatch: pytest.MonkeyPatch, reason: str | None
) -> None:
    """Beside ours, on the same rows; where it refuses, the row says why."""
    monkeypatch.setattr(kernel_speed, "DEVICE", torch.device("cpu"))
    for name, size in {"HIDDEN": 512, "FFN": 64, "SETS_BYTES": 1 << 12}.items():
        monkeypatch.setattr(kernel_speed, name, size)
    monkeypatch.setattr(fp8_products.choice, "why_not", lambda *_: reason)
    taken = []
    monkeypatch.setattr(fp8_products, "product", lambda packed, *_: taken.append(packed.by_torch))
    for quant, way in (("fp8", "rows"), ("fp8-static", "tensor"), ("fp8-block", "blocks")):
        work = kernel_speed.linear(3, quant)
        for calls in list(work.variants.values())[2:]:
            calls[0]()
        assert taken == ([None] if reason else [None, way])
        assert work.name.endswith("Invalid scaling)" if reason else f"3 rows, {quant}")
        taken.clear()
    assert "product alone, Triton" in work.variants


def test_a_section_out_of_time_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, and nothing of it is made."""
    monkeypatch.setattr(apart, "run", run_here)
    monkeypatch.setattr(kernel_speed, "DEVICE", torch.device("cpu"))
    report = Report(0.0)
    sections.kernels(report, {})
    left = list(kernel_pieces.pieces({}, 0.0))
    assert f"out of time: {len(left)} more, product qkv 1, product o 1," in report.lines[-1]
    assert "decode 256 1536 bfloat16 deterministic=True" in report.lines[-1]
    assert report.lines[-1].endswith("long prompts through SDPA.")
    assert len({piece.name for piece in left}) == len(left)


def test_a_kernel_that_breaks_or_does_not_fit_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def huge() -> kernel_speed.Work:
        raise torch.cuda.OutOfMemoryError

    def broken() -> kernel_speed.Work:
        raise ValueError("no such tile")

    monkeypatch.setattr(apart, "run", run_here)
    monkeypatch.setattr(linear_shapes, "all_work", lambda: iter([huge, broken]))
    for module in (kernel_speed, recurrent, little_kernels, adapters):
        monkeypatch.setattr(module, "all_work", lambda *_: iter([]))
    monkeypatch.setattr(sdpa_rule, "pair", lambda tokens, _past: (tokens, 2 * tokens))
    report = Report(10.0)
    sections.kernels(report, {})
    assert "| huge (does not fit this card) |  |  |  |  |" in report.lines
    assert report.failures == ["broken: ValueError: no such tile"]
    assert "leave LLMBOX_SDPA_FROM unset" in report.lines[-1]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_products_of_few_rows(rows: int) -> None:
    x, weight = torch.randn(rows, 1100), torch.randn(37, 1100)
    torch.testing.assert_close(linear_shapes.gemv(x, weight), x @ weight.T, rtol=1e-4, atol=1e-3)


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
