"""Merged models beside PEFT, and the check of an adapter that loading makes too."""

from dataclasses import replace
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
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


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


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"])
def test_all_experts_of_a_layer_are_merged_as_by_peft(tmp_path: Path, arch: str) -> None:
    """A tensor for each expert, and of all: transposed, with gates and ups that alternate."""
    base = make_tiny_model(tmp_path / "base", arch=arch, tokenizer=False)
    kind: dict[str, Any] = {"r": 3, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    peft = make_adapter(hf_model(base), tmp_path / "a", rank_pattern={EXPERTS[1]: 2}, **kind)
    out = merged(base, tmp_path / "a", tmp_path / "out")
    expected, found = peft.merge_and_unload().state_dict(), hf_model(out).state_dict()
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name], weight, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    changed = [
        name for name, weight in hf_model(base).state_dict().items() if not torch.equal(weight, found[name])
    ]
    assert any(name.endswith("gate_up_proj") for name in changed)
    assert any(name.endswith("down_proj") for name in changed)
    stored = load_file(base / "model.safetensors")
    shapes = {name: weight.shape for name, weight in load_file(out / "model.safetensors").items()}
    assert shapes == {name: weight.shape for name, weight in stored.items()}


@pytest.mark.parametrize(
    ("arch", "part", "stack", "outputs", "columns"),
    [
        ("llama4_text", "feed_forward.experts.2.up_proj", "gate_up_proj", 32, slice(32, 64)),
        ("gpt_oss", "mlp.experts.2.gate_up_proj", "gate_up_proj", 192, slice(0, 192)),
    ],
)
def test_single_experts_of_a_stored_stack_are_merged(
    tmp_path: Path, arch: str, part: str, stack: str, outputs: int, columns: slice
) -> None:
    base = make_tiny_model(tmp_path / "base", arch=arch, tokenizer=False)
    part = f"model.layers.1.{part}"
    tensors = plain_tensors(name=part, outputs=outputs)
    folder = write_adapter(tmp_path / "a", tensors)
    out = merged(base, folder, tmp_path / "out")
    name = f"{part.partition('.2.')[0]}.{stack}"
    a, b = (tensors[f"base_model.model.{part}.lora_{side}.weight"] for side in "AB")
    expected = load_file(base / "model.safetensors")
    expected[name][2][:, columns] += 2 * (b @ a).T
    for each, weight in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[each])
    beside = replace(ask("r", PROMPT, 8), adapter=str(folder))
    assert tokens(load(out, dtype="float32"), [ask("r", PROMPT, 8)]) == tokens(
        load(base, dtype="float32"), [beside]
    )


def test_experts_that_the_base_does_not_have(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base", arch="gpt_oss", tokenizer=False)
    name = "model.layers.0.mlp.experts"
    unknown = write_adapter(tmp_path / "a", plain_tensors(name=f"{name}.4.down_proj", inputs=96))
    with pytest.raises(AdapterError, match=r"no linear model.layers.0.mlp.experts.4.down_proj"):
        merged(base, unknown, tmp_path / "out")
    tensors = plain_tensors(96, 64, 4 * 5, name)
    more = write_adapter(tmp_path / "b", tensors, target_parameters=EXPERTS)
    with pytest.raises(AdapterError, match=r"20 ranks of all experts, and 4 experts of rank 4 have 16"):
        merged(base, more, tmp_path / "out")


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
    with pytest.raises(ModelError, match=r"exists already"):
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
