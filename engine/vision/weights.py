"""Requests of a vision tower for its weights, which no format quantizes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from ..checkpoint.safetensors import shown
from ..errors import ModelError
from ..model_config.vision.config import TowerConfig
from ..model_config.vision.tensors import BOUNDS
from ..partition import ShardSlice
from ..weights.checkpoint import Checkpoint
from ..weights.source import WeightRequest


class TowerWeights:
    """Weights of a tower under a name prefix."""

    def __init__(self, source: Checkpoint, prefix: str = "") -> None:
        self._source, self._prefix = source, prefix

    @property
    def ops(self) -> Ops:
        return self._source.ops

    @property
    def dtype(self) -> torch.dtype:
        return self._source.dtype

    @property
    def device(self) -> torch.device:
        return self._source.device

    def at(self, prefix: str) -> "TowerWeights":
        return TowerWeights(self._source, f"{self._prefix}{prefix}.")

    def vector(self, name: str, size: int) -> Tensor:
        return self._source.vector(self._prefix + name, size)

    def floats(self, name: str, *shape: int) -> Tensor:
        return self._source.floats(self._prefix + name, shape)

    def linear(
        self,
        names: Sequence[str],
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        order: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> PackedLinear:
        """Request one linear that stacks the named ones, each of `outputs`. `order`, `transposed`: as in
        `WeightRequest`.
        """
        stack = {self._prefix + name: ShardSlice.whole(outputs) for name in names}
        asked = WeightRequest("router", stack, ShardSlice.whole(inputs), bias, order, transposed)
        return self._source.packed(asked)

    def positions(self, tower: TowerConfig) -> Tensor | None:
        """Return the table of learned positions; of columns and of rows [2, N, E] where each has its own."""
        if not tower.table:
            return None
        name, rows, hidden = tower.names.table, tower.table_rows, tower.hidden_size
        if tower.table == "axes":
            return self.floats(name, 2, rows, hidden).to(self.dtype)
        if tower.table == "places":
            return self.floats(name, rows, 2, hidden).transpose(0, 1).contiguous().to(self.dtype)
        return self.floats(f"{name}.weight", rows, hidden).to(self.dtype)

    def bounds(self, linear: str) -> tuple[float, ...]:
        """Return the bounds of a linear that clips, of inputs and of results. They may be infinite."""
        at = self._prefix + linear.removesuffix(".linear")
        numbers = []
        for bound in BOUNDS:
            entry = self._source.entry(f"{at}.{bound}")
            numbers.append(float(self._source.read(entry, (ShardSlice.whole(1),))))
            if numbers[-1] != numbers[-1]:
                raise ModelError(f"{entry.file}: tensor {shown(entry.name)} is not a number")
        return tuple(numbers)


class TowerNorm:
    """RMS norm or LayerNorm of a tower. The constructor reads its weights."""

    def __init__(
        self, weights: TowerWeights, name: str, size: int, eps: float, *, is_rms: bool, adds_one: bool = False
    ) -> None:
        self._ops, self._eps, self._is_rms = weights.ops, eps, is_rms
        self._weight = weights.vector(f"{name}.weight", size)
        self._bias = None if is_rms else weights.vector(f"{name}.bias", size)
        if adds_one:
            self._weight = self._weight.float() + 1

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_rms:
            return self._ops.rms_norm(x, self._weight, self._eps)
        return self._ops.layer_norm(x, None, self._weight, self._eps, self._bias)
