"""Tensors of a GGUF file by their names in a checkpoint, dequantized to float32."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from llmbox.kernels.quant_formats import GGUF_DEQUANTIZED

from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import TensorEntry, shown
from ..checkpoint.tensor_io import bytes_of, read_fully, refuse_non_finite
from ..errors import ModelError
from .architectures import architecture_of
from .blocks import dequantize
from .config import count_layers, dtype_of
from .mixed_layers import has_delta_nets, has_tiled_outputs, has_tiled_values
from .names import GgufTensorPlace, parts_of_model, places_of
from .reader import BLOCKS, FLOATS, GgufFile

CHUNK_BLOCKS = 1 << 18
"""Blocks that are dequantized at once."""
_OF_LAYER = re.compile(r"blk\.(\d+)\.")
_LAYER_PREFIX = re.compile(r"model\.layers\.(\d+)\.")
_LATENT = re.compile(r"(.+\.self_attn)\.kv_b_proj\.(\d+)\.([kv])\.weight")
"""Parts of the linear that expands latents, which files have as one tensor for keys and one for values."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a tensor that the file has under another name: those of one part of a stack."""

    name: str
    first: int
    rows: int


class GgufTensors:
    """`quantizer.Tensors` over a GGUF file: each tensor is read on request, in float32."""

    def __init__(
        self, gguf: GgufFile, heads: int, kv_heads: int, progress: Callable[[int, int], None]
    ) -> None:
        """`progress` gets bytes read so far and bytes in total."""
        self.dtype: torch.dtype = getattr(torch, dtype_of(gguf))
        self._gguf = gguf
        self._kind = architecture_of(gguf)
        self._heads = {"attn_q": heads, "attn_k": kv_heads} if self._kind.has_pairs else {}
        self._halved = {"attn_q": heads, "attn_k": kv_heads} if has_halved_rope(gguf) else {}
        self._values = value_heads_of(gguf)
        self._parts: dict[str, StoredRows] = {}
        self._left = needed_tensors(gguf)
        self._progress = progress
        self._done = 0
        self._total = sum(gguf.tensors[name].nbytes for name in self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entries = self._entries(name, shape)
        pieces = [self._read(entry).view(entry.shape) for entry in entries]
        for entry, piece in zip(entries, pieces, strict=True):
            refuse_non_finite(piece, entry, "")
        tensor = self._as_stored_in_checkpoints(name, entries, pieces)
        tensor = (tensor.T if self.is_turned(name) else tensor).view(shape)
        if name.endswith("A_log"):  # a file has what the checkpoint's numbers stand for
            if not bool((tensor < 0).all()):
                raise ModelError(f"{entries[0].file}: tensor {shown(entries[0].name)} is not negative")
            tensor = (-tensor).log()
        if self._kind.norms_hold_one and name.endswith("norm.weight") and ".linear_attn." not in name:
            tensor -= 1
        return tensor

    def block_type(self, name: str) -> str | None:
        """Return the type of a tensor's blocks; None: it has floats or blocks that no kernel has, is missing,
        or is of two types.
        """
        types = {entry.dtype for entry in self._found(name)} if self._finds(name) else set()
        return types.pop() if len(types) == 1 and not types & {*FLOATS, *GGUF_DEQUANTIZED} else None

    def holds(self, name: str) -> bool:
        return self._finds(name)

    def is_turned(self, name: str) -> bool:
        """Return whether the file has the rows of a checkpoint's matrix as columns."""
        entries = self._found(name) if _LATENT.fullmatch(name) else []
        return any(entry.name.split(".")[-2] == "attn_k_b" for entry in entries)

    def take_blocks(self, name: str, shape: tuple[int, int]) -> tuple[TensorEntry, Tensor]:
        """Return the rows of a matrix as bytes of whole blocks, uint8 [outputs, bytes of a row]: of the
        turned matrix, if the file has that.
        """
        entries, pieces = self._entries(name, shape), []
        for entry in entries:
            raw = read_bytes(entry)
            self._done += raw.nbytes
            pieces.append(raw.view(entry.shape[0], -1))
        self._progress(self._done, self._total)
        return entries[0], self._as_stored_in_checkpoints(name, entries, pieces)

    def _found(self, name: str) -> list[TensorEntry]:
        """Return the entry of a tensor, of a part of one, or of two whose rows alternate; empty: none."""
        if part := _LATENT.fullmatch(name):
            layer = places_of(f"{part[1]}.kv_b_proj.weight", self._kind.layer)[0].name
            place = GgufTensorPlace(layer.replace("attn_kv_b", f"attn_{part[3]}_b"), int(part[2]))
            if place.name in self._gguf.tensors:
                return [_part(self._gguf.tensors[place.name], place)]
        if name in self._parts:
            stored = self._parts[name]
            return [_rows(entry, stored.first, stored.rows) for entry in self._found(stored.name)]
        for place in places_of(name, self._kind.layer):
            names = [place.name, place.other] if place.other else [place.name]
            if all(each in self._gguf.tensors for each in names):
                return [_part(self._gguf.tensors[each], place) for each in names]
        return []

    def _entries(self, name: str, shape: tuple[int, ...]) -> list[TensorEntry]:
        entries = self._found(name)
        if not entries:
            place = places_of(self._parts[name].name if name in self._parts else name, self._kind.layer)[0]
            missing = next(each for each in (place.name, place.other) if each not in self._gguf.tensors)
            raise ModelError(f"{self._gguf.path}: tensor {shown(missing)} is missing: the file is incomplete")
        self._left -= {entry.name for entry in entries}
        each = (shape[0] // len(entries), *shape[1:])
        if entries[0].name.endswith(".ssm_ba.weight"):
            each = (2 * shape[0], *shape[1:])
        if self.is_turned(name):
            each = each[::-1]
        if entries[0].name.endswith(".ssm_norm.weight"):  # group by group
            entries = [replace(entry, shape=(prod(entry.shape),)) for entry in entries]
        for entry in entries:
            if _plain(entry.shape) != _plain(each):
                raise ModelError(
                    f"{entry.file}: tensor {shown(entry.name)} has shape {list(entry.shape)}, "
                    f"the file's metadata require {list(each)}"
                )
        return entries

    def _as_stored_in_checkpoints(
        self, name: str, entries: list[TensorEntry], pieces: list[Tensor]
    ) -> Tensor:
        """Return the rows in the order of a checkpoint: numbers, or bytes of blocks."""
        rows = pieces[0] if len(pieces) == 1 else torch.stack(pieces, 1).flatten(0, 1)
        module = entries[0].name.split(".")[-2]
        if module in self._heads:
            return half_split_rope(rows, self._heads[module])
        if module in self._halved:
            rotated = self._gguf.integer("rope.dimension_count")
            return side_by_side_rope(rows, self._halved[module], rotated)
        return rows if self._values is None else self._values.in_order(name, module, rows)

    floats = take

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        """Find the parts of a linear in the stack that the file has of them."""
        for suffix in (".weight", ".bias"):
            first = 0
            for part, rows in parts.items():
                if self._finds(name + suffix) and not self._finds(part + suffix):
                    self._parts[part + suffix] = StoredRows(name + suffix, first, rows)
                first += rows

    def _finds(self, name: str) -> bool:
        try:
            return bool(self._found(name))
        except ModelError:
            return False

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        """Do nothing: `take` finds the experts of a stacked tensor."""

    def skip(self, name: str) -> None:
        if layer := _LAYER_PREFIX.fullmatch(name):
            self._left = {each for each in self._left if not each.startswith(f"blk.{layer[1]}.")}
        names = [f"{name}weight", f"{name}bias"] if name.endswith(".") else [name]
        self._left -= {entry.name for each in names if self._finds(each) for entry in self._found(each)}

    def finish(self) -> None:
        if self._left:
            name = min(self._left)
            raise ModelError(
                f"{self._gguf.path}: tensor {shown(name)} and {len(self._left) - 1} more have no place in "
                f"{self._gguf.architecture} as llmbox knows it: without them the model would answer wrongly"
            )

    def _read(self, entry: TensorEntry) -> Tensor:
        out = read_numbers(entry, self._count)
        return out * self._scale_of(entry) if entry.dtype in GGUF_DEQUANTIZED else out

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)

    def _scale_of(self, entry: TensorEntry) -> Tensor:
        """Return the factor beside a tensor of NVFP4, of all or of each expert; 1 where there is none."""
        name = f"{entry.name.removesuffix('.weight')}.scale"
        if name not in self._gguf.tensors or name.split(".", 2)[-1] in self._kind.layer.values():
            return torch.ones(())
        self._left -= {name}
        found, whole = self._gguf.tensors[name], self._gguf.tensors[entry.name]
        scales = self._read(found)
        refuse_non_finite(scales, found, "")
        expert = (entry.offset - whole.offset) // entry.nbytes
        if found.dtype not in FLOATS or len(scales) not in (1, whole.nbytes // entry.nbytes):
            raise ModelError(f"{found.file}: tensor {shown(name)} has {len(scales)} factors of {found.dtype}")
        return scales[expert if len(scales) > 1 else 0]


def needed_tensors(gguf: GgufFile) -> set[str]:
    """Return the names of tensors that the model needs: none of layers that predict several tokens."""
    beyond = range(count_layers(gguf), gguf.integer("block_count"))
    layers = {name: _OF_LAYER.match(name) for name in parts_of_model(gguf.tensors)}
    return {name for name, layer in layers.items() if layer is None or int(layer[1]) not in beyond}


@dataclass(frozen=True, slots=True)
class ValueHeads:
    """Order of the value heads of gated delta nets in a file."""

    keys: int
    each: int
    """Value heads of a key head."""
    is_tiled: bool
    """True if the first value heads of all key heads come first, then the second ones."""
    orders_outputs: bool
    """True if inputs of the linear at the end are to be put in order too."""

    def in_order(self, name: str, module: str, rows: Tensor) -> Tensor:
        """Return rows of a tensor as checkpoints have them, key head by key head."""
        part = name.rpartition(".linear_attn.")[2]
        if module == "ssm_ba":
            return rows.view(self.keys, 2, self.each, -1)[:, int(part == "in_proj_a.weight")].flatten(0, 1)
        if not self.is_tiled:
            return rows
        if part in _OF_VALUES:
            return rows.reshape(self.each, self.keys, -1).transpose(0, 1).reshape(rows.shape)
        if part == "out_proj.weight" and self.orders_outputs:
            heads = rows.reshape(len(rows), self.each, self.keys, -1)
            return heads.transpose(1, 2).reshape(rows.shape)
        return rows


_OF_VALUES = {
    "in_proj_v.weight",
    "in_proj_z.weight",
    "in_proj_b.weight",
    "in_proj_a.weight",
    "v_conv1d.weight",
    "A_log",
    "dt_bias",
}
"""Tensors of a gated delta net whose rows are of value heads."""


def value_heads_of(gguf: GgufFile) -> ValueHeads | None:
    """Return the order of a file's value heads; None for a model without gated delta nets."""
    if not has_delta_nets(gguf):
        return None
    keys = gguf.integer("ssm.group_count")
    each, is_tiled = gguf.integer("ssm.time_step_rank") // keys, has_tiled_values(gguf)
    return ValueHeads(keys, each, is_tiled, is_tiled and not has_tiled_outputs(gguf))


def read_tensor(gguf: GgufFile, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor by its name in the file, in float32. Raises ModelError."""
    entry = gguf.tensors.get(name)
    if entry is None or _plain(entry.shape) != _plain(shape):
        found = "is missing" if entry is None else f"has shape {list(entry.shape)}"
        raise ModelError(f"{gguf.path}: tensor {shown(name)} {found}, {list(shape)} is needed")
    numbers = read_numbers(entry)
    refuse_non_finite(numbers, entry, "")
    return numbers.view(shape)


def read_rows(matrix: TensorEntry, rows: Sequence[int]) -> list[list[float]]:
    """Return rows of a matrix, dequantized. One without a second dimension is one row. Raises ModelError."""
    shape = matrix.shape if len(matrix.shape) > 1 else (1, *matrix.shape)
    if len(shape) != 2 or matrix.dtype not in BLOCKS or matrix.dtype in GGUF_DEQUANTIZED:
        raise ModelError(f"{matrix.file}: tensor {shown(matrix.name)} has no rows that can be read")
    matrix = replace(matrix, shape=shape)
    return [read_numbers(_rows(matrix, row, 1)).tolist() for row in rows]


def read_numbers(entry: TensorEntry, progress: Callable[[int], None] = lambda _nbytes: None) -> Tensor:
    """Return the numbers of a tensor in float32, without shape. `progress` gets the bytes of each chunk.
    Raises ModelError.
    """
    block, block_bytes = BLOCKS[entry.dtype]
    blocks = entry.nbytes // block_bytes
    out = torch.empty(blocks * block)
    try:
        with open_regular(entry.file, buffering=0) as stream:
            stream.seek(entry.offset)
            for start in range(0, blocks, CHUNK_BLOCKS):
                count = min(CHUNK_BLOCKS, blocks - start)
                raw = torch.empty(count * block_bytes, dtype=torch.uint8)
                read_fully(stream.readinto, bytes_of(raw), entry)
                out[start * block : (start + count) * block] = dequantize(entry.dtype, raw)
                progress(raw.nbytes)
    except OSError as error:
        raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
    return out


def read_bytes(entry: TensorEntry) -> Tensor:
    """Return the bytes of a tensor as they are stored. Raises ModelError."""
    raw = torch.empty(entry.nbytes, dtype=torch.uint8)
    try:
        with open_regular(entry.file, buffering=0) as stream:
            stream.seek(entry.offset)
            read_fully(stream.readinto, bytes_of(raw), entry)
    except OSError as error:
        raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from None
    return raw


def _part(entry: TensorEntry, place: GgufTensorPlace) -> TensorEntry:
    """Return the entry of one expert in a stacked tensor."""
    if place.expert is None:
        return entry
    count, *shape = entry.shape
    if place.expert >= count:
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} has {count} experts, more are wanted")
    nbytes = entry.nbytes // count
    offset = entry.offset + place.expert * nbytes
    return TensorEntry(entry.file, entry.name, entry.dtype, tuple(shape), offset, nbytes)


def _rows(entry: TensorEntry, first: int, rows: int) -> TensorEntry:
    """Return the entry of some rows of a tensor. Raises ModelError."""
    total, *shape = entry.shape
    if first + rows > total:
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} has {total} rows, {first + rows} are wanted"
        )
    each = entry.nbytes // total
    return replace(entry, shape=(rows, *shape), offset=entry.offset + first * each, nbytes=rows * each)


def _plain(shape: tuple[int, ...]) -> list[int]:
    """Return a shape without dimensions of 1, which files leave out or add."""
    return [size for size in shape if size > 1]


def half_split_rope(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved RoPE pairs (GGUF) to half-split ones (transformers)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def has_halved_rope(gguf: GgufFile) -> bool:
    """Return whether RoPE pairs stand half a head apart in a file, and side by side in the checkpoint: in
    files of GLM-4V, as llama.cpp's M-RoPE knows them so alone.
    """
    return gguf.architecture == "glm4" and bool(gguf.value("rope.dimension_sections"))


def side_by_side_rope(rows: Tensor, heads: int, rotated: int) -> Tensor:
    """Reorder the first `rotated` rows of each head from halves to pairs that stand side by side."""
    by_head = rows.view(heads, -1, *rows.shape[1:])
    halves = by_head[:, :rotated].reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([halves, by_head[:, rotated:]], 1).view(rows.shape)
