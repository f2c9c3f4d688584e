"""Recurrence of gated delta nets, Kimi delta attention and Mamba, one row of a sequence after another.

A program takes some columns of a head's state through all rows of a sequence, in registers. The columns of a
state do not meet, so a state after a row has the same bits in any batch and under any cut of the prompt.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...recurrent import ScanRule, ScanShape, ScanWeights
from ..linear.tile_config import power_of_two
from .short_conv import PLACES, SAVES, StatePlace

RULES: dict[ScanRule, int] = {"delta": 0, "ssm": 1, "kda": 2, "s6": 3}
SSM, KDA, S6 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
COLUMNS = 16
"""Columns of a state in one program."""
NUMBERS = 2048
"""Numbers of a state that a warp holds: 64 registers a thread."""


def scan(rows: Tensor, gates: Tensor, weights: ScanWeights, shape: ScanShape, *place: *StatePlace) -> Tensor:
    """Implement `RecurrentOps.scan`."""
    state, layer, layout = place
    states = layout.states
    assert states is not None
    assert rows.stride(1) == gates.stride(1) == 1
    out = torch.empty((len(rows), shape.heads * shape.value_dim), dtype=rows.dtype, device=rows.device)
    if not len(rows):
        return out
    key_pad = power_of_two(shape.key_dim)
    columns = min(COLUMNS, power_of_two(shape.value_dim))
    grid = len(layout.query_lens), shape.heads, triton.cdiv(shape.value_dim, columns)
    scan_kernel[grid](
        out,
        rows,
        gates,
        weights.rate_H,
        weights.bias_H,
        weights.rate_H if weights.skip_H is None else weights.skip_H,
        state.memory_LSHAB[layer],
        layout.query_starts_N1,
        layout.context_lens_N,
        states.slots_N,
        states.save_starts_N1,
        states.save_rows,
        states.save_slots,
        rows.stride(0),
        gates.stride(0),
        *shape.limits,
        shape.beta,
        H=shape.heads,
        G=shape.key_heads,
        A=shape.key_dim,
        B=shape.value_dim,
        A_PAD=key_pad,
        COLUMNS=columns,
        RULE=RULES[shape.rule],
        SKIP=weights.skip_H is not None,
        BOUNDED=shape.limits[0] < 0,
        num_warps=max(1, key_pad * columns // NUMBERS),
    )
    return out


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + e^x), float32, also where e^x is lost beside 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + e
    near = tl.where(
        one_more == 1.0, e, tl.log(one_more) * (e / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    )
    return tl.where(x > 20.0, x, near)


@triton.jit
def kda_decay(x: tl.tensor, rate: tl.tensor, least: tl.tensor, BOUNDED: tl.constexpr) -> tl.tensor:
    """Return logarithms of the decays of Kimi delta attention, of which `least` may be the bound."""
    return least / (1.0 + tl.exp(rate * x)) if BOUNDED else rate * softplus(x)


@triton.jit
def unit(x: tl.tensor, scale: tl.constexpr) -> tl.tensor:
    return x * (scale * tl.rsqrt(tl.sum(x * x, 0) + 1e-6))


@triton.jit(do_not_specialize_on_alignment=[*PLACES, *SAVES])
def scan_kernel(
    out: tl.tensor,
    rows: tl.tensor,
    gates: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    skip: tl.tensor,
    state: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    slots: tl.tensor,
    save_starts: tl.tensor,
    save_rows: tl.tensor,
    save_slots: tl.tensor,
    rows_row: tl.tensor,
    gates_row: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    beta: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    A_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    SKIP: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> None:
    """Take COLUMNS columns of one head's state through the rows of one sequence.

    `ScanShape` says what is computed. Reference: `scan` in `kernels/reference/recurrent.py`.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    a, b = tl.arange(0, A_PAD), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = a < A, b < B
    tile = head * A * B + a[:, None] * B + b[None, :]
    in_tile = in_key[:, None] & in_value[None, :]
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    slot = tl.load(slots + sequence).to(tl.int64)
    is_kept = (slot >= 0) & (tl.load(contexts + sequence) > end - begin)
    memory = tl.load(state + slot * (H * A * B) + tile, mask=in_tile & is_kept, other=0.0)
    save, last_save = tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)
    save_row = tl.load(save_rows + save, mask=save < last_save, other=-1)

    # Rows are (q, k, v), or (v, k, q) for Mamba-2; for Mamba 1 they are v, and gates (dt, k, q).
    key_head = head // (H // G)
    query_at, key_at, value_at = key_head * A, (G + key_head) * A, 2 * G * A + head * B
    if RULE == SSM:
        query_at, key_at, value_at = H * B + (G + key_head) * A, H * B + key_head * A, head * B
    if RULE == S6:
        query_at, key_at, value_at = H * B + A, H * B, head * B
        head_rate = tl.load(rate + tile, mask=in_tile, other=0.0)
        head_bias = tl.load(bias + head * B + b, mask=in_value, other=0.0)
        head_skip = tl.load(skip + head * B + b, mask=in_value, other=0.0)
    else:
        head_rate = tl.load(rate + head)
        if RULE == KDA:
            head_bias = tl.load(bias + head * A + a, mask=in_key, other=0.0)
        else:
            head_bias = tl.load(bias + head)
        if SKIP:
            head_skip = tl.load(skip + head)
    for row in tl.range(begin, end, num_stages=3):
        at = begin.to(tl.int64) + (row - begin)  # a number of Python in the interpreter
        x, gate = rows + at * rows_row, gates + at * gates_row
        pair = x
        if RULE == S6:
            pair = gate
        query = tl.load(pair + query_at + a, mask=in_key, other=0.0).to(tl.float32)
        key = tl.load(pair + key_at + a, mask=in_key, other=0.0).to(tl.float32)
        value = tl.load(x + value_at + b, mask=in_value, other=0.0).to(tl.float32)
        if RULE == SSM:
            factor = softplus(tl.load(gate + head).to(tl.float32) + head_bias)
            factor = tl.minimum(tl.maximum(factor, least), most)
            memory *= tl.exp(head_rate * factor)
            change = value * factor
        elif RULE == S6:
            step = tl.load(gate + head * B + b, mask=in_value, other=0.0).to(tl.float32)
            factor = softplus(step + head_bias)
            memory *= tl.exp(head_rate * factor[None, :])
            change = value * factor
        else:
            query, key = unit(query, A**-0.5), unit(key, 1.0)
            factor = beta / (1.0 + tl.exp(-tl.load(gate + head).to(tl.float32)))
            if RULE == KDA:
                step = tl.load(gate + H + head * A + a, mask=in_key, other=0.0).to(tl.float32)
                memory *= tl.exp(kda_decay(step + head_bias, head_rate, least, BOUNDED))[:, None]
            else:
                step = tl.load(gate + H + head).to(tl.float32)
                memory *= tl.exp(head_rate * softplus(step + head_bias))
            change = (value - tl.sum(memory * key[:, None], 0)) * factor
        memory += key[:, None] * change[None, :]
        result = tl.sum(memory * query[:, None], 0)
        if SKIP:
            result += value * head_skip
        place = out + at * (H * B) + head * B + b
        tl.store(place, result.to(out.dtype.element_ty), mask=in_value)
        if row == save_row:
            target = tl.load(save_slots + save).to(tl.int64)
            tl.store(state + target * (H * A * B) + tile, memory, mask=in_tile & (target >= 0))
            save += 1
            save_row = tl.load(save_rows + save, mask=save < last_save, other=-1)
    tl.store(state + slot * (H * A * B) + tile, memory, mask=in_tile & (slot >= 0))
