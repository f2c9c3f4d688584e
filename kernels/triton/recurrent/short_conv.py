"""Causal short convolution of each channel, with the last inputs of a sequence in its slot.

An output is a function of K inputs, so rows are computed side by side: the inputs before a step's first row
come from the slot. The sum has one order, whatever the rows of a step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op_types import BatchLayout
from ...recurrent import RecurrentState
from ..linear.tile_config import power_of_two

BLOCK = 512
StatePlace = tuple[RecurrentState, int, BatchLayout]
"""State of all slots, layer, layout of the step."""
PLACES, SAVES = ("query_starts", "contexts", "slots"), ("save_starts", "save_rows", "save_slots")
"""Arguments that lie anywhere in what a step uploads."""


def short_conv(
    x: Tensor, weight_KC: Tensor, bias_C: Tensor | None, gated: bool, *place: *StatePlace
) -> Tensor:
    """Implement `RecurrentOps.short_conv`."""
    (width, channels), (state, layer, layout) = weight_KC.shape, place
    states = layout.states
    assert states is not None
    assert x.stride(1) == 1
    assert weight_KC.is_contiguous()
    out_TC = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    if not len(x):
        return out_TC
    conv_SKC, sequences = state.conv_LSKC[layer], len(layout.query_lens)
    one_row = len(x) == sequences
    blocks = triton.cdiv(channels, BLOCK)
    bias = weight_KC if bias_C is None else bias_C
    places = layout.query_starts_N1, layout.context_lens_N, states.slots_N
    saves = states.save_starts_N1, states.save_rows, states.save_slots
    sizes = {"C": channels, "K": width, "K_PAD": power_of_two(width), "GATED": gated, "BLOCK": BLOCK}
    conv_kernel[(len(x), blocks)](
        out_TC, x, weight_KC, bias, conv_SKC, *places, states.save_starts_N1, states.save_slots, x.stride(0),
        sequences,
        BIAS=bias_C is not None, ONE_ROW=one_row, **sizes, num_warps=4,
    )  # fmt: skip
    if not one_row:  # a sequence's first rows read the slot: it is written when all have
        conv_state_kernel[(sequences, blocks)](
            x, conv_SKC, *saves, *places, x.stride(0), **sizes, num_warps=4,
        )  # fmt: skip
    return out_TC


@triton.jit
def input_at(
    x: tl.tensor,
    state: tl.tensor,
    row: tl.tensor,
    begin: tl.tensor,
    slot: tl.tensor,
    is_kept: tl.tensor,
    x_row: tl.tensor,
    channel: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
) -> tl.tensor:
    """Return the input of `row`, float32, which may be up to K - 1 rows before `begin`: those are in the
    slot, or zero where it is not kept.
    """
    inside = channel < C
    here, before = inside & (row >= begin), inside & (row < begin) & is_kept
    place = x + row.to(tl.int64) * x_row + channel
    value = tl.load(place, mask=here, other=0.0).to(tl.float32)
    if GATED:
        value *= tl.load(place + 2 * C, mask=here, other=0.0).to(tl.float32)
    kept = state + (slot.to(tl.int64) * (K - 1) + K - 1 + row - begin) * C + channel
    return value + tl.load(kept, mask=before, other=0.0)


@triton.jit(do_not_specialize=["sequences"], do_not_specialize_on_alignment=[*PLACES, *SAVES])
def conv_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    slots: tl.tensor,
    save_starts: tl.tensor,
    save_slots: tl.tensor,
    x_row: tl.tensor,
    sequences: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Convolve a block of channels of one row. With ONE_ROW, where each sequence has one, its slot and the
    slot to save to are written too.

    Reference: `short_conv` in `kernels/reference/recurrent.py`.
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    sequence = row
    if not ONE_ROW:
        sequence, high = 0, sequences
        while high - sequence > 1:  # the last sequence that starts at or before our row
            middle = (sequence + high) // 2
            is_before = tl.load(query_starts + middle) <= row
            sequence = tl.where(is_before, middle, sequence)
            high = tl.where(is_before, high, middle)
    begin = tl.load(query_starts + sequence)
    slot = tl.load(slots + sequence)
    is_kept = (slot >= 0) & (tl.load(contexts + sequence) > tl.load(query_starts + sequence + 1) - begin)
    total = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    for k in tl.static_range(K):
        value = input_at(x, state, row - (K - 1) + k, begin, slot, is_kept, x_row, channel, C, K, GATED)
        total += value * tl.load(weight + k * C + channel, mask=inside, other=0.0)
    if GATED:
        after = x + row.to(tl.int64) * x_row + C + channel
        result = total * tl.load(after, mask=inside, other=0.0).to(tl.float32)
    else:
        result = total / (1.0 + tl.exp(-total))
    tl.store(out + row.to(tl.int64) * C + channel, result.to(out.dtype.element_ty), mask=inside)
    if ONE_ROW:
        save = tl.load(save_starts + sequence)
        has_save = save < tl.load(save_starts + sequence + 1)
        target = tl.load(save_slots + save, mask=has_save, other=-1)
        k = tl.arange(0, K_PAD)[:, None]
        channel = channel[None, :]
        kept = input_at(x, state, row - (K - 2) + k, begin, slot, is_kept, x_row, channel, C, K, GATED)
        tl.debug_barrier()  # all have read the slot
        store_inputs(state, target, kept, k, channel, C, K)
        store_inputs(state, slot, kept, k, channel, C, K)


@triton.jit
def store_inputs(
    state: tl.tensor,
    slot: tl.tensor,
    value: tl.tensor,
    k: tl.tensor,
    channel: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Store the last K - 1 inputs in a slot; a negative one is none."""
    place = state + (slot.to(tl.int64) * (K - 1) + k) * C + channel
    tl.store(place, value, mask=(k < K - 1) & (channel < C) & (slot >= 0))


@triton.jit(do_not_specialize_on_alignment=[*PLACES, *SAVES])
def conv_state_kernel(
    x: tl.tensor,
    state: tl.tensor,
    save_starts: tl.tensor,
    save_rows: tl.tensor,
    save_slots: tl.tensor,
    query_starts: tl.tensor,
    contexts: tl.tensor,
    slots: tl.tensor,
    x_row: tl.tensor,
    C: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the last K - 1 inputs of a sequence to its slot, and those at the saved rows to theirs."""
    sequence = tl.program_id(0)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    k = tl.arange(0, K_PAD)[:, None]
    begin, end = tl.load(query_starts + sequence), tl.load(query_starts + sequence + 1)
    slot = tl.load(slots + sequence)
    is_kept = (slot >= 0) & (tl.load(contexts + sequence) > end - begin)
    for save in range(tl.load(save_starts + sequence), tl.load(save_starts + sequence + 1)):
        row, target = tl.load(save_rows + save), tl.load(save_slots + save)
        value = input_at(x, state, row - (K - 2) + k, begin, slot, is_kept, x_row, channel, C, K, GATED)
        store_inputs(state, target, value, k, channel, C, K)
    value = input_at(x, state, end - (K - 1) + k, begin, slot, is_kept, x_row, channel, C, K, GATED)
    tl.debug_barrier()  # all have read the slot
    store_inputs(state, slot, value, k, channel, C, K)
