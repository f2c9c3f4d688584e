"""Attention within whole texts, in both directions, over rows that lie one after another: encoders.

A tile is neighboring rows of one text and one head. It finds its text by bisection over the texts' starts.
Tiles are cut from the text's first row on, so a text has the same bits alone and in a batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.gemm_inner import owner_of_tile
from ..linear.tile_config import power_of_two, prefill_tile
from .attention_inner import weigh

LOG2_E = 1.4426950408889634


def attend_texts(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, starts_N1: Tensor, scale: float, reach: int | None
) -> Tensor:
    """Implement `Ops.attend_texts`."""
    rows, heads, head_dim = q_THD.shape
    assert q_THD.stride(2) == k_TGD.stride(2) == v_TGD.stride(2) == 1
    out_THD = torch.empty((rows, heads, head_dim), dtype=q_THD.dtype, device=q_THD.device)
    texts = len(starts_N1) - 1
    tile = prefill_tile(q_THD.device, head_dim, q_THD.element_size())
    if rows:
        text_attention_kernel[(rows // tile.rows + texts, heads)](
            out_THD,
            q_THD,
            k_TGD,
            v_TGD,
            starts_N1,
            texts,
            scale * LOG2_E,
            *(x.stride(dim) for x in (q_THD, k_TGD, v_TGD) for dim in (0, 1)),
            reach or 0,
            GROUP=heads // k_TGD.shape[1],
            D=head_dim,
            D_PAD=max(16, power_of_two(head_dim)),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            REACH=reach is not None,
            PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages if head_dim <= 128 else 2,
        )
    return out_THD.flatten(1)


@triton.jit(do_not_specialize=["texts", "reach"], do_not_specialize_on_alignment=["starts"])
def text_attention_kernel(
    out: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    starts: tl.tensor,
    texts: tl.tensor,
    scale: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    reach: tl.tensor,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REACH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attend one tile of a text's rows to the text: softmax(scale q k^T) v; with REACH to the keys that are
    at most `reach` rows away. Scores, the online softmax and sums are float32.

    Reference: `attend` in `engine/model/encoder.py`.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    low = owner_of_tile(starts, texts, tile, ROWS)
    start = tl.load(starts + low)
    length = tl.load(starts + low + 1) - start
    first = (tile - (start // ROWS + low)) * ROWS
    row = first + tl.arange(0, ROWS)
    d = tl.arange(0, D_PAD)
    stored = (row < length)[:, None] & (d < D)[None, :]
    q_place = (start + row).to(tl.int64)[:, None] * q_row + head * q_head + d[None, :]
    q_tile = tl.load(q + q_place, mask=stored, other=0.0)

    from_key = 0
    to_key = length
    if REACH:
        from_key = tl.maximum(first - reach, 0) // COLUMNS * COLUMNS
        to_key = tl.minimum(length, first + ROWS + reach)
    to_key = tl.where(first < length, to_key, 0)  # tiles past the last row have nothing to do
    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for begin in range(from_key, to_key, COLUMNS):
        key = begin + tl.arange(0, COLUMNS)
        inside = (key < length)[:, None] & (d < D)[None, :]
        place = (start + key).to(tl.int64)[:, None]
        k_tile = tl.load(k + place * k_row + head // GROUP * k_head + d[None, :], mask=inside, other=0.0)
        v_tile = tl.load(v + place * v_row + head // GROUP * v_head + d[None, :], mask=inside, other=0.0)
        score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        seen = (key < length)[None, :]
        if REACH:
            seen = seen & (tl.abs(row[:, None] - key[None, :]) <= reach)
        score = tl.where(seen, score, float("-inf"))
        top, weight, keep = weigh(score, top)
        total = total * keep + tl.sum(weight, 1)
        acc = tl.dot(weight.to(q_tile.dtype), v_tile, acc * keep[:, None], input_precision=PRECISION)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = ((start + row).to(tl.int64) * tl.num_programs(1) + head)[:, None] * D + d[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=stored)
