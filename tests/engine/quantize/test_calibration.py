"""Calibration: moments are those of the real forward pass, and better integers come of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.product_error import activations
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.quantize.calibration import (
    BLOCK,
    MOST_BEGINNINGS,
    Calibration,
    generate_calibration_text,
    prompt_seeds,
)
from llmbox.engine.quantize.quantize import quantize
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.quant_formats import QUANTS
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

NATIVE = pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
SEQUENCES = [list(range(3, 3 + length)) for length in (2, 5, BLOCK, BLOCK + 1, 40, 7, 9, 1, 11, 30)]
"""More than go through a layer together."""


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen3", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 8}),
        ("llama", {"hidden_size": 72, "intermediate_size": 77}),
    ],
)
def test_moments_are_those_that_transformers_sees(tmp_path: Path, arch: str, changes: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path / "model", arch=arch, **changes)
    config = parse_config(model)
    names = [
        (f"model.layers.{layer}.{name}", f"model.layers.{layer}.{one}.weight")
        for layer in range(config.num_layers)
        for name, one in (("self_attn.q_proj", "self_attn.q_proj"), ("self_attn.o_proj",) * 2,
                          ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",) * 2)
    ]  # fmt: skip
    wanted = activations(model, SEQUENCES, [weight for _, weight in names])
    calibration = Calibration(model, config, torch.float32, SEQUENCES)
    rows = sum(map(len, SEQUENCES))
    for name, weight in names:
        stack = next(each for each in calibration.names if each.split("+")[0] == name)
        found = calibration.moment(stack)
        torch.testing.assert_close(found, (wanted[weight] / rows).float(), atol=1e-4, rtol=1e-3)


@NATIVE
def test_the_same_model_writes_the_same_text(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    first = generate_calibration_text(model, 1, lambda _done, _total: None, sequences=5)
    assert first == generate_calibration_text(model, 1, lambda _done, _total: None, sequences=5)
    assert len(first) == 5
    assert {len(ids) for ids in first} == {len(first[0])}
    assert len(first[0]) > 50


def test_texts_begin_with_special_tokens_that_the_model_knows(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", vocab_size=320)
    tokenizer = model / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["added_tokens"] = [
        {"id": 7, "special": True}, {"id": 8, "special": False}, {"id": 9999, "special": True},
    ]  # fmt: skip
    tokenizer.write_text(json.dumps(content))
    assert prompt_seeds(model) == [7]
    tokenizer.unlink()
    found = prompt_seeds(model)
    assert len(set(found)) == MOST_BEGINNINGS
    assert all(0 <= token < 320 for token in found)


@NATIVE
@pytest.mark.parametrize("to", ["int4", "int8"])
def test_a_calibrated_checkpoint_loads_and_says_what_it_was_made_of(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmbox.engine.quantize.calibration.LENGTH", 20)
    source = make_tiny_model(tmp_path / "model", arch="llama", hidden_size=72, intermediate_size=77)
    told: list[tuple[int, int]] = []
    nothing = lambda _done, _total: None  # noqa: E731
    report = quantize(source, tmp_path / "out", QUANTS[to], 1, nothing, lambda *done: told.append(done))
    plain = quantize(source, tmp_path / "plain", QUANTS[to], 1, nothing)
    assert report.calibrated == 64 * 20
    assert plain.calibrated == 0
    assert told[-1] == (64 * 19, 64 * 19)
    assert report.bytes_after == plain.bytes_after
    answers = [
        tokens(load(tmp_path / name), [ask("a", list(range(5, 25)), 4)])["a"] for name in ("out", "plain")
    ]
    assert [len(each) for each in answers] == [4, 4]
    assert (tmp_path / "out/model.safetensors").read_bytes() != (
        tmp_path / "plain/model.safetensors"
    ).read_bytes()
