"""Formats of small floats: MXFP4, NVFP4, and those of bitsandbytes.

Four bits are E2M1, a float of 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with its sign, low half of a byte first:

    gpt-oss       _blocks U8 [O, I/32, 16], _scales U8 [O, I/32]: 2^(scale - 127) for 32 inputs (MXFP4)
    compressed    .weight_packed U8 [O, I/2], .weight_scale U8 [O, I/32] (MXFP4)
                  or .weight_scale F8_E4M3 [O, I/16], divided by .weight_global_scale (NVFP4)
    quark         .weight U8 [O, I/2], .weight_scale U8 [O, I/32] (MXFP4)
    modelopt      .weight U8 [O, I/2], .weight_scale F8_E4M3 [O, I/16], times .weight_scale_2 (NVFP4)
    bitsandbytes  .weight U8 [O*I/2, 1], high half first: places in .weight.quant_map, times .weight.absmax of
                  a block of inputs, which may be places of another table; or .weight I8 [O, I] times .SCB/127

No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..safetensors import TensorEntry
from .weight_format import HALVES, StoredTensor, WeightFormat

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
