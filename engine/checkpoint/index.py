"""Index of the tensors in a model directory: one safetensors file, or shards with an index file; their check
against what a model asks for; and single rows of its matrices as Python floats, for code without torch.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from llmbox.kernels.quant_formats import Quant

from ..errors import ModelError
from .files import MAX_BYTES, open_regular, parse_json, read_regular
from .names import full_names, is_of_vision, renamed, vision_name
from .quantized_layout import BOUNDS, OF_KEYS_AND_VALUES, SCALE, STORED_BYTES
from .safetensors import (
    CAUSAL_MASKS,
    FETCH_AGAIN,
    TensorEntry,
    missing_tensor,
    read_header,
    shown,
    wrong_shape,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MEDUSA = "medusa_lm_head.safetensors"
"""File of Medusa heads."""
QUANTIZED_DTYPES = frozenset(STORED_BYTES)
"""Dtypes of tensors that need scales."""
NOT_NEEDED = (
    *(".rotary_emb.inv_freq", "score.weight"),
    *(*OF_KEYS_AND_VALUES, *BOUNDS, *CAUSAL_MASKS),
)
"""Suffixes of tensors that are ignored. Older checkpoints store the first, which is computed from
config.json. The second belongs to a head that the engine does not run (`model_config/config.py`)."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LAST: Final = "\U0010ffff"
"""Character that sorts behind those of names."""
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of tensors that are not quantized."""


def list_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor by its name in a causal language model; for a vision-language model, those of the
    language model.

    Raises ModelError for files that are missing, damaged or refused.
    """
    return full_names(_read_entries(directory))


def list_vision_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the vision tower and its projector, by their names without `model.` before them
    and without the inner `vision_model.` of some towers. Empty for a text-only checkpoint. Raises ModelError.
    """
    entries = _read_entries(directory)
    return renamed({name: entries[name] for name in entries if is_of_vision(name)}, vision_name)


def _read_entries(directory: Path) -> dict[str, TensorEntry]:
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if (directory / INDEX).exists():
        return read_shards(directory)
    if (directory / MEDUSA).exists():
        return read_header(directory / MEDUSA)
    raise ModelError(no_weights(directory))


def refuse_undeclared(entry: TensorEntry) -> None:
    """Raise ModelError for a quantized tensor that the quantization_config of config.json does not cover."""
    if entry.dtype in QUANTIZED_DTYPES:
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} is {entry.dtype}, but the quantization_config of "
            f"config.json does not cover it, or it is not a linear of a layer; {FETCH_AGAIN}"
        )


def weight_files(directory: Path) -> list[Path]:
    """Return the files that `list_tensors` reads. Raises ModelError."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if (directory / INDEX).exists():
        return [directory / name for name in sorted(set(read_index(directory / INDEX).values()))]
    if (directory / MEDUSA).exists():
        return [directory / MEDUSA]
    raise ModelError(no_weights(directory))


def no_weights(directory: Path) -> str:
    try:
        pickles = sorted(f.name for f in directory.iterdir() if f.suffix in PICKLES)
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    if pickles:
        return (
            f"{directory} has weights only as {pickles[0]}, a pickle that could run code and is not opened: "
            "get the model's safetensors version or convert it"
        )
    for file in (directory / SINGLE, directory / INDEX):
        if file.is_symlink():
            return (
                f"{file} is a link to {shown(str(file.readlink()))}, which is missing: fetch the model again"
            )
    return f"{directory}: neither {SINGLE} nor {INDEX} is there; fetch the model again"


def read_shards(directory: Path) -> dict[str, TensorEntry]:
    index = directory / INDEX
    weight_map = read_index(index)
    found: dict[str, TensorEntry] = {}
    for file in dict.fromkeys(weight_map.values()):
        for name, entry in read_header(directory / file).items():
            if name in found:
                raise ModelError(
                    f"tensor {shown(name)} is both in {found[name].file} and in {entry.file}: "
                    "refused, fetch another copy of the model"
                )
            found[name] = entry
    for name, file in weight_map.items():
        if name not in found or found[name].file.name != file:
            raise ModelError(
                f"{index} lists tensor {shown(name)} in {file}, but it is missing; {FETCH_AGAIN}"
            )
    return found


def read_index(index: Path) -> dict[str, str]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ModelError(f"{index} names a tensor twice: refused, fetch another copy of the model")
        return dict(pairs)

    try:
        raw = parse_json(read_regular(index, MAX_BYTES), unique)
    except OSError as error:
        raise ModelError(f"{index} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{index} is not valid JSON; {FETCH_AGAIN}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; {FETCH_AGAIN}")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{index} points at {shown(str(file))}, which is not a safetensors file beside it"
            )
    return weight_map


