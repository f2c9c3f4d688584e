"""Quantization configs and headers that nobody would write are refused, and never crash."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmbox.engine.checkpoint.formats.registry import READERS, read_weight_format
from llmbox.engine.checkpoint.formats.weight_format import NotReadable
from llmbox.engine.errors import EngineError
from llmbox.engine.weights.decoders import BadTensor, decode
from support.fp8_checkpoint import ENTRY, compressed
from support.published_formats import awq, bnb4, compressed_entry, gptq, hqq, publish, scheme_of
from support.real_engines import ask, load, tokens
from support.tiny_models import make_tiny_model

ODD = (None, True, -1, 0, 2.5, 10**30, "x", [], [4], {}, {"a": 1})
RULE = {"nbits": 4, "group_size": 64, "axis": 1}
ENTRIES: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "dynamic": {"-:a": {}, "+:b": {"bits": 4, "group_size": 128}},
    },
    "auto-round": {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {"lm_head": {"bits": 16}},
    },
    "compressed": compressed_entry(scheme_of(4, 128), "pack-quantized"),
    "compressed fp8": compressed(),
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
    },
    "torchao": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": None}}},
    },
    "torchao int4": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}},
    },
    "bitnet": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
    "eetq": {"quant_method": "eetq", "weights": "int8"},
    "gptq by layer": {
        "quant_method": "gptq",
        "bits": 4,
        "dynamic": {"-:a": {}, r"+:.*\.1\..*": {"bits": 8, "group_size": 32}},
    },
    "hqq": {"quant_method": "hqq", "quant_config": {"weight_quant_params": RULE}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    "fp8": ENTRY,
    "llmbox": {"quant_method": "llmbox", "version": 1, "format": "int8"},
    "mxfp4": {"quant_method": "mxfp4"},
}


def changed(entry: Any) -> Iterator[Any]:
    """Copies with one value replaced or left out, at any depth."""
    for key, value in entry.items():
        for odd in ODD:
            yield {**entry, key: odd}
        yield {name: each for name, each in entry.items() if name != key}
        if isinstance(value, dict):
            for inner in changed(value):
                yield {**entry, key: inner}


@pytest.mark.parametrize("name", ENTRIES)
def test_odd_configs_are_read_or_refused_with_a_reason(name: str) -> None:
    assert read_weight_format(copy.deepcopy(ENTRIES[name])).label
    for entry in changed(ENTRIES[name]):
        with suppress(NotReadable):
            form = read_weight_format(json.loads(json.dumps(entry)))
            assert form.label
            form.tensors(64, 64)


def test_every_method_is_here() -> None:
    known = {entry["quant_method"] for entry in ENTRIES.values()}
    assert set(READERS) - known == {"intel/auto-round", "fbgemm_fp8", "gguf"}


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "vocab_size": 60,
}
STORES = {"awq": awq, "gptq": gptq, "bitsandbytes": bnb4, "hqq": hqq}


@pytest.mark.parametrize("name", STORES)
def test_odd_tensors_are_refused_with_a_reason(tmp_path: Path, name: str) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, **SIZES)
    publish(model, ENTRIES[name], STORES[name])
    good = load_file(model / "model.safetensors")
    ends = [key for key in good if key.startswith("model.layers.0.mlp.up_proj.")]
    for key in ends:
        tensor = good[key]
        for harm in (
            torch.zeros(0, dtype=tensor.dtype),
            torch.zeros(*tensor.shape, 0, dtype=tensor.dtype),
            tensor.flatten(),
            tensor.unsqueeze(0),
            torch.zeros(()),
            torch.zeros(3, 5, dtype=torch.int32),
            tensor.flatten().flip(0).view(torch.uint8),
            tensor.half(),
        ):
            save_file({**good, key: harm.contiguous()}, model / "model.safetensors")
            with suppress(EngineError):
                engine = load(model)  # what the format does not use, or what it may be
                assert tokens(engine, [ask("a", [5, 6], 1)])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"quantization_mode": "online"}, "quantization_mode 'online', only offline is known"),
        ({"linear_class": "ternary"}, "linear_class 'ternary'"),
        ({"use_rms_norm": True}, "linears have norms"),
    ],
)
def test_other_bitnets_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(NotReadable, match=says):
        read_weight_format({"quant_method": "bitnet"} | change)


def test_a_byte_of_no_bitnet_is_refused() -> None:
    form = read_weight_format({"quant_method": "bitnet"})
    stored = {".weight": torch.full((2, 4), 3, dtype=torch.uint8), ".weight_scale": torch.ones(1)}
    with pytest.raises(BadTensor, match="holds 3"):
        decode(form, stored, 8, 4)
    stored = {".weight": torch.zeros(2, 4, dtype=torch.uint8), ".weight_scale": torch.zeros(1)}
    with pytest.raises(BadTensor, match="no scale"):
        decode(form, stored, 8, 4)
