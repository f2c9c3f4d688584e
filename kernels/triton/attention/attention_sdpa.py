"""Attention of long prompts by PyTorch's own kernels, which need contiguous keys and values: they are
gathered here.

Each prompt is computed on its own, in every layer. This pays off only where arithmetic costs more than the
copy, so it is off unless a prompt length is set from which to use it (`make gpu-check` measures that).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...op_types import BatchLayout
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
        k_GCD, v_GCD = (gathered(paged[layer], pages, context) for paged in (cache.k, cache.v))
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