class ExpectedTensors:
    """Tensors of a checkpoint, from which those that the model asks for are taken one by one."""

    def __init__(
        self,
        where: str,
        entries: Mapping[str, TensorEntry],
        names: Mapping[str, str],
        *,
        is_quantized: bool,
    ) -> None:
        """`where`: the model in errors. `names`: parts of names that the checkpoint has for usual ones."""
        self.left = dict(entries)
        self.where, self._names = where, names
        self._is_quantized = is_quantized
        self._sorted = sorted(entries)
        """Names: a dict of all modules would be quadratic in the length of a hostile name."""

    def _beginning(self, prefix: str) -> list[str]:
        """Return the names of the checkpoint that begin with `prefix`, taken ones included."""
        first = bisect_left(self._sorted, prefix)
        return self._sorted[first : bisect_left(self._sorted, prefix + _LAST, first)]

    def at(self, prefix: str, name: str) -> str:
        """Return a name below a prefix as the checkpoint has it (`Weights`)."""
        if name in self._names:
            return prefix + self._names[name]
        return prefix + ".".join(self._names.get(part, part) for part in name.split("."))

    def take(self, name: str, *shape: int) -> None:
        """Take a tensor. Vectors may be stored as one row, single numbers without dimensions."""
        entry = self.left.pop(name, None)
        if entry is None:
            raise missing_tensor(self.where, name)
        if entry.shape not in (shape, (1, *shape)) and (entry.shape, shape) != ((), (1,)):
            raise wrong_shape(entry, shape)

    def take_all(self, module: str) -> None:
        """Take all that is below a module."""
        for name in self._beginning(f"{module}."):
            self.left.pop(name, None)

    def take_stack(self, name: str, shape: tuple[int, int, int], biases: int) -> bool:
        """Take the tensors of all experts of a layer, whose names begin with `name`; False if there are none.
        Those of a quantized checkpoint are checked by their format. `biases`: number for each expert.
        """
        stack = [each for each in self._beginning(name) if each in self.left]
        for each in stack:
            is_matrix = each in {name, f"{name}.weight"} and self.left[each].dtype in _FLOATS
            if is_matrix:
                self.take(each, *shape)
            elif self._is_quantized:
                del self.left[each]
        if stack and biases and not self._is_quantized:
            self.take(f"{name}_bias", shape[0], biases)
        return bool(stack)

    def has(self, module: str) -> bool:
        return bool(self._beginning(f"{module}."))

    def each(self, count: int) -> Iterator[int]:
        """Iterate over modules of one shape by their numbers."""
        yield from range(count)

    def linears(
        self,
        module: str,
        rows: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        stacks: Iterable[str] = (),
    ) -> None:
        """Take linears below a module, {name: rows}, or a tensor of all of them that has one of the names
        `stacks`. Linears of a quantized checkpoint are checked by their format.
        """
        names = {self.at(module, name): outputs for name, outputs in rows.items()}
        stack = next((each for each in (self.at(module, name) for name in stacks) if self.has(each)), None)
        if stack is not None:
            names = {stack: sum(names.values())}
        for name, outputs in names.items():
            entry = self.left.get(f"{name}.weight")
            is_packed = entry is None or entry.dtype not in _FLOATS
            if not (self._is_quantized and self.has(name) and is_packed):
                self.take(f"{name}.weight", outputs, inputs)
        for name, outputs in names.items():
            if bias:
                self.take(f"{name}.bias", outputs)
            if self._is_quantized:
                self.take_all(name)


class CountedTensors(ExpectedTensors):
    """Count of the numbers in all tensors that a model asks for, without a checkpoint."""

    def __init__(self) -> None:
        super().__init__("", {}, {}, is_quantized=False)
        self.numbers = 0

    def take(self, _name: str, *shape: int) -> None:
        self.numbers += math.prod(shape)

    def take_stack(self, _name: str, shape: tuple[int, int, int], biases: int) -> bool:
        self.numbers += math.prod(shape) + shape[0] * biases
        return True

    def has(self, _module: str) -> bool:
        """Return True: one tensor holds as many numbers as those that checkpoints may have in its place."""
        return True

    def each(self, count: int) -> Iterator[int]:
        """Yield the first module alone, and count it for all."""
        before = self.numbers
        yield 0
        self.numbers += (count - 1) * (self.numbers - before)

    def linears(
        self,
        _module: str,
        rows: Mapping[str, int],
        inputs: int,
        *,
        bias: bool = False,
        stacks: Iterable[str] = (),  # noqa: ARG002 - a stack holds as many numbers
    ) -> None:
        self.numbers += sum(rows.values()) * (inputs + bias)


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


def differ(one: TensorEntry, other: TensorEntry, rows: int = 16) -> bool:
    """Return True if two matrices of the same shape and float dtype differ in some of `rows` rows, which are
    spread evenly and end with the last. Raises ModelError.
    """
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.dtype not in _FLOATS:
        return False
    last = one.shape[0] - 1
    return any(
        _row_bytes(one, row) != _row_bytes(other, row) for row in {last * i // rows for i in range(rows + 1)}
    )


def _found(entries: Mapping[str, TensorEntry], directory: Path, name: str) -> TensorEntry:
    if name not in entries:
        raise ModelError(f"{directory}: tensor {shown(name)} is missing; {FETCH_AGAIN}")
    return entries[name]


def _row_bytes(entry: TensorEntry, row: int) -> bytes:
    if len(entry.shape) != 2 or row >= entry.shape[0] or entry.dtype not in _BYTES:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} has no row {row} that can be read")
    size = entry.shape[1] * _BYTES[entry.dtype]
    try:
        with open_regular(entry.file) as stream:
            stream.seek(entry.offset + row * size)
            raw = stream.read(size)
    except OSError as error:
        raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
    if len(raw) != size:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is cut short; {FETCH_AGAIN}")
    return raw


def _row(entry: TensorEntry, row: int) -> list[float]:
    raw, count = _row_bytes(entry, row), entry.shape[1]
    match entry.dtype:
        case "F32":
            return list(struct.unpack(f"<{count}f", raw))
        case "F16":
            return list(struct.unpack(f"<{count}e", raw))
        case "I8":
            return list(map(float, struct.unpack(f"<{count}b", raw)))
        case _:  # BF16: the upper half of a float32
            wide = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
            return list(struct.unpack(f"<{count}f", wide))
