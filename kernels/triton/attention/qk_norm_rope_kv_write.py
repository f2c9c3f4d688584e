"""Fused QK-norm, RoPE and KV cache write: from the rows of one linear to rotated queries and a written cache.

A program has some heads of one row. A head is 256 bytes, and a multiprocessor runs 32 programs at most: with
one head each they would request 8 KB at a time where memory needs 29 KB (docs/gpu-kernels.md). Heads of a row
also share their angles. Norm and rotation run in float32; between them a number is rounded to the model's
dtype, as it is in two separate operations.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.quantize_activations import eight_bits, magnitude, row_scale
from ..linear.tile_config import power_of_two
from .attention_metadata import TritonAttentionMetadata
from .kv_cache import LARGEST, TritonKVCache

HEADS = 8
"""Heads of one program, at most."""


def rotate_and_write(
    qkv_TnD: Tensor,
    norm_nD: Tensor | None,
    eps: float,
    cos_TD: Tensor,
    sin_TD: Tensor,
    cache: TritonKVCache,
    layer: int,
    plan: TritonAttentionMetadata,
) -> Tensor:
    rows, heads, head_dim = qkv_TnD.shape
    kv_heads = cache.k.shape[2]
    query_heads = heads - 2 * kv_heads
    q_THD = torch.empty((rows, query_heads, head_dim), dtype=qkv_TnD.dtype, device=qkv_TnD.device)
    run(q_THD, qkv_TnD, norm_nD, eps, (cos_TD, sin_TD), cache, layer, plan.ragged.slots_T, query_heads)
    return q_THD


def write_kv(
    cache: TritonKVCache, layer: int, k_TGD: Tensor, v_TGD: Tensor, plan: TritonAttentionMetadata
) -> None:
    kv_heads = cache.k.shape[2]
    for source, written in ((k_TGD, 0), (v_TGD, kv_heads))[: 1 if cache.latent else 2]:
        run(source, source, None, 0.0, None, cache, layer, plan.ragged.slots_T, 0, first=written)


def rotary(x_TnD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    rows, heads, head_dim = x_TnD.shape
    at_once = min(HEADS, power_of_two(heads))
    assert x_TnD.stride()[1:] == (head_dim, 1)
    out = torch.empty((rows, heads, head_dim), dtype=x_TnD.dtype, device=x_TnD.device)
    if rows:
        heads_kernel[(rows, triton.cdiv(heads, at_once))](
            out, out, out, cos_TD, sin_TD, x_TnD, out, cos_TD, sin_TD, out, x_TnD.stride(0),
            cos_TD.stride(0), 0.0, heads, heads, heads, 1, 0, D=head_dim,
            HALF_PAD=power_of_two(head_dim // 2), HEADS=at_once, PAGE=1, NORM=False, ROTATE=True, WRITE=False,
            QuantizE=False, LARGEST=1.0, num_warps=warps_for(head_dim, at_once),
        )  # fmt: skip
    return out


def warps_for(head_dim: int, heads: int) -> int:
    """Return the warps of a program, for two times four numbers a thread: 8 heads of 128 have four warps."""
    return max(1, power_of_two(head_dim) * heads // 256)


def run(
    q_THD: Tensor,
    x_TnD: Tensor,
    norm_nD: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    cache: TritonKVCache,
    layer: int,
    slots_T: Tensor,
    query_heads: int,
    first: int = 0,
) -> None:
    rows, heads, head_dim = x_TnD.shape
    at_once = min(HEADS, power_of_two(heads))
    assert x_TnD.stride()[1:] == (head_dim, 1)
    if not rows:
        return
    cos_TD, sin_TD = angles or (cache.k_scale, cache.k_scale)
    heads_kernel[(rows, triton.cdiv(heads, at_once))](
        q_THD,
        *cache.layers[layer],
        x_TnD,
        x_TnD if norm_nD is None else norm_nD,
        cos_TD,
        sin_TD,
        slots_T,
        x_TnD.stride(0),
        head_dim if angles is None else cos_TD.stride(0),
        eps,
        heads,
        query_heads,
        query_heads - first,
        cache.k.shape[2],
        cache.k.stride(1),
        D=head_dim,
        HALF_PAD=power_of_two(head_dim // 2),
        HEADS=at_once,
        PAGE=cache.k.shape[3],
        NORM=norm_nD is not None,
        ROTATE=angles is not None,
        WRITE=True,
        QuantizE=cache.quantized,
        LARGEST=LARGEST.get(cache.k.dtype, 1.0),
        num_warps=warps_for(head_dim, at_once),
    )


@triton.jit(do_not_specialize=["heads", "first_key", "query_heads"], do_not_specialize_on_alignment=["slots"])
def heads_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    x: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    x_row: tl.tensor,
    angle_row: tl.tensor,
    eps: tl.tensor,
    heads: tl.tensor,
    query_heads: tl.tensor,
    first_key: tl.tensor,
    kv_heads: tl.tensor,
    page_stride: tl.tensor,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    WRITE: tl.constexpr,
    QuantizE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Norm (NORM), rotate (ROTATE) and store HEADS heads of one row, in two halves.

    Head h of x is query h, or key h - first_key, or value h - first_key - kv_heads. Norm x / sqrt(mean(x^2) +
    eps) * weight and rotation (a cos - b sin, b cos + a sin) are float32. Reference: `rms_norm` and `rotary`
    in `kernels/reference/elementwise.py`, `write_kv` in `kernels/reference/attention.py`.
    """
    row, first_head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS
    HALF: tl.constexpr = D // 2
    head = first_head + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_PAD)
    inside = (head < heads)[:, None] & (d < HALF)[None, :]
    offset = head[:, None] * D + d[None, :]
    source = x + row * x_row + offset
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    first_value = first_key + kv_heads
    if first_head < first_value:
        turns = (head < first_value)[:, None]
        new_low, new_high = low, high
        if NORM:
            low_f = low.to(tl.float32)
            high_f = high.to(tl.float32)
            square = tl.sum(low_f * low_f + high_f * high_f, 1)
            inverse = tl.rsqrt(square / D + eps)[:, None]
            low_w = tl.load(norm + offset, mask=inside & turns, other=0.0).to(tl.float32)
            high_w = tl.load(norm + offset + HALF, mask=inside & turns, other=0.0).to(tl.float32)
            new_low = (low_f * inverse * low_w).to(x.dtype.element_ty)
            new_high = (high_f * inverse * high_w).to(x.dtype.element_ty)
        if ROTATE:
            angle = row * angle_row + d
            a, b = new_low.to(tl.float32), new_high.to(tl.float32)
            cos_low = tl.load(cos + angle, mask=d < HALF, other=0.0)[None, :]
            cos_high = tl.load(cos + angle + HALF, mask=d < HALF, other=0.0)[None, :]
            sin_low = tl.load(sin + angle, mask=d < HALF, other=0.0)[None, :]
            sin_high = tl.load(sin + angle + HALF, mask=d < HALF, other=0.0)[None, :]
            new_low = (a * cos_low + b * sin_low).to(x.dtype.element_ty)
            new_high = (b * cos_high + a * sin_high).to(x.dtype.element_ty)
        low, high = tl.where(turns, new_low, low), tl.where(turns, new_high, high)
    if first_head < query_heads:
        place = q + (row * query_heads + head)[:, None] * D + d[None, :]
        stored = inside & (head < query_heads)[:, None]
        tl.store(place, low, mask=stored)
        tl.store(place + HALF, high, mask=stored)
    if WRITE:
        slot = tl.load(slots + row)
        if (first_head + HEADS > query_heads) & (slot >= 0):
            block = (slot // PAGE).to(tl.int64)
            is_kv, is_key = (head >= query_heads) & (head < heads), head < first_value
            token = tl.where(is_key, head - first_key, head - first_value) * PAGE + slot % PAGE
            if QuantizE:
                low_f = low.to(tl.float32)
                high_f = high.to(tl.float32)
                most = tl.max(tl.maximum(magnitude(low_f), magnitude(high_f)), 1)
                scale = row_scale(most, LARGEST)
                low_n = eight_bits(low_f, most[:, None], LARGEST)
                high_n = eight_bits(high_f, most[:, None], LARGEST)
                place_scale = block * (kv_heads * PAGE) + token
                tl.store(k_scale + place_scale, scale, mask=is_kv & is_key)
                tl.store(v_scale + place_scale, scale, mask=is_kv & (head >= first_value))
            else:
                low_n, high_n = low, high
            place_kv = block * page_stride + token[:, None] * D + d[None, :]
            keys = inside & (is_kv & is_key)[:, None]
            values = inside & (is_kv & (head >= first_value))[:, None]
            tl.store(k + place_kv, low_n.to(k.dtype.element_ty), mask=keys)
            tl.store(k + place_kv + HALF, high_n.to(k.dtype.element_ty), mask=keys)
            tl.store(v + place_kv, low_n.to(v.dtype.element_ty), mask=values)
            tl.store(v + place_kv + HALF, high_n.to(v.dtype.element_ty), mask=values)
