"""A rank's part of one rounded weight, stacked of the tensors that a checkpoint has for it (`rounded.py`)."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from llmbox.kernels import steps
from llmbox.kernels.packing import Rounded
from llmbox.kernels.quant import Quant

from . import rounded_parts as parts_of
from .errors import ModelError
from .parallel.layout import Part
from .rounded import INPUT_SCALES, STEP, scale_names, stored_dtype
from .safetensors_header import FETCH_AGAIN, TensorEntry, shown
from .tensor_bytes import refuse_non_finite


class Tensors(Protocol):
    """Of a checkpoint, each to be taken once."""

    @property
    def device(self) -> torch.device: ...

    def has(self, name: str) -> bool: ...

    def entry(self, name: str) -> TensorEntry:
        """Takes it. Raises ModelError if it is not there."""
        ...

    def read(self, entry: TensorEntry, parts: tuple[Part, ...]) -> Tensor:
        """As stored, on the CPU."""
        ...

    def fill(self, entry: TensorEntry, target: Tensor, *parts: Part) -> None:
        """Converted to the dtype of `target`; NaN and wrong shapes are refused."""
        ...


def read_rounded(tensors: Tensors, outputs: Mapping[str, Part], inputs: Part, quant: Quant) -> Rounded:
    """`outputs`: {name without `.weight`: rows}. Each keeps its own scales: nothing is rounded again.

    Raises ModelError, ParallelError.
    """
    parts_of.refuse_cut_groups("+".join(outputs), inputs, quant)
    codes, scales, found = [], [], []
    for name, rows in outputs.items():
        codes.append(read_codes(tensors, f"{name}.weight", rows, inputs, quant))
        scales.append(read_scales(tensors, f"{name}.weight", rows, inputs, quant))
        if quant.step:
            found.append(read_steps(tensors, f"{name}.weight{STEP}", rows, inputs, quant))
    codes_OI, steps_OS = parts_of.stacked(codes), None
    if quant.step:
        steps_OS = torch.cat(found)
        codes_OI = steps.to_numbers(codes_OI, steps_OS, quant)
    given = read_given(tensors, outputs) if quant.kind == "given" else None
    return Rounded(quant, codes_OI, torch.cat(scales), given, steps_OS)


def read_codes(tensors: Tensors, name: str, rows: Part, inputs: Part, quant: Quant) -> Tensor:
    """[rows, inputs] of that part; padding is zeros."""
    entry = tensors.entry(name)
    parts = parts_of.stored_parts(rows, inputs, quant)
    parts_of.refuse_other_codes(entry, tuple(part.total for part in parts), stored_dtype(quant))
    raw = tensors.read(entry, parts)
    if quant.is_float:
        refuse_non_finite(raw, entry, "")
    codes_OI = parts_of.unpacked(raw, quant, inputs.stop - inputs.start)
    target = torch.zeros((rows.size, inputs.size), dtype=codes_OI.dtype, device=tensors.device)
    target[: len(codes_OI)].copy_(codes_OI)
    return target


def read_steps(tensors: Tensors, name: str, rows: Part, inputs: Part, quant: Quant) -> Tensor:
    """[rows, steps of inputs] of that part; padding is what makes zeros of zeros."""
    entry = tensors.entry(name)
    parts = parts_of.step_parts(rows, inputs, quant)
    parts_of.refuse_other_codes(entry, tuple(part.total for part in parts), "U8")
    raw = tensors.read(entry, parts)
    if bool(((raw & 15) == 0).any()):
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} has a step of 0; {FETCH_AGAIN}")
    target = torch.full(
        (rows.size, quant.steps(inputs.size)), steps.PLAIN, dtype=torch.uint8, device=tensors.device
    )
    target[: len(raw), : raw.shape[1]].copy_(raw)
    return target


def read_scales(tensors: Tensors, name: str, rows: Part, inputs: Part, quant: Quant) -> Tensor:
    """[rows, groups of inputs] of that part; padding is zeros."""
    entry = tensors.entry(one_of(tensors, [f"{name}{scale}" for scale in scale_names(quant)]))
    dtype = torch.float32 if quant.is_float else torch.float16
    if quant.by_output:
        return read_column(tensors, parts_of.as_column(entry), rows)
    parts = parts_of.scale_parts(rows, inputs, quant)
    stored = torch.empty([part.size for part in parts], dtype=dtype, device=tensors.device)
    tensors.fill(entry, stored, *parts)
    return parts_of.scales_of_rows(stored, rows, quant)


def read_column(tensors: Tensors, entry: TensorEntry, rows: Part) -> Tensor:
    """[rows, 1]: one for each output, or the one that all of them share."""
    part = Part.whole(1) if entry.shape == (1, 1) else rows
    stored = torch.empty((part.size, 1), dtype=torch.float32, device=tensors.device)
    tensors.fill(entry, stored, part, Part.whole(1))
    return stored.expand(rows.size, 1)


def read_given(tensors: Tensors, names: Mapping[str, Part]) -> Tensor:
    """[1]: the scale of all activations that these linears share, as they read the same ones.

    Where they were calibrated apart it is the largest: what one of them could hold is not cut off.
    """
    found = []
    for name in names:
        entry = tensors.entry(one_of(tensors, [f"{name}.{scale}" for scale in INPUT_SCALES]))
        scale = torch.empty((1, 1), dtype=torch.float32)
        tensors.fill(parts_of.as_column(entry), scale, Part.whole(1), Part.whole(1))
        if not scale.item() > 0:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} is {scale.item()}, no scale of activations; "
                f"{FETCH_AGAIN}"
            )
        found.append(scale.view(1))
    return torch.cat(found).amax(0, keepdim=True).to(tensors.device)


def one_of(tensors: Tensors, names: list[str]) -> str:
    """The first where none is there, for it to be told as missing."""
    return next(filter(tensors.has, names), names[0])
