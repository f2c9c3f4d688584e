"""Reader of single matrix rows of a checkpoint as Python floats, for code without torch."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from llmbox.kernels.quant_formats import Quant

from ..errors import ModelError
from .files import open_regular
from .index import list_tensors
from .quantized_layout import SCALE
from .safetensors import FETCH_AGAIN, TensorEntry, shown

_BYTES: Final = {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}


def read_row(directory: Path, name: str, row: int, quant: Quant | None = None) -> list[float]:
    """Return row `row` of `name`.weight [O, I]. `quant`: format of the output head if `llmbox quantize` wrote
    the checkpoint (`quantized_layout.py`).

    Raises ModelError.
    """
    entries = list_tensors(directory)
    numbers = _row(_found(entries, directory, f"{name}.weight"), row)
    if quant is None:
        return numbers
    scales = _row(_found(entries, directory, f"{name}.weight{SCALE}"), row)
    shared = quant.shared(len(numbers))
    return [number * scales[i // shared] for i, number in enumerate(numbers)]


def count_rows(directory: Path, name: str) -> int:
    """Return the number of rows of `name`.weight; 0 if there is no such matrix. Raises ModelError."""
    entry = list_tensors(directory).get(f"{name}.weight")
    return 0 if entry is None or len(entry.shape) != 2 else entry.shape[0]


def _found(entries: Mapping[str, TensorEntry], directory: Path, name: str) -> TensorEntry:
    if name not in entries:
        raise ModelError(f"{directory}: tensor {shown(name)} is missing; {FETCH_AGAIN}")
    return entries[name]


def _row(entry: TensorEntry, row: int) -> list[float]:
    if len(entry.shape) != 2 or row >= entry.shape[0] or entry.dtype not in _BYTES:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} has no row {row} that can be read")
    count = entry.shape[1]
    size = count * _BYTES[entry.dtype]
    try:
        with open_regular(entry.file) as stream:
            stream.seek(entry.offset + row * size)
            raw = stream.read(size)
    except OSError as error:
        raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
    if len(raw) != size:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is cut short; {FETCH_AGAIN}")
    match entry.dtype:
        case "F32":
            return list(struct.unpack(f"<{count}f", raw))
        case "F16":
            return list(struct.unpack(f"<{count}e", raw))
        case "I8":
            return list(map(float, struct.unpack(f"<{count}b", raw)))
        case _:  # BF16: the upper half of a float32
            wide = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, size, 2))
            return list(struct.unpack(f"<{count}f", wide))
