"""Weights of an adapter as a model takes them: linears sliced for a rank, stacked and in order; experts of
all in one tensor, as PEFT's `target_parameters`, or single ones.

T rows of the step, I inputs, O outputs, R ranks; X experts, r ranks of one expert.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from llmbox.kernels.lora import ExpertLora, LoraPiece, LoraSite, LoraWeights
from llmbox.kernels.op_types import Mixture
from llmbox.kernels.ops import PackedLinear

from ..checkpoint.adapter import AdapterError, AdapterTarget, plain_name
from ..checkpoint.files import open_regular
from ..checkpoint.safetensors import ShardSlice, TensorEntry, shown
from ..checkpoint.tensor_io import DTYPES, ROUNDED_DTYPES, bytes_of, read_fully, refuse_non_finite
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
        if entry.is_transposed:
            turned = replace(entry, shape=entry.shape[::-1], is_transposed=False)
            return self.read(turned).T.contiguous()
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


@dataclass(frozen=True, slots=True, eq=False)
class ExpertStack:
    """Linears of the experts of a layer that have one place in it, and one site for all."""

    parameter: str
    """Name of the tensor that holds them all in transformers: `gate_up_proj` or `down_proj`."""
    linears: tuple[AdaptedLinear, ...]
    """Linears of the experts that this rank has."""
    site: LoraSite
    count: int
    """Number of experts of the layer, on all ranks."""
    here: Sequence[int]
    """Experts that this rank has."""
    turned: bool
    """True if adapters of all experts have inputs for outputs, as PEFT writes those of Llama 4."""

    @classmethod
    def of(
        cls,
        parameter: str,
        many: Sequence[PackedLinear],
        asked: Mapping[int, WeightRequest],
        mixture: Mixture,
        *,
        turned: bool,
    ) -> "ExpertStack":
        """`many`: of each expert that is here, or one of all of these."""
        site, here = LoraSite(), mixture.here
        if len(many) == len(here):
            each = ((asked[id(packed)], packed) for packed in many)
        else:
            requests = _of_each(asked[id(many[0])], len(here))
            each = ((request, (many[0], number)) for number, request in enumerate(requests))
        linears = tuple(AdaptedLinear(*pair, site, site) for pair in each)
        return cls(parameter, linears, site, mixture.count, here, turned)

    @property
    def shape(self) -> tuple[int, int]:
        """Return outputs and inputs of one expert, on all ranks."""
        asked = self.linears[0].asked
        return sum(rows.total for rows in asked.outputs.values()), asked.inputs.total

    def is_of(self, target: AdapterTarget) -> bool:
        """Return True if a target of all experts has the shape of these linears."""
        return target.shape == self.shape or self._is_turned(target)

    def _is_turned(self, target: AdapterTarget) -> bool:
        """Return True if A has outputs and B inputs. Squares of a base that turns them are turned."""
        return self.turned and target.shape == self.shape[::-1]

    def factors(self, target: AdapterTarget, reader: AdapterReader) -> tuple[Tensor, Tensor]:
        """Read what an adapter has for all experts, A [X r, I] and B [O, r X]. Return A [X, r, I] and
        B [X, O, r].
        """
        rank, _ = target.parameters[self.parameter]
        first_Xr = reader.read(target.a).view(self.count, rank, -1)
        second_rX = reader.read(target.b).view(-1, rank, self.count)
        if self._is_turned(target):
            return second_rX.permute(2, 1, 0), first_Xr.transpose(1, 2)
        return first_Xr, second_rX.permute(2, 0, 1)

    def read_all(self, target: AdapterTarget, reader: AdapterReader) -> ExpertLora:
        count, asked = len(self.linears), self.linears[0].asked
        rank, scale = target.parameters[self.parameter]
        a_XrI, b_XOr = (each[list(self.here)] for each in self.factors(target, reader))
        parts, first = [], 0
        for rows in asked.outputs.values():
            parts.append(cut(b_XOr.narrow(1, first, rows.total), rows, 1))
            first += rows.total
        b_XOr = torch.cat(parts, 1)
        if asked.order is not None:
            b_XOr = b_XOr[:, list(asked.order)]
        piece = LoraPiece(0, b_XOr.shape[1], 0, b_XOr.contiguous())
        weights = LoraWeights(cut(a_XrI, asked.inputs, 2), torch.full((rank,), scale), (piece,))
        return ExpertLora(tuple(range(count)), weights)

    def read_one(self, number: int, shares: list[AdapterShare], reader: AdapterReader) -> ExpertLora:
        weights = weights_of(shares, reader)
        pieces = tuple(
            LoraPiece(piece.start, piece.stop, piece.first, piece.b_Or.unsqueeze(0))
            for piece in weights.pieces
        )
        return ExpertLora((number,), LoraWeights(weights.a_RI.unsqueeze(0), weights.scales_R, pieces))


_NUMBER: Final = re.compile(r"\.\d+\.(?!.*\.\d+\.)")
"""Number of an expert in the name of one of its tensors: the last number."""


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedExperts:
    """Experts of one layer."""

    mixture: Mixture
    gate_ups: ExpertStack
    downs: ExpertStack
    numbers: Mapping[int, tuple[ExpertStack, int]] = field(init=False)
    """Stack and number of each expert's linears, by the id of `AdaptedLinear.packed`."""
    _names: list[str] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        numbers = {
            id(linear.packed): (stack, number)
            for stack in (self.gate_ups, self.downs)
            for number, linear in enumerate(stack.linears)
        }
        object.__setattr__(self, "numbers", numbers)

    @classmethod
    def of(cls, mixture: Mixture, asked: Mapping[int, WeightRequest], *, turned: bool) -> "AdaptedExperts":
        gate_ups = ExpertStack.of("gate_up_proj", mixture.gate_ups, asked, mixture, turned=turned)
        downs = ExpertStack.of("down_proj", mixture.downs, asked, mixture, turned=turned)
        return cls(mixture, gate_ups, downs)

    def rename(self, outputs: dict[str, AdaptedLinear]) -> None:
        """Put the linears into `outputs` by the names of the experts that they hold now, in place of earlier
        ones.
        """
        for name in self._names:
            outputs.pop(name, None)
        self._names.clear()
        for stack in (self.gate_ups, self.downs):
            for linear, expert in zip(stack.linears, stack.here, strict=True):
                rows = {_NUMBER.sub(f".{expert}.", name): each for name, each in linear.asked.outputs.items()}
                now = replace(linear, asked=replace(linear.asked, outputs=rows))
                outputs |= dict.fromkeys(map(plain_name, rows), now)
                self._names.extend(map(plain_name, rows))

    def stack_of(self, target: AdapterTarget) -> ExpertStack | None:
        """Return the stack that a target of all experts adapts: shapes tell, for names do not. None: none has
        its shape. Raises AdapterError for another number of experts.
        """
        stack = next((each for each in (self.gate_ups, self.downs) if each.is_of(target)), None)
        if stack is None:
            return None
        (rank, _), count = target.parameters[stack.parameter], stack.count
        if target.a.shape[0] != rank * count:
            raise AdapterError(
                f"{target.a.file}: tensor {shown(target.a.name)}: it has {target.a.shape[0]} ranks of all "
                f"experts, and {count} experts of rank {rank} have {rank * count}: the adapter is of another "
                "base"
            )
        return stack


