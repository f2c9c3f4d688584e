"""Paged KV cache: k and v are [layers, blocks, G, block_size, D], their scales the same without D.

A head's slots of one block are contiguous: a decode program reads runs of block_size * D numbers.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op_types import KVShape
from ..linear import tile_config as tiles

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Code of a row's largest magnitude, by 8-bit dtype."""


@dataclass(frozen=True, slots=True)
class TritonKVCache:
    """Keys and values of all layers; `compute_dtype` is the model's dtype."""

    k: Tensor
    v: Tensor
    k_scale: Tensor
    """float32 scales; a few unused numbers where the dtype needs no scales."""
    v_scale: Tensor
    compute_dtype: torch.dtype
    is_windowed: bool = False
    latent: int = 0
    """See `KVShape`. With latents `v` is `k`."""
    layers: list[tuple[Tensor, ...]] = field(init=False)
    """k, v and their scales of each layer: indexing them for each launch takes the host longer."""

    def __post_init__(self) -> None:
        parts = (self.k, self.v, self.k_scale, self.v_scale)
        object.__setattr__(self, "layers", list(zip(*(part.unbind() for part in parts), strict=True)))

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.latent or self.k.shape[-1]

    @property
    def tensors(self) -> list[Tensor]:
        pairs = [(self.k, self.v), (self.k_scale, self.v_scale)] if self.quantized else [(self.k, self.v)]
        return [tensor for pair in pairs for tensor in (pair[:1] if self.latent else pair)]

    @property
    def quantized(self) -> bool:
        return self.k.dtype in LARGEST


IN_FLOAT16 = 2


def conversion_mode(cache: TritonKVCache, dtype: torch.dtype) -> int:
    """Return how keys and values are converted for products with rows of `dtype`: 0 not at all, 1 to that
    dtype, IN_FLOAT16 to float16, as the rows are too.

    GPUs convert two numbers of E4M3 to float16 in one instruction, and one to bfloat16 in several.
    """
    if cache.k.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16:
        return IN_FLOAT16
    return int(cache.quantized)


def make_kv_cache(shape: KVShape, device: torch.device) -> TritonKVCache:
    """Allocate the cache. Raises ValueError for FP8 on a GPU without it."""
    if shape.dtype == torch.float8_e4m3fn and not tiles.has_fp8(device):
        raise ValueError("fp8 keys and values need a GPU of compute capability 8.9 or newer: use int8")
    scales = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size)

    def make_pair(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys = torch.empty(size, dtype=dtype, device=device)
        return keys, keys if shape.latent else torch.empty_like(keys)

    k, v = make_pair((*scales, shape.head_dim), shape.dtype)
    # Unused scales are passed too. Each layer's begin at a multiple of 16 bytes: otherwise Triton would
    # compile another variant of the kernel.
    size = scales if shape.dtype in LARGEST else (shape.num_layers, 1, 1, 4)
    k_scale, v_scale = make_pair(size, torch.float32)
    return TritonKVCache(k, v, k_scale, v_scale, shape.compute_dtype, shape.is_windowed, shape.latent)


def clear_blocks(cache: TritonKVCache, blocks: list[int]) -> None:
    """Do nothing: attention never reads a slot that no token was written to."""


def copy_blocks(cache: TritonKVCache, pairs: list[tuple[int, int]]) -> None:
    """Copy blocks (source, destination) in all layers, without synchronizing."""
    if not pairs:
        return
    pairs_P2 = torch.tensor(pairs, dtype=torch.int32)
    if cache.k.device.type == "cuda":
        pairs_P2 = pairs_P2.pin_memory().to(cache.k.device, non_blocking=True)
    for tensor in cache.tensors:
        words = tensor.flatten(2).view(torch.int32)  # bytes are bytes: one kernel for all dtypes
        layers, blocks, size = words.shape
        copy_kernel[(len(pairs), layers)](words, pairs_P2, blocks * size, size, BLOCK=1024)


@triton.jit(do_not_specialize=["layer_stride"])
def copy_kernel(
    data: tl.tensor, pairs: tl.tensor, layer_stride: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Copy one block of one layer as 32-bit words. Reference: `copy_blocks` in
    `kernels/reference/kv_cache.py`.
    """
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    destination = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    base = data + layer * layer_stride
    for start in range(0, size, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < size
        words = tl.load(base + source * size + offset, mask=inside)
        tl.store(base + destination * size + offset, words, mask=inside)
