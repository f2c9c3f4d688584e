"""Every published format gives the weights of its own library to the last bit, and the tokens of these."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.errors import ParallelError
from llmbox.engine.executor import build as loader
from llmbox.engine.model_config.config import parse_config
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import Kind, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.weight_packing import QuantizedWeight
from support.fp8_checkpoint import PLANNED_WITHOUT_KERNELS
from support.published_formats import (
    Stored,
    awq,
    bnb4,
    bnb8,
    compressed,
    compressed_entry,
    gptq,
    hqq,
    publish,
    scheme_of,
    torchao_int8,
)
from support.rank_threads import load_threads
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


def hqq_style(bits: int = 4, group: int = 64, axis: int = 1) -> Style:
    rule = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "view_as_float": False}
    entry = {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": rule},
        "skip_modules": ["lm_head"],
    }
    return Style(entry, partial(hqq, bits=bits, group=group, axis=axis))


AO = {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": None, "version": 2}}
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
    "torchao-int8": Style({"quant_method": "torchao", "quant_type": {"default": AO}}, torchao_int8),
    "hqq-4": hqq_style(),
    "hqq-8": hqq_style(bits=8),
    "hqq-3": hqq_style(bits=3),
    "hqq-2-axis-0": hqq_style(bits=2, axis=0),
    "hqq-1": hqq_style(bits=1),
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
    publish(model, STYLES["awq-g128"].entry, awq, keeps=("layers.0.mlp",))
    assert parse_config(model).wide_params == 3 * 128 * 256
    first, second = runner_of(load(model))._model.layers
    wide = load_file(model / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    if native_ready():
        assert first.mlp.down.quant is None
        assert second.mlp.down.quant.name == "w4a16-g128-zp"
        got = first.mlp.ops.linear(first.mlp.down, torch.eye(256)).T
        assert torch.equal(got, wide.float())


@pytest.mark.parametrize("store", [awq, partial(gptq, group=32, order=True)], ids=["zeros", "act-order"])
def test_stacked_rows_and_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Callable[[Tensor], Stored]
) -> None:
    """Phi-3 stores q, k and v as one, and rotary heads that turn in part reorder rows."""
    sizes = SIZES | {"arch": "phi3", "partial_rotary_factor": 0.5}
    model = make_tiny_model(tmp_path / "model", tokenizer=False, **sizes)
    entry = STYLES["awq-g128" if store is awq else "gptq-4-g32-act-order"].entry
    wide = publish(model, entry, store)
    same = make_tiny_model(tmp_path / "wide", tokenizer=False, **sizes)
    save_file(wide, same / "model.safetensors")
    prompt = list(range(5, 40))
    expected = hf_tokens(hf_model(same), prompt, 12)
    native = runner_of(load(model))._model.layers[0]
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    engine = load(model, dtype="float32")
    assert tokens(engine, [ask("a", prompt, 12)])["a"] == expected
    if native_ready():
        qkv = runner_of(engine)._model.layers[0].attention.qkv.weight_OI
        packed = native.attention.qkv
        assert packed.quant is not None
        rows = torch.eye(128, dtype=packed.dtype)
        assert torch.allclose(native.mlp.ops.linear(packed, rows).T.float(), qkv, rtol=1e-2, atol=1e-6)


@dataclass(frozen=True)
class Widens:
    """`StoredWeights` in plain torch, for the format of a checkpoint."""

    quant: Quant

    def format(self, kind: Kind) -> Quant | None:
        return self.quant if kind == "linear" else None

    def pack_quantized(
        self, rounded: QuantizedWeight, dtype: torch.dtype, bias_O: Tensor | None = None
    ) -> Any:
        return REFERENCE.pack_linear(rounded.floats().to(dtype), bias_O)


@pytest.mark.parametrize("cut", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("name", ["awq-g64", "gptq-4-asym", "w4a16-channel", "mxfp4", "bnb-nf4", "nvfp4"])
def test_ranks_answer_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cut: dict[str, int]
) -> None:
    """Each rank takes its rows and groups of what is decoded."""

    def backend(*told: Any) -> Ops:
        quants = [each for each in told if isinstance(each, Quant)]
        return replace(REFERENCE, stored=Widens(quants[0]) if quants else None)

    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", backend)
    model, _ = make(tmp_path, STYLES[name], head_dim=64, intermediate_size=256, torch_dtype="float32")
    requests = [ask("a", range(5, 25), 6), ask("b", [7, 8], 6)]
    wanted = tokens(load(model), requests)
    assert tokens(load_threads(model, **cut), requests) == wanted


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_inputs_in_another_order_are_not_cut(tmp_path: Path) -> None:
    model, _ = make(tmp_path, STYLES["gptq-4-g32-act-order"], head_dim=64)
    with pytest.raises(ParallelError, match=r"act-order.*--pp instead of --tp"):
        load_threads(model, tp=2)


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("name", ["awq-g128", "gptq-4-g32-act-order", "mxfp4"])
def test_packed_weights_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Linears that are kept wide stay so, and those with an order of inputs keep it."""
    monkeypatch.setenv("LLMBOX_REPACKED", str(tmp_path / "repacked"))
    monkeypatch.setenv("LLMBOX_REPACKED_GB", "1")
    model = make_tiny_model(tmp_path / "model", tokenizer=False, **SIZES)
    publish(model, STYLES[name].entry, STYLES[name].store, keeps=("layers.0.mlp",))
    request = [ask("a", range(5, 40), 8)]
    wanted = tokens(load(model), request)
    for thread in threading.enumerate():
        if thread.name == "keep packed weights":
            thread.join()
    monkeypatch.setattr("llmbox.engine.weights.checkpoint.Checkpoint.packed", None)  # not called
    assert tokens(load(model), request) == wanted
