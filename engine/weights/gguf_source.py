"""Weights of a GGUF file, read as they are: no other file is written.

Each tensor is dequantized from its own blocks to float32, once, and packed for the kernels in the model's
dtype, or in the integers that `--quant` asks for. Nothing is rounded in between.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llmbox.kernels.ops import Ops, PackedLinear

from ..distributed.communicator import SINGLE, TensorParallel
from ..gguf.reader import read_gguf
from ..gguf.tensors import GgufTensors
from ..model_config.config import ModelConfig
from ..partition import ShardSlice
from .source import WeightObserver, WeightRequest, pack


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
        self._device, self._keeper = device, keeper
        self._tensors = GgufTensors(read_gguf(file), config.num_heads, config.num_kv_heads, progress)

    def vector(self, name: str, size: int) -> Tensor:
        return self._kept(name, self._tensors.take(name, (size,)).to(self._device, self.dtype))

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._kept(name, self._tensors.take(name, shape).to(self._device))

    def _kept(self, name: str, vector: Tensor) -> Tensor:
        if self._keeper is not None:
            self._keeper.vector(name, vector)
        return vector

    def packed(self, asked: WeightRequest) -> PackedLinear:
        shape = asked.shape[::-1] if asked.transposed else asked.shape
        weight_OI = torch.empty(shape, dtype=self.dtype, device=self._device)
        row = 0
        for name, rows in asked.outputs.items():
            whole = self._tensors.take(f"{name}.weight", (rows.total, asked.inputs.total))
            row = _fill(weight_OI, row, whole, rows, asked.inputs)
        if asked.order is not None:
            weight_OI = weight_OI[list(asked.order)]
        if asked.transposed:
            weight_OI = weight_OI.T.contiguous()
        bias_O = self._bias(asked)
        packed = pack(self.ops, asked.kind, weight_OI, bias_O)
        if self._keeper is not None:
            self._keeper.packed(asked, packed, bias_O)
        return packed

    def _bias(self, asked: WeightRequest) -> Tensor | None:
        if not asked.bias:
            return None
        bias_O = torch.empty(asked.shape[0], dtype=self.dtype, device=self._device)
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

    def finish(self) -> None:
        self._tensors.finish()


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
