"""Registry of weight formats: the `quantization_config` of config.json, mapped to a `WeightFormat`. No torch.

    "quant_method": "llmbox"               `llmbox quantize` of earlier versions
    "quant_method": "awq"                  AutoAWQ, gemm layout
    "quant_method": "gptq"                 AutoGPTQ, GPTQModel, optimum
    "quant_method": "auto-round"           AutoRound in the layouts of the two before
    "quant_method": "compressed-tensors"   llm-compressor: integers, FP8, NVFP4, MXFP4
    "quant_method": "bitsandbytes"         NF4, FP4 and int8
    "quant_method": "mxfp4"                gpt-oss
    "quant_method": "quark"                AMD Quark, MXFP4
    "quant_method": "torchao"              integers (`torchao.py`)
    "quant_method": "eetq"                 int8
    "quant_method": "bitnet"               weights of -1, 0 and 1
    "quant_method": "hqq"                  HQQ
    "quant_method": "gguf"                 blocks of a GGUF file (`gguf/folder.py`)
    "quant_method": "fp8", "fbgemm_fp8", "modelopt"   FP8 (`floats.py`), and modelopt's NVFP4

A format is one reader in `READERS`, one class, and one decoder in `engine/weights/decoders.py`. Lists of
unquantized layers are ignored: the stored tensors say which linears are quantized.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Final

from llmbox.kernels.quant_formats import GGUF_DEQUANTIZED, GGUF_QUANTS, QUANTS, BlockSizes

from ...errors import ModelError
from ..files import read_json
from ..index import list_tensors
from ..quantized_layout import FORMATS, INPUT_SCALES, METHOD, MODELOPT_FILE, SCALE, SCALES, version_of
from .floats import (
    DYNAMIC,
    MX_GROUP,
    NV_GROUP,
    Bnb4Format,
    Bnb8Format,
    Float8Format,
    MxFp4Format,
    NvFp4Format,
    modelopt_entry,
    read_compressed,
    read_fp8,
    read_modelopt,
    read_schemes,
)
from .integers import (
    HQQ_PACKED,
    AwqFormat,
    CompressedBytes,
    CompressedWords,
    GptqFormat,
    HqqFormat,
    Integers,
    read_bitnet,
    read_eetq,
)
from .torchao import read_torchao
from .weight_format import (
    FormatRule,
    GgufFormat,
    NativeFormat,
    NotReadable,
    WeightFormat,
    compile_pattern,
    form_of,
    forms_of,
    is_quantized,
    mix_formats,
    quantized_linears,
    require,
)

Config = Mapping[str, Any]
_GPTQ_BITS: Final = (2, 3, 4, 8)


def read_weight_format(raw: Any) -> WeightFormat:
    """Return the format that a `quantization_config` describes. Raises NotReadable."""
    require(isinstance(raw, dict), "not an object")
    method = raw.get("quant_method")
    if method is None and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
        method = "bitsandbytes"
    read = READERS.get(str(method))
    if read is None:
        name = raw.get("format")
        raise NotReadable(f"weights of quant_method {method!r}" + (f" and format {name!r}" if name else ""))
    return read(raw)


def find_weight_format(raw: Config, directory: Path) -> WeightFormat | None:
    """Return the format of a checkpoint from its parsed config.json, or from modelopt's file beside it; None
    if it is not quantized. Raises NotReadable and ModelError.
    """
    text = raw.get("text_config")
    for place in (raw, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if place.get(key) is not None:
                return read_weight_format(place[key])
    beside = directory / MODELOPT_FILE
    entry = modelopt_entry(read_json(beside)) if beside.is_file() else None
    return None if entry is None else read_weight_format(entry)


def running_format(stored: WeightFormat | None, *, has_experts: bool) -> str | None:
    """Return the kernels' format for a checkpoint's numbers. Experts have no inputs in another order."""
    if stored is None:
        return None
    if has_experts and any(isinstance(each, Integers) and each.may_reorder for each in forms_of(stored)):
        return None
    return stored.quant


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


def _read_llmbox(raw: Config) -> WeightFormat:
    name = raw.get("format")
    require(name in FORMATS, f"weights of quant_method {METHOD!r} and format {name!r}")
    quant = QUANTS[str(name)]
    if raw.get("version") != version_of(quant):
        raise NotReadable(f"{name} weights of another version of llmbox: make them again (llmbox quantize)")
    dtypes, needed = ("I8", "U8"), ((f".weight{SCALE}",),)
    return NativeFormat(quant=quant.name, dtypes=dtypes, needed=needed, has_steps=quant.step > 0)


def _float8(name: str) -> WeightFormat:
    scales = tuple(f".weight{suffix}" for suffix in SCALES)
    given = (tuple(f".{suffix}" for suffix in INPUT_SCALES),) if QUANTS[name].kind == "given" else ()
    return NativeFormat(quant=name, dtypes=("F8_E4M3",), needed=(scales, *given))


def _group_of(raw: Config, *keys: str) -> int:
    value = next((raw[key] for key in keys if raw.get(key) is not None), 128)
    require(type(value) is int and (value == -1 or value > 0), f"group_size {value!r}")
    return 0 if value == -1 else int(value)


def _read_awq(raw: Config) -> WeightFormat:
    bits = raw.get("bits", raw.get("w_bit", 4))
    layout = str(raw.get("version", raw.get("format", "gemm"))).lower()
    require(bits == 4, f"AWQ weights of {bits!r} bits, only 4 are known")
    require(layout == "gemm", f"AWQ weights of version {layout!r}, only gemm is known")
    require(raw.get("zero_point", True) is True, "AWQ weights without zero points")
    return AwqFormat(bits=4, group=_group_of(raw, "group_size", "q_group_size"), is_symmetric=False)


def _read_gptq(raw: Config) -> WeightFormat:
    bits, layout = raw.get("bits"), raw.get("checkpoint_format") or raw.get("format") or "gptq"
    require(bits is not None, "GPTQ weights without `bits`")
    require(bits in _GPTQ_BITS, f"GPTQ weights of {bits!r} bits, only 2, 3, 4 and 8 are known")
    offsets = {"gptq": 1, "gptq_v2": 0}
    require(
        layout in list(offsets), f"GPTQ weights of checkpoint_format {layout!r}, known are gptq and gptq_v2"
    )
    require(raw.get("pack_dtype", "int32") == "int32", f"GPTQ weights in {raw.get('pack_dtype')!r} words")
    base = GptqFormat(
        bits=int(bits or 0),
        group=_group_of(raw, "group_size"),
        is_symmetric=raw.get("sym", True) is True,
        may_reorder=raw.get("desc_act") is True,
        zero_offset=offsets[layout],
    )
    return mix_formats([*_rules_by_layer(raw, "dynamic", base), FormatRule(base, is_default=True)])


def _rules_by_layer(raw: Config, key: str, base: GptqFormat) -> Iterator[FormatRule]:
    """Yield the rules that give layers other bits or groups. Those that leave layers out are passed over: the
    files tell. Names of `dynamic` are patterns, those of AutoRound names or patterns.
    """
    rules = raw.get(key) or {}
    require(isinstance(rules, dict), f"{key} that is not an object")
    for name, rule in rules.items():
        bits = rule.get("bits", base.bits) if isinstance(rule, dict) else base.bits
        if not isinstance(rule, dict) or name.startswith("-:") or (type(bits) is int and bits >= 16):
            continue
        require(bits in _GPTQ_BITS, f"weights of {bits!r} bits ({key}), only 2, 3, 4 and 8 are known")
        symmetric = rule.get("sym", base.is_symmetric) is True
        form = replace(
            base,
            bits=bits,
            group=_group_of(rule, "group_size") if rule.get("group_size") is not None else base.group,
            is_symmetric=symmetric,
            may_reorder=rule.get("desc_act", base.may_reorder) is True,
            zero_offset=base.zero_offset if symmetric == base.is_symmetric else None if symmetric else 1,
        )
        pattern = compile_pattern(name.removeprefix("+:"))
        yield FormatRule(form, frozenset({name}), (pattern,))


def _read_auto_round(raw: Config) -> WeightFormat:
    bits, kind = raw.get("bits"), raw.get("data_type", "int")
    layout = str(raw.get("packing_format", raw.get("backend", "auto_round:auto_gptq"))).lower()
    require(kind == "int", f"AutoRound weights of data_type {kind!r}")
    group, symmetric = _group_of(raw, "group_size"), raw.get("sym", True) is True
    if "awq" in layout:
        awq = _read_awq(raw)
        own = [rule for rule in (raw.get("extra_config") or {}).values() if isinstance(rule, dict)]
        kept = all(rule.get("bits", bits) in (bits, 16, 32) for rule in own)
        require(kept, "AWQ weights whose bits differ by layer (extra_config)")
        return awq
    require(bits is not None, "AutoRound weights without `bits`")
    require(bits in _GPTQ_BITS, f"AutoRound weights of {bits!r} bits, only 2, 3, 4 and 8 are known")
    known = "gptq" in layout or layout in {"auto_round", "auto_round:tritonv2"}
    require(known, f"AutoRound weights of packing_format {layout!r}")
    offset = None if symmetric else 1 if "gptq" in layout else 0
    base = GptqFormat(
        bits=int(bits or 0), group=group, is_symmetric=symmetric, zero_offset=offset, method="AutoRound"
    )
    return mix_formats([*_rules_by_layer(raw, "extra_config", base), FormatRule(base, is_default=True)])


def _read_compressed(raw: Config) -> WeightFormat:
    form, groups = raw.get("format"), raw.get("config_groups")
    found = list(groups.values()) if isinstance(groups, dict) else []
    schemes = [each.get("weights") for each in found if isinstance(each, dict)]
    if not found or len(schemes) < len(found) or not all(isinstance(each, dict) for each in schemes):
        return _float8(read_compressed(raw))
    if all(each["weights"].get("type") == "float" and each["weights"].get("num_bits") == 8 for each in found):
        return _float8(read_compressed(raw))
    sparsity = raw.get("sparsity_config") or {}
    require(isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense", "sparse weights")
    require(not raw.get("transform_config"), "weights that were transformed (transform_config)")
    return mix_formats(_compressed_rule(each, each.get("format") or form) for each in found)


def _compressed_rule(group: Config, form: Any) -> FormatRule:
    targets = group.get("targets") or ["Linear"]
    known = isinstance(targets, list) and all(isinstance(each, str) for each in targets)
    require(known, f"config_groups with targets {targets!r}")
    patterns = tuple(compile_pattern(each[3:]) for each in targets if each.startswith("re:"))
    names = frozenset(each for each in targets if not each.startswith("re:"))
    return FormatRule(_compressed_group(group, form), names - {"Linear"}, patterns, "Linear" in names)


def _compressed_group(group: Config, form: Any) -> WeightFormat:
    weights = group["weights"]
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    size = weights.get("group_size")
    require(not weights.get("dynamic"), "weights with dynamic scales")
    if (kind, bits) == ("float", 4):
        return _compressed_fp4(form, size)
    if (kind, bits) == ("float", 8):
        known = form in ("float-quantized", "naive-quantized") and strategy in ("tensor", "channel", "block")
        require(known, f"8-bit floats of format {form!r} and strategy {strategy!r}")
        if strategy == "block":
            read_schemes(weights, group.get("input_activations") or {})
        return Float8Format()
    require(
        kind == "int" and type(bits) is int and 2 <= bits <= 8, f"weights of {bits!r} bits, type {kind!r}"
    )
    require(strategy in ("group", "channel", "tensor"), f"weights of strategy {strategy!r}")
    inputs = 0
    if strategy == "group":
        require(type(size) is int and size > 0, f"weights with a group_size of {size!r}")
        inputs = int(size)
    symmetric = weights.get("symmetric", True) is True
    match form:
        case "pack-quantized":
            require(strategy != "tensor", "packed weights of strategy 'tensor'")
            reorders = weights.get("actorder") in (True, "group", "dynamic")
            return CompressedWords(bits=bits, group=inputs, is_symmetric=symmetric, may_reorder=reorders)
        case "int-quantized" | "naive-quantized":
            return CompressedBytes(bits=8, group=inputs, is_symmetric=symmetric)
    raise NotReadable(f"compressed-tensors of format {form!r}")


def _compressed_fp4(form: Any, size: Any) -> WeightFormat:
    match form:
        case "nvfp4-pack-quantized":
            require(size in (None, NV_GROUP), f"NVFP4 weights with a group_size of {size!r}")
            return NvFp4Format(
                method="compressed-tensors",
                main_suffix=".weight_packed",
                global_suffix=".weight_global_scale",
                divides=True,
            )
        case "mxfp4-pack-quantized":
            require(size in (None, MX_GROUP), f"MXFP4 weights with a group_size of {size!r}")
            return MxFp4Format(
                method="compressed-tensors", main_suffix=".weight_packed", scale_suffix=".weight_scale"
            )
    raise NotReadable(f"compressed-tensors of format {form!r}")


def _read_bitsandbytes(raw: Config) -> WeightFormat:
    if raw.get("load_in_8bit") or raw.get("_load_in_8bit"):
        return Bnb8Format()
    kind = raw.get("bnb_4bit_quant_type", "fp4")
    require(kind in ("nf4", "fp4"), f"bitsandbytes weights of bnb_4bit_quant_type {kind!r}")
    return Bnb4Format(kind=str(kind))


def _read_quark(raw: Config) -> WeightFormat:
    whole = raw.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, dict) else None
    require(isinstance(weight, dict), "quark weights without a global_quant_config")
    assert isinstance(weight, dict)
    require(not raw.get("layer_quant_config"), "quark weights whose format differs by layer")
    kind = weight.get("dtype"), weight.get("group_size"), weight.get("scale_format")
    known = kind == ("fp4", MX_GROUP, "e8m0")
    require(known, f"quark weights of dtype {kind[0]!r}, only fp4 in groups of 32 (MXFP4) is known")
    return MxFp4Format(method="quark", main_suffix=".weight", scale_suffix=".weight_scale")


def _read_hqq(raw: Config) -> WeightFormat:
    rule = raw.get("quant_config")
    weights = rule.get("weight_quant_params") if isinstance(rule, dict) else None
    require(isinstance(weights, dict), "HQQ weights whose format differs by layer, or is not said")
    assert isinstance(weights, dict)
    assert isinstance(rule, dict)
    bits, size, axis = weights.get("nbits"), weights.get("group_size"), weights.get("axis")
    require(
        type(bits) is int and bits in HQQ_PACKED,
        f"HQQ weights of {bits!r} bits, only 1, 2, 3, 4 and 8 are known",
    )
    require(size is None or (type(size) is int and size > 0), f"HQQ weights with a group_size of {size!r}")
    require(axis in (0, 1), f"HQQ weights of axis {axis!r}")
    require(axis == 1 or size is not None, "HQQ weights of axis 0 without a group_size")
    require(not weights.get("view_as_float"), "HQQ weights that are stored as floats (view_as_float)")
    scales = rule.get("scale_quant_params") or rule.get("zero_quant_params")
    require(not scales, "HQQ weights with quantized scales or zeros")
    return HqqFormat(bits=int(bits or 0), group=size or 0, is_symmetric=False, axis=int(axis or 0))


def _read_modelopt(raw: Config) -> WeightFormat:
    if raw.get("quant_algo") != "NVFP4":
        return _float8(read_modelopt(raw))
    size = raw.get("group_size", NV_GROUP)
    require(size == NV_GROUP, f"NVFP4 weights with a group_size of {size!r}")
    return NvFp4Format(
        method="modelopt", main_suffix=".weight", global_suffix=".weight_scale_2", divides=False
    )


def _read_gguf(raw: Config) -> WeightFormat:
    types, sizes = raw.get("types"), raw.get("bytes_per_weight")
    known = {*GGUF_QUANTS, *GGUF_DEQUANTIZED}
    is_known = isinstance(types, list) and all(each in known for each in types) and isinstance(sizes, dict)
    require(is_known, f"GGUF blocks of types {types!r}")
    assert isinstance(types, list)
    assert isinstance(sizes, dict)
    found = [sizes.get(name) for name in ("layers", "head", "table")]
    unit = raw.get("unit")
    numbers = [each for each in found if isinstance(each, int | float) and 0 < each <= 4]
    require(len(numbers) == 3 and type(unit) is int and unit in (32, 256), f"GGUF blocks of {found!r} bytes")
    layers, head, table = map(float, numbers)
    wide = not GGUF_DEQUANTIZED.isdisjoint(types)
    blocks = BlockSizes(layers=layers, head=head, table=table, unit=int(unit or 0), has_dequantized=wide)
    return GgufFormat(blocks, tuple(map(str, types)))


READERS: Final[Mapping[str, Callable[[Config], WeightFormat]]] = {
    METHOD: _read_llmbox,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "intel/auto-round": _read_auto_round,
    "compressed-tensors": _read_compressed,
    "bitsandbytes": _read_bitsandbytes,
    "mxfp4": lambda _raw: MxFp4Format(
        method="gpt-oss", main_suffix="_blocks", scale_suffix="_scales", is_blocked=True
    ),
    "quark": _read_quark,
    "torchao": read_torchao,
    "eetq": read_eetq,
    "bitnet": read_bitnet,
    "hqq": _read_hqq,
    "fp8": lambda raw: _float8(read_fp8(raw)),
    "fbgemm_fp8": lambda _raw: _float8(DYNAMIC),
    "modelopt": _read_modelopt,
    "gguf": _read_gguf,
}
