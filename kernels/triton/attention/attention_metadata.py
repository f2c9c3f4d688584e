"""Attention metadata of a step, built once for all layers, and long prompts that PyTorch's own kernels
attend.

These need contiguous keys and values, which are gathered. Each prompt is computed on its own, in every layer.
This pays off only where arithmetic costs more than the copy, so it is off unless a prompt length is set from
which to use it (`make gpu-check` measures that).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...op_types import BatchLayout
from ..linear import tile_config as tiles
from .attention_combine import MOST_SPLITS
from .kv_cache import TritonKVCache


def all_are_long(prompts: Sequence[int], least: int | None) -> bool:
    """Return whether all prompts of a step have `least` rows or more: one kernel serves them all, or none."""
    return least is not None and len(prompts) > 0 and min(prompts) >= least


def attend_gathered(
    out_THD: Tensor,
    q_THD: Tensor,
    cache: TritonKVCache,
    layer: int,
    ragged: BatchLayout,
    first: int,
    scale: float,
) -> None:
    """Attend for the sequences from `first` on. The cache has q's dtype; there is no sliding window."""
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415 - it imports torch's compiler: 2 s

    row = sum(ragged.query_lens[:first])
    for n in range(first, len(ragged.query_lens)):
        count, context = ragged.query_lens[n], ragged.contexts[n]
        rows = slice(row, row + count)
        pages = ragged.block_tables_NB[n, : -(-context // ragged.block_size)]
        k_GCD, v_GCD = (gathered(paged, pages, context) for paged in cache.layers[layer][:2])
        attended = F.scaled_dot_product_attention(
            q_THD[rows].transpose(0, 1).unsqueeze(0),
            k_GCD.unsqueeze(0),
            v_GCD.unsqueeze(0),
            attn_mask=causal_lower_right(count, context),
            scale=scale,
            enable_gqa=True,
        )
        out_THD[rows].copy_(attended[0].transpose(0, 1))
        row += count


def gathered(paged_BGSD: Tensor, pages: Tensor, context: int) -> Tensor:
    """Gather one layer's keys or values to [G, context, D]. Slots beyond the context are cut off."""
    pages_GPSD = paged_BGSD.transpose(0, 1).index_select(1, pages.to(torch.int64))
    return pages_GPSD.flatten(1, 2)[:, :context]


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
