"""Attention over int8 keys and values, and what writes them, with the bits of C++.

A context is cut into chunks of 64 slots from its beginning. Queries and softmax weights are 16-bit integers,
two parts of 8 bits each, so that both products are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..attention.attention_metadata import TritonAttentionMetadata
from ..attention.kv_cache import TritonKVCache
from ..linear.gemm_inner import owner_of_tile
from ..linear.tile_config import power_of_two as whole_tile
from .arithmetic import (
    SUM_LANES,
    codes_of_rows,
    constant,
    multiply_add,
    over_lanes,
    power_of_two,
    quotient,
    range_of,
    rounded,
    scale_of_rows,
    tanh,
    widen,
)
from .rows import ROWS, inverse_root

LOG2_E = 1.44269504
STRIP, STRIPS = tl.constexpr(16), tl.constexpr(4)
"""Slots of a strip, and strips of a chunk. If a block is not a multiple of a strip, its last one is short."""
SLOTS = tl.constexpr(64)
LARGEST = tl.constexpr(127.0 * 128)
"""Code of the largest query of a head, and of the largest weight of a chunk."""
WITH_WINDOW, WITH_CHUNKS = tl.constexpr(1), tl.constexpr(2)


def rotary(x_TnD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    out = torch.empty(x_TnD.shape, dtype=x_TnD.dtype, device=x_TnD.device)
    run_heads(out, x_TnD, None, 0.0, (cos_TD, sin_TD), None, 0, None, 0)
    return out


def write_kv(
    cache: TritonKVCache, layer: int, k_TGD: Tensor, v_TGD: Tensor, plan: TritonAttentionMetadata
) -> None:
    for x, first in ((k_TGD, 0), (v_TGD, k_TGD.shape[1])):
        run_heads(x, x, None, 0.0, None, cache, layer, plan.ragged.slots_T, first)


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
    rows, heads, width = qkv_TnD.shape
    queries = heads - 2 * cache.k.shape[2]
    q_THD = torch.empty((rows, queries, width), dtype=qkv_TnD.dtype, device=qkv_TnD.device)
    run_heads(q_THD, qkv_TnD, norm_nD, eps, (cos_TD, sin_TD), cache, layer, plan.ragged.slots_T, -queries)
    return q_THD


def run_heads(
    out_TnD: Tensor,
    x_TnD: Tensor,
    norm_nD: Tensor | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    cache: TritonKVCache | None,
    layer: int,
    slots_T: Tensor | None,
    first: int,
) -> None:
    """Launch `portable_heads_kernel`. Head n of x is the head n + `first` of keys and values, or a query."""
    rows, heads, width = x_TnD.shape
    assert x_TnD.stride()[1:] == (width, 1)
    if not rows:
        return
    cos_TD, sin_TD = (out_TnD, out_TnD) if angles is None else angles
    k, v, k_scale, v_scale = (out_TnD,) * 4
    if cache is not None:
        k, v, k_scale, v_scale = cache.layers[layer]
    portable_heads_kernel[(triton.cdiv(rows, ROWS), heads)](
        out_TnD,
        k,
        v,
        k_scale,
        v_scale,
        x_TnD,
        out_TnD if norm_nD is None else norm_nD,
        cos_TD,
        sin_TD,
        out_TnD if slots_T is None else slots_T,
        rows,
        x_TnD.stride(0),
        cos_TD.stride(0),
        eps,
        first,
        out_TnD.shape[1],
        1 if cache is None else cache.k.shape[2],
        D=width,
        HALF=whole_tile(triton.cdiv(width, 2)),
        PAGE=1 if cache is None else cache.k.shape[3],
        NORM=norm_nD is not None,
        ROTATE=angles is not None,
        WRITE=cache is not None,
        ROWS=ROWS,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows", "first"])
def portable_heads_kernel(
    out: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    x: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    x_row: tl.tensor,
    angle_row: tl.tensor,
    eps: tl.tensor,
    first: tl.tensor,
    out_heads: tl.tensor,
    kv_heads: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    WRITE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Norm and rotate one head of ROWS rows, then store it as a query or quantized as a key or value; values
    are only stored. C++: `HeadsOp` in `native/attention/qk_norm_rope_kv_write.h`.
    """
    m, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    stored = head + first
    is_value = stored >= kv_heads
    real = (m < rows)[:, None]
    from_x = x + (m.to(tl.int64) * x_row + head * D)[:, None]
    d = tl.arange(0, HALF)[None, :]
    in_low, in_high = real & (d < D // 2), real & (d < D - D // 2)
    low = widen(tl.load(from_x + d, mask=in_low, other=0.0))
    high = widen(tl.load(from_x + D // 2 + d, mask=in_high, other=0.0))
    given_low, given_high = low, high
    if NORM:
        squares = tl.zeros((ROWS, SUM_LANES), tl.float32)
        for begin in range(0, D, SUM_LANES):
            i = begin + tl.arange(0, SUM_LANES)[None, :]
            each = widen(tl.load(from_x + i, mask=real & (i < D), other=0.0))
            squares = multiply_add(each, each, squares)
        scale = inverse_root(over_lanes(squares, ROWS), eps, D)[:, None]
        by = norm + head * D + d
        by_low = widen(tl.load(by, mask=(d < D // 2) & (stored < kv_heads), other=0.0))
        by_high = widen(tl.load(by + D // 2, mask=(d < D - D // 2) & (stored < kv_heads), other=0.0))
        low = widen(rounded(low * scale * by_low, x.dtype.element_ty))
        high = widen(rounded(high * scale * by_high, x.dtype.element_ty))
    if ROTATE:
        at = m.to(tl.int64)[:, None] * angle_row + d
        c, s = tl.load(cos + at, mask=in_low, other=0.0), tl.load(sin + D // 2 + at, mask=in_low, other=0.0)
        turned = multiply_add(low, c, -(high * s))
        high = widen(rounded(multiply_add(high, c, low * s), x.dtype.element_ty))
        low = widen(rounded(turned, x.dtype.element_ty))
    if WRITE:
        low, high = tl.where(is_value, given_low, low), tl.where(is_value, given_high, high)
        slot = tl.load(slots + m, mask=m < rows, other=-1)
        kept = (slot >= 0) & (stored >= 0)
        kv_head = tl.where(is_value, stored - kv_heads, stored)
        cell = ((slot // PAGE).to(tl.int64) * kv_heads + kv_head) * PAGE + slot % PAGE
        most_low, finite_low = range_of(low, in_low)
        most_high, finite_high = range_of(high, in_high)
        most, finite = tl.maximum(most_low, most_high), finite_low & finite_high
        low_n = codes_of_rows(low, most, finite, 127.0).to(tl.int8)
        high_n = codes_of_rows(high, most, finite, 127.0).to(tl.int8)
        scale = scale_of_rows(most, finite, 127.0)
        place = cell[:, None] * D + d
        keys, values = kept & (stored < kv_heads), kept & is_value
        tl.store(k + place, low_n, mask=in_low & keys[:, None])
        tl.store(k + place + D // 2, high_n, mask=in_high & keys[:, None])
        tl.store(k_scale + cell, scale, mask=keys)
        tl.store(v + place, low_n, mask=in_low & values[:, None])
        tl.store(v + place + D // 2, high_n, mask=in_high & values[:, None])
        tl.store(v_scale + cell, scale, mask=values)
    to = out + (m.to(tl.int64) * out_heads + head)[:, None] * D + d
    is_query = (stored < 0) | (WRITE == 0)
    tl.store(to, rounded(low, out.dtype.element_ty), mask=in_low & is_query)
    tl.store(to + D // 2, rounded(high, out.dtype.element_ty), mask=in_high & is_query)


def attention(
    q_THD: Tensor,
    cache: TritonKVCache,
    layer: int,
    plan: TritonAttentionMetadata,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Implement `Ops.attention` over int8, without rows that see later ones."""
    rows, heads, width = q_THD.shape
    ragged, kv_heads = plan.ragged, cache.k.shape[2]
    assert ragged.spans_N is None
    assert q_THD.stride(2) == 1
    out_THD = torch.empty((rows, heads, width), dtype=q_THD.dtype, device=q_THD.device)
    group = heads // kv_heads
    tile = max(16, whole_tile(group))
    sequences = len(ragged.query_lens)
    # In float32, as C++ multiplies them.
    factor = torch.tensor(scale) * LOG2_E if softcap is None else torch.tensor(scale) / softcap
    if rows:
        portable_attention_kernel[(rows // (tile // group) + sequences, kv_heads)](
            out_THD,
            q_THD,
            *cache.layers[layer],
            ragged.query_starts_N1,
            ragged.context_lens_N,
            ragged.block_tables_NB,
            q_THD if sinks_H is None else sinks_H,
            sequences,
            float(factor),
            0.0 if softcap is None else float(torch.tensor(softcap) * LOG2_E),
            q_THD.stride(0),
            q_THD.stride(1),
            ragged.block_tables_NB.stride(0),
            abs(plan.window or 0),
            kv_heads,
            GROUP=group,
            D=width,
            D_PAD=max(16, whole_tile(width)),
            ROWS=tile,
            PAGE=ragged.block_size,
            WINDOW=0 if plan.window is None else WITH_CHUNKS.value if plan.window < 0 else WITH_WINDOW.value,
            CAPPED=softcap is not None,
            SINKS=sinks_H is not None,
            enable_fp_fusion=False,
        )
    return out_THD.flatten(1)


@triton.jit
def parts_of(codes: tl.tensor) -> tl.tensor:
    """Split 16-bit codes into parts of 8 bits: 128 * high + low."""
    high = (codes + 64) >> 7
    return high.to(tl.int8), (codes - (high << 7)).to(tl.int8)


@triton.jit(
    do_not_specialize=["sequences", "table_row", "window"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables"],
)
def portable_attention_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    starts: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    sinks: tl.tensor,
    sequences: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    table_row: tl.tensor,
    window: tl.tensor,
    kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """Attend one tile of rows, the query heads of a KV head times neighboring tokens of a sequence, chunk by
    chunk. C++: `native/attention/attention.h` and `update_softmax` in `attention_state.h`.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    OF_BLOCK: tl.constexpr = (PAGE + STRIP - 1) // STRIP
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = owner_of_tile(starts, sequences, tile, TOKENS)
    start = tl.load(starts + sequence)
    rows = tl.load(starts + sequence + 1) - start
    skipped = (tile - ((start - tl.load(starts)) // TOKENS + sequence)) * TOKENS
    count = tl.minimum(rows - skipped, TOKENS)
    position = tl.load(contexts + sequence) - rows + skipped

    r = tl.arange(0, ROWS)
    token = r // GROUP
    member = head * GROUP + r % GROUP
    real = (token < count) & (token < TOKENS)
    d = tl.arange(0, D_PAD)
    inside = real[:, None] & (d < D)[None, :]
    at_row = (start + skipped + token).to(tl.int64)
    x = widen(tl.load(q + (at_row * q_row + member * q_head)[:, None] + d[None, :], mask=inside, other=0.0))
    most_q, finite_q = range_of(x, inside)
    q_high, q_low = parts_of(codes_of_rows(x, most_q, finite_q, LARGEST))
    by_row = scale_of_rows(most_q, finite_q, LARGEST) * factor

    newest = position + token
    oldest = tl.zeros((ROWS,), tl.int32)
    begin = 0
    if WINDOW == WITH_WINDOW:
        oldest = tl.maximum(newest - window + 1, 0)
        begin = tl.maximum(position - window + 1, 0)
    if WINDOW == WITH_CHUNKS:
        oldest = newest // window * window
        begin = tl.maximum(position, 0) // window * window
    last = tl.where(count > 0, position + count - 1, -1)
    first_chunk = (begin // PAGE * OF_BLOCK + begin % PAGE // STRIP) // STRIPS
    end_chunk = tl.where(count > 0, (last // PAGE * OF_BLOCK + last % PAGE // STRIP) // STRIPS + 1, 0)
    table = tables + sequence.to(tl.int64) * table_row

    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, SUM_LANES), tl.float32)
    j = tl.arange(0, SLOTS)
    for chunk in range(first_chunk, end_chunk):
        strip = chunk * STRIPS + j // STRIP
        within = strip % OF_BLOCK * STRIP + j % STRIP
        slot = strip // OF_BLOCK * PAGE + within
        known = (within < PAGE) & (slot <= last)
        block = tl.load(table + strip // OF_BLOCK, mask=known, other=0).to(tl.int64)
        cell = (block * kv_heads + head) * PAGE + within
        in_cell = known[:, None] & (d < D)[None, :]
        keys = tl.load(k + cell[:, None] * D + d[None, :], mask=in_cell, other=0)
        high = tl.dot(q_high, tl.trans(keys), out_dtype=tl.int32)
        sums = (high << 7) + tl.dot(q_low, tl.trans(keys), out_dtype=tl.int32)
        scores = sums.to(tl.float32) * by_row[:, None]
        scores = scores * tl.load(k_scale + cell, mask=known, other=0.0)[None, :]
        if CAPPED:
            scores = cap * tanh(scores)
        seen = known[None, :] & (slot[None, :] <= newest[:, None]) & (slot[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        zero = tl.where(now == float("-inf"), 0.0, now)
        weights = power_of_two(scores - zero[:, None])
        of_chunk = by_strip(weights, ROWS)
        weights = weights * tl.load(v_scale + cell, mask=known, other=0.0)[None, :]
        most_p, finite_p = range_of(weights, seen)
        p_high, p_low = parts_of(codes_of_rows(weights, most_p, finite_p, LARGEST))
        previous = tl.where(most == float("-inf"), zero, most)
        by = tl.where(most == float("-inf"), 0.0, power_of_two(previous - zero))
        kept = tl.where(now == most, 1.0, by)
        total = multiply_add(total, kept[:, None], of_chunk)
        values = tl.load(v + cell[:, None] * D + d[None, :], mask=in_cell, other=0)
        high = tl.dot(p_high, values, out_dtype=tl.int32)
        sums = (high << 7) + tl.dot(p_low, values, out_dtype=tl.int32)
        added = sums.to(tl.float32) * scale_of_rows(most_p, finite_p, LARGEST)[:, None]
        acc = multiply_add(acc, kept[:, None], added)
        most = now

    sum_r = over_lanes(total, ROWS)
    if SINKS:
        sink = tl.load(sinks + member, mask=real, other=0.0)
        sum_r += power_of_two(sink * 1.44269504 - most)
    inverse = quotient(constant(1.0, sum_r), tl.where(real, sum_r, 1.0))
    to = out + (at_row * (kv_heads * GROUP) + member)[:, None] * D + d[None, :]
    tl.store(to, rounded(acc * inverse[:, None], out.dtype.element_ty), mask=inside)


@triton.jit
def by_strip(weights: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Add the four strips of [ROWS, 64] one after the other: [ROWS, 16]."""
    strips = tl.permute(tl.reshape(weights, (ROWS, 2, 2, 16)), (0, 3, 1, 2))
    even, odd = tl.split(strips)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return ((first + second) + third) + fourth
