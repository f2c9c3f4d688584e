"""Formats of torchao, as its safetensors serialization writes them.

- `Int8Tensor` and `IntxUnpackedToInt8Tensor`: ._weight_qdata I8 [O, I], ._weight_scale [O, I/g] and
  ._weight_zero_point I8 [O, I/g].
- `Int4Tensor`: ._weight_qdata I8 [O, I/2] of signed halves, the low one first; ._weight_scale and
  ._weight_zero_point [I/g, O]. A weight is n * scale + zero_point.
- `Int4TilePackedTo4dTensor`: ._weight_qdata I32 [O/8, I/128, 32, 4], inputs padded to 1024 and outputs to 8;
  ._weight_scale_and_zero [I/g, O, 2]. A weight is (n - 8) * scale + zero.

No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..safetensors import TensorEntry
from .integers import Integers
from .weight_format import HALVES, StoredTensor, WeightFormat, require

Config = Mapping[str, Any]
QDATA, SCALE, ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
SCALE_AND_ZERO = "._weight_scale_and_zero"
TILE_INPUTS, TILE_OUTPUTS, PADDED_INPUTS = 128, 8, 1024
"""Inputs and outputs of a tile of `Int4TilePackedTo4dTensor`, and what inputs are padded to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAoBytes(Integers):
    """A number a byte. Activations are quantized as kernels do it."""

    suffix = QDATA

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        shapes: tuple[tuple[int, ...], ...] = ((outputs, self.groups(inputs)),)
        if not self.group:
            shapes += ((outputs,), (1, 1), (1,), ())
        return (
            StoredTensor(SCALE, HALVES, shapes),
            StoredTensor(ZERO, ("I8",), shapes, is_optional=self.is_symmetric),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAoInt4(Integers):
    method: str = "torchao int4"
    suffix, dtypes, float_zeros = QDATA, ("I8", "U8"), True

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, inputs // 2

    def size_of(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, 2 * columns

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        shapes = ((self.groups(inputs), outputs),)
        return StoredTensor(SCALE, HALVES, shapes), StoredTensor(ZERO, HALVES, shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAoTiles(Integers):
    method: str = "torchao int4 in tiles"
    suffix, dtypes, float_zeros = QDATA, ("I32",), True

    def padded(self, outputs: int, inputs: int) -> tuple[int, int]:
        return -(-outputs // TILE_OUTPUTS) * TILE_OUTPUTS, -(-inputs // PADDED_INPUTS) * PADDED_INPUTS

    def main_shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        rows, columns = self.padded(outputs, inputs)
        return rows // TILE_OUTPUTS, columns // TILE_INPUTS, 32, 4

    def size(self, entry: TensorEntry) -> tuple[int, int] | None:
        """Return the padded size, which has the same tensors."""
        return (
            (entry.shape[0] * TILE_OUTPUTS, entry.shape[1] * TILE_INPUTS) if len(entry.shape) == 4 else None
        )

    def tensors(self, outputs: int, inputs: int) -> tuple[StoredTensor, ...]:
        rows, columns = self.padded(outputs, inputs)
        return (StoredTensor(SCALE_AND_ZERO, HALVES, ((columns // self.group, rows, 2),)),)


def read_torchao(raw: Config) -> WeightFormat:
    """Return the format of `quant_method: torchao`. Raises NotReadable."""
    told = raw.get("quant_type")
    rule = told.get("default") if isinstance(told, dict) else told
    name, data = (rule.get("_type"), rule.get("_data")) if isinstance(rule, dict) else (rule, {})
    read = _READERS.get(str(name))
    known = ", ".join(_READERS)
    require(read is not None, f"torchao weights of quant_type {name!r}, only {known} are known")
    assert read is not None
    return read(data if isinstance(data, dict) else {})


def _read_int8(data: Config) -> WeightFormat:
    size = data.get("group_size")
    granularity = data.get("granularity") or {}
    if isinstance(granularity, list):
        granularity = granularity[-1] if granularity else {}
    return TorchAoBytes(method="torchao int8", bits=8, group=_group(granularity, size), is_symmetric=True)


def _read_intx(data: Config) -> WeightFormat:
    told = data.get("weight_dtype")
    bits = str(told.get("_data") if isinstance(told, dict) else told).removeprefix("int")
    require(bits in set("2345678"), f"torchao weights of weight_dtype {told!r}, only int2 to int8 are known")
    packing = _name_of(data.get("intx_packing_format"), "UNPACKED_TO_INT8")
    require(packing == "UNPACKED_TO_INT8", f"torchao weights of intx_packing_format {packing!r}")
    group = _group(data.get("granularity") or data.get("weight_granularity") or {}, None)
    mapping = _name_of(data.get("mapping_type") or data.get("weight_mapping_type"), "SYMMETRIC")
    symmetric = mapping != "ASYMMETRIC"
    return TorchAoBytes(method=f"torchao int{bits}", bits=int(bits), group=group, is_symmetric=symmetric)


def _read_int4(data: Config) -> WeightFormat:
    size = data.get("group_size", 128)
    require(size in (32, 64, 128, 256), f"torchao int4 weights with a group_size of {size!r}")
    packing = str(_name_of(data.get("int4_packing_format"), "PLAIN")).upper()
    tiles = data.get("int4_tile_packed_ntile", TILE_OUTPUTS)
    if packing == "PLAIN":
        return TorchAoInt4(bits=4, group=int(size), is_symmetric=False)
    require(packing == "TILE_PACKED_TO_4D", f"torchao int4 weights of int4_packing_format {packing!r}")
    require(tiles == TILE_OUTPUTS, f"torchao int4 weights in tiles of {tiles!r} outputs, only 8 are known")
    return TorchAoTiles(bits=4, group=int(size), is_symmetric=False)


def _name_of(told: Any, default: str) -> Any:
    """Return the value of an enumeration, as torchao writes it."""
    return default if told is None else told.get("_data") if isinstance(told, dict) else told


def _group(granularity: Any, size: Any) -> int:
    """Return the inputs that share a scale; 0: all of them."""
    name = granularity.get("_type") if isinstance(granularity, dict) else granularity
    data = granularity.get("_data") if isinstance(granularity, dict) else None
    if name == "PerGroup":
        size = data.get("group_size") if isinstance(data, dict) else None
        require(type(size) is int and size > 0, f"torchao weights with a group_size of {size!r}")
    else:
        known = name in (None, "PerRow", "PerTensor", "PerAxis")
        require(known, f"torchao weights of granularity {name!r}")
    require(
        size is None or (type(size) is int and size > 0), f"torchao weights with a group_size of {size!r}"
    )
    return int(size or 0)


_READERS: Final = {
    "Int8WeightOnlyConfig": _read_int8,
    "Int8DynamicActivationInt8WeightConfig": _read_int8,
    "IntxWeightOnlyConfig": _read_intx,
    "Int8DynamicActivationIntxWeightConfig": _read_intx,
    "Int4WeightOnlyConfig": _read_int4,
}
