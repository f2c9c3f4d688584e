"""Attention over a paged KV cache in plain torch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op_types import BatchLayout
from .kv_cache import ReferenceKVCache

# Gathered keys of one group stay near 2^20 numbers: larger ones leave the CPU's caches (measured for 32
# sequences of 256 tokens: 3.8 ms a layer in groups of 4, 5.4 ms at once).
GATHER_LIMIT = {"cpu": 1 << 20, "cuda": 1 << 24}
MASK_LIMIT = 64 << 20
"""Largest mask in bytes. The memory estimator uses the same number."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """`rows` single-token rows with the same padded context of C slots."""

    rows: slice | Tensor
    count: int
    pages: Tensor
    """(block, head) pairs to gather, flat: [count * G * C / block_size]."""
    mask_N11C: Tensor
    """0 where a slot is seen, -inf elsewhere, in the model's dtype."""


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """Consecutive rows of one sequence."""

    rows: slice
    pages: Tensor
    """[G * C / block_size]."""
    context: int
    """Number of slots of the gathered pages that are used: the rest of the last block is cut off."""
    mask_LC: Tensor | None
    """None where a causal mask over equal lengths is enough."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Attention metadata of a step: slots to write, and groups and runs to attend."""

    block_of_T: Tensor
    offset_of_T: Tensor
    groups: list[AttentionGroup]
    runs: list[AttentionRun]


