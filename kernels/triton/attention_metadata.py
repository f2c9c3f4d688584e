"""What attention derives from a step's shape, once for all layers."""

from dataclasses import dataclass

import torch

from ..op_types import BatchLayout
from . import tile_config as tiles
from .attention_combine import MOST_SPLITS
from .attention_sdpa import all_are_long
from .kv_cache import TritonKVCache

LEAST_SPLIT = 128
"""Tokens: shorter pieces would cost more in the reduction than they win."""
WAVES = 16
"""Programs a multiprocessor that decoding aims at: with three resident, the last to end are a small part."""
FIXED_SPLIT = 1024


@dataclass(frozen=True, slots=True)
class TritonAttentionMetadata:
    """`decoding` of the sequences, the first ones, have one row each; `longest` bounds their contexts.
    `sdpa`: the others go through PyTorch's kernels.
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
    """`sdpa_from`: tokens from which on prompts may leave these kernels; None: they never do."""
    decoding = next((n for n, rows in enumerate(ragged.query_lens) if rows != 1), len(ragged.query_lens))
    longest = ragged.block_tables_NB.shape[1] * ragged.block_size
    sdpa = window is None and not fixed and all_are_long(ragged.query_lens[decoding:], sdpa_from)
    return TritonAttentionMetadata(ragged, window, decoding, longest, fixed, sdpa and not cache.quantised)


def num_splits(plan: TritonAttentionMetadata, kv_heads: int, device: torch.device) -> int:
    if plan.fixed:
        return -(-plan.longest // FIXED_SPLIT)
    wanted = -(-WAVES * tiles.multiprocessors(device) // (plan.decoding * kv_heads))
    return max(1, min(wanted, MOST_SPLITS, -(-plan.longest // LEAST_SPLIT)))
