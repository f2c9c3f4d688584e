"""Recurrences of `scan.py` for prompts: matrix products, chunk by chunk, so that bits may depend on the cut.

Inside a chunk of C rows, with G the sums of log-decays up to a row and S the state before the chunk,

    M_ij = factor_i exp(G_i - G_j) k_i k_j for j < i     T = (I + M)^-1
    W = T (factor exp(G) k)     U = T (factor v)     P_ij = exp(G_i - G_j) q_i k_j for j <= i
    Q = exp(G) q                K = exp(G_C - G) k
    change = U - W S            out = Q S + P change     S' = exp(G_C) S + K^T change

without M, T and W for Mamba-2, where U is factor v. One kernel computes W, U, P, Q and K of all chunks side
by side; another takes columns of a state through the chunks of its sequence. Chunks end at positions that are
multiples of C, as blocks do: that is where states are saved.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...recurrent import ScanShape, ScanWeights
from ..linear.tile_config import power_of_two
from .scan import KDA, RULES, SSM, kda_decay, softplus
from .short_conv import PLACES, SAVES, StatePlace

CHUNK = 16
"""Rows of a chunk; tensor cores take at least 16. Blocks must be multiples of it."""
COLUMNS = 32
"""Columns of a state in one program."""


def chunked_scan(
    rows: Tensor, gates: Tensor, weights: ScanWeights, shape: ScanShape, *place: *StatePlace
) -> Tensor:
    """Do as `scan`, with results that may differ in their last bits between cuts of a prompt."""
    state, layer, layout = place
    states, count, heads = layout.states, len(rows), shape.heads
    assert states is not None
    assert rows.stride(1) == gates.stride(1) == 1
    assert layout.block_size % CHUNK == 0
    sequences, is_kda = len(layout.query_lens), shape.rule == "kda"
    # As many as there can be: a sequence has a chunk for each C rows, and two that are not whole.
    chunks = count // CHUNK + 2 * sequences
    widths = shape.key_dim, shape.key_dim, shape.key_dim, shape.value_dim, CHUNK
    q_THA, k_THA, w_THA, u_THB, p_THC = (rows.new_empty(count, heads, width) for width in widths)
    decays = rows.new_empty(chunks, heads, shape.key_dim if is_kda else 1, dtype=torch.float32)
    parts = q_THA, k_THA, w_THA, u_THB, p_THC, decays
    starts, contexts = layout.query_starts_N1, layout.context_lens_N
    value_pad = max(16, power_of_two(shape.value_dim))
    sizes = {
        "H": heads, "A": shape.key_dim, "B": shape.value_dim, "C": CHUNK,
        "A_PAD": max(16, power_of_two(shape.key_dim)), "RULE": RULES[shape.rule],
    }  # fmt: skip
    prepare_chunks_kernel[(chunks, heads)](
        *parts, rows, gates, weights.rate_H, weights.bias_H, starts, contexts, rows.stride(0),
        gates.stride(0), *shape.limits, shape.beta, sequences, G=shape.key_heads, B_PAD=value_pad,
        BOUNDED=shape.limits[0] < 0,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32", **sizes, num_warps=4,
    )  # fmt: skip
    out = rows.new_empty(count, heads * shape.value_dim)
    columns, skip = min(COLUMNS, value_pad), weights.skip_H
    scan_chunks_kernel[(sequences, heads, triton.cdiv(shape.value_dim, columns))](
        out, rows, weights.rate_H if skip is None else skip, u_THB, w_THA, q_THA, p_THC, k_THA, decays,
        starts, contexts,
        states.save_starts_N1, states.save_rows, states.save_slots, states.slots_N, state.memory_LSHAB[layer],
        rows.stride(0), SKIP=skip is not None, COLUMNS=columns, **sizes, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def chunk_keys(
    rows: tl.tensor,
    gates: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    first: tl.tensor,
    inside: tl.tensor,
    head: tl.tensor,
    beta: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    rows_row: tl.tensor,
    gates_row: tl.tensor,
    C: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    B: tl.constexpr,
    A: tl.constexpr,
    A_PAD: tl.constexpr,
    RULE: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return queries and keys [C, A], the sums of log-decays up to each row, [C, 1] or for KDA [C, A], those
    of all rows, and factors [C]. Rows that are not `inside` have 0.
    """
    a = tl.arange(0, A_PAD)
    in_tile = inside[:, None] & (a < A)[None, :]
    key_head = head // (H // G)
    query_at, key_at = key_head * A, (G + key_head) * A
    if RULE == SSM:
        query_at, key_at = H * B + (G + key_head) * A, H * B + key_head * A
    i = tl.arange(0, C)
    x = rows + first.to(tl.int64) * rows_row + (i[:, None] * rows_row + a[None, :])
    gates += first.to(tl.int64) * gates_row
    gate = gates + (i * gates_row + head)
    query = tl.load(x + query_at, mask=in_tile, other=0.0).to(tl.float32)
    key = tl.load(x + key_at, mask=in_tile, other=0.0).to(tl.float32)
    first = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
    head_rate = tl.load(rate + head)
    if RULE == SSM:
        factor = softplus(first + tl.load(bias + head))
        factor = tl.where(inside, tl.minimum(tl.maximum(factor, least), most), 0.0)
        decay = head_rate * factor
    else:
        query *= (A**-0.5 * tl.rsqrt(tl.sum(query * query, 1) + 1e-6))[:, None]
        key *= tl.rsqrt(tl.sum(key * key, 1) + 1e-6)[:, None]
        factor = tl.where(inside, beta / (1.0 + tl.exp(-first)), 0.0)
        if RULE == KDA:
            at = i[:, None] * gates_row + H + head * A + a[None, :]
            step = tl.load(gates + at, mask=in_tile, other=0.0).to(tl.float32)
            step += tl.load(bias + head * A + a, mask=a < A, other=0.0)[None, :]
            decay = tl.where(in_tile, kda_decay(step, head_rate, least, BOUNDED), 0.0)
        else:
            step = tl.load(gate + H, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + head)
            decay = tl.where(inside, head_rate * softplus(step), 0.0)
    total = tl.cumsum(decay, 0)
    if RULE != KDA:
        decay, total = decay[:, None], total[:, None]
    return query, key, total, tl.sum(decay, 0, keep_dims=True), factor


