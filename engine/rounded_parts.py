"""Which part of a checkpoint's codes and scales makes a rank's part of a rounded weight (`rounded.py`)."""

from dataclasses import replace

import torch
from torch import Tensor

from llmbox.kernels.packing import Rounded
from llmbox.kernels.quant import Quant

from .errors import ModelError, ParallelError
from .parallel.layout import Part
from .rounded import stored_columns
from .safetensors_header import FETCH_AGAIN, TensorEntry, shown


def unpacked(stored: Tensor, quant: Quant, inputs: int) -> Tensor:
    """Codes [O, I], int8 or E4M3, of what a checkpoint holds (`rounded.py`); of formats with steps n."""
    if quant.bits == 8:
        return stored
    halves = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)[:, :inputs]
    return halves.to(torch.int8) - (0 if quant.step else 8)


def stored_codes(rounded: Rounded) -> Tensor:
    """Codes as a checkpoint holds them: what `unpacked` reads, and numbers of steps from that."""
    if rounded.quant.bits == 8:
        return rounded.codes_OI
    halves = rounded.halves()
    halves = torch.nn.functional.pad(halves, (0, halves.shape[1] % 2), value=8)
    return halves[:, 0::2] | halves[:, 1::2] << 4


def reordered(rounded: Rounded, rows: list[int]) -> Rounded:
    """With these rows, in this order. Rows stay within a block that shares scales."""
    codes_OI = rounded.codes_OI.view(torch.uint8)[rows].view(rounded.codes_OI.dtype)
    steps_OS = None if rounded.steps_OS is None else rounded.steps_OS[rows]
    return replace(rounded, codes_OI=codes_OI, scales_OG=rounded.scales_OG[rows], steps_OS=steps_OS)


def stored_parts(rows: Part, inputs: Part, quant: Quant) -> tuple[Part, Part]:
    """Of a tensor of codes, what holds these rows and inputs. Groups are not cut."""
    if quant.bits == 8:
        return rows, inputs
    return rows, Part(
        stored_columns(quant, inputs.total), inputs.start // 2, stored_columns(quant, inputs.stop)
    )


def scale_parts(rows: Part, inputs: Part, quant: Quant) -> tuple[Part, Part]:
    """Of its scales. Blocks may be cut between rows: then their scales belong to both parts."""
    groups = Part(quant.groups(inputs.total), inputs.start // quant.group, quant.groups(inputs.stop))
    assert not quant.by_output
    if quant.kind != "blocks":
        return rows, groups
    return Part(quant.groups(rows.total), rows.start // quant.group, quant.groups(rows.stop)), groups


def step_parts(rows: Part, inputs: Part, quant: Quant) -> tuple[Part, Part]:
    """Of its steps, which no group's end cuts."""
    _, groups = scale_parts(rows, inputs, quant)
    each = quant.group // quant.step
    return rows, Part(groups.total * each, groups.start * each, groups.stop * each)


def scales_of_rows(scales: Tensor, rows: Part, quant: Quant) -> Tensor:
    """One row of scales for each of the `rows`, of which blocks share theirs."""
    if quant.kind != "blocks":
        return scales
    first = rows.start // quant.group * quant.group
    spread = scales.repeat_interleave(quant.group, 0)
    return spread[rows.start - first : rows.stop - first]


def refuse_cut_groups(name: str, inputs: Part, quant: Quant) -> None:
    """Raises ParallelError where a part of the inputs begins or ends inside a group: it has one scale."""
    if quant.by_output:
        return
    if inputs.start % quant.group or (inputs.stop % quant.group and inputs.stop != inputs.total):
        raise ParallelError(
            f"the checkpoint's {quant.name} weights have one scale for {quant.group} inputs, and a part of "
            f"{name} would have {inputs.size} of {inputs.total}: ask for another --tp, or for --pp"
        )


def stacked(codes: list[Tensor]) -> Tensor:
    """By their bytes: 8-bit floats are not joined by all versions of torch."""
    return torch.cat([each.view(torch.uint8) for each in codes]).view(codes[0].dtype)


def refuse_other_codes(entry: TensorEntry, shape: tuple[int, ...], dtype: str) -> None:
    """Raises ModelError where a tensor of codes or steps is not what config.json says."""
    if (entry.dtype, entry.shape) != (dtype, shape):
        raise ModelError(
            f"{entry.file}: tensor {shown(entry.name)} is {entry.dtype} {list(entry.shape)}, config.json "
            f"asks for {dtype} {list(shape)}; {FETCH_AGAIN}"
        )


def as_column(entry: TensorEntry) -> TensorEntry:
    """Scales for each output, or one for all: [O, 1] or [1, 1], also where they are stored as [O] or []."""
    return replace(entry, shape=(*entry.shape, 1, 1)[:2]) if len(entry.shape) < 2 else entry
