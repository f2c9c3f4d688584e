"""Paged KV cache: k and v are [layers, blocks, G, block_size, D].

A head's slots of one block lie together, so that attention gathers whole (block, head) rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ragged import KVShape


@dataclass(frozen=True, slots=True)
class Cache:
    k: Tensor
    v: Tensor
    compute_dtype: torch.dtype


def make_kv_cache(shape: KVShape, device: torch.device) -> Cache:
    size = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    # Not zeroed here: `clear_blocks` comes before a block's first use, and until then untouched pages of a
    # large cache cost no memory.
    k, v = (torch.empty(size, dtype=shape.dtype, device=device) for _ in "kv")
    return Cache(k, v, shape.compute_dtype)


def copy_blocks(cache: Cache, pairs: list[tuple[int, int]]) -> None:
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs, device=cache.k.device).unbind(1)
    for tensor in (cache.k, cache.v):
        tensor.index_copy_(1, destinations, tensor.index_select(1, sources))


def clear_blocks(cache: Cache, blocks: list[int]) -> None:
    if not blocks:
        return
    index = torch.tensor(blocks, device=cache.k.device)
    for tensor in (cache.k, cache.v):
        tensor.index_fill_(1, index, 0)
