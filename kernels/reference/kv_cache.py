"""Paged KV cache: k and v are [layers, blocks, G, block_size, D], their scales the same without D.

A head's slots of one block are contiguous, so that attention gathers whole (block, head) rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..op_types import KVShape

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127, FP8: 448}


def quantize_dynamic(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize to codes shaped like `rows` and scales without the last dim.

    A row with NaN or infinity has codes 0 and the scale NaN.
    """
    rows, largest = rows.float(), LARGEST[dtype]
    most = rows.abs().amax(-1)
    # torch divides a Python number by a tensor with two roundings.
    inverse = torch.where(most > 0, torch.full_like(most, largest) / most, 0)
    scales = torch.where(most.isfinite(), most / largest, torch.nan)
    codes = (rows * inverse.unsqueeze(-1)).nan_to_num(0, 0, 0)
    return (codes.round_() if dtype == torch.int8 else codes).to(dtype), scales


@dataclass(frozen=True, slots=True)
class PagedTensor:
    """Keys or values of a cache."""

    numbers: Tensor
    scales: Tensor | None
    """float32 scales, for int8 and E4M3 only: a row is `scale * numbers`."""

    @property
    def tensors(self) -> list[Tensor]:
        numbers = self.numbers.view(torch.uint8) if self.numbers.dtype == FP8 else self.numbers  # same bytes
        return [numbers] if self.scales is None else [numbers, self.scales]

    def write(self, layer: int, block_of_T: Tensor, offset_of_T: Tensor, rows_TGD: Tensor) -> None:
        """Store rows at (block, offset), quantized where the cache has scales."""
        if self.scales is None:
            self.numbers[layer][block_of_T, :, offset_of_T] = rows_TGD.to(self.numbers.dtype)
            return
        codes_TGD, scales_TG = quantize_dynamic(rows_TGD, self.numbers.dtype)
        self.numbers[layer][block_of_T, :, offset_of_T] = codes_TGD
        self.scales[layer][block_of_T, :, offset_of_T] = scales_TG

    def gather(self, layer: int, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather pages to [pages, block_size, D]. A page holds the slots of one head in one block."""
        rows_PSD = self.numbers[layer].flatten(0, 1).index_select(0, pages)
        if self.scales is None:
            return rows_PSD.to(dtype)
        scales_PS = self.scales[layer].flatten(0, 1).index_select(0, pages)
        return (rows_PSD.float() * scales_PS.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class ReferenceKVCache:
    """Keys and values of all layers; `compute_dtype` is the model's dtype."""

    k: PagedTensor
    v: PagedTensor
    compute_dtype: torch.dtype
    is_windowed: bool = False
    """See `KVShape`. With latents `v` is `k`."""

    @property
    def device(self) -> torch.device:
        return self.k.numbers.device

    @property
    def heads(self) -> int:
        return self.k.numbers.shape[2]

    @property
    def block_numbers(self) -> int:
        """Numbers of the keys of one layer in one block."""
        return self.k.numbers[0, 0].numel()

    @property
    def tensors(self) -> list[Tensor]:
        """[layers, blocks, ...] each."""
        return self.k.tensors + (self.v.tensors if self.v is not self.k else [])


def read_keys(cache: ReferenceKVCache, layer: int, slots_S: Tensor, dims: slice) -> Tensor:
    """Implement `Ops.read_keys`."""
    numbers, scales = cache.k.numbers[layer], cache.k.scales
    block_S, offset_S = slots_S // numbers.shape[2], slots_S % numbers.shape[2]
    keys = numbers[block_S, 0, offset_S, dims].float()
    return keys if scales is None else keys * scales[layer][block_S, 0, offset_S].unsqueeze(1)


def make_kv_cache(shape: KVShape, device: torch.device) -> ReferenceKVCache:
    """Allocate the cache. int8 and E4M3 caches get float32 scales."""
    size = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)

    # Not zeroed here: `clear_blocks` comes before a block's first use, and until then untouched pages of a
    # large cache cost no memory.
    def half() -> PagedTensor:
        scaled = shape.dtype in LARGEST
        scales = torch.empty(size[:-1], dtype=torch.float32, device=device) if scaled else None
        return PagedTensor(torch.empty(size, dtype=shape.dtype, device=device), scales)

    keys = half()
    return ReferenceKVCache(keys, keys if shape.latent else half(), shape.compute_dtype, shape.is_windowed)


def copy_blocks(cache: ReferenceKVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in all layers."""
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs, device=cache.device).unbind(1)
    for tensor in cache.tensors:
        tensor.index_copy_(1, destinations, tensor.index_select(1, sources))


def clear_blocks(cache: ReferenceKVCache, blocks: list[int]) -> None:
    """Set blocks to zero in all layers."""
    if not blocks:
        return
    index = torch.tensor(blocks, device=cache.device)
    for tensor in cache.tensors:
        tensor.index_fill_(1, index, 0)
