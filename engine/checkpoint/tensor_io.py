"""Conversion between bytes of a checkpoint's files and tensors, without numpy, which is not a dependency.

The writer of safetensors checkpoints makes shards of a few gigabytes with an index, in an atomic directory.
"""

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ..errors import ModelError
from .index import INDEX, SINGLE
from .safetensors import FETCH_AGAIN, ShardSlice, TensorEntry, shown

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


SHARD_BYTES: Final = 2 << 30
_NAMES: Final = {dtype: name for name, dtype in (ROUNDED_DTYPES | DTYPES).items() if name != "F8_E8M0"}


class ShardWriter:
    """Write tensors into shards as they arrive; at most one shard is held in memory."""

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, name_of: Callable[[str], str] = str
    ) -> None:
        """`name_of`: name in the files of a tensor that is added."""
        self._folder = folder
        self._name_of = name_of
        self._most = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors that must be in the same file, as quantized weights and their scales."""
        have = sum(each.nbytes for each in self._tensors.values())
        more = sum(each.nbytes for each in tensors.values())
        if self._tensors and have + more > self._most:
            self._write()
        self._tensors |= {self._name_of(name): tensor.contiguous() for name, tensor in tensors.items()}
        self._total += more

    def finish(self) -> None:
        """Write the last shard, give the files their final names and write the index."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        write_file(self._tensors, self._part(len(self._shards)))
        self._shards.append(list(self._tensors))
        self._tensors = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def write_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors as one safetensors file. The package's `save_file` needs numpy, which is no
    dependency.
    """
    # Largest elements first, and a header of whole words, so that each tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        dtype = _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _name, tensor in ordered:
            stream.write(bytes_of(tensor))


def require_free_space(folder: Path, need: int) -> None:
    """Raise ModelError if the file system where `folder` is or will be has less than `need` bytes free."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < need:
        why = f"{free / 1e9:.1f} GB free, {need / 1e9:.1f} GB are needed"
        raise ModelError(f"{folder} has {why}: free some space, or take another folder")


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Create the directory `out` atomically: yield a temporary sibling to fill, fsync it, rename it into
    place.

    `out` must not exist or must be empty. Raises ModelError and OSError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists already: choose another place with --out")
    part = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        part.mkdir(parents=True)
        yield part
        fsync_tree(part)
        if out.is_dir():
            out.rmdir()
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def fsync_tree(folder: Path) -> None:
    """Fsync a directory and everything in it: a rename does not guarantee that earlier writes are on disk."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