@triton.jit
def chunk_rows(
    begin: tl.tensor, end: tl.tensor, context: tl.tensor, number: tl.tensor, C: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row of a sequence's chunk and the row behind its last one."""
    position = context - (end - begin)
    edge = begin - position + (position // C + number) * C
    return tl.maximum(begin, edge), tl.minimum(end, edge + C)


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=PLACES)
def prepare_chunks_kernel(
    q: tl.tensor,
    k: tl.tensor,
    w: tl.tensor,
    u: tl.tensor,
    p: tl.tensor,
    decays: tl.tensor,
    rows: tl.tensor,
    gates: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    rows_row: tl.tensor,
    gates_row: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    beta: tl.tensor,
    sequences: tl.tensor,
    G: tl.constexpr,
    B_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    BOUNDED: tl.constexpr,
    H: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    A_PAD: tl.constexpr,
    RULE: tl.constexpr,
) -> None:
    """Compute Q, K, W, U and P of one chunk and head. The chunks of sequence n are those from
    query_starts[n] // C + 2 n on.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    sequence, high = 0, sequences
    while high - sequence > 1:
        middle = (sequence + high) // 2
        is_before = tl.load(query_starts + middle) // C + 2 * middle <= chunk
        sequence = tl.where(is_before, middle, sequence)
        high = tl.where(is_before, high, middle)
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    number = chunk - (begin // C + 2 * sequence)
    first, last = chunk_rows(begin, end, tl.load(contexts + sequence), number, C)
    if first < last:
        i, a = tl.arange(0, C), tl.arange(0, A_PAD)
        inside = first + i < last
        query, key, total, last_total, factor = chunk_keys(
            rows, gates, rate, bias, first, inside, head, beta, least, most, rows_row, gates_row,
            C, H, G, B, A, A_PAD, RULE, BOUNDED,
        )  # fmt: skip
        at, b = first.to(tl.int64) * H + head, tl.arange(0, B_PAD)
        in_key, in_value = inside[:, None] & (a < A)[None, :], inside[:, None] & (b < B)[None, :]
        at_key, at_value = i[:, None] * (H * A) + a[None, :], i[:, None] * (H * B) + b[None, :]
        tl.store(q + at * A + at_key, (query * tl.exp(total)).to(q.dtype.element_ty), mask=in_key)
        kept = key * tl.exp(tl.minimum(last_total - total, 0.0))
        tl.store(k + at * A + at_key, kept.to(k.dtype.element_ty), mask=in_key)
        at_decay = decays + (chunk * H + head) * (A if RULE == KDA else 1)
        if RULE == KDA:
            tl.store(at_decay + a[None, :], tl.exp(last_total), mask=(a < A)[None, :])
        else:
            tl.store(at_decay + tl.zeros((1, 1), tl.int32), tl.exp(last_total))
        if RULE == KDA:
            keys, scores = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
            for j in range(C):
                here = (i == j)[:, None]
                key_j = tl.sum(tl.where(here, key, 0.0), 0)[None, :]
                total_j = tl.sum(tl.where(here, total, 0.0), 0)[None, :]
                seen = key_j * tl.exp(tl.minimum(total - total_j, 0.0))
                keys = tl.where(i[None, :] == j, tl.sum(key * seen, 1)[:, None], keys)
                scores = tl.where(i[None, :] == j, tl.sum(query * seen, 1)[:, None], scores)
        else:
            spread = tl.exp(tl.minimum(total - tl.trans(total), 0.0))
            keys = tl.dot(key, tl.trans(key), input_precision=PRECISION) * spread
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * spread
        scores = tl.where(i[:, None] >= i[None, :], scores, 0.0)
        at_score = i[:, None] * (H * C) + i[None, :]
        tl.store(p + at * C + at_score, scores.to(p.dtype.element_ty), mask=inside[:, None])
        # Rows are (q, k, v), or (v, k, q) for Mamba-2.
        x = rows + first.to(tl.int64) * rows_row + (0 if RULE == SSM else 2 * G * A) + head * B
        value = tl.load(x + (i[:, None] * rows_row + b[None, :]), mask=in_value, other=0.0).to(tl.float32)
        if RULE == SSM:
            change = value * factor[:, None]
        else:
            inverse = tl.where(i[:, None] > i[None, :], -factor[:, None] * keys, 0.0)
            for j in range(1, C):
                here = (i == j)[:, None]
                line = tl.sum(tl.where(here, inverse, 0.0), 0)
                line += tl.sum(line[:, None] * inverse, 0)
                inverse = tl.where(here, line[None, :], inverse)
            inverse = (inverse + tl.where(i[:, None] == i[None, :], 1.0, 0.0)) * factor[None, :]
            change = tl.dot(inverse, value, input_precision=PRECISION)
            seen = tl.dot(inverse, key * tl.exp(total), input_precision=PRECISION)
            tl.store(w + at * A + at_key, seen.to(w.dtype.element_ty), mask=in_key)
        tl.store(u + at * B + at_value, change.to(u.dtype.element_ty), mask=in_value)


@triton.jit(do_not_specialize_on_alignment=[*PLACES, *SAVES])
def scan_chunks_kernel(
    out: tl.tensor,
    rows: tl.tensor,
    skip: tl.tensor,
    u: tl.tensor,
    w: tl.tensor,
    q: tl.tensor,
    p: tl.tensor,
    k: tl.tensor,
    decays: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    save_starts: tl.tensor,
    save_rows: tl.tensor,
    save_slots: tl.tensor,
    slots: tl.tensor,
    state: tl.tensor,
    rows_row: tl.tensor,
    SKIP: tl.constexpr,
    COLUMNS: tl.constexpr,
    A: tl.constexpr,
    A_PAD: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    RULE: tl.constexpr,
) -> None:
    """Take COLUMNS columns of one head's state through the chunks of one sequence.

    Operands of products are in the model's dtype, the state and sums in float32.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    sequence, head = tl.program_id(0), tl.program_id(1)
    i, a, b = tl.arange(0, C), tl.arange(0, A_PAD), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_tile = (a < A)[:, None] & (b < B)[None, :]
    tile = state + head * A * B + a[:, None] * B + b[None, :]
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    context, slot = tl.load(contexts + sequence), tl.load(slots + sequence).to(tl.int64)
    is_kept = (slot >= 0) & (context > end - begin)
    memory = tl.load(tile + slot * (H * A * B), mask=in_tile & is_kept, other=0.0)
    save, last_save = tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)
    save_row = tl.load(save_rows + save, mask=save < last_save, other=end)
    for number in range((context - 1) // C - (context - (end - begin)) // C + 1):
        first, last = chunk_rows(begin, end, context, number, C)
        inside = first + i < last
        in_key, in_value = inside[:, None] & (a < A)[None, :], inside[:, None] & (b < B)[None, :]
        at, at_key = first.to(tl.int64) * H + head, i[:, None] * (H * A) + a[None, :]
        at_value = i[:, None] * (H * B) + b[None, :]
        rounded = memory.to(DTYPE)
        change = tl.load(u + at * B + at_value, mask=in_value, other=0.0).to(tl.float32)
        if RULE != SSM:
            seen = tl.load(w + at * A + at_key, mask=in_key, other=0.0)
            change -= tl.dot(seen, rounded, input_precision="ieee")
        query = tl.load(q + at * A + at_key, mask=in_key, other=0.0)
        result = tl.dot(query, rounded, input_precision="ieee")
        at_score = i[:, None] * (H * C) + i[None, :]
        scores = tl.load(p + at * C + at_score, mask=inside[:, None], other=0.0)
        result += tl.dot(scores, change.to(DTYPE), input_precision="ieee")
        if SKIP:
            x = rows + first.to(tl.int64) * rows_row + head * B
            value = tl.load(x + (i[:, None] * rows_row + b[None, :]), mask=in_value, other=0.0)
            result += value.to(tl.float32) * tl.load(skip + head)
        tl.store(out + at * B + at_value, result.to(out.dtype.element_ty), mask=in_value)
        at_decay = decays + ((begin // C + 2 * sequence + number) * H + head) * (A if RULE == KDA else 1)
        if RULE == KDA:
            memory *= tl.load(at_decay + a, mask=a < A, other=0.0)[:, None]
        else:
            memory *= tl.load(at_decay)
        key = tl.load(k + at * A + at_key, mask=in_key, other=0.0)
        memory += tl.dot(tl.trans(key), change.to(DTYPE), input_precision="ieee")
        if save_row == last - 1:
            target = tl.load(save_slots + save).to(tl.int64)
            tl.store(tile + target * (H * A * B), memory, mask=in_tile & (target >= 0))
            save += 1
            save_row = tl.load(save_rows + save, mask=save < last_save, other=end)
    tl.store(tile + slot * (H * A * B), memory, mask=in_tile & (slot >= 0))
