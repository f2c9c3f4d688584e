"""Interface of vision towers, and the table of their families.

L = 1 + deepstack levels, R rows of one picture, E hidden size of the language model.
"""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops

from ..ipc.messages import PreparedImage
from ..model_config.vision.config import VisionConfig


class VisionEncoder(Protocol):
    """Tower and projector of one model."""

    def encode(self, image: PreparedImage) -> Generator[None, None, Tensor]:
        """Encode one picture, and yield wherever the step loop may run a step: about once a layer.

        Returns [L, R, E] in the model's dtype: the rows that stand for token embeddings, then those of each
        deepstack level. They are a function of the picture alone.
        """
        ...


MakeVisionEncoder = Callable[[VisionConfig, Path, Ops, torch.dtype], VisionEncoder]
"""Loads a tower (vision part, model folder, operations, dtype). Raises ModelError."""

VISION_ENCODERS: dict[str, MakeVisionEncoder] = {}
"""Towers by `VisionConfig.family`."""
