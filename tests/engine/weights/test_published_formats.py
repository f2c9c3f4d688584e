"""Every published format gives the weights of its own library to the last bit, and the tokens of these."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.model_config.config import parse_config
from llmbox.kernels.dispatch import native_ready
from support.published_formats import (
    Stored,
    awq,
    bnb4,
    bnb8,
    compressed,
    compressed_entry,
    gptq,
    publish,
    scheme_of,
)
from support.real_engines import ask, hf_model, hf_tokens, load, runner_of, tokens
from support.tiny_models import make_tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 99}


@dataclass(frozen=True)
class Style:
    entry: dict[str, Any]
    store: Callable[[Tensor], Stored]


def gptq_style(bits: int = 4, group: int = 128, *, v2: bool = False, **more: Any) -> Style:
    entry = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": more.get("symmetric", True),
    }
    entry |= {"desc_act": more.get("order", False), "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    return Style(entry, partial(gptq, bits=bits, group=group, version=2 if v2 else 1, **more))


def compressed_style(scheme: dict[str, Any], form: str = "pack-quantized") -> Style:
    return Style(compressed_entry(scheme, form), partial(compressed, scheme=scheme, form=form))


def float4(group: int) -> dict[str, Any]:
    strategy = "group" if group == 32 else "tensor_group"
    return {"weights": {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group}}


ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
BNB = {"quant_method": "bitsandbytes"}
STYLES = {
    "awq-g128": Style(AWQ | {"group_size": 128}, awq),
    "awq-g64": Style(AWQ | {"group_size": 64}, partial(awq, group=64)),
    "awq-g32": Style(AWQ | {"group_size": 32}, partial(awq, group=32)),
    "gptq-4": gptq_style(),
    "gptq-4-asym": gptq_style(symmetric=False),
    "gptq-4-asym-v2": gptq_style(symmetric=False, v2=True),
    "gptq-4-g32-act-order": gptq_style(group=32, order=True),
    "gptq-4-channel": gptq_style(group=0),
    "gptq-2": gptq_style(bits=2, group=64, symmetric=False),
    "gptq-3": gptq_style(bits=3, symmetric=False),
    "gptq-8": gptq_style(bits=8),
    "gptq-8-asym": gptq_style(bits=8, group=32, symmetric=False),
    "auto-round": Style(
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
        | {"packing_format": "auto_round:auto_gptq", "data_type": "int"},
        gptq,
    ),
    "w4a16-g128": compressed_style(scheme_of(4, 128)),
    "w4a16-g32-asym": compressed_style(scheme_of(4, 32, symmetric=False)),
    "w4a16-channel": compressed_style(scheme_of(4)),
    "w3a16-g128": compressed_style(scheme_of(3, 128)),
    "w8a16-g128": compressed_style(scheme_of(8, 128)),
    "w8a8": compressed_style(scheme_of(8) | {"input_activations": ROWS}, "int-quantized"),
    "w8a8-asym": compressed_style(
        scheme_of(8, symmetric=False) | {"input_activations": ROWS}, "int-quantized"
    ),
    "mxfp4": compressed_style(float4(32), "mxfp4-pack-quantized"),
    "nvfp4": compressed_style(float4(16), "nvfp4-pack-quantized"),
    "bnb-nf4": Style(BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bnb4),
    "bnb-nf4-nested": Style(
        BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, partial(bnb4, nested=True)
    ),
    "bnb-fp4": Style(BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, partial(bnb4, kind="fp4")),
    "bnb-int8": Style(BNB | {"load_in_8bit": True}, bnb8),
}


def make(folder: Path, style: Style, **overrides: Any) -> tuple[Path, dict[str, Tensor]]:
    model = make_tiny_model(folder, tokenizer=False, **{**SIZES, "torch_dtype": "float16"} | overrides)
    return model, publish(model, style.entry, style.store)


@pytest.mark.parametrize("name", STYLES)
def test_weights_and_tokens_are_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    model, wide = make(tmp_path / "model", STYLES[name])
    engine = load(model, dtype="float32")
    for number, layer in enumerate(runner_of(engine)._model.layers):
        prefix = f"model.layers.{number}."
        qkv = torch.cat([wide[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])
        gate_up = torch.cat([wide[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(layer.attention.qkv.weight_OI, qkv)
        assert torch.equal(layer.mlp.gate_up.weight_OI, gate_up)
        assert torch.equal(layer.mlp.down.weight_OI, wide[f"{prefix}mlp.down_proj.weight"])
    same = make_tiny_model(tmp_path / "wide", tokenizer=False, **SIZES)
    save_file(wide, same / "model.safetensors")
    prompt = list(range(5, 40))
    assert tokens(engine, [ask("a", prompt, 12)])["a"] == hf_tokens(hf_model(same), prompt, 12)


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("name", STYLES)
def test_the_cpp_kernels_multiply_the_same_numbers(tmp_path: Path, name: str) -> None:
    """A row with a single one in it gives a column of the weights, as its 8-bit value is exact."""
    model, wide = make(tmp_path, STYLES[name], torch_dtype="float32")
    runner = runner_of(load(model))
    mlp = runner._model.layers[0].mlp
    prefix = "model.layers.0.mlp."
    stacked = torch.cat([wide[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")])
    for packed, weight in ((mlp.gate_up, stacked), (mlp.down, wide[f"{prefix}down_proj.weight"])):
        form = parse_config(model)
        assert (packed.quant is None) == (form.quant is None)
        assert packed.quant is None or packed.quant.name == form.quant
        got = mlp.ops.linear(packed, torch.eye(weight.shape[1])).T
        assert torch.allclose(got, weight, rtol=2e-3 if name == "bnb-int8" else 1e-6, atol=1e-9)


@pytest.mark.parametrize("name", STYLES)
def test_configs_name_the_format(name: str) -> None:
    form = read_weight_format(STYLES[name].entry)
    assert form.label
    assert form.quant is None or form.quant.startswith(("w4a16", "w8a16", "mxfp4"))


def test_layers_that_are_kept_wide_are_counted(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, **SIZES)
    wide = publish(model, STYLES["awq-g128"].entry, awq, keeps=("layers.0.mlp",))
    assert parse_config(model).wide_params == 3 * 128 * 256
    engine = load(model)
    assert tokens(engine, [ask("a", [5, 6, 7], 3)])["a"]
    assert wide
