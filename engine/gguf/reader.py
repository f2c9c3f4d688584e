"""Reader of GGUF headers, which are validated before use. Torch-free, as the command line uses it too.

Layout (little-endian): "GGUF", version u32, tensors u64, entries u64; entries (key, type, value); tensors
(name, dimensions from the innermost, type, offset); padding; data. Source: the GGUF specification,
docs/gguf.md of ggml. Files are read, never mapped: a file that shrinks later causes an error message, not a
SIGBUS.
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Final

from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import FETCH_AGAIN, TensorEntry, refuse_overlaps, shown
from ..errors import ModelError
from ..model_config.fields import MAX_LAYERS, is_number

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER: Final = 256 << 20
"""Largest header in bytes. Vocabularies of 250,000 tokens with their merges take some 20 MB."""
MAX_DIMENSIONS: Final = 4
TENSOR_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}(\.[A-Za-z0-9_\-]{1,64}){0,15}", re.ASCII)
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

BLOCKS: Final = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "NVFP4": (64, 36),
}
"""Supported formats: weights in a block, and bytes of a block."""
FLOATS: Final = {"F32", "F16", "BF16"}
_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    41: "Q1_0",
}  # fmt: skip
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Header of a model's GGUF file, or of all its parts together."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    """Shapes from the outermost dimension, as torch writes them; `dtype` is a name of ggml's."""

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelError(f"{self.path}: general.architecture is missing; {FETCH_AGAIN}")
        return name

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of a key given without its architecture: `block_count` of llama.block_count."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; a list with one value per layer must be uniform. Raises ModelError."""
        value = self.value(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._bad(key, value, "a positive number for all layers")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """Return a number from 0 on. Raises ModelError."""
        return self.by_layer(key, 1, default)[0]

    def by_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Return a number from 0 on for each of the first layers, of a list or of one number for all. Raises
        ModelError.
        """
        value = self.value(key, default)
        if layers > MAX_LAYERS:
            raise self._bad("block_count", layers, f"a number up to {MAX_LAYERS}")
        found = value if isinstance(value, list) else [value] * layers
        if len(found) < layers or not all(isinstance(each, int) and each >= 0 for each in found):
            raise self._bad(key, value, f"a number for each of {layers} layers")
        return [int(each) for each in found[:layers]]

    def number(self, key: str, default: float) -> float:
        """Return a float32 in its shortest decimal form: 1e-06, not 9.999999974752427e-07. Raises
        ModelError.
        """
        value = self.value(key, default)
        if not is_number(value):
            raise self._bad(key, value, "a number")
        return float(f"{value:.7g}")

    def _bad(self, key: str, value: Any, needed: str) -> ModelError:
        found = "missing" if value is None else str(value)[:80]
        return ModelError(
            f"{self.path}: {self.architecture}.{key} is {found}, {needed} is needed; {FETCH_AGAIN}"
        )


def is_gguf(path: Path) -> bool:
    try:
        with open_regular(path) as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read a file, or the first of several parts with all its parts. Raises ModelError saying what to do."""
    first = _read_one(path)
    tensors = dict(first.tensors)
    for part in _other_parts(path, first.metadata):
        for name, entry in _read_one(part).tensors.items():
            if name in tensors:
                raise ModelError(
                    f"{part}: tensor {shown(name)} is in {tensors[name].file} too; {FETCH_AGAIN}"
                )
            tensors[name] = entry
    expected = _whole_number(path, first.metadata, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelError(
            f"{path}: {len(tensors)} tensors in all parts, {expected} are expected; {FETCH_AGAIN}"
        )
    return GgufFile(path, first.metadata, tensors)


def read_header(path: Path, head: bytes, size: int) -> GgufFile:
    """Read one file of `size` bytes of which only `head` is at hand. Raises ModelError."""
    return _Reader(path, BytesIO(head), size).read()


def files_of(path: Path) -> list[Path]:
    """Return the files of a model, given the first. Raises ModelError."""
    return sorted({path, *(entry.file for entry in read_gguf(path).tensors.values())})


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    count = _whole_number(path, metadata, "split.count", 1)
    if count < 2:
        return []
    found = PART.search(path.name)
    if found is None or int(found[2]) != count:
        raise ModelError(f"{path} is one of {count} parts; their names must end in -00001-of-{count:05}.gguf")
    if int(found[1]) != 1:
        raise ModelError(
            f"{path} is part {int(found[1])} of {count}: name the first one, -00001-of-{count:05}.gguf"
        )
    return [
        path.with_name(f"{path.name[: found.start()]}-{part:05}-of-{count:05}.gguf")
        for part in range(2, count + 1)
    ]


def _whole_number(path: Path, metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelError(f"{path}: {key} is {str(value)[:80]}, a whole number is needed; {FETCH_AGAIN}")
    return value


def _read_one(path: Path) -> GgufFile:
    try:
        with open_regular(path) as stream:
            return _Reader(path, stream, os.fstat(stream.fileno()).st_size).read()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: fetch the model again") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None


class _Reader:
    """Sequential parser of one header. Counts and lengths are checked against the rest of the file."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self._path = path
        self._stream = stream
        self._size = size
        self._at = 0

    def read(self) -> GgufFile:
        if self._take(4) != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with GGUF")
        version = self._number("I")
        if version >> 16 and not version & 0xFFFF:
            raise ModelError(
                f"{self._path} is big-endian, for processors such as IBM Z: use a little-endian file"
            )
        if version == 1:
            raise ModelError(
                f"{self._path} has version 1 of GGUF (August 2023), which is not supported: use a newer file"
            )
        if version not in VERSIONS:
            raise self._error(f"version {version} cannot be read, only {' and '.join(map(str, VERSIONS))}")
        tensors, entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self._count(entries)):
            key = self._string()
            if key in metadata:
                raise self._error(f"{shown(key)} stands in the header twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor() for _ in range(self._count(tensors))]
        return GgufFile(self._path, metadata, self._entries(infos, metadata))

    def _entries(self, infos: list[TensorEntry], metadata: Mapping[str, Any]) -> dict[str, TensorEntry]:
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or align < 8 or align & (align - 1) or align > 1 << 20:
            raise self._error(f"general.alignment {align!r} is no power of two")
        data = -(-self._at // align) * align
        entries: dict[str, TensorEntry] = {}
        for info in infos:
            if info.name in entries:
                raise self._error(f"tensor {shown(info.name)} stands in the header twice")
            offset = data + info.offset
            if offset + info.nbytes > self._size:
                raise self._error(f"tensor {shown(info.name)} ends beyond the file's {self._size} bytes")
            entries[info.name] = TensorEntry(
                self._path, info.name, info.dtype, info.shape, offset, info.nbytes
            )
        refuse_overlaps(list(entries.values()))
        return entries

    def _tensor(self) -> TensorEntry:
        """Parse a tensor entry; its offset is relative to the start of the data."""
        name = self._string()
        if not TENSOR_NAME.fullmatch(name):
            raise self._error(f"{shown(name)} is not a tensor name")
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        dtype = _TYPES.get(number, f"number {number}")
        if dtype not in BLOCKS:
            raise ModelError(
                f"{self._path}: tensor {shown(name)} is {dtype}, which cannot be read; readable: "
                f"{', '.join(BLOCKS)}: use another quantization of the model"
            )
        block, nbytes = BLOCKS[dtype]
        count = math.prod(shape)
        if not 0 < count < 1 << 48 or shape[-1] % block:
            raise self._error(f"tensor {shown(name)} has shape {list(shape)}, which {dtype} cannot have")
        return TensorEntry(self._path, name, dtype, shape, offset, count // block * nbytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._count(self._number("Q"))
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        code = self._code(kind)
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._error(f"a value of kind {kind} is not known here")
        return _NUMBERS[kind]

    def _count(self, count: int) -> int:
        """Check a count: each item takes at least one byte."""
        if count > min(self._size - self._at, MAX_HEADER):
            raise self._error(f"its header speaks of {count} things, which it cannot hold")
        return count

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, count: int) -> bytes:
        if count > min(self._size, MAX_HEADER) - self._at:
            raise self._error("its header is cut short, or larger than any")
        taken = self._stream.read(count)
        if len(taken) != count:
            raise self._error("its header is cut short")
        self._at += count
        return taken

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._path}: {problem}; {FETCH_AGAIN}")
