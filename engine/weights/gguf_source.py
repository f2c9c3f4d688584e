"""Weights of a GGUF model, read as they are (no other file is written): its language model, and the vision
tower in its projector file (mmproj).

Matrices keep the numbers of their blocks where the kernels compute these. Other tensors are dequantized to
float32, once, and packed in the model's dtype, or in the integers that `--quant` asks for.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear
from llmbox.kernels.weight_packing import BlockWeight, QuantizedWeight, scale_dtype

from ..checkpoint.safetensors import ShardSlice, TensorEntry, shown
from ..checkpoint.tensor_io import refuse_non_finite
from ..distributed.communicator import SINGLE, TensorParallel
from ..errors import ParallelError
from ..gguf.blocks import dequantize, unpack_rows
from ..gguf.names import EXPERT_PARTS
from ..gguf.projector import ProjectorTensor, check_projector_tensors, read_projector
from ..gguf.reader import BLOCKS, read_gguf
from ..gguf.tensors import GgufTensors, half_split_rope, read_bytes
from ..model_config.config import ModelConfig
from ..model_config.vision.config import VisionConfig
from .checkpoint import Checkpoint
from .source import WeightObserver, WeightRequest, pack, placed_for

_EXPERT = re.compile(r"(.+\.experts\.\d+)\.\w+")
_UPS = ("up_proj", "up", "w3", "gate_up_proj")


class GgufSource:
    """`WeightSource` over a GGUF file. Methods raise ModelError for missing or bad tensors."""

    def __init__(
        self,
        file: Path,
        config: ModelConfig,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        keeper: WeightObserver | None = None,
        rank: TensorParallel = SINGLE,
    ) -> None:
        self.ops, self.rank, self.dtype = ops, rank, dtype
        self.device, self._keeper = device, keeper
        self._tensors = GgufTensors(read_gguf(file), config.num_heads, config.num_kv_heads, progress)

    def vector(self, name: str, size: int) -> Tensor:
        return self._kept(name, self._tensors.take(name, (size,)).to(self.device, self.dtype))

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._kept(name, self._tensors.take(name, shape).to(self.device))

    def _kept(self, name: str, vector: Tensor) -> Tensor:
        if self._keeper is not None:
            self._keeper.vector(name, vector)
        return vector

    def packed(self, asked: WeightRequest) -> PackedLinear:
        with placed_for(asked, self):
            return self._packed(asked)

    def _packed(self, asked: WeightRequest) -> PackedLinear:
        types = self._block_types(asked)
        if (wide := self._packed_wide(asked)) is not None:
            packed, bias_O = wide, None
        elif types is None:
            packed, bias_O = self._packed_floats(asked)
        else:
            assert self.ops.packing is not None
            bias_O = self._bias(asked)
            parts = self._parts(asked, types)
            packed = self.ops.packing.pack_blocks(parts, self.dtype, bias_O)
        if self._keeper is not None:
            self._keeper.packed(asked, packed, bias_O)
        return packed

    def _packed_wide(self, asked: WeightRequest) -> PackedLinear | None:
        """Return a head's linear that is multiplied as float32 and stays Q8_0 in memory; None for others, and
        where the file has blocks along the wrong dimension.
        """
        packing, (name, *others) = self.ops.packing, asked.outputs
        if packing is None or not packing.holds_blocks or others or not asked.is_by_head:
            return None
        weight_name, (rows,) = f"{name}.weight", asked.outputs.values()
        kind = self._tensors.block_type(weight_name)
        if kind != "Q8_0" or self._tensors.is_turned(weight_name) != asked.transposed:
            return None
        entry, raw = self._tensors.take_blocks(weight_name, (rows.total, asked.inputs.total))
        weight = _unpack(kind, raw, entry)
        assert isinstance(weight, QuantizedWeight)
        return packing.pack_wide(weight, self.dtype)

    def _block_types(self, asked: WeightRequest) -> dict[str, str | None] | None:
        """Return the block type of each tensor (None: floats), or None where they are dequantized."""
        packing = self.ops.packing
        if packing is None or not packing.holds_blocks or asked.kind == "router" or asked.transposed:
            return None
        types = {name: self._tensors.block_type(f"{name}.weight") for name in asked.outputs}
        if not any(types.values()):
            return None
        if found := _EXPERT.fullmatch(next(iter(types))):
            # The experts of a layer are computed as one: all in blocks, and gates in those of `up`.
            parts = [part for part in EXPERT_PARTS if self._tensors.holds(f"{found[1]}.{part}.weight")]
            of_parts = {part: self._tensors.block_type(f"{found[1]}.{part}.weight") for part in parts}
            ups = {of_parts[part] for part in parts if part in _UPS or part in ("gate_proj", "w1")}
            if len(ups) != 1 or None in of_parts.values():
                return None
        return types

    def _parts(
        self, asked: WeightRequest, types: dict[str, str | None]
    ) -> list[QuantizedWeight | BlockWeight | Tensor]:
        """Read a weight as parts of one type each, from the first output to the last."""
        if asked.order is None:
            return [
                self._part(asked, [name for name, _ in group], kind, None)
                for kind, group in groupby(types.items(), key=lambda item: item[1])
            ]
        places: list[tuple[str | None, int]] = []
        rows: dict[str | None, int] = {}
        for name, kind in types.items():
            first = rows.get(kind, 0)
            rows[kind] = first + asked.outputs[name].size
            places += [(kind, row) for row in range(first, rows[kind])]
        names = {kind: [name for name, of_name in types.items() if of_name == kind] for kind in rows}
        runs = groupby((places[row] for row in asked.order), key=lambda place: place[0])
        order = [(kind, [row for _, row in run]) for kind, run in runs]
        return [self._part(asked, names[kind], kind, run) for kind, run in order]

    def _part(
        self, asked: WeightRequest, names: list[str], kind: str | None, order: list[int] | None
    ) -> QuantizedWeight | BlockWeight | Tensor:
        """Read tensors of one type as one weight, or those rows of it that `order` names."""
        rows = sum(asked.outputs[name].size for name in names)
        if kind is None:
            floats_OI = self._floats(asked, names)
            return floats_OI if order is None else floats_OI[order]
        block, nbytes = BLOCKS[kind]
        inputs = asked.inputs
        if any(end % block and end != inputs.total for end in (inputs.start, inputs.stop, inputs.size)):
            raise ParallelError(
                f"the blocks of {shown(names[0])} are {block} inputs, and a part of it would have "
                f"{inputs.size} of {inputs.total}: ask for another --tp, or for --pp"
            )
        raw = torch.zeros((rows, inputs.size // block * nbytes), dtype=torch.uint8)
        row = 0
        for name in names:
            shard = asked.outputs[name]
            entry, whole = self._tensors.take_blocks(f"{name}.weight", (shard.total, inputs.total))
            part = whole[
                shard.start : shard.stop, inputs.start // block * nbytes : inputs.stop // block * nbytes
            ]
            raw[row : row + len(part), : part.shape[1]] = part
            row += shard.size
        if order is not None:
            raw = raw[order]
        return _unpack(kind, raw, entry)

    def _packed_floats(self, asked: WeightRequest) -> tuple[PackedLinear, Tensor | None]:
        weight_OI = self._floats(asked, list(asked.outputs))
        if asked.order is not None:
            weight_OI = weight_OI[list(asked.order)]
        if asked.transposed:
            weight_OI = weight_OI.T.contiguous()
        bias_O = self._bias(asked)
        return pack(self.ops, asked.kind, weight_OI, bias_O), bias_O

    def _floats(self, asked: WeightRequest, names: list[str]) -> Tensor:
        outputs = sum(asked.outputs[name].size for name in names)
        weight_OI = torch.empty((outputs, asked.inputs.size), dtype=self.dtype, device=self.device)
        row = 0
        for name in names:
            rows = asked.outputs[name]
            whole = self._tensors.take(f"{name}.weight", (rows.total, asked.inputs.total))
            row = _fill(weight_OI, row, whole, rows, asked.inputs)
        return weight_OI

    def _bias(self, asked: WeightRequest) -> Tensor | None:
        if not asked.bias:
            return None
        bias_O = torch.empty(asked.shape[0], dtype=self.dtype, device=self.device)
        row = 0
        for name, rows in asked.outputs.items():
            row = _fill(bias_O, row, self._tensors.take(f"{name}.bias", (rows.total,)), rows)
        return bias_O if asked.order is None else bias_O[list(asked.order)]

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        self._tensors.split(name, parts)

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        self._tensors.split_experts(name, parts, transposed=transposed)

    def skip(self, name: str) -> None:
        self._tensors.skip(name)

    def skip_experts(self, name: str, held: Sequence[int]) -> None:
        """Do nothing: the experts of a layer are one tensor, of which those held are read."""

    def finish(self) -> None:
        self._tensors.finish()


def _unpack(kind: str, raw: Tensor, entry: TensorEntry) -> QuantizedWeight | BlockWeight:
    """Take rows of blocks apart, with scales as kernels have them. Raises ModelError for bad scales."""
    weight = unpack_rows(kind, raw, len(raw))
    refuse_bad_scales(weight, entry)
    if isinstance(weight, QuantizedWeight):
        scales_OG = weight.scales_OG.to(scale_dtype(weight.quant))
        return QuantizedWeight(weight.quant, weight.codes_OI, scales_OG)
    return weight


def refuse_bad_scales(weight: QuantizedWeight | BlockWeight, entry: TensorEntry) -> None:
    """Raise ModelError where a scale or a minimum is NaN or infinite."""
    scales = (
        [weight.scales_OG] if isinstance(weight, QuantizedWeight) else [weight.scales_OU, weight.minimums_OU]
    )
    for each in scales:
        if each is not None:
            refuse_non_finite(each, entry, "")


def _fill(target: Tensor, row: int, whole: Tensor, rows: ShardSlice, inputs: ShardSlice | None = None) -> int:
    """Copy a shard of `whole` to `target` from `row` on, with zeros as padding. Returns the row after it."""
    shard = whole[rows.start : rows.stop]
    part = target[row : row + rows.size]
    part.zero_()
    if inputs is not None:
        shard = shard[:, inputs.start : inputs.stop]
        part[: len(shard), : shard.shape[1]] = shard
    else:
        part[: len(shard)] = shard
    return row + rows.size


class ProjectorSource(Checkpoint):
    """Checkpoint whose tensors are made of those of a projector file, dequantized to float32."""

    def __init__(
        self,
        file: Path,
        vision: VisionConfig,
        directory: Path,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ModelError for a file that does not hold the tower of `vision`."""
        projector = read_projector(file)
        self._places: Mapping[str, ProjectorTensor] = check_projector_tensors(projector, vision)
        self._stored, self._heads = projector.tensors, vision.tower.num_heads
        entries = {
            name: replace(projector.tensors[place.names[0]], name=name, shape=place.shape)
            for name, place in self._places.items()
        }
        super().__init__(directory, ops, dtype, device, entries=entries)
        self._form = self._reader = None  # config.json declares blocks for the language model

    def read(self, entry: TensorEntry, parts: tuple[ShardSlice, ...]) -> Tensor:
        place = self._places[entry.name]
        if not place.shape:
            return self._floats(place.names[0]).view(())
        found = [self._floats(name).view(place.part_shape) for name in place.names]
        match place.layout:
            case "frames":
                # A file has a tensor for each frame, a checkpoint frames inside of colors.
                by_color = [each.view(each.shape[0], 3, -1) for each in found]
                whole = torch.stack(by_color, 2).flatten(1)
            case "pairs":
                whole = half_split_rope(found[0], self._heads)
            case "colors_first":
                colors = found[0].view(-1, 3, place.shape[-1] // 3)
                whole = colors.transpose(1, 2).reshape(place.shape)
            case "axes_first":
                whole = found[0].transpose(0, 1)
            case "adds_one":
                whole = found[0] - 1
            case _:
                whole = torch.cat(found)
        for dimension, part in enumerate(parts):
            whole = whole.narrow(dimension, part.start, part.stop - part.start)
        return whole

    def _floats(self, name: str) -> Tensor:
        entry = self._stored[name]
        return dequantize(entry.dtype, read_bytes(entry))
