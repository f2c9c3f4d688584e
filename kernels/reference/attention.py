"""Attention over a paged KV cache in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_metadata import AttentionGroup, AttentionMetadata, AttentionRun, causal_mask
from .kv_cache import ReferenceKVCache


def write_kv(
    cache: ReferenceKVCache, layer: int, k_TGD: Tensor, v_TGD: Tensor, plan: AttentionMetadata
) -> None:
    """Store keys and values of a step at their slots."""
    cache.k.write(layer, plan.block_of_T, plan.offset_of_T, k_TGD)
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
    special = Specials(softcap, sinks_H)
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


class Specials(NamedTuple):
    """Softcap and sinks, which PyTorch's attention does not have."""

    softcap: float | None
    sinks_H: Tensor | None

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks_H is None


def attend_group(
    group: AttentionGroup, q_NHD: Tensor, k_NGCD: Tensor, v_NGCD: Tensor, scale: float, special: Specials
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
    run: AttentionRun, q_LHD: Tensor, k_GCD: Tensor, v_GCD: Tensor, scale: float, special: Specials
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
