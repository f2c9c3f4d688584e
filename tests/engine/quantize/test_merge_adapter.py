"""Merged models beside PEFT, and the check of an adapter that loading makes too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.adapter import AdapterError
from llmbox.engine.errors import ModelError
from llmbox.engine.quantize.merge_adapter import check_adapter, merge
from support.adapters import make_adapter, plain_tensors, write_adapter
from support.real_engines import ask, hf_model, hf_tokens, load, tokens
from support.tiny_models import make_tiny_model

PROMPT = [5, 9, 77, 31, 200, 4]


def merged(base: Path, folder: Path, out: Path) -> Path:
    merge(base, folder, out, lambda _done, _total: None)
    return out


@pytest.mark.parametrize(
    ("tied", "kind"),
    [
        (False, {"use_rslora": True, "r": 3}),
        (False, {"use_dora": True}),
        (True, {"target_modules": ["q_proj", "lm_head"]}),
    ],
)
def test_a_merged_model_is_that_of_peft(tmp_path: Path, tied: bool, kind: dict[str, Any]) -> None:
    base = make_tiny_model(tmp_path / "base", arch="qwen3", tie_word_embeddings=tied)
    peft = make_adapter(hf_model(base), tmp_path / "adapter", **kind)
    out = merged(base, tmp_path / "adapter", tmp_path / "out")
    expected = hf_tokens(peft, PROMPT, 8)
    assert hf_tokens(hf_model(out), PROMPT, 8) == expected
    assert tokens(load(out, dtype="float32"), [ask("r", PROMPT, 8)])["r"] == expected
    assert (out / "tokenizer.json").exists()


def test_stacked_linears_are_merged_as_they_are_stored(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="phi3", tokenizer=False)
    peft = make_adapter(hf_model(base), tmp_path / "adapter")
    out = merged(base, tmp_path / "adapter", tmp_path / "out")
    assert hf_tokens(hf_model(out), PROMPT, 8) == hf_tokens(peft, PROMPT, 8)


def test_linears_of_a_stored_stack_are_merged_apart(tmp_path: Path) -> None:
    """Adapters that name q, k and v of a checkpoint that stores them as one, as loading takes them."""
    base = make_tiny_model(tmp_path / "base", arch="phi3", tokenizer=False)
    tensors = plain_tensors() | plain_tensors(name="model.layers.1.mlp.up_proj", outputs=96)
    folder = write_adapter(tmp_path / "adapter", tensors)
    check_adapter(base, folder)
    out = load_file(merged(base, folder, tmp_path / "out") / "model.safetensors")
    stored = load_file(base / "model.safetensors")
    for stack, part, rows in (
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj", slice(0, 64)),
        ("model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.up_proj", slice(96, 192)),
    ):
        a, b = (tensors[f"base_model.model.{part}.lora_{side}.weight"] for side in "AB")
        expected = stored[f"{stack}.weight"].clone()
        expected[rows] += 2 * (b @ a)
        torch.testing.assert_close(out[f"{stack}.weight"], expected)


def test_single_experts_of_a_stack_are_refused_by_their_reason(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False)
    folder = write_adapter(tmp_path / "a", plain_tensors(name="model.layers.0.mlp.experts.0.up_proj"))
    with pytest.raises(AdapterError, match="all experts of a layer as one tensor"):
        merged(base, folder, tmp_path / "out")


def test_what_cannot_be_merged_leaves_nothing(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False)
    other = write_adapter(tmp_path / "other", plain_tensors(inputs=32))
    with pytest.raises(AdapterError, match=r"of 64 x 32, and the model's has 64 x 64"):
        merged(base, other, tmp_path / "out")
    unknown = write_adapter(tmp_path / "unknown", plain_tensors(name="model.layers.9.self_attn.q_proj"))
    with pytest.raises(AdapterError, match=r"no linear model.layers.9"):
        merged(base, unknown, tmp_path / "out")
    good = write_adapter(tmp_path / "good", plain_tensors())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(ModelError, match=r"is there already"):
        merged(base, good, tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "good", "other", "taken", "unknown"]


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_next", "qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_the_check_needs_no_weights(tmp_path: Path, arch: str) -> None:
    """Linears of every kind of layer are known without them."""
    base = make_tiny_model(tmp_path / "base", arch=arch, tokenizer=False)
    (base / "model.safetensors").unlink()
    name = "model.layers.0." + ("linear_attn.out_proj" if arch == "qwen3_next" else "self_attn.o_proj")
    with pytest.raises(AdapterError, match=r"o\w*_proj of 7 x 5, and the model's has 64 x \d+"):
        check_adapter(base, write_adapter(tmp_path / "a", plain_tensors(5, 7, name=name)))


def test_what_is_applied_only_after_a_merge(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False)
    tensors = plain_tensors()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    dora = write_adapter(tmp_path / "dora", {**tensors, name: torch.ones(64)}, use_dora=True)
    with pytest.raises(AdapterError, match=r"is a DoRA adapter.*llmbox lora merge"):
        check_adapter(base, dora)
    assert check_adapter(base, write_adapter(tmp_path / "plain", tensors)).rank == 4


def test_numbers_that_are_not_finite_are_found_by_the_check(tmp_path: Path) -> None:
    """Not by a request: of several ranks only those with its layer would notice."""
    base = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False)
    tensors = {name: torch.full_like(each, torch.inf) for name, each in plain_tensors().items()}
    with pytest.raises(ModelError, match=r"lora_\w.weight.* holds NaN or infinity"):
        check_adapter(base, write_adapter(tmp_path / "a", tensors))


def test_integers_of_a_base_are_copied(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="qwen3", tokenizer=False)
    extra = {"model.positions": torch.arange(4), "model.ids.weight": torch.arange(3)}
    save_file({**load_file(base / "model.safetensors"), **extra}, base / "model.safetensors")
    out = merged(base, write_adapter(tmp_path / "a", plain_tensors()), tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in extra.items())
