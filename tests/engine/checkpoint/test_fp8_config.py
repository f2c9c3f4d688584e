"""Which of our formats config.json means, and what is refused with its reason."""

from typing import Any

import pytest

from llmbox.engine.checkpoint.formats.registry import read_weight_format
from llmbox.engine.checkpoint.formats.weight_format import NotReadable
from llmbox.kernels.quant_formats import QUANTS
from support.fp8_checkpoint import ENTRY, SCHEME, compressed

BY_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}


def blocks(**rows: Any) -> dict[str, Any]:
    entry = compressed("block")
    group = entry["config_groups"]["group_0"]
    group["weights"]["block_structure"] = [128, 128]
    group["input_activations"] |= {"strategy": "group", "group_size": 128, **rows}
    return entry


def targeting(*targets: str) -> dict[str, Any]:
    entry = compressed()
    entry["config_groups"]["group_0"]["targets"] = list(targets)
    return entry


def several(*entries: dict[str, Any]) -> dict[str, Any]:
    """One checkpoint of the groups of all, each for linears of its own."""
    found = [each["config_groups"]["group_0"] for each in entries]
    groups = {f"group_{n}": each | {"targets": [f"re:.*layers.{n}.*"]} for n, each in enumerate(found)}
    return compressed(config_groups=groups)


def with_own_format(form: str, *entries: dict[str, Any]) -> dict[str, Any]:
    entry = several(*entries) | {"format": "mixed-precision"}
    groups = entry["config_groups"]
    return entry | {"config_groups": {name: each | {"format": form} for name, each in groups.items()}}


def layered(*algorithms: str) -> dict[str, Any]:
    """As Model Optimizer writes where layers may differ."""
    layers = {f"model.layers.{n}.mlp.up_proj": {"quant_algo": each} for n, each in enumerate(algorithms)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        (ENTRY, "fp8-block"),
        (blocks(), "fp8-block"),
        (BY_TENSOR, "fp8-static"),
        (BY_TENSOR | {"ignored_layers": ["lm_head"], "kv_cache_scheme": "static"}, "fp8-static"),
        (BY_TENSOR | {"activation_scheme": "dynamic", "weight_block_size": None}, "fp8-dynamic"),
        (compressed("tensor", "static"), "fp8-static"),
        (compressed("channel", "static", format="naive-quantized"), "fp8-static"),
        (compressed("channel", "token"), "fp8-dynamic"),
        (compressed("tensor", "tensor", ignore=["re:.*lm_head", "model.norm"]), "fp8-dynamic"),
        (compressed(sparsity_config={"format": "dense"}, transform_config={}), "fp8-dynamic"),
        (BY_TENSOR | {"ignored_layers": ["model.layers.0.mlp.down_proj"]}, "fp8-static"),
        (ENTRY | {"modules_to_not_convert": ["lm_head", "model.layers.0", "mlp.gate"]}, "fp8-block"),
        (compressed(ignore=["re:.*down_proj$", "model.layers.3.self_attn.o_proj"]), "fp8-dynamic"),
        (targeting("re:.*mlp.*"), "fp8-dynamic"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8-dynamic"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}, "fp8-static"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8-dynamic"),
        (layered("FP8", "FP8"), "fp8-static"),
        (several(compressed("tensor"), compressed("channel")), "fp8-dynamic"),
        (several(compressed("tensor", "static"), compressed("channel", "static")), "fp8-static"),
        (several(blocks(), blocks()), "fp8-block"),
        (with_own_format("float-quantized", compressed(), compressed("channel")), "fp8-dynamic"),
    ],
)
def test_what_is_read(entry: dict[str, Any], name: str) -> None:
    assert read_weight_format(entry).quant == name
    assert QUANTS[name].keeps_head


def changed(part: str, **change: Any) -> dict[str, Any]:
    entry = compressed()
    entry["config_groups"]["group_0"][part] |= change
    return entry


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (None, "not an object"),
        ({"quant_method": "vptq", "bits": 4}, "'vptq'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "quant_algo"),
        ({"quant_method": "llmbox", "version": 2, "format": "int5"}, "'llmbox' and format 'int5'"),
        ({"quant_method": "llmbox", "version": 1, "format": "int4"}, "int4 weights of another version"),
        ({"quant_method": "llmbox", "version": 2, "format": "int8"}, "int8 weights of another version"),
        (BY_TENSOR | {"activation_scheme": "sometimes"}, "activation_scheme 'sometimes'"),
        (BY_TENSOR | {"activation_scheme": ["static"]}, "activation_scheme"),
        (BY_TENSOR | {"fmt": "e5m2"}, "e5m2"),
        (BY_TENSOR | {"weight_block_size": [64, 64]}, r"\[64, 64\]"),
        (ENTRY | {"activation_scheme": "static"}, "128 x 128 with static"),
        (compressed(format="pack-quantized"), "'pack-quantized'"),
        (compressed(format="int-quantized"), "'int-quantized'"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse"),
        (compressed(transform_config={"config_groups": {"u": 1}}), "transformed"),
        (compressed(config_groups={}), "without a group"),
        (compressed(config_groups={"a": {}, "b": 1}), "without a group"),
        (several(compressed(), compressed("tensor", "static")), "mix fp8-dynamic and fp8-static"),
        (several(blocks(), compressed("channel")), "mix fp8-block and fp8-dynamic"),
        (several(compressed(), compressed("group")), "'group'"),
        (with_own_format("nvfp4-pack-quantized", compressed()), "'nvfp4-pack-quantized'"),
        (several(compressed()) | {"format": "mixed-precision"}, "'mixed-precision'"),
        (layered("FP8", "NVFP4"), "mix FP8 and NVFP4"),
        (layered(), "no algorithms"),
        (layered("NVFP4"), "quant_algo 'NVFP4'"),
        (compressed("group"), "'group'"),
        (compressed("block"), "block_structure None"),
        (blocks(strategy="token"), "128 inputs"),
        (blocks(group_size=64), "128 inputs"),
        (compressed("tensor", "group"), "'group'"),
        (changed("weights", num_bits=4), "'float-quantized'"),
        (changed("weights", dynamic=True), "dynamic"),
        (changed("input_activations", type="int"), "input_activations that are not"),
        (changed("input_activations", dynamic=False), "one scale"),
        (changed("input_activations", dynamic="local"), "one scale"),
    ],
)
def test_what_is_not(entry: Any, says: str) -> None:
    with pytest.raises(NotReadable, match=says):
        read_weight_format(entry)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("input_activations", None, "without quantized input_activations"),
        ("weights", None, "without a scheme"),
        ("output_activations", SCHEME, "output_activations"),
    ],
)
def test_schemes_that_are_missing_or_too_many(part: str, value: Any, says: str) -> None:
    entry = compressed()
    entry["config_groups"]["group_0"][part] = value
    with pytest.raises(NotReadable, match=says):
        read_weight_format(entry)
