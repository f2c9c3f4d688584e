"""Attention metadata of a step, built once for all layers."""

from dataclasses import dataclass

import torch

from ...op_types import BatchLayout
from ..linear import tile_config as tiles
from .attention_combine import MOST_SPLITS
from .attention_sdpa import all_are_long
from .kv_cache import TritonKVCache

LEAST_SPLIT = 128
"""Fewest tokens of a split: shorter ones cost more in the reduction than they win."""
WAVES = 16
"""Programs a multiprocessor that decode aims at: with three resident, the last ones to end are a small
part.
"""
FIXED_SPLIT = 1024


@dataclass(frozen=True, slots=True)
class TritonAttentionMetadata:
    """Attention metadata. The first `decoding` sequences have one row each; `longest` bounds their contexts.

    `sdpa`: the other sequences go through PyTorch's kernels.
    """

    ragged: BatchLayout
    window: int | None
    decoding: int
    longest: int
    fixed: bool
    sdpa: bool = False


def plan_attention(
    ragged: BatchLayout,
    cache: TritonKVCache,
    window: int | None,
    *,
    fixed: bool = False,
    sdpa_from: int | None = None,
) -> TritonAttentionMetadata:
    """Build the metadata. `sdpa_from` is the prompt length from which PyTorch's kernels may be used; None:
    never.
    """
    if ragged.window is not None:
        ragged = ragged.for_cache(is_windowed=cache.is_windowed)
    decoding = next((n for n, rows in enumerate(ragged.query_lens) if rows != 1), len(ragged.query_lens))
    longest = ragged.block_tables_NB.shape[1] * ragged.block_size
    sdpa = window is None and not fixed and ragged.spans_N is None
    sdpa = sdpa and all_are_long(ragged.query_lens[decoding:], sdpa_from)
    return TritonAttentionMetadata(ragged, window, decoding, longest, fixed, sdpa and not cache.quantized)


def num_splits(plan: TritonAttentionMetadata, kv_heads: int, device: torch.device) -> int:
    if plan.fixed:
        return -(-plan.longest // FIXED_SPLIT)
    wanted = -(-WAVES * tiles.multiprocessors(device) // (plan.decoding * kv_heads))
    return max(1, min(wanted, MOST_SPLITS, -(-plan.longest // LEAST_SPLIT)))
