"""The whole engine on Triton's kernels gives the tokens that it gives on the reference."""

from pathlib import Path

import pytest
import torch

from llmbox.kernels.dispatch import QuantUnavailable, UnknownBackend, select_ops
from llmbox.kernels.quant import QUANTS
from llmbox.kernels.triton import probe, tiles
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

PROMPTS = {"a": range(3, 22), "b": [5, 9, 11]}


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("qwen3", {"dtype": "float32"}),
        ("llama", {"dtype": "float32", "deterministic": True}),
    ],
)
def test_tokens_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, object]
) -> None:
    model = make_tiny_model(tmp_path, arch=arch, tokenizer=False, num_hidden_layers=1, vocab_size=99)
    requests = [ask(name, prompt, 3) for name, prompt in PROMPTS.items()]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    expected = tokens(load(model, dtype="float32"), requests)
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")
    engine = load(model, **options)
    assert engine.info.backend == "triton"
    assert tokens(engine, requests) == expected


@pytest.fixture
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")


@pytest.mark.usefixtures("_asked_for")
def test_a_machine_where_no_kernel_runs_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler\nmore")

    monkeypatch.setattr(probe, "silu_mul", broken)
    with pytest.raises(UnknownBackend, match=r"failed: RuntimeError: Failed to find C compiler$"):
        select_ops(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("_asked_for")
def test_on_a_cpu_only_the_interpreter_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops(torch.device("cpu"), torch.float32).name == "triton"
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UnknownBackend, match="TRITON_INTERPRET=1 only"):
        select_ops(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("_asked_for")
def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "has_fp8", lambda _: False)
    with pytest.raises(QuantUnavailable, match="compute capability"):
        select_ops(torch.device("cpu"), torch.float32, quant=QUANTS["fp8"])
