"""Inputs of a decode step from the state on the device; no host tensor is read."""

import triton
import triton.language as tl
from torch import Tensor

from ..sampling_types import DecodeInputs, DecodeRows

BLOCK = 128


def prepare_decode_inputs(
    rows: DecodeRows, drawn_R: Tensor | None, inputs: DecodeInputs, block_size: int
) -> None:
    """Implement `Ops.prepare_decode_inputs`."""
    count = len(rows.lengths_R)
    if not count:
        return
    advance_kernel[(triton.cdiv(count, BLOCK),)](
        rows.ids_R,
        rows.lengths_R,
        rows.tables_RB,
        rows.ids_R if drawn_R is None else drawn_R,
        inputs.positions_R,
        inputs.slots_R,
        inputs.context_lens_R,
        count,
        rows.tables_RB.stride(0),
        PAGE=block_size,
        DRAWN=drawn_R is not None,
        BLOCK=BLOCK,
    )


@triton.jit(do_not_specialize=["count", "table_row"])
def advance_kernel(
    ids: tl.tensor,
    lengths: tl.tensor,
    tables: tl.tensor,
    drawn: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    contexts: tl.tensor,
    count: tl.tensor,
    table_row: tl.tensor,
    PAGE: tl.constexpr,
    DRAWN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Append sampled tokens to the rows (with DRAWN), then write position, slot and context length of each.

    All numbers are integers. A free row (length 0) gets position 0, slot -1 and context length 0.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < count
    length = tl.load(lengths + row, mask=real, other=0)
    taken = length > 0
    if DRAWN:
        token = tl.load(drawn + row, mask=taken, other=0)
        tl.store(ids + row, token, mask=taken)
        length = tl.where(taken, length + 1, 0)
        tl.store(lengths + row, length, mask=taken)
    position = tl.maximum(length - 1, 0)
    block = tl.load(tables + row.to(tl.int64) * table_row + position // PAGE, mask=taken, other=0)
    tl.store(positions + row, position, mask=real)
    tl.store(slots + row, tl.where(taken, block * PAGE + position % PAGE, -1), mask=real)
    tl.store(contexts + row, length, mask=real)