def build_attention_metadata(
    ragged: BatchLayout, cache: ReferenceKVCache, window: int | None
) -> AttentionMetadata:
    """Build the metadata of a step for layers of one sliding window; None: full attention."""
    ragged = ragged.for_cache(is_windowed=cache.is_windowed)
    slots = ragged.slots_T.long()
    singles: dict[int, list[int]] = {}
    runs: list[AttentionRun] = []
    start = 0
    for n, (length, context) in enumerate(zip(ragged.query_lens, ragged.contexts, strict=True)):
        if length == 1:
            first = first_seen_block(context, window, ragged.block_size)
            blocks = -(-context // ragged.block_size) - first
            singles.setdefault(padded_blocks(blocks), []).append(n)
        else:
            runs += plan_runs(ragged, cache, n, start, window)
        start += length
    groups = [
        plan_group(ragged, cache, blocks, chunk, window)
        for blocks, members in sorted(singles.items())
        for chunk in chunks(members, group_size(cache, blocks))
    ]
    return AttentionMetadata(slots // ragged.block_size, slots % ragged.block_size, groups, runs)


def first_seen_block(context: int, window: int | None, block_size: int) -> int:
    """Return the first block of the context that the window reaches, from the context's last position on."""
    if window is None:
        return 0
    return int(oldest_seen(torch.tensor(context - 1), window)) // block_size


def oldest_seen(positions: Tensor, window: int) -> Tensor:
    """Return the oldest position that a row at each position sees: see `Ops.plan_attention`."""
    if window < 0:
        return positions - positions % -window
    return (positions - window + 1).clamp(min=0)


def padded_blocks(blocks: int) -> int:
    """Round up to 4, 6, 8, 12, 16, 24...: a function of the row alone, so its sums do not depend on its
    neighbors.
    """
    size = 4
    while size < blocks:
        if size * 3 // 2 >= blocks:
            return size * 3 // 2
        size *= 2
    return size


def group_size(cache: ReferenceKVCache, blocks: int) -> int:
    """Return the number of rows of a group, limited by the size of its gathered keys."""
    return max(1, GATHER_LIMIT[cache.device.type] // (blocks * cache.block_numbers))


def chunks(members: list[int], size: int) -> list[list[int]]:
    return [members[i : i + size] for i in range(0, len(members), size)]


def plan_group(
    ragged: BatchLayout, cache: ReferenceKVCache, blocks: int, members: list[int], window: int | None
) -> AttentionGroup:
    """Plan a group of single-token rows: blocks to gather, and the mask."""
    device = cache.device
    heads = cache.heads
    block_size = ragged.block_size
    n = torch.tensor(members, device=device)
    context_N1 = ragged.context_lens_N[n].long().unsqueeze(1)
    first_N1 = torch.zeros_like(context_N1)
    if window is not None:
        first_N1 = oldest_seen(context_N1 - 1, window) // block_size
    # Past the end: the sequence's own first block, whose slots are masked but known to be its own.
    index_NB = first_N1 + torch.arange(blocks, device=device)
    index_NB = torch.where(index_NB * block_size < context_N1, index_NB, first_N1)
    tables_NB = ragged.block_tables_NB[n].long().gather(1, index_NB)
    pages_NGB = tables_NB.unsqueeze(1) * heads + torch.arange(heads, device=device).view(1, -1, 1)

    position_NC = first_N1 * block_size + torch.arange(blocks * block_size, device=device)
    seen_NC = position_NC < context_N1
    if window is not None:
        seen_NC &= position_NC >= oldest_seen(context_N1 - 1, window)
    mask_NC = torch.zeros(seen_NC.shape, dtype=cache.compute_dtype, device=device).masked_fill_(
        ~seen_NC, -torch.inf
    )
    starts = ragged.query_starts_N1[n]
    return AttentionGroup(as_rows(starts), len(members), pages_NGB.flatten(), mask_NC[:, None, None, :])


def as_rows(index: Tensor) -> slice | Tensor:
    """Return a slice if the rows are consecutive: slicing is free, gathering is not."""
    if index.device.type != "cpu":
        return index.long()
    first, count = int(index[0]), len(index)
    consecutive = torch.equal(index, torch.arange(first, first + count, dtype=index.dtype))
    return slice(first, first + count) if consecutive else index.long()


def plan_runs(
    ragged: BatchLayout, cache: ReferenceKVCache, n: int, start: int, window: int | None
) -> list[AttentionRun]:
    """Plan the rows of one sequence from row `start` on, in pieces where the mask would be too large."""
    length, context = ragged.query_lens[n], ragged.contexts[n]
    if sees_whole_context(ragged, n, window):
        return [
            plan_run(ragged, cache, n, slice(start + first, start + end), context, window, after=length - end)
            for first, end in pieces(length, context, cache)
        ]
    if length == context and (window is None or context <= abs(window)):
        return [plan_run(ragged, cache, n, slice(start, start + length), context, None)]
    return [
        plan_run(
            ragged,
            cache,
            n,
            slice(start + first, start + end),
            context - length + end,
            window,
            masked=True,
        )
        for first, end in pieces(length, context, cache)
    ]


def pieces(length: int, context: int, cache: ReferenceKVCache) -> list[tuple[int, int]]:
    """Cut rows of a sequence so that masks stay below `MASK_LIMIT`."""
    most = max(1, MASK_LIMIT // (context * cache.compute_dtype.itemsize))
    return [(first, min(first + most, length)) for first in range(0, length, most)]


def sees_whole_context(ragged: BatchLayout, n: int, window: int | None) -> bool:
    """Return True if rows of a sequence see those after them: see `BatchLayout.spans_N`."""
    if ragged.spans_N is None:
        return False
    span = int(ragged.spans_N[n])
    return span == 1 or (span == 2 and window is not None)


def plan_run(
    ragged: BatchLayout,
    cache: ReferenceKVCache,
    n: int,
    rows: slice,
    context: int,
    window: int | None,
    *,
    masked: bool = False,
    after: int | None = None,
) -> AttentionRun:
    """Plan a piece: `rows` are the last of the sequence's first `context` positions, or `after` positions
    before these, and then see all of them.
    """
    device = cache.device
    length = rows.stop - rows.start
    first = first_seen_block(context - (after or 0) - length + 1, window, ragged.block_size)
    end = -(-context // ragged.block_size)
    heads = torch.arange(cache.heads, device=device).unsqueeze(1)
    pages_GB = ragged.block_tables_NB[n, first:end].long() * len(heads) + heads
    seen = context - first * ragged.block_size
    mask = None
    if masked or after is not None:
        mask = causal_mask(length, seen, context, window, cache.compute_dtype, device, after)
    return AttentionRun(rows, pages_GB.flatten(), seen, mask)


def causal_mask(
    length: int,
    seen: int,
    context: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    after: int | None = None,
) -> Tensor:
    """Build a mask: rows are the last `length` positions of the context, columns its last `seen` ones.
    `after`: see `plan_run`.
    """
    end = context - (after or 0)
    row_L1 = torch.arange(end - length, end, device=device).unsqueeze(1)
    column_C = torch.arange(context - seen, context, device=device)
    hidden_LC = column_C > (row_L1 if after is None else torch.full_like(row_L1, context))
    if window is not None:
        hidden_LC |= column_C < oldest_seen(row_L1, window)
    return torch.zeros(hidden_LC.shape, dtype=dtype, device=device).masked_fill_(hidden_LC, -torch.inf)


def write_kv(
    cache: ReferenceKVCache, layer: int, k_TGD: Tensor, v_TGD: Tensor, plan: AttentionMetadata
) -> None:
    """Store keys and values of a step at their slots."""
    cache.k.write(layer, plan.block_of_T, plan.offset_of_T, k_TGD)
    if cache.v is not cache.k:
        cache.v.write(layer, plan.block_of_T, plan.offset_of_T, v_TGD)


def attention(
    q_THD: Tensor,
    cache: ReferenceKVCache,
    layer: int,
    plan: AttentionMetadata,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute softmax(scale q k^T + mask) v, each row over its own context, gathered from its blocks."""
    special = ScoreOptions(softcap, sinks_H)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    heads, dtype = cache.heads, q_THD.dtype
    for group in plan.groups:
        k_NGCD = cache.k.gather(layer, group.pages, dtype).view(group.count, heads, -1, q_THD.shape[-1])
        v_NGCD = cache.v.gather(layer, group.pages, dtype).view_as(k_NGCD)
        out_THD[group.rows] = attend_group(group, q_THD[group.rows], k_NGCD, v_NGCD, scale, special)
    for run in plan.runs:
        k_GCD = cache.k.gather(layer, run.pages, dtype).view(heads, -1, q_THD.shape[-1])[:, : run.context]
        v_GCD = cache.v.gather(layer, run.pages, dtype).view(heads, -1, q_THD.shape[-1])[:, : run.context]
        out_THD[run.rows] = attend_run(run, q_THD[run.rows], k_GCD, v_GCD, scale, special)
    return out_THD.flatten(1)


class ScoreOptions(NamedTuple):
    """Softcap and sinks, which PyTorch's attention does not have."""

    softcap: float | None
    sinks_H: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None


def attend_group(
    group: AttentionGroup, q_NHD: Tensor, k_NGCD: Tensor, v_NGCD: Tensor, scale: float, special: ScoreOptions
) -> Tensor:
    """Attend for a group of single-token rows.

    The query heads of one KV head become rows of one product: keys are read once for all of them.
    """
    q_NGrD = q_NHD.reshape(group.count, k_NGCD.shape[1], -1, q_NHD.shape[-1])
    if not special.is_plain:
        sinks = None if special.sinks_H is None else special.sinks_H.view(*q_NGrD.shape[1:3], 1)
        out = attend_special(q_NGrD, k_NGCD, v_NGCD, group.mask_N11C, scale, special.softcap, sinks)
    else:
        out = F.scaled_dot_product_attention(q_NGrD, k_NGCD, v_NGCD, attn_mask=group.mask_N11C, scale=scale)
    return out.reshape(q_NHD.shape)


def attend_run(
    run: AttentionRun, q_LHD: Tensor, k_GCD: Tensor, v_GCD: Tensor, scale: float, special: ScoreOptions
) -> Tensor:
    """Attend for consecutive rows of one sequence: q [L, H, D], keys and values [G, C, D]."""
    if not special.is_plain:
        mask_LC = run.mask_LC
        if mask_LC is None:
            length = len(q_LHD)
            mask_LC = causal_mask(length, length, length, None, q_LHD.dtype, q_LHD.device)
        q_GrLD = q_LHD.transpose(0, 1).reshape(len(k_GCD), -1, *q_LHD.shape[::2])
        sinks = None if special.sinks_H is None else special.sinks_H.view(*q_GrLD.shape[:2], 1, 1)
        k, v = k_GCD.unsqueeze(1), v_GCD.unsqueeze(1)
        out_GrLD = attend_special(q_GrLD, k, v, mask_LC, scale, special.softcap, sinks)
        return out_GrLD.flatten(0, 1).transpose(0, 1)
    return F.scaled_dot_product_attention(
        q_LHD.transpose(0, 1).unsqueeze(0),
        k_GCD.unsqueeze(0),
        v_GCD.unsqueeze(0),
        attn_mask=run.mask_LC,
        is_causal=run.mask_LC is None,
        scale=scale,
        enable_gqa=True,
    )[0].transpose(0, 1)


def attend_special(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with capped scores or with sinks, in float32; q, k and v are [..., rows, D]."""
    scores = (q @ k.transpose(-1, -2)).float()
    if softcap is None:
        scores = scores * scale + mask
    else:
        scores = (scores * (scale / softcap)).tanh_() * softcap + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1)
        weights = scores.softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v
