"""Tokens of engines that must agree, over the stand-in for CUDA and kernels in Triton's interpreter."""

from typing import Any
from unittest import mock

import pytest

from gpu import apart, smoke
from gpu.report import Report
from gpu.smoke import Answer
from llmbox.engine.runner.gpu_runner import GPUModelRunner
from support.broken_groups import run_here
from support.fake_cuda import Card, fake_cuda

SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "head_dim": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    monkeypatch.setattr(smoke, "SHAPE", smoke.SHAPE | SMALL)
    small = {"SIZES": (1, 3), "LENGTHS": (14, 15), "STEPS": 4, "CONTEXT": 32, "RUNNING": 4}
    for name, value in {**small, "BUDGET": 24, "CHUNK": 5, "POOL": 48}.items():
        monkeypatch.setattr(smoke, name, value)
    return []


def failures(lines: list[str]) -> list[str]:
    return [line for line in lines if "FAILED" in line]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_engines_agree(lines: list[str]) -> None:
    with fake_cuda(Card(multiprocessors=2)) as cuda:
        smoke.fixed(smoke.random_model, "float32", lines.append)
        assert cuda.card.graphs > 0
        smoke.plain(smoke.random_model, "float32", lines.append)
    assert failures(lines) == []
    told = [line.split(": tokens of ") for line in lines]
    assert [what.split(", ")[1] for what, _ in told] == [
        "alone", "without graphs", "without overlap", "chunked", "preempted",
        "without graphs", "without overlap", "on the CPU",
    ]  # fmt: skip
    assert {how for _, how in told} == {"4 of 4 requests are equal"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_graph_that_computes_something_else_is_noticed(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with a stale pointer does: fast, without an error, and wrong."""
    run = GPUModelRunner._run_decoding

    def stale(self: GPUModelRunner, *args: Any) -> None:
        run(self, *args)
        if self.graphs is not None:
            self._hidden_RE.neg_()

    monkeypatch.setattr(GPUModelRunner, "_run_decoding", stale)
    with fake_cuda(Card(multiprocessors=2)):
        smoke.plain(smoke.random_model, "float32", lines.append)
    found = failures(lines)
    assert any("without graphs: request" in line for line in found)
    assert any("on the CPU: request" in line for line in found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*encountered in")
def test_a_launch_that_waits_is_a_failure(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = GPUModelRunner._prepare_blocks

    def waiting(self: GPUModelRunner, plan: Any) -> None:
        self._hidden_RE.sum().item()
        prepare(self, plan)

    with fake_cuda(Card(multiprocessors=2)):
        engine = smoke.ready(smoke.random_model(dtype="float32"))
        monkeypatch.setattr(GPUModelRunner, "_prepare_blocks", waiting)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            smoke.served(engine, smoke.requests(None))


GOOD = {"a": Answer([5, 6, 7], [{5: -0.1, 8: -3.0}, {6: -0.70, 9: -0.75}, {7: -0.2}])}


@pytest.mark.parametrize(
    ("tokens", "tie", "says"),
    [
        ([5, 6, 7], 0.0, "tokens of 1 of 1 requests are equal"),
        ([5, 9, 3], 0.1, "tokens of 0 of 1 requests are equal, 1 more up to a near tie"),
        ([5, 9, 7], 0.01, "FAILED**: x, y: request a, token 1: [9], not [6]"),
        ([5, 9, 7], 0.0, "FAILED**: x, y: request a, token 1: [9], not [6]"),
        ([5, 4, 7], 0.1, "FAILED**: x, y: request a, token 1: [4], not [6]"),
        ([8, 6, 7], 0.1, "FAILED**: x, y: request a, token 0: [8], not [5]"),
        ([5, 6], 0.1, "FAILED**: x, y: request a, token 2: [], not [7]"),
        ([5, 6, 7, 8], 0.1, "FAILED**: x, y: request a, token 3: [8], not []"),
    ],
)
def test_a_token_that_differs_is_a_failure_but_for_a_near_tie(
    lines: list[str], tokens: list[int], tie: float, says: str
) -> None:
    smoke.compare(lines.append, "x", GOOD, "y", {"a": Answer(tokens, [])}, tie=tie)
    assert any(says in line for line in lines)
    assert bool(failures(lines)) == ("FAILED" in says)


def test_the_section_names_what_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(apart, "run", run_here)
    monkeypatch.setattr(smoke, "random_model", broken)
    monkeypatch.setattr(smoke, "builtin", lambda _end, say: say("- built-in model: left out"))
    report = Report(100.0)
    smoke.report_smoke(report)
    assert [failure.split(":")[0] for failure in report.failures] == [
        "deterministic bfloat16", "deterministic float32", "plain bfloat16", "plain float32",
    ]  # fmt: skip
    assert report.lines[-1] == "- built-in model: left out"


@pytest.mark.slow
def test_the_builtin_model_is_compared_with_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here on the CPU: one engine is as good as another, and a model without its weights is not."""
    from gpu import quality

    monkeypatch.setattr(quality, "IN_SCOPE", quality.IN_SCOPE[:4])
    monkeypatch.setattr(quality, "PARTS", 3)
    report = Report(100.0)
    load = lambda **options: quality.load_builtin(device="cpu", threads=1, dtype="bfloat16", **options)  # noqa: E731
    quality.compare_with_cpu(report, load)
    assert not report.failures
    assert "in float32 on the CPU" in report.lines[-1]
    with mock.patch.object(quality, "measure", return_value=quality.Found("broken", 99.0, ["?"] * 4)):
        quality.compare_with_cpu(report, load)
    assert len(report.failures) == 2