def _of_each(asked: WeightRequest, count: int) -> Iterator[WeightRequest]:
    """Divide the request for all experts in one linear, whose outputs lie one expert after the other."""
    outputs = list(asked.outputs.items())
    parts = len(outputs) // count
    rows = sum(part.size for _, part in outputs[:parts])
    order = None if asked.order is None else asked.order[:rows]
    for first in range(0, len(outputs), parts):
        yield replace(asked, outputs=dict(outputs[first : first + parts]), order=order)


def is_held_elsewhere(name: str, held: Mapping[str, Sequence[int]]) -> bool:
    """Return whether `name` is below an expert that another rank has. `held`: experts of this rank, by the
    name that holds all experts of their layer.
    """
    layer, dot, linear = name.rpartition(".experts.")
    here, number = held.get(f"{layer}{dot}".removesuffix(".")), linear.partition(".")[0]
    return here is not None and number.isdecimal() and int(number) not in here


class ExpertAdditions:
    """Additions of adapters of all experts of a layer to the linears of single ones, by the linear's name."""

    def __init__(self, claimed: Iterable[tuple[ExpertStack, AdapterTarget]]) -> None:
        self._places: dict[str, tuple[AdapterTarget, ExpertStack, int, slice]] = {}
        self._read: dict[str, tuple[Tensor, Tensor]] = {}
        for stack, target in claimed:
            for number, linear in enumerate(stack.linears):
                first = 0
                for name, rows in linear.asked.outputs.items():
                    place = target, stack, number, slice(first, first + rows.total)
                    self._places[plain_name(name)] = place
                    first += rows.total

    def target_of(self, name: str) -> AdapterTarget | None:
        return self._places[name][0] if name in self._places else None

    def addition(self, name: str) -> Tensor:
        """Return what is added to a linear, in float32. Raises AdapterError."""
        target, stack, number, rows = self._places[name]
        if target.name not in self._read:
            if len(self._read) > 1:  # those of one layer are asked for by turns
                self._read.clear()
            self._read[target.name] = stack.factors(target, AdapterReader(torch.float32))
        a_XrI, b_XOr = self._read[target.name]
        _, scale = target.parameters[stack.parameter]
        return scale * (b_XOr[number, rows] @ a_XrI[number])
