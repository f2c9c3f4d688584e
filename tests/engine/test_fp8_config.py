"""Which of our formats config.json means, and what is refused with its reason."""

from typing import Any

import pytest

from llmbox.engine.fp8_config import NotReadable
from llmbox.engine.rounded import read_entry
from llmbox.kernels.quant import QUANTS
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
    ],
)
def test_what_is_read(entry: dict[str, Any], name: str) -> None:
    assert read_entry(entry) == name
    assert QUANTS[name].keeps_head


def changed(part: str, **change: Any) -> dict[str, Any]:
    entry = compressed()
    entry["config_groups"]["group_0"][part] |= change
    return entry


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (None, "not an object"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
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
        (compressed(config_groups={}), "one group"),
        (compressed(config_groups={"a": {}, "b": {}}), "one group"),
        (compressed("group"), "'group'"),
        (compressed("block"), "block_structure None"),
        (blocks(strategy="token"), "128 inputs"),
        (blocks(group_size=64), "128 inputs"),
        (compressed("tensor", "group"), "'group'"),
        (changed("weights", num_bits=4), "weights that are not symmetric 8-bit floats"),
        (changed("weights", dynamic=True), "dynamic"),
        (changed("input_activations", type="int"), "input_activations that are not"),
        (changed("input_activations", dynamic=False), "one scale"),
        (changed("input_activations", dynamic="local"), "one scale"),
    ],
)
def test_what_is_not(entry: Any, says: str) -> None:
    with pytest.raises(NotReadable, match=says):
        read_entry(entry)


@pytest.mark.parametrize(
    ("part", "value", "says"),
    [
        ("input_activations", None, "not rounded"),
        ("weights", None, "without a scheme"),
        ("output_activations", SCHEME, "output_activations"),
    ],
)
def test_schemes_that_are_missing_or_too_many(part: str, value: Any, says: str) -> None:
    entry = compressed()
    entry["config_groups"]["group_0"][part] = value
    with pytest.raises(NotReadable, match=says):
        read_entry(entry)
