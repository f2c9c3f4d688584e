"""Tables of what torch.profiler recorded, and the constants that are tried."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu import (
    apart,
    engine_speed,
    kernel_speed,
    linear_shapes,
    profiling,
    tuning,
    whole_engine,
)
from gpu.report import Report
from gpu.shapes import SHAPES
from gpu.tuning import decoding_variants as decoding
from gpu.tuning import product_variants as products
from gpu.tuning import prompt_variants as prompt
from llmbox.kernels.triton.attention import attention_metadata as splits
from llmbox.kernels.triton.linear.tile_config import Tile
from support.broken_groups import run_here
from support.triton_interpreter import turn_on

turn_on()

GEMM = "nvjet_tst_128x128_64x6_2x1_v_bz_TNT"


def event(name: str, start: float, took: float, category: str = "kernel") -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": took, "pid": 0, "tid": 7}


def recorded(path: Path) -> Path:
    """Two steps as Kineto writes them: on two streams, with events that are no kernels."""
    events = [
        event("host: launch", 0, 150, "user_annotation"),
        event("host: launch", 700, 170, "user_annotation"),
        event("host: schedule", 900, 20, "user_annotation"),
        event("aten::mm", 5, 9, "cpu_op"),
        {"ph": "M", "name": "process_name"},
        event("attention_kernel", 100, 200),
        event("attention_kernel", 1100, 200),
        event("reduce_kernel", 300, 10),
        event(GEMM, 320, 100),
        event(GEMM, 1300, 100),
        event("void at::native::reduce_kernel<512, 1>", 350, 20),
        event("Memcpy DtoH (Device -> Pinned)", 1500, 2, "gpu_memcpy"),
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_recorded_trace_becomes_tables(tmp_path: Path) -> None:
    trace = profiling.Trace.read(recorded(tmp_path / "trace.json"), steps=2)
    assert trace.kernels[0] == profiling.Kernel("attention_kernel", 1.0, 200.0)
    assert trace.busy == (200 + 10 + 100 + 300 + 2) / 2, "what runs beside another counts once"
    assert trace.busy + trace.idle == (1502 - 100) / 2
    assert trace.host == {"launch": 160.0, "schedule": 10.0}
    assert trace.kinds() == {"attention": 200, "linears": 100, profiling.SPLITS: 5, profiling.REST: 11}
    report = Report(10.0)
    profiling.tell(report, "Decode 256 x 1024", trace, {"attention": 8e8}, predicted=True)
    assert "A step of 0.70 ms: GPU busy 0.31 ms, idle between kernels 0.40 ms (56%)." in report.lines[0]
    assert report.lines[1] == "Host, of one step: schedule 10 us, launch 160 us.\n"
    assert "| attention_kernel | 1.0 | 200.0 | 65.4% |" in report.lines
    assert "| attention | 0.200 | 4.00 | 14.7 to 15.9 ms |" in report.lines
    assert "| linears | 0.100 |  | 5.9 to 6.6 ms |" in report.lines


def test_many_kernels_are_cut_and_none_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "SHOWN", 1)
    trace = profiling.Trace.read(recorded(tmp_path / "trace.json"), steps=2)
    report = Report(10.0)
    profiling.tell(report, "Prompt", trace, {}, predicted=False)
    assert "| 4 others | 2.5 | 116.0 | 37.9% |" in report.lines
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    empty = profiling.Trace.read(tmp_path / "trace.json", steps=2)
    profiling.tell(report, "Prompt", empty, {}, predicted=False)
    assert report.failures == ["Prompt: the profiler saw no kernels"]


def test_an_engine_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU: its operations are recorded in place of kernels, the host's parts as on a GPU."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 300}
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    monkeypatch.setitem(SHAPES, "8B", SHAPES["0.6B"] | small)
    on_cpu = partial(
        engine_speed.engine, device="cpu", threads=1, memory_bytes=1 << 30, max_running=4, token_budget=64
    )
    monkeypatch.setattr(engine_speed, "engine", on_cpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(whole_engine, "CONTEXTS", (700,))
    monkeypatch.setattr(apart, "run", run_here)
    for name, value in {
        "LOADS": (1, 3, 9),
        "CONTEXT": 20,
        "PROMPT": 40,
        "STEPS": 3,
        "GPU": {"cpu_op"},
    }.items():
        monkeypatch.setattr(profiling, name, value)
    report = Report(100.0)
    profiling.report_profile(report)
    assert report.failures == []
    titles = [line.split("\n")[1] for line in report.lines if line.startswith("\n### ")]
    assert titles == ["### Decode 1 x 20", "### Decode 3 x 20", "### Prompt of 40"]
    hosts: list[Any] = [line for line in report.lines if line.startswith("Host, of one step: ")]
    assert all(f"{part} " in host for host in hosts for part in ("schedule", "launch", "collect", "update"))
    assert report.lines[-1] == "\nLeft out for want of memory or time: decode 9."


@pytest.fixture
def _small_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "run", run_here)
    monkeypatch.setattr(kernel_speed, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernel_speed, "SETS_BYTES", 1 << 12)
    monkeypatch.setattr(tuning, "FEW_ROWS", (3,))
    monkeypatch.setattr(tuning, "BATCHES", ((2, 40),))
    monkeypatch.setattr(tuning, "PROMPT", 20)
    monkeypatch.setitem(linear_shapes.PRODUCTS, "o", (96, 128))
    for name in ("decoding_variants", "prompt_variants", "product_variants"):
        few = getattr(tuning, name)
        monkeypatch.setattr(tuning, name, lambda *rows, few=few: few(*rows)[:2])


@pytest.mark.usefixtures("_small_kernels")
def test_variants_are_tried_and_the_best_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def times(turns: dict[str, Any]) -> dict[str, float]:
        seen.append(turns)
        return {name: 4.0 - place for place, name in enumerate(turns)}

    monkeypatch.setattr(tuning, "times", times)
    monkeypatch.setattr(kernel_speed, "BF16", torch.float16)
    monkeypatch.setattr(tuning, "BF16", torch.float16)
    report = Report(1000.0)
    tuning.report_best(report)
    assert report.failures == []
    loads = tuning.loads()
    total = sum(len(load.variants) for load in loads)
    assert f"{total} of {total} variants compile and run; 0 were out of time." in report.lines
    assert [next(iter(turns)) for turns in seen] == ["as it is"] * len(loads)
    first = loads[0]
    best = str(first.variants[1])
    assert report.lines[report.lines.index(f"\n### {first.name}: 4.0000 ms as it is\n") + 3] == (
        f"| {best} | 2.0000 | 50.0% |"
    )


class NotedTile:
    """Numbers of a tile, and which of them a launch has read."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> int:
        self.read.add(name)
        return int(getattr(Tile(16, 32, 4, 2), name))


