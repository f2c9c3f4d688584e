"""Vision tower and projector of a model: prepared pictures to rows of embeddings.

L = 1 + deepstack levels, R rows of one picture, E hidden size of the language model.
"""

from collections.abc import Generator
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops

from ..checkpoint.index import list_vision_tensors
from ..checkpoint.safetensors import TensorEntry
from ..gguf.folder import projector_of
from ..ipc.messages import PreparedImage
from ..model_config.vision.config import VisionConfig
from ..model_config.vision.tensors import check_vision_tensors
from ..weights.checkpoint import Checkpoint
from ..weights.projector_source import ProjectorSource
from .layers import TowerWeights
from .projectors import PROJECTORS, Projector
from .tower import VisionTower

CPU = torch.device("cpu")


class VisionEncoder:
    """Tower and projector of one model. Weights are unquantized, in the model's dtype."""

    def __init__(self, vision: VisionConfig, weights: TowerWeights) -> None:
        self.vision = vision
        self._tower = VisionTower(vision.tower, vision.processor, weights)
        self._projector: Projector = PROJECTORS[vision.tower.projector](vision, weights)

    @torch.inference_mode()
    def encode(self, image: PreparedImage) -> Generator[None, None, Tensor]:
        """Encode one picture, and yield wherever the step loop may run a step.

        Returns [L, R, E] in the model's dtype: the rows that stand for token embeddings, then those of each
        deepstack level. They are a function of the picture alone.
        """
        tiles: list[Tensor] = []
        start = 0
        for height, width in image.tiles:
            size = 3 * height * width
            pixels = torch.frombuffer(bytearray(image.pixels[start : start + size]), dtype=torch.uint8)
            start += size
            tiles.append((yield from self._tower.run(pixels.view(height, width, 3), self._projector)))
        return torch.cat(tiles, dim=1)


def load_vision_encoder(
    vision: VisionConfig, directory: Path, ops: Ops, dtype: torch.dtype, device: torch.device = CPU
) -> VisionEncoder:
    """Load tower and projector from the checkpoint's files, or from a projector file. Raises ModelError."""
    if (projector := projector_of(directory)) is not None:
        found = ProjectorSource(projector, vision, directory, ops, dtype, device)
        return VisionEncoder(vision, TowerWeights(found))
    entries = list_vision_tensors(directory)
    check_vision_tensors(directory, entries, vision.tensors)
    source = Checkpoint(directory, ops, dtype, device, entries=flatten_kernels(entries, vision))
    return VisionEncoder(vision, TowerWeights(source))


def flatten_kernels(entries: dict[str, TensorEntry], vision: VisionConfig) -> dict[str, TensorEntry]:
    """Return the tensors of the vision part, kernels of convolutions as matrices and numbers as vectors: a
    convolution whose stride is its size is a linear over patches.
    """
    found = {}
    for name, shape in vision.tensors.items():
        entry = entries[name]
        if not shape:
            entry = replace(entry, shape=(1,))
        elif len(entry.shape) > len(shape):
            entry = replace(entry, shape=(entry.shape[0], prod(entry.shape[1:])))
        found[name.replace("_projection_weight", "_projection.weight")] = entry
    return found
