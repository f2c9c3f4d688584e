"""Weights of an adapter as the linears of a model take them: sliced for a rank, stacked and in order.

T rows of the step, I inputs, O outputs, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from llmbox.kernels.lora import LoraPiece, LoraSite, LoraWeights
from llmbox.kernels.ops import PackedLinear

from ..checkpoint.adapter import AdapterError, AdapterTarget, plain_name
from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import TensorEntry, shown
from ..checkpoint.tensor_io import DTYPES, ROUNDED_DTYPES, bytes_of, read_fully, refuse_non_finite
from ..partition import ShardSlice
from .source import WeightRequest


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLinear:
    """One linear of the model, a stack of named outputs, and what adapters add to it."""

    asked: WeightRequest
    packed: PackedLinear
    site: LoraSite = field(default_factory=LoraSite)
    table: LoraSite = field(default_factory=LoraSite)
    """Tables of adapters in place of it, as an embedding."""

    @property
    def numbers(self) -> int:
        """Numbers of A and B for each rank of an adapter, with an A for each output."""
        return sum(rows.total + self.asked.inputs.total for rows in self.asked.outputs.values())

    def stored_name(self, name: str) -> str:
        """Return the name in the request of the linear for that of an adapter."""
        names = list(self.asked.outputs)
        return next((each for each in names if plain_name(each) == name), names[0])

    def offset(self, name: str) -> int:
        """Return the first row of an output in the stack, before `order`."""
        names = list(self.asked.outputs)
        return sum(self.asked.outputs[each].size for each in names[: names.index(name)])


@dataclass(frozen=True, slots=True)
class AdapterShare:
    """Share of an adapted tensor in one output of a linear: rows of B `first .. first + total`."""

    linear: AdaptedLinear
    name: str
    target: AdapterTarget
    first: int


def weights_of(shares: Sequence[AdapterShare], reader: "AdapterReader") -> LoraWeights:
    """Stack what an adapter has for the outputs of one linear: each A once, B in the order of its rows."""
    linear = shares[0].linear
    firsts: dict[str, int] = {}
    many_a: list[Tensor] = []
    scales: list[Tensor] = []
    rank = 0
    for share in shares:
        if share.target.name not in firsts:
            firsts[share.target.name] = rank
            many_a.append(cut(reader.read(share.target.a), linear.asked.inputs, 1))
            scales.append(torch.full((share.target.rank,), share.target.scale))
            rank += share.target.rank
    pieces: list[LoraPiece] = []
    for share in shares:
        rows = linear.asked.outputs[share.name]
        b_Or = cut(reader.read(share.target.b)[share.first : share.first + rows.total], rows, 0)
        pieces += _pieces(linear, share.name, firsts[share.target.name], b_Or)
    return LoraWeights(torch.cat(many_a).contiguous(), torch.cat(scales), tuple(pieces))


def _pieces(linear: AdaptedLinear, name: str, first: int, b_Or: Tensor) -> Iterator[LoraPiece]:
    """Return B in runs of neighboring outputs of the packed linear, whose rows may have another order."""
    offset, order = linear.offset(name), linear.asked.order
    if order is None:
        yield LoraPiece(offset, offset + len(b_Or), first, b_Or.contiguous())
        return
    order_O = torch.tensor(order)
    is_mine_O = (order_O >= offset) & (order_O < offset + len(b_Or))
    changes = torch.nonzero(torch.diff(is_mine_O.int())).flatten() + 1
    bounds = [0, *changes.tolist(), len(order)]
    for start, stop in pairwise(bounds):
        if bool(is_mine_O[start]):
            yield LoraPiece(start, stop, first, b_Or[order_O[start:stop] - offset].contiguous())


def cut(weight: Tensor, part: ShardSlice, dim: int) -> Tensor:
    """Return this rank's rows or columns, with its padding."""
    cut = weight.narrow(dim, part.start, part.stop - part.start)
    if part.pad:
        shape = list(cut.shape)
        shape[dim] = part.pad
        cut = torch.cat((cut, cut.new_zeros(shape)), dim)
    return cut.contiguous()


class AdapterReader:
    """Reader of an adapter's tensors in the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._keeps_open = False
        self._open: dict[Path, FileIO] = {}

    def __enter__(self) -> Self:
        """Open each file once, until the end of the block."""
        self._keeps_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._keeps_open = False
        for stream in self._open.values():
            stream.close()
        self._open.clear()

    def read(self, entry: TensorEntry) -> Tensor:
        stored = torch.empty(entry.shape, dtype=(ROUNDED_DTYPES | DTYPES)[entry.dtype])
        if self._keeps_open:
            if entry.file not in self._open:
                self._open[entry.file] = open_regular(entry.file, 0)
            self._read_into(stored, self._open[entry.file], entry)
        else:
            with open_regular(entry.file, 0) as stream:
                self._read_into(stored, stream, entry)
        refuse_non_finite(stored, entry, "")
        return stored.to(self.dtype)

    @staticmethod
    def _read_into(stored: Tensor, stream: FileIO, entry: TensorEntry) -> None:
        stream.seek(entry.offset)
        read_fully(stream.readinto, bytes_of(stored), entry)


def wrong_base(name: str, entry: TensorEntry, shape: Sequence[int], expected: Sequence[int]) -> AdapterError:
    return AdapterError(
        f"{entry.file}: tensor {shown(entry.name)}: it adapts a {name} of {_by(shape)}, and the model's has "
        f"{_by(expected)}: the adapter is of another base"
    )


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def unknown_module(name: str, entry: TensorEntry) -> AdapterError:
    where = f"{entry.file}: tensor {shown(entry.name)}"
    return AdapterError(f"{where}: the model has no linear {name}: the adapter is of another base")
