"""Quantized checkpoints whose files are not what config.json says: fit and load refuse with one sentence."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llmbox.app.hub.model_info import local_facts
from llmbox.app.models.catalog import directory
from llmbox.engine.config import EngineConfig
from llmbox.engine.errors import EngineError
from llmbox.engine.executor.build import load_engine
from support.fp8_checkpoint import round_to_blocks
from support.published_formats import (
    Stored,
    awq,
    bitnet,
    bnb4,
    compressed,
    compressed_entry,
    eetq,
    gptq,
    hqq,
    publish,
    scheme_of,
    torchao_int4,
    torchao_tiles,
)
from support.tiny_models import make_tiny_model

UP = "model.layers.0.mlp.up_proj"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 99}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
W4 = compressed_entry(scheme_of(4, 128), "pack-quantized")
COMPRESS = partial(compressed, scheme=scheme_of(4, 128), form="pack-quantized")
FOUR = {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}
NVFP4 = compressed_entry(FOUR, "nvfp4-pack-quantized")
BITNET = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
EETQ = {"quant_method": "eetq", "weights": "int8"}
HQQ = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
}
HQQ_32 = {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}}


def torchao(config: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": config, "_data": data}}}


INT4 = torchao("Int4WeightOnlyConfig", group_size=32)
TILES = torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="TILE_PACKED_TO_4D")
INT4_64 = torchao("Int4WeightOnlyConfig", group_size=64)
INT8 = torchao("Int8WeightOnlyConfig")
EIGHT_IN_SECOND = {"dynamic": {r".*\.1\.mlp\.up_proj": {"bits": 8}}}
Weights = dict[str, Tensor]


def without(end: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(UP + end)


def changed(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Weights], None]:
    return lambda weights: weights.__setitem__(UP + end, change(weights[UP + end]))


def cut(tensor: Tensor) -> Tensor:
    return tensor[1:].contiguous()


def of_two(weights: Weights) -> None:
    """The second layer is of another tool."""
    for name in [name for name in weights if name.startswith("model.layers.1.mlp.up_proj")]:
        del weights[name]
    stored, _ = COMPRESS(torch.randn(256, 128))
    weights |= {f"model.layers.1.mlp.up_proj{end}": tensor for end, tensor in stored.items()}


def nothing(_weights: Weights) -> None:
    pass


NVFP4_STORE = partial(compressed, scheme=FOUR, form="nvfp4-pack-quantized")
Store = Callable[[Tensor], Stored]
CASES: dict[str, tuple[dict[str, Any], Store, Callable[[Weights], None], dict[str, Any], str]] = {
    "no zeros": (AWQ, awq, without(".qzeros"), {}, r"up_proj\.qzeros' is missing, which AWQ"),
    "no scales": (AWQ, awq, without(".scales"), {}, r"up_proj\.scales' is missing"),
    "no numbers": (AWQ, awq, without(".qweight"), {}, r"up_proj\.qweight' is missing, to which"),
    "another group": (AWQ, awq, nothing, {"group_size": 64}, r"_proj\.qzeros' has shape .* need \[\d, \d+\]"),
    "another layout": (AWQ, awq, nothing, GPTQ, r"_proj\.qzeros' has shape"),
    "two tools": (AWQ, awq, of_two, {}, r"layers\.1\.mlp\.up_proj\.weight_\w+' is I(32|64) and not part of"),
    "other bits": (GPTQ, gptq, nothing, {"bits": 8}, r"has shape"),
    "scales of another dtype": (
        GPTQ, gptq, changed(".scales", Tensor.int), {}, r"up_proj\.scales' is I32, GPTQ .* F16 or BF16",
    ),
    "no scale of words": (W4, COMPRESS, without(".weight_scale"), {}, r"up_proj\.weight_scale' is missing"),
    "scales cut": (
        W4, COMPRESS, changed(".weight_scale", lambda scale: scale[:7].contiguous()), {}, r"need \[256, 1\]",
    ),
    "no scale of the tensor": (
        NVFP4, NVFP4_STORE, without(".weight_global_scale"), {}, r"weight_global_scale' is missing",
    ),
    "no state": (
        NF4, bnb4, without(".weight.quant_state.bitsandbytes__nf4"), {}, r"bitsandbytes__nf4' is missing",
    ),
    "bitnet without scales": (
        BITNET, partial(bitnet, divides=False), without(".weight_scale"), {}, r"weight_scale' is missing",
    ),
    "eetq without scales": (EETQ, eetq, without(".weight_scales"), {}, r"up_proj\.weight_scales' is missing"),
    "eetq scales cut": (EETQ, eetq, changed(".weight_scales", cut), {}, r"need \[256\] or"),
    "torchao without zeros": (
        INT4, torchao_int4, without("._weight_zero_point"), {}, r"_zero_point' is missing, which torchao",
    ),
    "torchao of another group": (
        INT4, torchao_int4, nothing, INT4_64, r"_weight_\w+' has shape",
    ),
    "torchao in another packing": (TILES, torchao_int4, nothing, {}, r"qdata' is I8, torchao .* have I32"),
    "torchao tiles cut": (TILES, torchao_tiles, changed("._weight_scale_and_zero", cut), {}, r"need \["),
    "torchao bytes for int4": (INT8, torchao_int4, nothing, {}, r"_weight_\w+' (has shape|is BF16)"),
    "hqq of another group": (HQQ, hqq, nothing, HQQ_32, r"_proj\.\w+' has shape"),
    "a layer of other bits than its rule": (
        GPTQ, gptq, nothing, EIGHT_IN_SECOND, r"layers\.1\.mlp\.up_proj\.\w+' has shape",
    ),
    "one linear unpacked": (
        AWQ, awq, changed(".qweight", Tensor.float), {}, r"up_proj\.qweight' is F32, AWQ .* have I32",
    ),
}  # fmt: skip


def reasons(model: Path) -> tuple[str, str]:
    """Why fit and load refuse; empty where they do not."""
    found = []
    for refuses in (
        lambda: local_facts(directory(model)),
        lambda: load_engine(
            EngineConfig(model_path=str(model), name="m", threads=1, memory_bytes=256 << 20), lambda _: None
        ),
    ):
        try:
            refuses()
        except EngineError as error:
            found.append(str(error))
        else:
            found.append("")
    fit, load = found
    return fit, load


@pytest.mark.parametrize("name", CASES)
def test_half_a_format_is_refused_by_fit_and_by_load(tmp_path: Path, name: str) -> None:
    entry, store, harm, config, says = CASES[name]
    model = make_tiny_model(tmp_path, tokenizer=False, torch_dtype="float16", **SIZES)
    publish(model, entry | config, store)
    weights = load_file(model / "model.safetensors")
    harm(weights)
    save_file(weights, model / "model.safetensors")
    fit, load = reasons(model)
    assert re.search(says, fit), fit
    assert load == fit


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "norms that are missing": ({"architectures": ["Qwen3ForCausalLM"]}, r"q_norm\.weight' is missing"),
    "more layers": ({"num_hidden_layers": 3}, r"layers\.2\.self_attn\.q_proj\.weight' is missing"),
    "fewer layers": ({"num_hidden_layers": 1}, r"layers\.1\..* has no place|layers\.1\..* no place"),
    "another vocabulary": ({"vocab_size": 98}, r"has shape \[99, 128\]"),
    "latents": ({"architectures": ["DeepseekV3ForCausalLM"]}, r"is missing"),
}


@pytest.mark.parametrize(("entry", "store"), [(AWQ, awq), (GPTQ, gptq), (W4, COMPRESS), (NF4, bnb4)])
@pytest.mark.parametrize("claim", OTHERS)
def test_a_quantized_folder_of_another_model_is_refused(
    tmp_path: Path, entry: dict[str, Any], store: Store, claim: str
) -> None:
    changes, says = OTHERS[claim]
    model = make_tiny_model(tmp_path, arch="llama", tokenizer=False, torch_dtype="float16", **SIZES)
    publish(model, entry, store)
    assert reasons(model) == ("", "")
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    fit, load = reasons(model)
    assert re.search(says, fit), fit
    assert load == fit


@pytest.mark.parametrize("entry", [AWQ, GPTQ, W4, NF4], ids=lambda entry: entry["quant_method"])
def test_a_config_that_claims_a_format_is_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    fit, load = reasons(make_tiny_model(tmp_path, tokenizer=False, quantization_config=entry, **SIZES))
    assert "but no tensor ends in" in fit
    assert load == fit


def test_a_missing_scale_of_fp8_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, **SIZES)
    round_to_blocks(model)
    weights = load_file(model / "model.safetensors")
    del weights[f"{UP}.weight_scale_inv"]
    save_file(weights, model / "model.safetensors")
    fit, load = reasons(model)
    assert f"'{UP}.weight_scale' is missing, which fp8-block weights need" in fit
    assert load == fit


def test_a_layer_of_which_some_experts_are_quantized_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, arch="qwen3_moe", **SIZES, moe_intermediate_size=128)
    publish(model, AWQ, awq, keeps=("layers.0.mlp.experts.2.",))
    fit, load = reasons(model)
    assert "layers.0.mlp.experts.2." in fit
    assert "all experts of a layer are computed as one" in fit
    assert load == fit


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (changed(".g_idx", lambda index: index + 7), r"up_proj\.g_idx' names groups outside 0 to 0"),
        (changed(".scales", lambda scales: scales * torch.inf), r"up_proj\.scales' holds NaN or infinity"),
        (changed(".qzeros", torch.zeros_like), r"up_proj\.qzeros' has other zeros than 8"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_at_load(
    tmp_path: Path, harm: Callable[[Weights], None], says: str
) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, torch_dtype="float16", **SIZES)
    publish(model, GPTQ, gptq)
    weights = load_file(model / "model.safetensors")
    harm(weights)
    save_file(weights, model / "model.safetensors")
    load = reasons(model)[1]
    assert re.search(says, load), load


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({r"+:.*\.18\..*": {"bits": 5}}, "weights of 5 bits (dynamic)"),
        ({r"+:(.*)+x": {"bits": 8}}, "which repeats too much"),
        ({r"+:.*(": {"bits": 8}}, "the pattern '.*('"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(tmp_path: Path, rules: dict[str, Any], says: str) -> None:
    entry = GPTQ | {"dynamic": rules}
    fit, load = reasons(make_tiny_model(tmp_path, tokenizer=False, quantization_config=entry, **SIZES))
    assert says in fit
    assert load == fit


def test_experts_of_two_formats_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, tokenizer=False, arch="qwen3_moe", **SIZES, moe_intermediate_size=128)
    entry = GPTQ | {"dynamic": {r".*experts\.1\..*": {"group_size": 32}}}
    publish(model, entry, gptq, others={"experts.1.": partial(gptq, group=32)})
    fit, load = reasons(model)
    assert "but all experts of a layer are computed as one" in fit
    assert load == fit
