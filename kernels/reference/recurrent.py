"""Recurrent layers in plain torch: one row of one sequence after another."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op_types import BatchLayout
from ..recurrent import RecurrentOps, RecurrentState, ScanShape, ScanWeights

Advance = Callable[[int, Tensor], Tensor]
"""(row, state before it) -> state after it; the result of the row is written on the way."""


def _sequences(layout: BatchLayout) -> Iterator[tuple[range, bool, int, dict[int, int]]]:
    """Yield rows, whether they begin at position 0, the slot, and {row: slot to save the state to}."""
    states = layout.states
    assert states is not None
    starts, slots = layout.query_starts_N1.tolist(), states.slots_N.tolist()
    save_starts = states.save_starts_N1.tolist()
    saves = list(zip(states.save_rows.tolist(), states.save_slots.tolist(), strict=True))
    for n, slot in enumerate(slots):
        rows = range(starts[n], starts[n + 1])
        fresh = slot < 0 or layout.contexts[n] == layout.query_lens[n]
        yield rows, fresh, slot, dict(saves[save_starts[n] : save_starts[n + 1]])


def _run(memory_SX: Tensor, layout: BatchLayout, advance: Advance) -> None:
    """Take every sequence through its rows; `memory_SX`: state of one layer by slot."""
    for rows, fresh, slot, saves in _sequences(layout):
        state = torch.zeros_like(memory_SX[slot]) if fresh else memory_SX[slot].clone()
        for row in rows:
            state = advance(row, state)
            if saves.get(row, -1) >= 0:
                memory_SX[saves[row]] = state
        if slot >= 0:
            memory_SX[slot] = state


def short_conv(
    x: Tensor,
    weight_KC: Tensor,
    bias_C: Tensor | None,
    gated: bool,
    state: RecurrentState,
    layer: int,
    layout: BatchLayout,
) -> Tensor:
    wide = x.float()
    channels = weight_KC.shape[1]
    before, after, inputs = torch.split(wide, channels, 1) if gated else (None, None, wide)
    if before is not None:
        inputs = before * inputs
    out_TC = torch.empty(len(x), channels, device=x.device)

    def advance(row: int, kept_KC: Tensor) -> Tensor:
        window_KC = torch.cat((kept_KC, inputs[row : row + 1]))
        total_C = (window_KC * weight_KC).sum(0)
        total_C = total_C if bias_C is None else total_C + bias_C
        out_TC[row] = F.silu(total_C) if after is None else after[row] * total_C
        return window_KC[1:]

    _run(state.conv_LSKC[layer], layout, advance)
    return out_TC.to(x.dtype)


def scan(
    rows: Tensor,
    gates: Tensor,
    weights: ScanWeights,
    shape: ScanShape,
    state: RecurrentState,
    layer: int,
    layout: BatchLayout,
) -> Tensor:
    keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
    wide, gate = rows.float(), gates.float()
    repeat = shape.heads // shape.key_heads
    is_delta = shape.rule in {"delta", "kda"}
    if shape.rule == "s6":
        v = wide
        dt, k, q = torch.split(gate, [values, keys, keys], 1)
        factor_TH = dt = F.softplus(dt + weights.bias_H)
    elif is_delta:
        q, k, v = torch.split(wide, [keys, keys, values], 1)
        beta_TH, a = gate[:, : shape.heads], gate[:, shape.heads :]
        factor_TH, dt = shape.beta * beta_TH.sigmoid(), F.softplus(a + weights.bias_H)
        if shape.limits[0] < 0:
            rate_T = (a + weights.bias_H).view(len(rows), shape.heads, -1) * -weights.rate_H[:, None]
            dt = shape.limits[0] * rate_T.sigmoid() / weights.rate_H[:, None]
    else:
        v, k, q = torch.split(wide, [values, keys, keys], 1)
        factor_TH = dt = F.softplus(gate + weights.bias_H).clamp(*shape.limits)
    dt_THn = dt.view(len(rows), shape.heads, -1)
    factor_THn = factor_TH.view(len(rows), shape.heads, -1)
    if shape.rule == "s6":
        decay_THAn = (weights.rate_H * dt_THn.unsqueeze(2)).exp()
    else:
        decay_THAn = (weights.rate_H[:, None] * dt_THn).exp().unsqueeze(-1)
    q_THA, k_THA = (x.reshape(len(rows), shape.key_heads, -1).repeat_interleave(repeat, 1) for x in (q, k))
    v_THB = v.reshape(len(rows), shape.heads, -1)
    if is_delta:
        q_THA, k_THA = _unit(q_THA) * shape.key_dim**-0.5, _unit(k_THA)
    out_THB = torch.empty(len(rows), shape.heads, shape.value_dim, device=rows.device)

    def advance(row: int, memory_HAB: Tensor) -> Tensor:
        memory_HAB = memory_HAB * decay_THAn[row]
        value_HB = v_THB[row]
        if is_delta:
            value_HB = value_HB - (memory_HAB * k_THA[row].unsqueeze(-1)).sum(1)
        change_HB = value_HB * factor_THn[row]
        memory_HAB = memory_HAB + k_THA[row].unsqueeze(-1) * change_HB.unsqueeze(1)
        out_THB[row] = (memory_HAB * q_THA[row].unsqueeze(-1)).sum(1)
        return memory_HAB

    _run(state.memory_LSHAB[layer], layout, advance)
    if weights.skip_H is not None:
        out_THB += weights.skip_H.view(shape.heads, -1) * v_THB
    return out_THB.flatten(1).to(rows.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_norm(x_TnD: Tensor, gate_TnD: Tensor, weight_nD: Tensor, eps: float, norm_first: bool) -> Tensor:
    wide, gate = x_TnD.float(), F.silu(gate_TnD.float())
    wide = wide if norm_first else wide * gate
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight_nD.float()
    return (normed * gate if norm_first else normed).flatten(1).to(x_TnD.dtype)


def sigmoid_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    return (x_TF.float() * gate_TF.float().sigmoid()).to(x_TF.dtype)


def silu_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    return (x_TF.float() * F.silu(gate_TF.float())).to(x_TF.dtype)


def softplus_mul(x_TF: Tensor, gate_TF: Tensor) -> Tensor:
    return (x_TF.float() * F.softplus(gate_TF.float())).to(x_TF.dtype)


def mul_add(x_TN: Tensor, by_N: Tensor, added_TN: Tensor | None) -> Tensor:
    scaled = x_TN.float() * by_N
    return (scaled if added_TN is None else scaled + added_TN.float()).to(x_TN.dtype)


def swap_heads(x_TMND: Tensor) -> Tensor:
    return x_TMND.transpose(1, 2).flatten(1)


RECURRENT = RecurrentOps(
    short_conv, scan, gated_norm, sigmoid_mul, silu_mul, softplus_mul, mul_add, swap_heads
)
