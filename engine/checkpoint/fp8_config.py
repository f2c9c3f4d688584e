"""Quantization configs of FP8 (E4M3) checkpoints by other tools, mapped to formats of llmbox. No torch.

    "quant_method": "fp8"                  AutoFP8, transformers, DeepSeek-V3, Qwen3-FP8
    "quant_method": "fbgemm_fp8"           transformers, Llama 3.1 405B
    "quant_method": "compressed-tensors"   llm-compressor
    "quant_method": "modelopt"             NVIDIA Model Optimizer; older ones in hf_quant_config.json alone

Only keys that decide the format are read; names and shapes of scales are in `quantized_layout.py`. Linears
that stay unquantized, such as some layers' `down_proj`, are listed as names, parts of names, globs or regular
expressions, and every tool matches these in its own way. So the lists are ignored, and these linears are
detected by the stored tensors, which no list can contradict.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .formats.weight_format import WeightFormat, form_of, forms_of, is_quantized, quantized_linears, require
from .index import list_tensors
from .safetensors import TensorEntry, shown

DYNAMIC, STATIC, BLOCKS = "fp8-dynamic", "fp8-static", "fp8-block"
SIZE = [128, 128]


def read_fp8(raw: dict[str, Any]) -> str:
    """Return the format of `quant_method: fp8`. Raises NotReadable."""
    size, scheme = raw.get("weight_block_size"), raw.get("activation_scheme", "dynamic")
    require(raw.get("fmt", "e4m3") == "e4m3", f"8-bit floats of fmt {raw.get('fmt')!r}, only e4m3 is known")
    require(scheme in ("dynamic", "static"), f"activation_scheme {scheme!r}, known are dynamic and static")
    if size is None:
        return DYNAMIC if scheme == "dynamic" else STATIC
    require(size == SIZE, f"weight_block_size {size!r}, only blocks of 128 x 128 are known")
    require(scheme == "dynamic", "blocks of 128 x 128 with static activations, only dynamic ones are known")
    return BLOCKS


def read_modelopt(raw: dict[str, Any]) -> str:
    """Return the format of `quant_method: modelopt`. If layers are listed one by one, all must have the same
    algorithm. Raises NotReadable.
    """
    known = {"FP8": STATIC, "FP8_PER_CHANNEL_PER_TOKEN": DYNAMIC}
    name, layers = raw.get("quant_algo"), raw.get("quantized_layers")
    if name == "MIXED_PRECISION" and isinstance(layers, dict):
        names = {str(each.get("quant_algo") if isinstance(each, dict) else each) for each in layers.values()}
        require(
            len(names) == 1, f"modelopt weights that mix {' and '.join(sorted(names)) or 'no algorithms'}"
        )
        (name,) = names
    require(isinstance(name, str) and name in known, f"modelopt weights of quant_algo {name!r}")
    return known[str(name)]


def modelopt_entry(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Convert an hf_quant_config.json to a config.json entry. None if only the KV cache is quantized."""
    section = raw.get("quantization")
    require(isinstance(section, dict), "hf_quant_config.json without an object `quantization`")
    assert isinstance(section, dict)
    return None if section.get("quant_algo") is None else {"quant_method": "modelopt", **section}


