"""Published formats by a short name: the entry in config.json, and what stores a linear."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from support.published_formats import (
    Stored,
    awq,
    bitnet,
    bnb4,
    bnb8,
    compressed,
    compressed_entry,
    eetq,
    gptq,
    hqq,
    scheme_of,
    torchao_bytes,
    torchao_int4,
    torchao_tiles,
)


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
FLOAT32_SCALES = {"bnb-int8", "torchao-int8", "mixed-4-8", "bitnet-divides"}
"""Styles whose scales the kernels round to float16."""
STYLES = {
    "awq-g128": Style(AWQ | {"group_size": 128}, awq),
    "awq-g64": Style(AWQ | {"group_size": 64}, partial(awq, group=64)),
    "awq-g32": Style(AWQ | {"group_size": 32}, partial(awq, group=32)),
    "gptq-4": gptq_style(),
    "gptq-4-asym": gptq_style(symmetric=False),
    "gptq-4-asym-v2": gptq_style(symmetric=False, v2=True),
    "gptq-4-act-order": gptq_style(order=True),
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
    "w4a16-g128-asym": compressed_style(scheme_of(4, 128, symmetric=False)),
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
    "bitnet": Style(
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        partial(bitnet, divides=False),
    ),
    "bitnet-divides": Style({"quant_method": "bitnet"}, partial(bitnet, divides=True)),
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
