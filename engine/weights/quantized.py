"""Read a rank's shard of quantized weights: codes, scales and sub-block steps of a checkpoint.

`checkpoint/quantized_layout.py` describes the stored layout. O outputs, I inputs, G groups, S steps.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmbox.kernels import weight_packing as steps
from llmbox.kernels.quant_formats import Quant
from llmbox.kernels.weight_packing import QuantizedWeight

from ..checkpoint.quantized_layout import INPUT_SCALES, STEP, scale_names, stored_columns, stored_dtype
from ..checkpoint.safetensors import FETCH_AGAIN, ShardSlice, TensorEntry, shown
from ..checkpoint.tensor_io import refuse_non_finite
from ..errors import ModelError, ParallelError

if TYPE_CHECKING:
    from .checkpoint import Checkpoint


def unpack_codes(stored: Tensor, quant: Quant, inputs: int) -> Tensor:
    """Unpack stored values to codes [O, I], int8 or E4M3 (`quantized_layout.py`).

    In formats with sub-block steps these are the unsigned numbers n, which `to_numbers` combines with the
    steps.
    """
    if quant.bits == 8:
        return stored
    halves = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)[:, :inputs]
    return halves.to(torch.int8) - (0 if quant.step else 8)


def stored_codes(rounded: QuantizedWeight) -> Tensor:
    """Pack codes as a checkpoint stores them: the inverse of `unpack_codes`."""
    if rounded.quant.bits == 8:
        return rounded.codes_OI
    halves = rounded.nibbles()
    halves = torch.nn.functional.pad(halves, (0, halves.shape[1] % 2), value=8)
    return halves[:, 0::2] | halves[:, 1::2] << 4


def select_rows(rounded: QuantizedWeight, rows: list[int]) -> QuantizedWeight:
    """Select rows in this order. Rows must stay within a block that shares scales."""
    codes_OI = rounded.codes_OI.view(torch.uint8)[rows].view(rounded.codes_OI.dtype)
    steps_OS = None if rounded.steps_OS is None else rounded.steps_OS[rows]
    zeros_OG = None if rounded.zeros_OG is None else rounded.zeros_OG[rows]
    return replace(
        rounded, codes_OI=codes_OI, scales_OG=rounded.scales_OG[rows], steps_OS=steps_OS, zeros_OG=zeros_OG
    )


def slice_codes(rows: ShardSlice, inputs: ShardSlice, quant: Quant) -> tuple[ShardSlice, ShardSlice]:
    """Return the slices of the stored codes that hold these rows and inputs. Groups are not split."""
    if quant.bits == 8:
        return rows, inputs
    return rows, ShardSlice(
        stored_columns(quant, inputs.total), inputs.start // 2, stored_columns(quant, inputs.stop)
    )


def slice_scales(rows: ShardSlice, inputs: ShardSlice, quant: Quant) -> tuple[ShardSlice, ShardSlice]:
    """Return the slices of the scales. A block may be split between rows: both ranks then read its scale."""
    groups = ShardSlice(quant.groups(inputs.total), inputs.start // quant.group, quant.groups(inputs.stop))
    assert not quant.by_output
    if quant.kind != "blocks":
        return rows, groups
    return ShardSlice(quant.groups(rows.total), rows.start // quant.group, quant.groups(rows.stop)), groups


def slice_steps(rows: ShardSlice, inputs: ShardSlice, quant: Quant) -> tuple[ShardSlice, ShardSlice]:
    """Return the slices of the sub-block steps, which never cross the end of a group."""
    _, groups = slice_scales(rows, inputs, quant)
    each = quant.group // quant.step
    return rows, ShardSlice(groups.total * each, groups.start * each, groups.stop * each)


def expand_scales(scales: Tensor, rows: ShardSlice, quant: Quant) -> Tensor:
    """Expand scales to one row for each of `rows`: the rows of a block share its scales."""
    if quant.kind != "blocks":
        return scales
    first = rows.start // quant.group * quant.group
    spread = scales.repeat_interleave(quant.group, 0)
    return spread[rows.start - first : rows.stop - first]


def refuse_cut_groups(name: str, inputs: ShardSlice, quant: Quant) -> None:
    """Raise ParallelError where a shard of the inputs begins or ends inside a group, which has one scale."""
    if quant.by_output:
        return
    if inputs.start % quant.group or (inputs.stop % quant.group and inputs.stop != inputs.total):
        raise ParallelError(
            f"the checkpoint's {quant.name} weights have one scale for {quant.group} inputs, and a part of "
            f"{name} would have {inputs.size} of {inputs.total}: ask for another --tp, or for --pp"
        )


def concatenate_codes(codes: list[Tensor]) -> Tensor:
    """Concatenate codes by their bytes: not all versions of torch concatenate 8-bit floats."""
    return torch.cat([each.view(torch.uint8) for each in codes]).view(codes[0].dtype)


def refuse_other_codes(entry: TensorEntry, shape: tuple[int, ...], dtype: str) -> None:
    """Raise ModelError where dtype or shape of codes or steps differ from config.json."""
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} is {entry.dtype} {list(entry.shape)}, config.json "
            f"asks for {dtype} {list(shape)}; {FETCH_AGAIN}"
        )


def as_column(entry: TensorEntry) -> TensorEntry:
    """Reshape per-output scales [O] to [O, 1], and a per-tensor scale [] to [1, 1]."""
    return replace(entry, shape=(*entry.shape, 1, 1)[:2]) if len(entry.shape) < 2 else entry


def read_quantized(
    tensors: "Checkpoint", outputs: Mapping[str, ShardSlice], inputs: ShardSlice, quant: Quant
) -> QuantizedWeight:
    """Read several quantized linears as one stacked weight; each keeps its scales: nothing is requantized.

    `outputs`: {name without `.weight`: rows}. Raises ModelError, ParallelError.
    """
    refuse_cut_groups("+".join(outputs), inputs, quant)
    codes, scales, found = [], [], []
    for name, rows in outputs.items():
        codes.append(read_codes(tensors, f"{name}.weight", rows, inputs, quant))
        scales.append(read_scales(tensors, f"{name}.weight", rows, inputs, quant))
        if quant.step:
            found.append(read_steps(tensors, f"{name}.weight{STEP}", rows, inputs, quant))
    codes_OI, steps_OS = concatenate_codes(codes), None
    if quant.step:
        steps_OS = torch.cat(found)
        codes_OI = steps.to_numbers(codes_OI, steps_OS, quant)
    given = read_static_input_scale(tensors, outputs) if quant.kind == "given" else None
    return QuantizedWeight(quant, codes_OI, torch.cat(scales), given, steps_OS)


def read_codes(
    tensors: "Checkpoint", name: str, rows: ShardSlice, inputs: ShardSlice, quant: Quant
) -> Tensor:
    """Read codes [rows, inputs] of this shard; padding is zeros."""
    entry = tensors.entry(name)
    parts = slice_codes(rows, inputs, quant)
    refuse_other_codes(entry, tuple(part.total for part in parts), stored_dtype(quant))
    raw = tensors.read(entry, parts)
    if quant.is_float:
        refuse_non_finite(raw, entry, "")
    codes_OI = unpack_codes(raw, quant, inputs.stop - inputs.start)
    target = torch.zeros((rows.size, inputs.size), dtype=codes_OI.dtype, device=tensors.device)
    target[: len(codes_OI)].copy_(codes_OI)
    return target


def read_steps(
    tensors: "Checkpoint", name: str, rows: ShardSlice, inputs: ShardSlice, quant: Quant
) -> Tensor:
    """Read sub-block steps [rows, steps of inputs] of this shard; padding keeps zero codes zero."""
    entry = tensors.entry(name)
    parts = slice_steps(rows, inputs, quant)
    refuse_other_codes(entry, tuple(part.total for part in parts), "U8")
    raw = tensors.read(entry, parts)
    if bool(((raw & 15) == 0).any()):
        raise ModelError(f"{entry.file}: tensor {shown(entry.name)} has a step of 0; {FETCH_AGAIN}")
    target = torch.full(
        (rows.size, quant.steps(inputs.size)), steps.PLAIN, dtype=torch.uint8, device=tensors.device
    )
    target[: len(raw), : raw.shape[1]].copy_(raw)
    return target


def read_scales(
    tensors: "Checkpoint", name: str, rows: ShardSlice, inputs: ShardSlice, quant: Quant
) -> Tensor:
    """Read scales [rows, groups of inputs] of this shard; padding is zeros."""
    entry = tensors.entry(one_of(tensors, [f"{name}{scale}" for scale in scale_names(quant)]))
    dtype = torch.float32 if quant.is_float else torch.float16
    if quant.by_output:
        return read_column(tensors, as_column(entry), rows)
    parts = slice_scales(rows, inputs, quant)
    stored = torch.empty([part.size for part in parts], dtype=dtype, device=tensors.device)
    tensors.fill(entry, stored, *parts)
    return expand_scales(stored, rows, quant)


def read_column(tensors: "Checkpoint", entry: TensorEntry, rows: ShardSlice) -> Tensor:
    """Read scales [rows, 1]: per output, or one per tensor, expanded."""
    part = ShardSlice.whole(1) if entry.shape == (1, 1) else rows
    stored = torch.empty((part.size, 1), dtype=torch.float32, device=tensors.device)
    tensors.fill(entry, stored, part, ShardSlice.whole(1))
    return stored.expand(rows.size, 1)


def read_static_input_scale(tensors: "Checkpoint", names: Mapping[str, ShardSlice]) -> Tensor:
    """Read the static input scale [1] of these linears, which read the same activations.

    Where they were calibrated separately it is the largest, so that no activation saturates.
    """
    found = []
    for name in names:
        entry = tensors.entry(one_of(tensors, [f"{name}.{scale}" for scale in INPUT_SCALES]))
        scale = torch.empty((1, 1), dtype=torch.float32)
        tensors.fill(as_column(entry), scale, ShardSlice.whole(1), ShardSlice.whole(1))
        if not scale.item() > 0:
            raise ModelError(
                f"{entry.file}: tensor {shown(entry.name)} is {scale.item()}, not a valid activation scale; "
                f"{FETCH_AGAIN}"
            )
        found.append(scale.view(1))
    return torch.cat(found).amax(0, keepdim=True).to(tensors.device)


def one_of(tensors: "Checkpoint", names: list[str]) -> str:
    """Return the name that exists; the first one where none does, to be reported as missing."""
    return next(filter(tensors.has, names), names[0])