@pytest.mark.usefixtures("_small_kernels")
def test_a_variant_replaces_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kernel that is tuned, and only while it is launched."""
    monkeypatch.setattr(kernel_speed, "BF16", torch.float16)
    monkeypatch.setattr(tuning, "BF16", torch.float16)
    before = splits.WAVES
    for load in tuning.loads():
        if "int8" not in load.name:  # the interpreter is slow
            tile: Any = NotedTile()
            tuning.launched(tuning.Variant(tile, 3), load.place, load.calls()[0])
            assert {"rows", "columns", "warps", "stages"} <= tile.read, load.name
    assert before == splits.WAVES


def test_each_load_has_24_variants() -> None:
    assert [len(each) for each in (decoding(), prompt(), products(16))] == [24, 24, 24]
    assert {each.tile.rows for each in products(64)} == {64}


@pytest.mark.usefixtures("_small_kernels")
def test_a_variant_that_does_not_compile_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(variant: tuning.Variant, *_: object) -> None:
        if variant.tile.stages == 5 or variant.waves == 8:
            raise ValueError("out of resource: shared memory")

    timed: list[str] = []
    monkeypatch.setattr(tuning, "launched", launched)
    monkeypatch.setattr(tuning, "times", lambda turns: timed.extend(turns) or dict.fromkeys(turns, 1.0))
    report = Report(1000.0)
    tuning.report_best(report)
    assert report.failures == []
    assert not any("8 programs" in name for name in timed)
    assert any("16 programs" in name for name in timed)
