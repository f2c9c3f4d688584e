"""Formats of small floats: FP8, MXFP4, NVFP4, and those of bitsandbytes.

Four bits are E2M1, a float of 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with its sign, low half of a byte first:

    gpt-oss       _blocks U8 [O, I/32, 16], _scales U8 [O, I/32]: 2^(scale - 127) for 32 inputs (MXFP4)
    compressed    .weight_packed U8 [O, I/2], .weight_scale U8 [O, I/32] (MXFP4)
                  or .weight_scale F8_E4M3 [O, I/16], divided by .weight_global_scale (NVFP4)
    quark         .weight U8 [O, I/2], .weight_scale U8 [O, I/32] (MXFP4)
    modelopt      .weight U8 [O, I/2], .weight_scale F8_E4M3 [O, I/16], times .weight_scale_2 (NVFP4)
    bitsandbytes  .weight U8 [O*I/2, 1], high half first: places in .weight.quant_map, times .weight.absmax of
                  a block of inputs, which may be places of another table; or .weight I8 [O, I] times .SCB/127

Names and shapes of FP8's scales are in `quantized_layout.py`. Linears that stay unquantized, such as some
layers' `down_proj`, are listed as names, parts of names, globs or regular expressions, and every tool matches
these in its own way. So the lists are ignored, and these linears are detected by the stored tensors, which no
list can contradict.

No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..safetensors import TensorEntry
from .weight_format import HALVES, StoredTensor, WeightFormat, require

MX_GROUP, NV_GROUP, FP8_BLOCK = 32, 16, 128
MAX_EXPERTS = 1024
"""Most experts of a layer, as in `model_config/moe.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MxFp4Format:
    """E2M1 with a power of two for 32 inputs."""

    method: str
    main_suffix: str
    scale_suffix: str
    is_blocked: bool = False
    """True if the bytes of 32 inputs have a dimension of their own."""

    quant: str = "mxfp4"

    @property
    def label(self) -> str:
        return f"MXFP4 ({self.method})"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(self.main_suffix, ("U8",))

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return (outputs, inputs // MX_GROUP, MX_GROUP // 2) if self.is_blocked else (outputs, inputs // 2)

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        if self.is_blocked:
            return (entry.shape[0], entry.shape[1] * MX_GROUP) if len(entry.shape) == 3 else None
        return (entry.shape[0], entry.shape[1] * 2) if len(entry.shape) == 2 else None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        shapes = ((outputs, -(-inputs // MX_GROUP)),)
        return (StoredTensor(self.scale_suffix, ("U8", "F8_E8M0"), shapes),)


def split_experts(form: WeightFormat, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Split the tensors of gpt-oss, which hold all experts of a layer, into those of one expert each:
    `experts.gate_up_proj_blocks` becomes `experts.0.gate_up_proj_blocks` and so on,
    `experts.gate_up_proj_bias` becomes `experts.0.gate_up_proj.bias`.
    """
    found = dict(entries)
    if not isinstance(form, MxFp4Format) or not form.is_blocked:
        return found
    for name, entry in entries.items():
        linear = name.removesuffix(form.main_suffix)
        if linear == name or len(entry.shape) != 4 or not entry.nbytes or entry.shape[0] > MAX_EXPERTS:
            continue
        module, _, last = linear.rpartition(".")
        for suffix, end in ((form.main_suffix,) * 2, (form.scale_suffix,) * 2, ("_bias", ".bias")):
            stack = found.get(linear + suffix)
            if stack is None or not stack.shape or stack.shape[0] != entry.shape[0]:
                continue
            del found[linear + suffix]
            nbytes = stack.nbytes // stack.shape[0]
            for expert in range(stack.shape[0]):
                offset = stack.offset + expert * nbytes
                part = replace(stack, shape=stack.shape[1:], offset=offset, nbytes=nbytes)
                found[f"{module}.{expert}.{last}{end}"] = part
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class NvFp4Format:
    """E2M1 with an E4M3 scale for 16 inputs and one float32 scale of the tensor."""

    method: str
    main_suffix: str
    global_suffix: str
    divides: bool
    """True if weights are divided by the tensor's scale."""

    quant: None = None

    @property
    def label(self) -> str:
        return f"NVFP4 ({self.method})"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(self.main_suffix, ("U8",))

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, inputs // 2

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        return (entry.shape[0], entry.shape[1] * 2) if len(entry.shape) == 2 else None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        optional = (".input_global_scale", ".input_scale")
        return (
            StoredTensor(".weight_scale", ("F8_E4M3",), ((outputs, -(-inputs // NV_GROUP)),)),
            StoredTensor(self.global_suffix, ("F32",), ((), (1,))),
            *(StoredTensor(end, HALVES, is_optional=True) for end in optional),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Format:
    """E4M3 beside linears of other formats, as compressed-tensors writes it (else `NativeFormat`)."""

    quant: None = None

    @property
    def label(self) -> str:
        return "compressed-tensors FP8"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(".weight", ("F8_E4M3",))

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, inputs

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        return (entry.shape[0], entry.shape[1]) if len(entry.shape) == 2 else None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        blocks = (-(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK))
        shapes = ((outputs, 1), (outputs,), (1, 1), (1,), (), blocks)
        return (
            StoredTensor(".weight_scale", HALVES, shapes),
            StoredTensor(".input_scale", HALVES, is_optional=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb4Format:
    """bitsandbytes NF4 and FP4."""

    kind: str
    """`nf4` or `fp4`."""

    quant: None = None

    @property
    def label(self) -> str:
        return f"bitsandbytes {self.kind.upper()}"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(".weight.absmax", ("F32", "U8"))

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:  # noqa: ARG002
        return ()

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:  # noqa: ARG002
        return None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:  # noqa: ARG002
        return (
            StoredTensor(".weight", ("U8",)),
            StoredTensor(".weight.quant_map", ("F32",)),
            StoredTensor(f".weight.quant_state.bitsandbytes__{self.kind}", ("U8",)),
            StoredTensor(".weight.nested_absmax", ("F32",), is_optional=True),
            StoredTensor(".weight.nested_quant_map", ("F32",), is_optional=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bnb8Format:
    """bitsandbytes int8: SCB / 127 is the scale of an output. Outliers of activations stay in the product."""

    quant: str = "w8a16-g128"

    @property
    def label(self) -> str:
        return "bitsandbytes int8"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(".SCB", ("F32",))

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:  # noqa: ARG002
        return (outputs,)

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:  # noqa: ARG002
        return None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        return (
            StoredTensor(".weight", ("I8",), ((outputs, inputs),)),
            StoredTensor(".weight_format", ("U8",), is_optional=True),
        )


DYNAMIC, STATIC, BLOCKS = "fp8-dynamic", "fp8-static", "fp8-block"
SIZE = [128, 128]


def read_fp8(raw: Mapping[str, Any]) -> str:
    """Return the format of `quant_method: fp8`. Raises NotReadable."""
    size, scheme = raw.get("weight_block_size"), raw.get("activation_scheme", "dynamic")
    require(raw.get("fmt", "e4m3") == "e4m3", f"8-bit floats of fmt {raw.get('fmt')!r}, only e4m3 is known")
    require(scheme in ("dynamic", "static"), f"activation_scheme {scheme!r}, known are dynamic and static")
    if size is None:
        return DYNAMIC if scheme == "dynamic" else STATIC
    require(size == SIZE, f"weight_block_size {size!r}, only blocks of 128 x 128 are known")
    require(scheme == "dynamic", "blocks of 128 x 128 with static activations, only dynamic ones are known")
    return BLOCKS


def read_modelopt(raw: Mapping[str, Any]) -> str:
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


def modelopt_entry(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Convert an hf_quant_config.json to a config.json entry. None if only the KV cache is quantized."""
    section = raw.get("quantization")
    require(isinstance(section, dict), "hf_quant_config.json without an object `quantization`")
    assert isinstance(section, dict)
    return None if section.get("quant_algo") is None else {"quant_method": "modelopt", **section}


def read_compressed(raw: Mapping[str, Any]) -> str:
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


def read_group(group: Mapping[str, Any], form: Any) -> str:
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


def read_schemes(weights: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
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
