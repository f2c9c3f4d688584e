"""Every published format gives the weights of its own library to the last bit, and the tokens of these."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.checkpoint.formats.weight_format import form_of
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
    eetq,
    gptq,
    hqq,
    publish,
    scheme_of,
    torchao_bytes,
    torchao_int4,
    torchao_tiles,
)
from support.rank_threads import load_threads
from support.real_engines import ask, hf_model, hf_tokens, load, runner_of, tokens
from support.tiny_models import make_tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 99}


@dataclass(frozen=True)
class Style:
    entry: dict[str, Any]
    store: Callable[[Tensor], Stored]
    others: dict[str, Callable[[Tensor], Stored]] = field(default_factory=dict)
    """Stores of linears with these parts in their names."""


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


def torchao_style(config: str, store: Callable[[Tensor], Stored], **data: Any) -> Style:
    rule = {"_type": config, "_version": 2, "_data": data}
    return Style({"quant_method": "torchao", "quant_type": {"default": rule}}, store)


def intx(bits: int, mapping: str = "SYMMETRIC") -> dict[str, Any]:
    return {
        "weight_dtype": {"_type": "torch.dtype", "_data": f"int{bits}"},
        "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
        "mapping_type": {"_type": "MappingType", "_data": mapping},
        "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
    }


PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
TILES = {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
BNB = {"quant_method": "bitsandbytes"}


def mixed(*groups: tuple[list[str], dict[str, Any], str]) -> dict[str, Any]:
    """`config_groups` of compressed-tensors: targets, scheme and format of each."""
    found = [compressed_entry(scheme, form) for _, scheme, form in groups]
    told = {
        f"group_{number}": {**entry["config_groups"]["group_0"], "targets": targets, "format": form}
        for number, (entry, (targets, _, form)) in enumerate(zip(found, groups, strict=True))
    }
    return {**found[0], "format": "mixed-precision", "config_groups": told}


FOUR, EIGHT = scheme_of(4, 128), scheme_of(8)
FP8_ROWS = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
FLOAT32_SCALES = {"bnb-int8", "torchao-int8", "mixed-4-8"}
"""Styles whose scales the kernels round to float16."""
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
    "torchao-int8": torchao_style(
        "Int8WeightOnlyConfig", torchao_bytes, group_size=None, granularity=PER_ROW
    ),
    "torchao-intx-4": torchao_style(
        "IntxWeightOnlyConfig", partial(torchao_bytes, bits=4, group=32), **intx(4)
    ),
    "torchao-intx-4-asym": torchao_style(
        "IntxWeightOnlyConfig",
        partial(torchao_bytes, bits=4, group=32, symmetric=False),
        **intx(4, "ASYMMETRIC"),
    ),
    "torchao-int4": torchao_style("Int4WeightOnlyConfig", torchao_int4, group_size=32),
    "torchao-int4-tiles": torchao_style(
        "Int4WeightOnlyConfig", torchao_tiles, group_size=32, int4_packing_format=TILES
    ),
    "eetq": Style({"quant_method": "eetq", "weights": "int8", "modules_to_not_convert": ["lm_head"]}, eetq),
    "hqq-4": hqq_style(),
    "hqq-8": hqq_style(bits=8),
    "hqq-3": hqq_style(bits=3),
    "hqq-2-axis-0": hqq_style(bits=2, axis=0),
    "hqq-1": hqq_style(bits=1),
    "mixed-4-8": Style(
        mixed((["Linear"], FOUR, "pack-quantized"), (["re:.*down_proj$"], EIGHT, "int-quantized")),
        partial(compressed, scheme=FOUR, form="pack-quantized"),
        {"down_proj": partial(compressed, scheme=EIGHT, form="int-quantized")},
    ),
    "mixed-fp8-nvfp4": Style(
        mixed(
            (["re:.*self_attn.*"], FP8_ROWS, "float-quantized"),
            (["Linear"], float4(16), "nvfp4-pack-quantized"),
        ),
        partial(compressed, scheme=float4(16), form="nvfp4-pack-quantized"),
        {"self_attn": partial(compressed, scheme=FP8_ROWS, form="float-quantized")},
    ),
    "gptq-dynamic": Style(
        gptq_style().entry | {"dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 32}, "-:.*x": {}}},
        gptq,
        {"down_proj": partial(gptq, bits=8, group=32)},
    ),
    "auto-round-by-layer": Style(
        {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
        | {"packing_format": "auto_round:auto_gptq", "data_type": "int"}
        | {"extra_config": {"model.layers.0.mlp.down_proj": {"bits": 8}, "lm_head": {"bits": 16}}},
        gptq,
        {"layers.0.mlp.down_proj": partial(gptq, bits=8)},
    ),
    "bnb-int8": Style(BNB | {"load_in_8bit": True}, bnb8),
}


def make(folder: Path, style: Style, **overrides: Any) -> tuple[Path, dict[str, Tensor]]:
    model = make_tiny_model(folder, tokenizer=False, **{**SIZES, "torch_dtype": "float16"} | overrides)
    return model, publish(model, style.entry, style.store, others=style.others)


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
@pytest.mark.parametrize("style", STYLES)
def test_the_cpp_kernels_multiply_the_same_numbers(tmp_path: Path, style: str) -> None:
    """A row with a single one in it gives a column of the weights, as its 8-bit value is exact."""
    model, wide = make(tmp_path, STYLES[style], torch_dtype="float32")
    runner = runner_of(load(model))
    mlp = runner._model.layers[0].mlp
    prefix = "model.layers.0.mlp."
    stacked = torch.cat([wide[f"{prefix}{part}_proj.weight"] for part in ("gate", "up")])
    for packed, weight in ((mlp.gate_up, stacked), (mlp.down, wide[f"{prefix}down_proj.weight"])):
        name = prefix + ("down_proj" if packed is mlp.down else "up_proj")
        form = form_of(parse_config(model).stored, name)
        assert (packed.quant is None) == (form.quant is None)
        assert packed.quant is None or packed.quant.name == form.quant
        got = mlp.ops.linear(packed, torch.eye(weight.shape[1])).T
        assert torch.allclose(got, weight, rtol=2e-3 if style in FLOAT32_SCALES else 1e-6, atol=1e-9)


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_scales_of_mxfp4_below_float16_are_kept(tmp_path: Path) -> None:
    style = STYLES["mxfp4"]
    model = make_tiny_model(tmp_path, tokenizer=False, **SIZES, torch_dtype="float32")
    wide = publish(model, style.entry, lambda weight: style.store(weight * 2.0**-24))
    mlp = runner_of(load(model))._model.layers[0].mlp
    weight = wide["model.layers.0.mlp.down_proj.weight"]
    assert 0 < weight.abs().max() < 2**-24
    for rows in (1, 3, 256):  # widened in registers, and in memory
        got = torch.cat([mlp.ops.linear(mlp.down, part) for part in torch.eye(256).split(rows)]).T
        assert torch.equal(got, weight)


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
