"""Conversion between bytes of a checkpoint's files and tensors, without numpy, which is no dependency."""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ModelError
from ..partition import ShardSlice
from .safetensors import FETCH_AGAIN, TensorEntry, shown

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ROUNDED_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
}
"""Dtypes of quantized tensors, which need scales."""
READ_CHUNK = 64 << 20


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor. The tensor must outlive the view."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def byte_runs(
    entry: TensorEntry, parts: tuple[ShardSlice, ...]
) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    """Return the (offset, bytes) ranges of a shard inside a tensor's data, contiguous ones of at most
    READ_CHUNK bytes, and the shard's shape. `parts`: slice of each dimension.
    """
    shape = tuple(part.stop - part.start for part in parts)
    size = entry.nbytes // math.prod(entry.shape)
    rows, *columns = parts
    if not all(part.is_whole for part in columns):
        (column,) = columns
        width = column.total * size
        length = shape[1] * size
        starts = range(rows.start * width + column.start * size, rows.stop * width, width)
        return [(start, length) for start in starts], shape
    width = math.prod(part.total for part in columns) * size
    first, last = rows.start * width, rows.stop * width
    return [(start, min(READ_CHUNK, last - start)) for start in range(first, last, READ_CHUNK)], shape


def read_fully(readinto: Callable[[memoryview], int | None], view: memoryview, entry: TensorEntry) -> None:
    while view:
        count = readinto(view)
        if not count:
            raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is cut short; {FETCH_AGAIN}")
        view = view[count:]


def refuse_non_finite(tensor: Tensor, entry: TensorEntry, place: str) -> None:
    if tensor.dtype == torch.float8_e4m3fn:  # NaN has all bits but the sign set; there is no infinity
        tensor = torch.where((tensor.view(torch.uint8) & 127) == 127, torch.nan, 0.0)
    if tensor.numel() and not all(torch.isfinite(x) for x in torch.aminmax(tensor)):
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} holds NaN or infinity{place or '; ' + FETCH_AGAIN}"
        )


def split_rows(entry: TensorEntry, parts: Mapping[str, int]) -> dict[str, TensorEntry]:
    """Split a stacked tensor into `parts`, {name: rows of the linear}. Block scales are split between blocks;
    a single scale is shared by all parts. Raises ModelError.
    """
    if entry.shape in ((), (1,), (1, 1)):
        return dict.fromkeys(parts, entry)
    total, rows = sum(parts.values()), entry.shape[0]
    if entry.is_transposed and total == rows:
        return _split_columns(entry, parts)
    found, first = {}, 0
    for name, size in parts.items():
        have, rest = divmod(size * rows, total)
        if rest:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} of shape {list(entry.shape)} cannot be cut into "
                f"parts of {', '.join(map(str, parts.values()))} rows, as config.json has them"
            )
        nbytes = entry.nbytes // rows
        shape = (have, *entry.shape[1:])
        found[name] = replace(entry, shape=shape, offset=entry.offset + first * nbytes, nbytes=have * nbytes)
        first += have
    return found


def _split_columns(entry: TensorEntry, parts: Mapping[str, int]) -> dict[str, TensorEntry]:
    found, first = {}, 0
    for name, size in parts.items():
        shape, nbytes = (size, *entry.shape[1:]), entry.nbytes * size // entry.shape[0]
        found[name] = replace(entry, shape=shape, columns=(first, entry.shape[0]), nbytes=nbytes)
        first += size
    return found


def split_stack(entry: TensorEntry, names: Sequence[str], *, transposed: bool) -> dict[str, TensorEntry]:
    """Split a tensor of all experts into one of each. `transposed`: they are [inputs, outputs]. Raises
    ModelError.
    """
    if entry.shape[:1] != (len(names),):
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} of shape {list(entry.shape)} is not one of "
            f"{len(names)} experts, as config.json has them"
        )
    shape, nbytes = entry.shape[1:], entry.nbytes // len(names)
    return {
        name: replace(
            entry,
            shape=shape[::-1] if transposed else shape,
            offset=entry.offset + number * nbytes,
            nbytes=nbytes,
            is_transposed=transposed,
        )
        for number, name in enumerate(names)
    }
