import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_plan import Group, Plan, Run
from .kv_cache import Cache


def write_kv(cache: Cache, layer: int, k_TGD: Tensor, v_TGD: Tensor, plan: Plan) -> None:
    cache.k.write(layer, plan.block_of_T, plan.offset_of_T, k_TGD)
    cache.v.write(layer, plan.block_of_T, plan.offset_of_T, v_TGD)


def attention(q_THD: Tensor, cache: Cache, layer: int, plan: Plan, scale: float) -> Tensor:
    """softmax(scale q k^T + mask) v, each row over its own context gathered from the pages."""
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    heads, dtype = cache.heads, q_THD.dtype
    for group in plan.groups:
        k_NGCD = cache.k.gather(layer, group.pages, dtype).view(group.count, heads, -1, q_THD.shape[-1])
        v_NGCD = cache.v.gather(layer, group.pages, dtype).view_as(k_NGCD)
        out_THD[group.rows] = attend_group(group, q_THD[group.rows], k_NGCD, v_NGCD, scale)
    for run in plan.runs:
        k_GCD = cache.k.gather(layer, run.pages, dtype).view(heads, -1, q_THD.shape[-1])[:, : run.context]
        v_GCD = cache.v.gather(layer, run.pages, dtype).view(heads, -1, q_THD.shape[-1])[:, : run.context]
        out_THD[run.rows] = attend_run(run, q_THD[run.rows], k_GCD, v_GCD, scale)
    return out_THD.flatten(1)


def attend_group(group: Group, q_NHD: Tensor, k_NGCD: Tensor, v_NGCD: Tensor, scale: float) -> Tensor:
    """The query heads of one kv head become rows of one product: keys are read once for all of them."""
    q_NGrD = q_NHD.reshape(group.count, k_NGCD.shape[1], -1, q_NHD.shape[-1])
    out = F.scaled_dot_product_attention(q_NGrD, k_NGCD, v_NGCD, attn_mask=group.mask_N11C, scale=scale)
    return out.reshape(q_NHD.shape)


def attend_run(run: Run, q_LHD: Tensor, k_GCD: Tensor, v_GCD: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        q_LHD.transpose(0, 1).unsqueeze(0),
        k_GCD.unsqueeze(0),
        v_GCD.unsqueeze(0),
        attn_mask=run.mask_LC,
        is_causal=run.mask_LC is None,
        scale=scale,
        enable_gqa=True,
    )[0].transpose(0, 1)
