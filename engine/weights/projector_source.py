"""Weights of a vision tower in a projector file (mmproj), as `TowerWeights` asks for them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops

from ..checkpoint.safetensors import TensorEntry
from ..gguf.blocks import dequantize
from ..gguf.projector import read_projector
from ..gguf.projector_tensors import ProjectorTensor, check_projector_tensors
from ..gguf.tensors import half_split_rope, read_bytes
from ..model_config.vision.config import VisionConfig
from ..partition import ShardSlice
from .checkpoint import Checkpoint


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
