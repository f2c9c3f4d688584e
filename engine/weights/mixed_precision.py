"""Mixed-precision formats: selected linears are packed in the higher precision of the output head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from ..distributed.communicator import TensorParallel
from ..model_config.mixed_precision import is_fine
from .source import WeightRequest, WeightSource


class MixedPrecisionSource:
    """`WeightSource` wrapper that upgrades the selected linears (`model_config/mixed_precision.py`)."""

    def __init__(self, source: WeightSource, layers: int) -> None:
        self._source = source
        self._layers = layers

    @property
    def ops(self) -> Ops:
        return self._source.ops

    @property
    def rank(self) -> TensorParallel:
        return self._source.rank

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.vector(name, size)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._source.floats(name, shape)

    def packed(self, asked: WeightRequest) -> PackedLinear:
        if is_fine(asked.name, self._layers):
            asked = replace(asked, kind="head")
        return self._source.packed(asked)

    def split(self, name: str, parts: Mapping[str, int]) -> None:
        self._source.split(name, parts)

    def split_experts(self, name: str, parts: Sequence[str], *, transposed: bool) -> None:
        self._source.split_experts(name, parts, transposed=transposed)

    def skip(self, name: str) -> None:
        self._source.skip(name)

    def finish(self) -> None:
        self._source.finish()
