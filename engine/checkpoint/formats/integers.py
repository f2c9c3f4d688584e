"""Integer formats: AWQ, GPTQ, AutoRound, compressed-tensors, EETQ, BitNet and HQQ.

A weight is scale * (q - zero), with a scale, and perhaps a zero point, for each output and group of inputs:

    AWQ (gemm)    .qweight I32 [I, O/8], .qzeros I32 [I/g, O/8], .scales [I/g, O]: eight outputs a word, in
                  the order 0 2 4 6 1 3 5 7
    GPTQ          .qweight I32 [I*bits/32, O], .qzeros I32 [I/g, O*bits/32], .scales [I/g, O], .g_idx I32 [I]:
                  bits of inputs one after the other. Version 1 stores zero - 1. g_idx is the group of each
                  input, in any order after act-order
    compressed    .weight_packed I32 [O, I*bits/32], .weight_scale [O, I/g], .weight_zero_point I32
                  [O*bits/32, I/g], .weight_shape, .weight_g_idx: q and zero plus half their range
                  or .weight I8 [O, I] with .weight_scale and .weight_zero_point I8 of any of these shapes
    EETQ          .weight I8 [I, O], .weight_scales [O]; the numbers are in an order of their own
                  (`decode_eetq`)
    BitNet        .weight U8 [O/4, I], .weight_scale [1]: q from 0 to 2, of outputs a quarter of all apart,
                  the first in the lowest two bits; zero is 1
    HQQ           .W_q U8 of 8, 4, 2 or 1 bits, or I32 of ten of 3 bits; .scale and .zero, which is no
                  integer. Weights are [O*I/g, g] (axis 1) or [g, O*I/g] (axis 0), and a byte holds numbers of
                  rows that are far apart, the first in the highest bits

No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Final

from ..safetensors import TensorEntry
from .weight_format import HALVES, StoredTensor, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Integers:
    """Bits, groups and zeros that all integer formats have. Where a format says nothing else, its main tensor
    has a number a byte, [O, I].
    """

    suffix: ClassVar[str] = ".weight"
    dtypes: ClassVar[tuple[str, ...]] = ("I8",)
    """End of the name and dtypes of the main tensor."""
    float_zeros: ClassVar[bool] = False
    """True if zero points are floats: no kernel has such numbers."""
    method: str
    """Name of the format for the user."""
    bits: int
    group: int
    """Inputs that share a scale; 0: all of them."""
    is_symmetric: bool
    may_reorder: bool = False
    """True if groups may be of inputs anywhere in a row (act-order)."""

    def groups(self, inputs: int) -> int:
        return -(-inputs // self.group) if self.group else 1

    @property
    def label(self) -> str:
        zeros = "" if self.is_symmetric else " with zeros"
        groups = f"groups of {self.group}" if self.group else "one scale an output"
        return f"{self.method} ({self.bits}-bit, {groups}{zeros})"

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(self.suffix, self.dtypes)

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, inputs

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        return self.size_of(*entry.shape) if len(entry.shape) == 2 else None

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Return O and I by the shape of the main tensor."""
        return rows, columns

    @property
    def quant(self) -> str | None:
        """Numbers q - zero fit 4 bits beside their zero, or 8 bits, in groups of the kernels or several."""
        if self.float_zeros:
            return None
        if not self.group or self.group % 128 == 0:
            size = 128
        elif self.group % 32 == 0:
            size = 32
        else:
            return None
        if self.bits <= 4:
            return f"w4a16-g{size}" + ("-zp" if self.bits == 4 and not self.is_symmetric else "")
        return f"w8a16-g{size}" if self.is_symmetric or self.bits < 8 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat(Integers):
    method: str = "AWQ"
    suffix, dtypes = ".qweight", ("I32",)

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return inputs, outputs // 8

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        return columns * 8, rows

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups = self.groups(inputs)
        return (
            StoredTensor(".qzeros", ("I32",), ((groups, outputs // 8),)),
            StoredTensor(".scales", HALVES, ((groups, outputs),)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat(Integers):
    suffix, dtypes = ".qweight", ("I32",)
    method: str = "GPTQ"
    zero_offset: int | None = 1
    """Offset added to a stored zero; None: 1 or 0, whichever gives the middle of the range."""

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return -(-inputs * self.bits // 32), outputs

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows * 32 // self.bits

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups = self.groups(inputs)
        return (
            StoredTensor(".qzeros", ("I32",), ((groups, -(-outputs * self.bits // 32)),)),
            StoredTensor(".scales", HALVES, ((groups, outputs),)),
            StoredTensor(".g_idx", ("I32",), ((inputs,),), is_optional=True),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedWords(Integers):
    """compressed-tensors `pack-quantized`."""

    method: str = "compressed-tensors"
    suffix, dtypes = ".weight_packed", ("I32",)

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, -(-inputs * self.bits // 32)

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns * 32 // self.bits

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        groups = self.groups(inputs)
        zeros = StoredTensor(".weight_zero_point", ("I32",), ((-(-outputs * self.bits // 32), groups),))
        return (
            StoredTensor(".weight_scale", HALVES, ((outputs, groups),)),
            StoredTensor(".weight_shape", ("I64", "I32"), ((2,),), is_optional=True),
            StoredTensor(".weight_g_idx", ("I32",), ((inputs,),), is_optional=True),
            *(() if self.is_symmetric else (zeros,)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedBytes(Integers):
    """compressed-tensors `int-quantized`: an int8 a weight. Activations are quantized as kernels do it."""

    method: str = "compressed-tensors int8"

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        return (entry.shape[0], prod(entry.shape[1:])) if entry.shape else None

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        shapes: tuple[tuple[int, ...], ...] = ((outputs, self.groups(inputs)),)
        if not self.group:
            shapes += ((outputs,), (1,), (1, 1), ())
        optional = (".input_scale", ".input_zero_point")
        return (
            StoredTensor(".weight_scale", HALVES, shapes),
            StoredTensor(".weight_zero_point", ("I8",), shapes, is_optional=self.is_symmetric),
            *(StoredTensor(end, (*HALVES, "I8"), is_optional=True) for end in optional),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EetqFormat(Integers):
    """Int8 with one scale an output, in the order of a GPU's matrix instructions."""

    method: str = "EETQ"

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return inputs, outputs

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        return columns, rows

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:  # noqa: ARG002
        return (StoredTensor(".weight_scales", HALVES, ((outputs,), (1, outputs))),)


BITNET_PACKED: Final = 4
"""Weights of a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BitNetFormat(Integers):
    """Weights of -1, 0 and 1, and one scale for all of a linear."""

    method: str = "BitNet"
    dtypes = ("U8",)
    divides: bool
    """True if weights are divided by the scale."""

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return -(-outputs // BITNET_PACKED), inputs

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        return rows * BITNET_PACKED, columns

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:  # noqa: ARG002
        return (StoredTensor(".weight_scale", HALVES, ((1,), (1, 1), ())),)


HQQ_PACKED: Final = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""Numbers of so many bits that HQQ packs into a byte, or into 32 bits."""
_HQQ_TOLD: Final = (
    *("nbits", "group_size", "axis", "shape", "packing", "unpack_view_dtype", "view_as_float"),
    *("compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise"),
    *("optimize", "round_zero", "quant_scale", "quant_zero"),
)
"""Tensors of HQQ that repeat what config.json says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HqqFormat(Integers):
    method: str = "HQQ"
    float_zeros = True
    axis: int

    @property
    def main(self) -> StoredTensor:
        return StoredTensor(".W_q", ("I32",) if self.bits == 3 else ("U8",))

    def rows(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the grouped weights."""
        group = self.group or inputs
        return (outputs * inputs // group, group) if self.axis else (group, outputs * inputs // group)

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        rows, columns = self.rows(outputs, inputs)
        return -(-rows // HQQ_PACKED[self.bits]), columns

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        """Return a size of as many weights, which has the same scales and zeros; 3 bits have padding."""
        count = prod(entry.shape) * HQQ_PACKED[self.bits]
        if not self.group or self.bits == 3 or count % self.group:
            return None
        return count // self.group, self.group

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        rows, columns = self.rows(outputs, inputs)
        shapes = ((rows, 1) if self.axis else (1, columns),)
        dtypes = (*HALVES, "U8", "I32", "I64")
        return (
            StoredTensor(".scale", HALVES, shapes),
            StoredTensor(".zero", HALVES, shapes),
            *(StoredTensor(f".{name}", dtypes, is_optional=True) for name in _HQQ_TOLD),
        )


def read_bitnet(raw: Mapping[str, Any]) -> BitNetFormat:
    """Return the format of a `quantization_config` of `bitnet`. Raises NotReadable."""
    mode, kind = raw.get("quantization_mode", "offline"), raw.get("linear_class", "bitlinear")
    require(mode == "offline", f"BitNet weights of quantization_mode {mode!r}, only offline is known")
    require(kind in ("bitlinear", "autobitlinear"), f"BitNet weights of linear_class {kind!r}")
    require(not raw.get("use_rms_norm"), "BitNet weights whose linears have norms (use_rms_norm)")
    return BitNetFormat(bits=2, group=0, is_symmetric=True, divides=kind == "bitlinear")


def read_eetq(raw: Mapping[str, Any]) -> EetqFormat:
    kind = raw.get("weights", "int8")
    require(kind == "int8", f"EETQ weights of {kind!r}, only int8 is known")
    return EetqFormat(bits=8, group=0, is_symmetric=True)
