"""Header of a safetensors file, parsed and fully validated, and slices of its tensors.

Layout: 8 bytes little-endian length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
Files are read and never mapped: one that shrinks later causes an error message and not a SIGBUS.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from ..errors import ModelError
from .files import open_regular, parse_json
from .quantized_layout import STORED_BYTES

FETCH_AGAIN = "the file is damaged or its download was cut short: download it again"
MAX_HEADER = 100_000_000
"""Maximum header size in bytes, as the format defines it."""
MAX_TENSORS = 1 << 18
"""Most tensors of one file. A shard of a mixture of 384 experts has some thousand."""
MAX_DIMENSIONS = 16
"""Most dimensions of a tensor: the product of a million large ones would take hours."""
SUPPORTED = {"BF16": 2, "F16": 2, "F32": 4}
SIZES = SUPPORTED | STORED_BYTES
"""Bytes of one element."""
UNREAD_MASK = "t2d"
"""Mask of an EAGLE-3 head, which says no more than its `d2t` and is not read."""
CAUSAL_MASKS = tuple(
    f".{module}.{name}" for module in ("attention", "attn") for name in ("bias", "masked_bias")
)
"""Ends of the names of masks that older checkpoints store."""
_MASKS = (UNREAD_MASK, *CAUSAL_MASKS)
_MASK_SIZES = SIZES | {"BOOL": 1}
OTHER_DTYPES = {
    "BOOL",
    "F8_E5M2",
    "F4",
    "I16",
    "U16",
    "U32",
    "U64",
    "F64",
    "C64",
}
NAME = re.compile(r"[A-Za-z0-9_\-]+(\.[A-Za-z0-9_\-]+)*", re.ASCII)
MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Location of one tensor: `nbytes` bytes at `offset` of `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    is_transposed: bool = False
    columns: tuple[int, int] | None = None
    """(first, total) of a transposed linear that is some columns of the stored tensor; None: all of it."""
    """True if `shape` is [outputs, inputs] of a matrix that is stored as [inputs, outputs]."""


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Part of a dimension that one rank holds: `start .. stop` of `total`, followed by `pad` zeros."""

    total: int
    start: int
    stop: int
    pad: int = 0

    @classmethod
    def whole(cls, total: int) -> "ShardSlice":
        return cls(total, 0, total)

    @property
    def size(self) -> int:
        return self.stop - self.start + self.pad

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == self.total


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return all tensors of a file by name. Raises ModelError with the file, the tensor and a remedy."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            raw, data_start = load_json(file, stream, size)
    except FileNotFoundError:
        raise ModelError(f"{file} is missing: fetch the model again") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from None
    raw.pop("__metadata__", None)
    if not raw:
        raise ModelError(f"{file}: the header names no tensors; {FETCH_AGAIN}")
    entries = entries_of(file, raw, data_start, size)
    return {e.name: e for e in entries}


def load_json(file: Path, stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
        raise ModelError(
            f"{file}: not a safetensors file of {size} bytes (header length {length}); {FETCH_AGAIN}"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) < len(pairs):
            key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise ModelError(f"{file}: {shown(key)} appears twice in the header: refused, fetch another copy")
        return seen

    try:
        raw = parse_json(stream.read(length), unique)
    except ValueError:
        raise ModelError(f"{file}: the header is not valid JSON; {FETCH_AGAIN}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file}: the header is not a JSON object; {FETCH_AGAIN}")
    return raw, 8 + length


def entries_of(file: Path, raw: dict[str, Any], data_start: int, size: int) -> list[TensorEntry]:
    """Return the tensors of a parsed header without its metadata, none over another. Whether quantized ones
    may be there is checked with the weight format that config.json names (`formats/weight_format.py`).
    """
    if len(raw) > MAX_TENSORS:
        raise ModelError(
            f"{file}: the header names {len(raw):,} tensors, at most {MAX_TENSORS:,} are read: save the "
            "model in more shards"
        )
    entries = [entry(file, name, value, data_start, size) for name, value in raw.items()]
    refuse_overlaps(entries)
    return entries


def entry(file: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    def refused(why: str) -> ModelError:
        return ModelError(f"{file}: tensor {shown(name)}{why}")

    if len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise refused(": not a tensor name; refused, fetch another copy of the model")
    if not isinstance(value, dict):
        raise refused(f": its header entry is not an object; {FETCH_AGAIN}")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    sizes = _MASK_SIZES if name.endswith(_MASKS) else SIZES
    if not isinstance(dtype, str) or dtype not in sizes:
        known = "is not supported" if str(dtype) in OTHER_DTYPES else "is unknown"
        raise refused(f": dtype {shown(str(dtype))} {known}; supported: {', '.join(SUPPORTED)}")
    if not is_counts(shape, MAX_DIMENSIONS) or not is_counts(offsets, 2) or len(offsets) != 2:
        bad = f"shape {shown(str(shape))} or data_offsets {shown(str(offsets))}"
        raise refused(f": bad {bad}; {FETCH_AGAIN}")
    begin, end = offsets
    need = math.prod(shape) * sizes[dtype]
    if end - begin != need:
        raise refused(f": shape {shape} needs {need} bytes, the header gives {end - begin}; {FETCH_AGAIN}")
    if data_start + end > size:
        raise refused(f" ends at byte {data_start + end}, the file has {size}; {FETCH_AGAIN}")
    return TensorEntry(file, name, dtype, tuple(shape), data_start + begin, need)


def refuse_overlaps(entries: list[TensorEntry]) -> None:
    ordered = sorted((e for e in entries if e.nbytes), key=lambda e: e.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise ModelError(
                f"{after.file}: tensors {shown(before.name)} and {shown(after.name)} overlap; {FETCH_AGAIN}"
            )


def is_counts(value: Any, most: int) -> TypeGuard[list[int]]:
    """Return whether a value is a list of at most `most` counts."""
    is_short = isinstance(value, list) and len(value) <= most
    return is_short and all(type(x) is int and 0 <= x < 1 << 62 for x in value)


def missing_tensor(where: Path | str, name: str) -> ModelError:
    return ModelError(f"{where}: tensor {shown(name)} is missing; {FETCH_AGAIN}")


def wrong_shape(entry: TensorEntry, wanted: tuple[int, ...]) -> ModelError:
    return ModelError(
        f"{entry.file}: tensor {shown(entry.name)} has shape {list(entry.shape)}, config.json asks for "
        f"{list(wanted)}: config and weights do not belong to the same model"
    )


def misplaced_tensor(left: Mapping[str, TensorEntry]) -> ModelError:
    """Return the error for tensors that nothing asks for, at least one."""
    name, entry = next(iter(left.items()))
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return ModelError(
        f"{entry.file}: tensor {shown(name)}{more} has no place in the architecture that config.json "
        "names: config and weights do not belong to the same model"
    )


def shown(name: str) -> str:
    """Return text of a file, such as a tensor's name, quoted and shortened, so that it is safe to print."""
    return repr(name if len(name) <= 100 else name[:100] + "...")