def read_compressed(raw: dict[str, Any]) -> str:
    """Return the format of `quant_method: compressed-tensors`. Raises NotReadable."""
    form, groups = raw.get("format"), raw.get("config_groups")
    sparsity = raw.get("sparsity_config") or {}
    require(isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense", "sparse weights")
    require(not raw.get("transform_config"), "weights that were transformed (transform_config)")
    found = list(groups.values()) if isinstance(groups, dict) else []
    require(bool(found) and all(isinstance(each, dict) for each in found), "config_groups without a group")
    formats = {read_group(each, each.get("format") or form) for each in found}
    # The assignment of linears to groups does not matter then: the files have the shapes of scales.
    require(len(formats) == 1, f"config_groups that mix {' and '.join(sorted(formats))}")
    return formats.pop()


def read_group(group: dict[str, Any], form: Any) -> str:
    """Return the format of one config group. `form`: the group's own, or that of the whole checkpoint."""
    require(form in ("float-quantized", "naive-quantized"), f"compressed-tensors of format {form!r}")
    require(not group.get("output_activations"), "quantized output_activations")
    weights, rows = group.get("weights"), group.get("input_activations")
    require(rows is not None, "8-bit weights without quantized input_activations")
    return read_schemes(scheme_of(weights, "weights"), scheme_of(rows, "input_activations"))


def scheme_of(raw: Any, key: str) -> dict[str, Any]:
    """Return a quantization scheme, which must be symmetric E4M3. Raises NotReadable."""
    require(isinstance(raw, dict), f"{key} without a scheme")
    kind = (raw.get("num_bits"), raw.get("type"), raw.get("symmetric", True))
    require(kind == (8, "float", True), f"{key} that are not symmetric 8-bit floats")
    return dict(raw)


def read_schemes(weights: dict[str, Any], rows: dict[str, Any]) -> str:
    how, over, dynamic = weights.get("strategy"), rows.get("strategy"), rows.get("dynamic", False)
    require(not weights.get("dynamic"), "weights with dynamic scales")
    if how == "block":
        size = weights.get("block_structure")
        require(size in (SIZE, "128x128"), f"block_structure {size!r}, only blocks of 128 x 128 are known")
        known = (over, rows.get("group_size"), dynamic) == ("group", SIZE[1], True)
        require(known, "blocks of 128 x 128 whose rows have other than dynamic scales for 128 inputs")
        return BLOCKS
    require(how in ("tensor", "channel"), f"weights of strategy {how!r}, not tensor, channel or block")
    require(over in ("token", "tensor"), f"input_activations of strategy {over!r}, not token or tensor")
    if dynamic is True:
        return DYNAMIC
    require(dynamic is False and over == "tensor", "static input_activations of other than one scale")
    return STATIC


_LINEAR = re.compile(r"model\.layers\.\d+\.(.+_proj|.+\.w[123])\.weight")


def count_unquantized_params(directory: Path, form: WeightFormat) -> int:
    """Return the number of parameters of all unquantized linears, and of those in another format than
    `form.quant`; 0 if the files cannot be read, because loading them reports the reason.
    """
    try:
        entries = list_tensors(directory)
    except ModelError:
        return 0
    unquantized = sum(
        prod(entry.shape)
        for name, entry in entries.items()
        if _LINEAR.fullmatch(name) and not is_quantized(form, name.removesuffix(".weight"), entries)
    )
    if len(forms_of(form)) == 1:
        return unquantized
    others = [name for name in quantized_linears(form, entries) if form_of(form, name).quant != form.quant]
    sizes = (form_of(form, name).size(entries[name + form_of(form, name).main.suffix]) for name in others)
    return unquantized + sum(prod(size or (0,)) for size in sizes)


def is_unquantized(form: WeightFormat, names: Iterable[str], entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if the linears `names`, which are fused into one, are unquantized. Raises ModelError if one
    is quantized and another is not.
    """
    wide = [name for name in names if not is_quantized(form, name, entries)]
    rest = [name for name in names if name not in wide]
    if wide and rest and (entry := entries.get(f"{wide[0]}.weight")) is not None:
        other = entries[rest[0] + form_of(form, rest[0]).main.suffix]
        raise ModelError(
            f"{entry.file}: {shown(entry.name)} is kept in {entry.dtype} and {shown(other.name)} is "
            f"{other.dtype}, but both are multiplied as one matrix here: use a checkpoint that keeps all of "
            "q_proj, k_proj and v_proj (of gate_proj and up_proj) unquantized, or none of them"
        )
    return bool(wide) and not rest
