"""Read a rank's part of linears in published weight formats: decode each, cut it, and stack them.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from llmbox.kernels.quant_formats import Quant
from llmbox.kernels.weight_packing import QuantizedWeight

from ..checkpoint.formats.weight_format import StoredTensor, WeightFormat, check_tensor
from ..checkpoint.safetensors import TensorEntry, shown
from ..errors import ModelError, ParallelError
from ..partition import ShardSlice
from .decoders import BadTensor, DecodedLinear, decode


class StoredTensors(Protocol):
    """Tensors of a checkpoint, each taken once."""

    @property
    def device(self) -> torch.device: ...

    def take_stored(self, linear: str, tensors: tuple[StoredTensor, ...]) -> dict[str, TensorEntry]:
        """Take the entries of a linear that are there, by the end of their names."""
        ...

    def read(self, entry: TensorEntry, parts: tuple[ShardSlice, ...]) -> Tensor:
        """Read these slices as stored, on the CPU."""
        ...


@dataclass(slots=True)
class StoredStack:
    """Linears that the checkpoint stores as one: decoded once, for all of them."""

    name: str
    rows: int
    decoded: DecodedLinear | None = None


@dataclass(frozen=True, slots=True)
class StackPart:
    stack: StoredStack
    first: int
    """First row of the part."""


@dataclass(slots=True)
class StoredReader:
    """Reads linears of one weight format."""

    form: WeightFormat
    tensors: StoredTensors
    parts: dict[str, StackPart] = field(default_factory=dict)
    """Linears that are rows of a stored one, by name."""

    def read(
        self, outputs: Mapping[str, ShardSlice], inputs: ShardSlice, quant: Quant | None
    ) -> QuantizedWeight | Tensor:
        """Read several linears as one stacked weight: in `quant`, the kernels' format, or in float32 if it is
        None or does not hold their numbers. Raises ModelError and ParallelError.
        """
        found = [self._linear(name, rows, inputs.total) for name, rows in outputs.items()]
        if quant is None or any(each.groups_I is not None or each.scales_OG is None for each in found):
            return self._floats(found, outputs, inputs)
        pieces = [
            _cut(name, each, rows, inputs, quant)
            for each, (name, rows) in zip(found, outputs.items(), strict=True)
        ]
        device = self.tensors.device
        return QuantizedWeight(
            quant,
            torch.cat([numbers for numbers, _ in pieces]).to(device),
            torch.cat([scales for _, scales in pieces]).to(device),
        )

    def _floats(
        self, found: list[DecodedLinear], outputs: Mapping[str, ShardSlice], inputs: ShardSlice
    ) -> Tensor:
        weight_OI = torch.zeros(
            (sum(rows.size for rows in outputs.values()), inputs.size), device=self.tensors.device
        )
        first = 0
        for each, rows in zip(found, outputs.values(), strict=True):
            part = each.floats()[rows.start : rows.stop, inputs.start : inputs.stop]
            weight_OI[first : first + len(part), : part.shape[1]].copy_(part)
            first += rows.size
        return weight_OI

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        """Declare that the linears `parts`, {name: rows}, are stored stacked as `name`."""
        stack, first = StoredStack(name, sum(parts.values())), 0
        for part, rows in parts.items():
            self.parts[part] = StackPart(stack, first)
            first += rows

    def _linear(self, name: str, rows: ShardSlice, inputs: int) -> DecodedLinear:
        part = self.parts.get(name)
        if part is None:
            return self._decode(name, rows.total, inputs)
        self.tensors.take_stored(name, (self.form.main,))
        if part.stack.decoded is None:
            part.stack.decoded = self._decode(part.stack.name, part.stack.rows, inputs)
        whole = part.stack.decoded
        return _rows_of(whole, slice(part.first, part.first + rows.total))

    def _decode(self, name: str, outputs: int, inputs: int) -> DecodedLinear:
        form, shape = self.form, self.form.main_shape(outputs, inputs)
        main = StoredTensor(form.main.suffix, form.main.dtypes, (shape,) if shape else ())
        needed = (main, *form.tensors(outputs, inputs))
        entries = self.tensors.take_stored(name, needed)
        by_name = {name + suffix: entry for suffix, entry in entries.items()}
        for tensor in needed:
            check_tensor(form, name, tensor, by_name)
        stored = {suffix: self._whole(entry) for suffix, entry in entries.items()}
        for suffix, read in stored.items():
            if read.is_floating_point() and not bool(read.float().isfinite().all()):
                raise bad_tensor(entries[suffix], "holds NaN or infinity")
        try:
            return decode(form, stored, outputs, inputs)
        except BadTensor as bad:
            raise bad_tensor(entries[bad.suffix], str(bad)) from None

    def _whole(self, entry: TensorEntry) -> Tensor:
        if not entry.nbytes:
            raise bad_tensor(entry, "is empty")
        row = replace(entry, shape=entry.shape or (1,))
        return self.tensors.read(row, tuple(map(ShardSlice.whole, row.shape)))


def bad_tensor(entry: TensorEntry, reason: str) -> ModelError:
    return ModelError(f"{entry.file}: tensor {shown(entry.name)} {reason}: fetch another copy of the model")


def _rows_of(decoded: DecodedLinear, rows: slice) -> DecodedLinear:
    return DecodedLinear(
        numbers_OI=decoded.numbers_OI[rows],
        scales_OG=None if decoded.scales_OG is None else decoded.scales_OG[rows],
        group=decoded.group,
        zeros_OG=None if decoded.zeros_OG is None else decoded.zeros_OG[rows],
        groups_I=decoded.groups_I,
    )


def _cut(
    name: str, decoded: DecodedLinear, rows: ShardSlice, inputs: ShardSlice, quant: Quant
) -> tuple[Tensor, Tensor]:
    """Return numbers and float16 scales of this rank's part, in the groups of `quant`. Padding is zeros."""
    assert decoded.scales_OG is not None
    group = decoded.group
    if group and (inputs.start % group or (inputs.stop % group and inputs.stop != inputs.total)):
        raise ParallelError(
            f"the checkpoint has one scale for {group} inputs, and a part of {name} would have {inputs.size} "
            f"of {inputs.total}: ask for another --tp, or for --pp"
        )
    held = slice(rows.start, rows.stop)
    numbers_OI = torch.zeros((rows.size, inputs.size), dtype=torch.int8)
    part = decoded.numbers_OI[held, inputs.start : inputs.stop]
    numbers_OI[: len(part), : part.shape[1]].copy_(part)
    scales_OG = torch.zeros((rows.size, quant.groups(inputs.size)), dtype=torch.float16)
    stored = decoded.scales_OG[held]
    if group:
        spread = stored[:, inputs.start // group : -(-inputs.stop // group)]
        spread = spread.repeat_interleave(group // quant.group, 1)[:, : scales_OG.shape[1]]
    else:
        spread = stored.expand(-1, scales_OG.shape[1])
    scales_OG[: len(spread), : spread.shape[1]].copy_(spread)
    if not bool(scales_OG.isfinite().all()):
        raise ModelError(f"the scales of {shown(name)} are larger than float16 holds: use another checkpoint")
    return numbers_OI, scales_OG
