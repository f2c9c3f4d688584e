"""Every published format gives the weights of its own library to the last bit, and the tokens of these."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.checkpoint.formats.weight_format import form_of
from llmbox.engine.errors import ParallelError
from llmbox.engine.executor import rank_engine as loader
from llmbox.engine.model_config.config import parse_config
from llmbox.engine.weights.decoders import decode
from llmbox.kernels.dispatch import native_ready
from llmbox.kernels.ops import Ops
from llmbox.kernels.quant_formats import ROUNDED_HEAD, Kind, Quant
from llmbox.kernels.reference import REFERENCE
from llmbox.kernels.weight_packing import QuantizedWeight
from support.format_styles import FLOAT32_SCALES, STYLES, Style
from support.fp8_checkpoint import PLANNED_WITHOUT_KERNELS
from support.published_formats import Stored, awq, gptq, publish
from support.rank_threads import load_threads
from support.real_engines import ask, hf_model, hf_tokens, load, runner_of, tokens
from support.tiny_models import make_tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 99}


def make(folder: Path, style: Style, **overrides: Any) -> tuple[Path, dict[str, Tensor]]:
    model = make_tiny_model(folder, tokenizer=False, **{**SIZES, "torch_dtype": "float16"} | overrides)
    return model, publish(model, style.entry, style.store, others=style.others)


@pytest.mark.parametrize("name", STYLES)
def test_weights_and_tokens_are_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("LLMBOX_KERNELS", "reference")
    model, wide = make(tmp_path / "model", STYLES[name])
    local_facts(directory(model))
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


INTS = [
    (name, group, mapping) for name in ("int3", "int4", "int8") for group in (32, 128) for mapping in (1, 2)
]


@pytest.mark.parametrize(("name", "group", "mapping"), [("", 0, 1), *INTS])
def test_torchao_writes_what_is_read(name: str, group: int, mapping: int) -> None:
    """Where torchao is installed; it runs on a CPU."""
    pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_
    from torchao.quantization.quant_primitives import MappingType

    config: Any = Int8WeightOnlyConfig()
    if group:
        config = IntxWeightOnlyConfig(getattr(torch, name), PerGroup(group), MappingType(mapping))
    model = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False, dtype=torch.bfloat16))
    quantize_(model, config)
    stored, _ = flatten_tensor_state_dict(model.state_dict())
    form = read_weight_format(
        {"quant_method": "torchao", "quant_type": {"default": json.loads(json.dumps(config_to_dict(config)))}}
    )
    tensors = {name.removeprefix("0"): tensor for name, tensor in stored.items()}
    weight = decode(form, tensors, 64, 256).floats()
    assert torch.equal(weight.bfloat16(), model[0].weight.dequantize().bfloat16())


@pytest.mark.parametrize("name", STYLES)
def test_configs_name_the_format(name: str) -> None:
    form = read_weight_format(STYLES[name].entry)
    assert form.label
    assert form.quant is None or form.quant.startswith(("w4a16", "w8a16", "mxfp4"))


def test_a_mix_names_what_its_formats_are_in_memory() -> None:
    mixed, floats = (read_weight_format(STYLES[f"mixed-{name}"].entry) for name in ("4-8", "fp8-nvfp4"))
    assert (mixed.quant, floats.quant) == ("w4a16-g128", None)
    assert mixed.label.endswith("(8-bit, one scale an output) [w8a16-g128]")
    assert floats.label == "compressed-tensors FP8 and NVFP4 (compressed-tensors)"


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


DECODED = ["awq-g64", "gptq-4-asym", "mxfp4", "bnb-nf4", "nvfp4"]
"""Formats that experts have too."""


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        *product([*DECODED, "mixed-4-8"], [{"tp": 2}, {"pp": 2}]),
        *product(DECODED, [{"tp": 2, "expert_parallel": True}]),
    ],
    ids=str,
)
def test_ranks_answer_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cut: dict[str, Any]
) -> None:
    """Each rank takes its rows and groups of what is decoded, or its experts whole."""

    def backend(*told: Any) -> Ops:
        quants = [each for each in told if isinstance(each, Quant)]
        return replace(REFERENCE, stored=Widens(quants[0]) if quants else None)

    monkeypatch.setattr(PLANNED_WITHOUT_KERNELS, lambda *_: "")
    monkeypatch.setattr(loader, "backend", backend)
    sizes = {"head_dim": 64, "intermediate_size": 256, "torch_dtype": "float32"}
    experts = {"arch": "qwen3_moe", "moe_intermediate_size": 128} if "expert_parallel" in cut else {}
    model, _ = make(tmp_path, STYLES[name], **sizes, **experts)
    requests = [ask("a", range(5, 25), 6), ask("b", [7, 8], 6)]
    wanted = tokens(load(model), requests)
    assert tokens(load_threads(model, **cut), requests) == wanted


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
def test_inputs_in_another_order_are_not_cut(tmp_path: Path) -> None:
    model, _ = make(tmp_path, STYLES["gptq-4-g32-act-order"], head_dim=64)
    with pytest.raises(ParallelError, match=r"act-order.*--pp instead of --tp"):
        load_threads(model, tp=2)


def wait_until_kept() -> None:
    for thread in threading.enumerate():
        if thread.name == "keep packed weights":
            thread.join()


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["awq-g128", "gptq-4-g32-act-order", "mixed-4-8"])
def test_the_head_is_rounded_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_tied: bool
) -> None:
    """It is that of `--quant int8`, and nothing else changes: linears that are kept wide stay so. Packed
    weights with it and without do not stand in for each other.
    """
    monkeypatch.setenv("LLMBOX_REPACKED", str(tmp_path / "repacked"))
    monkeypatch.setenv("LLMBOX_REPACKED_GB", "1")
    sizes = {**SIZES, "tie_word_embeddings": is_tied}
    model = make_tiny_model(tmp_path / "model", tokenizer=False, **sizes)
    style = STYLES[name]
    publish(model, style.entry, style.store, keeps=("layers.0.mlp",), others=style.others)
    plain = load(model, dtype="bfloat16")
    request = [ask("a", range(5, 40), 8)]
    wait_until_kept()
    rounded = load(model, dtype="bfloat16", quant_head="int8")
    wanted = tokens(rounded, request)
    before, after = (runner_of(engine)._model for engine in (plain, rounded))
    assert (before.head.quant, after.head.quant.name) == (None, "int8")
    packing = before.layers[0].mlp.ops.packing
    weights = load_file(model / "model.safetensors")
    weight = weights["model.embed_tokens.weight" if is_tied else "lm_head.weight"].bfloat16()
    own = packing.pack_quantized(packing.round(ROUNDED_HEAD, weight), torch.bfloat16)
    assert bytes(packing.panels(after.head)) == bytes(packing.panels(own))
    assert after.layers[0].mlp.down.quant is None
    for one, other in zip(before.layers, after.layers, strict=True):
        assert bytes(packing.panels(one.mlp.down)) == bytes(packing.panels(other.mlp.down))
        assert bytes(packing.panels(one.attention.qkv)) == bytes(packing.panels(other.attention.qkv))
    assert rounded.info.quant == plain.info.quant + "+int8-head"
    saved = plain.info.weights_bytes - rounded.info.weights_bytes
    assert saved == pytest.approx(weight.numel() * (2 - 8.125 / 8), rel=0.01)
    wait_until_kept()
    monkeypatch.setattr("llmbox.engine.weights.checkpoint.Checkpoint.packed", None)  # not called
    assert tokens(load(model, dtype="bfloat16", quant_head="int8"), request) == wanted


@pytest.mark.skipif(not native_ready(), reason="needs the C++ kernels")
@pytest.mark.parametrize("name", ["mixed-4-8", "gptq-4-g32-act-order", "mxfp4"])
def test_packed_weights_are_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Linears that are kept wide stay so, and those with an order of inputs keep it."""
    monkeypatch.setenv("LLMBOX_REPACKED", str(tmp_path / "repacked"))
    monkeypatch.setenv("LLMBOX_REPACKED_GB", "1")
    model = make_tiny_model(tmp_path / "model", tokenizer=False, **SIZES)
    style = STYLES[name]
    publish(model, style.entry, style.store, keeps=("layers.0.mlp",), others=style.others)
    request = [ask("a", range(5, 40), 8)]
    wanted = tokens(load(model), request)
    wait_until_kept()
    monkeypatch.setattr("llmbox.engine.weights.checkpoint.Checkpoint.packed", None)  # not called
    assert tokens(load(model), request) == wanted
