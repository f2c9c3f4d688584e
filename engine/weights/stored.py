"""Read a rank's part of linears in published weight formats: decode each, cut it, and stack them.

O outputs, I inputs, G groups of inputs that share a scale.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmbox.kernels.quant_formats import QUANTS, Quant
from llmbox.kernels.weight_packing import QuantizedWeight, scale_dtype

from ..checkpoint.formats.weight_format import StoredTensor, WeightFormat, check_tensor, form_of
from ..checkpoint.safetensors import ShardSlice, TensorEntry, shown
from ..errors import ModelError, ParallelError
from .decoders import BadTensor, DecodedLinear, decode

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


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
    tensors: "Checkpoint"
    parts: dict[str, StackPart] = field(default_factory=dict)
    """Linears that are rows of a stored one, by name."""

    def read(
        self, outputs: Mapping[str, ShardSlice], inputs: ShardSlice, *, as_stored: bool
    ) -> QuantizedWeight | Tensor:
        """Read several linears as one stacked weight: in the kernels' format for their numbers, or in float32
        if it is not wanted `as_stored` or they have none in common. Raises ModelError and ParallelError.
        """
        found = [self._linear(name, rows, inputs.total) for name, rows in outputs.items()]
        forms = {form_of(self.form, name) for name in outputs}
        quant = QUANTS.get(forms.pop().quant or "") if as_stored and len(forms) == 1 else None
        if quant is None or any(each.scales_OG is None for each in found):
            return self._floats(found, outputs, inputs)
        order_I = None
        if any(each.groups_I is not None for each in found):
            order_I = _order_of(found, "+".join(outputs), inputs)
            if order_I is None:
                return self._floats(found, outputs, inputs)
        pieces = [
            _cut(name, each, rows, inputs, quant, order_I)
            for each, (name, rows) in zip(found, outputs.items(), strict=True)
        ]
        device = self.tensors.device
        numbers, scales, zeros = (torch.cat(parts).to(device) for parts in zip(*pieces, strict=True))
        return QuantizedWeight(
            quant,
            numbers,
            scales,
            zeros_OG=zeros if quant.has_zeros else None,
            order_I=None if order_I is None else order_I.int().to(device),
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
        self.tensors.take_stored(name, (form_of(self.form, name).main,))
        if part.stack.decoded is None:
            part.stack.decoded = self._decode(part.stack.name, part.stack.rows, inputs)
        whole = part.stack.decoded
        return _rows_of(whole, slice(part.first, part.first + rows.total))

    def _decode(self, name: str, outputs: int, inputs: int) -> DecodedLinear:
        form = form_of(self.form, name)
        shape = form.main_shape(outputs, inputs)
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


def _order_of(found: list[DecodedLinear], name: str, inputs: ShardSlice) -> Tensor | None:
    """Return the inputs in the order of their groups (act-order); None where the linears of a stack differ in
    it, or groups in size. Raises ParallelError and ModelError where it cannot be followed.
    """
    groups_I = found[0].groups_I
    for each in found[1:]:
        if groups_I is None or each.groups_I is None or not torch.equal(each.groups_I, groups_I):
            return None
    assert groups_I is not None
    if not bool((torch.bincount(groups_I) == found[0].group).all()):
        return None
    if not inputs.is_whole:
        raise ParallelError(
            f"groups of {name} are of inputs anywhere in a row (act-order), which ranks cannot share: ask "
            "for --pp instead of --tp"
        )
    if ".experts." in name:
        raise ModelError(
            f"experts with groups of inputs anywhere in a row (act-order) cannot be computed in their own "
            f"bits, and config.json does not say that {shown(name)} has them: fetch the model again"
        )
    return torch.argsort(groups_I, stable=True)


def _cut(
    name: str,
    decoded: DecodedLinear,
    rows: ShardSlice,
    inputs: ShardSlice,
    quant: Quant,
    order_I: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, scales (`scale_dtype`) and zeros of this rank's part, in the groups of `quant`. Padding
    is zeros.
    """
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
    numbers_OI[: len(part), : part.shape[1]].copy_(part if order_I is None else part[:, order_I])

    def spread(stored_OG: Tensor, dtype: torch.dtype) -> Tensor:
        groups_OG = torch.zeros((rows.size, quant.groups(inputs.size)), dtype=dtype)
        if group:
            mine = stored_OG[held, inputs.start // group : -(-inputs.stop // group)]
            mine = mine.repeat_interleave(group // quant.group, 1)[:, : groups_OG.shape[1]]
        else:
            mine = stored_OG[held].expand(-1, groups_OG.shape[1])
        groups_OG[: len(mine), : mine.shape[1]].copy_(mine)
        return groups_OG

    scales_OG = spread(decoded.scales_OG, scale_dtype(quant))
    if not bool(scales_OG.isfinite().all()):
        raise ModelError(f"the scales of {shown(name)} are larger than float16 holds: use another checkpoint")
    zeros_OG = scales_OG[:, :0]
    if quant.has_zeros and decoded.zeros_OG is not None:
        zeros_OG = spread(decoded.zeros_OG, torch.uint8)
    return numbers_OI, scales_OG, zeros_OG
