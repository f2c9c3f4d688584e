"""Tensors of a GGUF file by their names in a checkpoint, dequantized to float32."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import TensorEntry, shown
from ..checkpoint.tensor_io import bytes_of, read_fully, refuse_non_finite
from ..errors import ModelError
from .blocks import dequantise
from .config import NOT_NEEDED, GgufTensorPlace, architecture_of, dtype_of, place_of
from .reader import BLOCKS, FLOATS, GgufFile

CHUNK_BLOCKS = 1 << 18
"""Blocks that are dequantized at once."""


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
        self._stacks: dict[str, tuple[str, int, int]] = {}
        """Stacked tensor of a linear, and its rows there: first and number."""
        self._left = {name for name in gguf.tensors if not NOT_NEEDED.fullmatch(name)}
        self._progress = progress
        self._done = 0
        self._total = sum(gguf.tensors[name].nbytes for name in self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entry = self._entry(name, shape)
        tensor = self._read(entry).view(shape)
        refuse_non_finite(tensor, entry, "")
        if self._kind.norms_hold_one and name.endswith("norm.weight"):
            tensor -= 1
        return self._in_order(entry, tensor)

    def block_type(self, name: str) -> str | None:
        """Return the type of a tensor's blocks; None: it has floats, or is missing."""
        entry = self._gguf.tensors.get(self._place(name).name)
        return None if entry is None or entry.dtype in FLOATS else entry.dtype

    def take_blocks(self, name: str, shape: tuple[int, int]) -> tuple[TensorEntry, Tensor]:
        """Return the rows of a matrix as bytes of whole blocks, uint8 [outputs, bytes of a row]."""
        entry = self._entry(name, shape)
        raw = read_bytes(entry)
        self._done += raw.nbytes
        self._progress(self._done, self._total)
        return entry, self._in_order(entry, raw.view(shape[0], -1))

    def _place(self, name: str) -> GgufTensorPlace:
        linear, _, kind = name.rpartition(".")
        stack = self._stacks.get(linear)
        return place_of(name if stack is None else f"{stack[0]}.{kind}", self._kind.layer)

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        place = self._place(name)
        entry = self._gguf.tensors.get(place.name)
        if entry is None:
            raise ModelError(
                f"{self._gguf.path}: tensor {shown(place.name)} is missing: it is no whole model"
            )
        self._left.discard(place.name)
        part = _part(entry, place)
        if (stack := self._stacks.get(name.rpartition(".")[0])) is not None:
            part = _rows(part, *stack[1:])
        if len(shape) == 3 and shape[1] == 1:  # a convolution of each channel by itself
            shape = shape[::2]
        if part.shape != shape:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} has shape {list(part.shape)}, what the file says "
                f"of the model wants {list(shape)}"
            )
        return part

    def _in_order(self, entry: TensorEntry, rows: Tensor) -> Tensor:
        heads = self._heads.get(entry.name.split(".")[-2])
        return rows if heads is None else half_split_rope(rows, heads)

    floats = take

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        """Remember where the linears of short convolutions lie, which files stack as checkpoints do. They
        have all others apart.
        """
        first = 0
        for part, rows in parts.items() if name.endswith(".conv.in_proj") else ():
            self._stacks[part] = name, first, rows
            first += rows

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        """Do nothing: `take` finds the experts of a stacked tensor."""

    def skip(self, name: str) -> None:
        gone = {place_of(name, self._kind.layer).name} if not name.endswith(".") else set()
        self._left -= gone

    def finish(self) -> None:
        if self._left:
            name = min(self._left)
            raise ModelError(
                f"{self._gguf.path}: tensor {shown(name)} and {len(self._left) - 1} more have no place in "
                f"{self._gguf.architecture} as it is known here: the model would answer wrongly without"
            )

    def _read(self, entry: TensorEntry) -> Tensor:
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
                    out[start * block : (start + count) * block] = dequantise(entry.dtype, raw)
                    self._done += raw.nbytes
                    self._progress(self._done, self._total)
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
    """Return the entry of some rows of a tensor; of all where it has fewer, which its shape tells."""
    if first + rows > entry.shape[0]:
        return entry
    each = entry.nbytes // entry.shape[0]
    shape = (rows, *entry.shape[1:])
    return TensorEntry(entry.file, entry.name, entry.dtype, shape, entry.offset + first * each, rows * each)


def half_split_rope(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved RoPE pairs (GGUF) to half-split ones (transformers)."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
