"""The paged KV cache of the C++ library, and what its attention needs of a step."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ..op_types import BatchLayout, KVShape
from .weight_packing import KV_DTYPES, PackedHandle


@dataclass(frozen=True, slots=True)
class CPUAttentionMetadata:
    """Layout of the step and the sliding window of some layers."""

    ragged: BatchLayout
    window: int | None


class CPUKVCache(PackedHandle):
    """KV cache owned by the C++ library. Raises MemoryError if it cannot be allocated."""

    def __init__(self, library: ctypes.CDLL, shape: KVShape) -> None:
        self.dtype = shape.dtype
        self.heads = shape.num_kv_heads
        self._shape = shape
        self._library = library
        super().__init__(
            library.llmbox_cache_new(
                KV_DTYPES[shape.dtype],
                shape.num_layers,
                shape.num_blocks,
                shape.block_size,
                shape.num_kv_heads,
                shape.head_dim,
                shape.is_windowed,
            ),
            library.llmbox_cache_free,
        )

    def block_tensors(self) -> list[Tensor]:
        """Implement `Ops.block_tensors`: the library's own memory, valid as long as the cache."""
        at = self._library.llmbox_cache_data(self.pointer)
        size = self._library.llmbox_cache_block_bytes(self.pointer)
        count = self._shape.num_layers * self._shape.num_blocks * size
        memory = torch.frombuffer((ctypes.c_uint8 * count).from_address(at), dtype=torch.uint8)
        return [memory.view(self._shape.num_layers, self._shape.num_blocks, size)]
