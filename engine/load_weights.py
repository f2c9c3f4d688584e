"""The weights of a model: from packed ones on disk if they are there, else from the checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from llmbox.kernels.ops import Ops
from llmbox.kernels.quant import QUANTS

from .footprint import grown, memory_in_use
from .layers.decoder import Decoder
from .model_config import ModelConfig
from .models import build_model
from .parallel.rank import ALONE, Rank
from .repacked import environment
from .weights import Checkpoint, Keeper

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WeightsWanted:
    directory: Path
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quant: str
    rank: Rank = ALONE


Loaded = tuple[Decoder, int | None]
"""The model, and the bytes of memory that it took (None where nobody tells)."""


def load_weights(config: ModelConfig, wanted: WeightsWanted, progress: Progress) -> Loaded:
    """Raises ModelError."""
    place = environment.read()
    if wanted.ops.packing is None or place is None:
        return from_checkpoint(config, wanted, progress)
    from .repacked.load import load_repacked  # noqa: PLC0415 - needs xxhash, which GPU machines may not have

    return load_repacked(config, wanted, progress, place)


def from_checkpoint(
    config: ModelConfig, wanted: WeightsWanted, progress: Progress, keeper: Keeper | None = None
) -> Loaded:
    before = memory_in_use(wanted.device)
    source = Checkpoint(
        wanted.directory, wanted.ops, wanted.dtype, wanted.device, progress, keeper, wanted.rank
    )
    model = build_model(config, source, QUANTS.get(wanted.quant))
    return model, grown(before, memory_in_use(wanted.device))
