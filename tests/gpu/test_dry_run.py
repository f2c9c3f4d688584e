"""Sections of `make gpu-check` from end to end over a stand-in for CUDA in which kernels compute nothing."""

from functools import partial
from unittest import mock

import pytest

from gpu import (
    ahead,
    apart,
    beside,
    check,
    engine_speed,
    idle,
    kernel_speed,
    pictures,
    timing,
    whole_engine,
)
from gpu.report import Report, versions
from gpu.shapes import SHAPES
from support.broken_groups import run_here
from support.fake_cuda import Card, fake_cuda

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 300, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
PEAKS = {"bytes": 4e12, "bf16": 8e14, "fp8": 1.5e15}


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    few = partial(_small_engine, engine_speed.engine)
    for module, constants in {
        whole_engine: {"BATCHES": (2,), "PROMPTS": (20,), "SHORT": 16, "LONG": 40, "OUTPUT": 3, "LATE": 20},
        beside: {"REQUESTS": 2, "PROMPT": 8, "OUTPUT": 3},
        timing: {"COPIED": 1 << 12, "SIDE": 64, "ROUNDS": 1},
        kernel_speed: {"HIDDEN": 128, "FFN": 128, "SETS_BYTES": 1 << 12},
        engine_speed: {"engine": few},
    }.items():
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(whole_engine, "CONTEXTS", (700,))
    monkeypatch.setattr(apart, "run", run_here)
    monkeypatch.setattr(idle, "time", mock.Mock())
    return Report(1000.0)


def _small_engine(engine, shape, **options):
    return engine(shape, max_running=2, token_budget=32, **options)


def cells(report, start):
    return next(line for line in report.lines if line.startswith(f"| {start}"))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{}, {"quant": "fp8", "kv_dtype": "fp8"}])
def test_an_engine_is_measured_to_its_idle_clocks(report, monkeypatch, variant):
    monkeypatch.setattr(whole_engine, "engine_variants", lambda _: [("bf16", variant)])
    monkeypatch.setitem(SHAPES, "8B", SHAPES["8B"] | SMALL)
    with fake_cuda(Card(multiprocessors=2), blank=True) as cuda:
        whole_engine.measure(report, "8B", PEAKS)
        assert report.failures == []
        assert cuda.card.graphs == 4, "two sizes, each with its draws"
        assert cuda.card.allocated < 1 << 20, "the engine is gone"
    for work in ("decode 2 x 16", "decode 1 x 40", "prompt of 20", "2 requests of 8 in, 3 out"):
        assert "tok/s" in cells(report, work)
    assert "ms | to the first token" in cells(report, "prompt of 20 while 1 decode")
    assert "1980 MHz, 412 W | utilisation 42 %" in cells(report, "idle for 4 s")


def test_times_are_those_of_graphs_between_events(report):
    with fake_cuda(Card(multiprocessors=2), blank=True) as cuda:
        assert check.why_not() is None
        assert "`make gpu-check" in versions()
        peaks = check.measured_peaks(report)
        assert peaks["bf16"] == 2 * timing.SIDE**3 / (1e-3 / timing.CALLS)
        assert peaks["read"] == timing.COPIED / 2 / (1e-3 / timing.CALLS)
        assert cuda.card.graphs == 4
        with mock.patch.object(kernel_speed, "DEVICE", cuda.gpu):
            speed = kernel_speed.measure(kernel_speed.norm(3), peaks)
        assert speed.ms == 1 / timing.CALLS
        assert cuda.card.graphs == 6, "ours and eager"


def test_pictures_are_timed(report, monkeypatch):
    monkeypatch.setattr(pictures, "vision", partial(_tiny_vision, pictures.vision))
    monkeypatch.setattr(pictures, "SIDES", (16, 24))
    with fake_cuda(Card(multiprocessors=2), blank=True) as cuda:
        pictures.report_times(report, cuda.gpu, 2)
    assert "36 patches" in cells(report, "24 x 24")


def _tiny_vision(vision, kind, **options):
    return vision(kind, **options | {"tiny": True})


def test_an_engine_is_loaded_to_compile_its_kernels(report, monkeypatch):
    monkeypatch.setitem(SHAPES, "8B", SHAPES["8B"] | SMALL)
    monkeypatch.setattr(ahead, "LAYERS", 1)
    with fake_cuda(Card(total=16 << 30, multiprocessors=2), blank=True):
        assert ahead.load("8B", "bf16", {}).startswith("8B bf16 in ")
    assert report.failures == []
