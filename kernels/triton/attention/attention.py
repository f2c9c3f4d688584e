"""Paged attention over ragged rows: prompts, chunks of prompts and decode rows in one step.

The rows of a tile are the query heads of one KV head times neighboring tokens, so keys and values are read
once for all of them. The leading sequences of one row each (decode) have programs of their own, split along
the context where there are few of them. All others find their sequence by bisection over the query starts:
the grid follows from shapes alone, and a CUDA graph can hold it.

With `fixed`, a row's sums never depend on its neighbors: there is one tile size, and contexts are cut into
pieces of FIXED_SPLIT tokens from their beginning. Partial results are combined in order, whether one program
walked all pieces or several shared them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear.gemm_inner import owner_of_tile
from ..linear.quantize_activations import RowFormat, Rows8
from ..linear.tile_config import Tile, decode_tile, fixed_tile, power_of_two, prefill_tile
from . import attention_metadata as attention_plan
from .attention_combine import Result, fits_heads, reduce_splits, store_eight_heads
from .attention_inner import IN_FLOAT16, add_sink, attend, fold, piece_size, to_float16
from .attention_metadata import TritonAttentionMetadata, attend_gathered, num_splits
from .kv_cache import TritonKVCache, conversion_mode

LOG2_E = 1.4426950408889634
WITH_WINDOW, WITH_CHUNKS = tl.constexpr(1), tl.constexpr(2)
"""Values of WINDOW."""


class ExponentFactors(NamedTuple):
    """Factors that turn a product s of query and key into an exponent of two: s * factor, or cap * tanh(s *
    factor).
    """

    factor: float
    cap: float | None = None
    sinks_H: Tensor | None = None
    """One more score of each head, as it is given."""

    @classmethod
    def of(cls, scale: float, softcap: float | None, sinks_H: Tensor | None) -> "ExponentFactors":
        if softcap is None:
            return cls(scale * LOG2_E, None, sinks_H)
        return cls(scale / softcap, softcap * LOG2_E, sinks_H)


class AttentionInputs(NamedTuple):
    """Queries of a step, and what they attend to."""

    q_THD: Tensor
    cache: TritonKVCache
    layer: int
    plan: TritonAttentionMetadata
    powers: ExponentFactors


class TileLayout(NamedTuple):
    """Tile of a program, its rows, and how many programs share the query heads of a KV head."""

    tile: Tile
    rows: int
    parts: int

    @classmethod
    def of(cls, tile: Tile, q_THD: Tensor, cache: TritonKVCache) -> "TileLayout":
        """Latents have one KV head for up to 128 query heads, more than registers hold sums for."""
        group = q_THD.shape[1] // cache.k.shape[2]
        if not cache.latent:
            return cls(tile, max(tile.rows, power_of_two(group)), 1)
        parts = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= tile.rows)
        return cls(tile, tile.rows, parts)


def attention(
    q_THD: Tensor,
    cache: TritonKVCache,
    layer: int,
    plan: TritonAttentionMetadata,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Implement `Ops.attention`."""
    return attend_rows(q_THD, cache, layer, plan, scale, None, softcap, sinks_H)[0]


def attend_rows(
    q_THD: Tensor,
    cache: TritonKVCache,
    layer: int,
    plan: TritonAttentionMetadata,
    scale: float,
    row_format: RowFormat | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Rows8 | None]:
    """Return the attention output and, where programs that hold heads of a row can (`fits_heads`), the
    quantized rows.
    """
    (rows, heads, _), head_dim = q_THD.shape, cache.value_dim
    out_THD = torch.empty((rows, heads, head_dim), dtype=q_THD.dtype, device=q_THD.device)
    # PyTorch's kernels have none of these.
    gathers = plan.sdpa and softcap is None and sinks_H is None and not cache.latent
    inputs = AttentionInputs(q_THD, cache, layer, plan, ExponentFactors.of(scale, softcap, sinks_H))
    eight = None
    if row_format is not None and fits_heads(row_format, head_dim) and not gathers:
        eight = Rows8.empty(rows, heads * head_dim, row_format, q_THD.device)
    result = Result(out_THD, eight, row_format)
    if plan.decoding:
        decode(result, inputs)
    if gathers:
        attend_gathered(out_THD, q_THD, cache, layer, plan.ragged, plan.decoding, scale)
    elif rows > plan.decoding:
        prefill(result, inputs)
    return out_THD.flatten(1), eight


def decode(result: Result, inputs: AttentionInputs) -> None:
    """Attend for the leading sequences of one row each, with split-K where they are few."""
    q_THD, cache, _, plan, powers = inputs
    heads, head_dim = q_THD.shape[1], cache.value_dim
    sizes = q_THD.device, head_dim, q_THD.element_size()
    tile = fixed_tile(*sizes, cache.k.element_size()) if plan.fixed else decode_tile(*sizes)
    tiles = TileLayout.of(tile, q_THD, cache)
    programs = cache.k.shape[2] * tiles.parts
    splits = num_splits(plan, programs, q_THD.device)
    pieces, sums = result, cache.k_scale
    if splits > 1:
        size = (plan.decoding, heads, splits)
        pieces = Result(torch.empty((*size, head_dim), dtype=torch.float32, device=q_THD.device))
        sums = torch.empty((*size, 2), dtype=torch.float32, device=q_THD.device)
    grid = (programs, splits, plan.decoding)
    launch(grid, tiles, pieces, sums, inputs, splits, decoding=True)
    if splits > 1:
        reduce_splits(result, pieces.out, sums, powers.sinks_H, fixed=plan.fixed)


def prefill(result: Result, inputs: AttentionInputs) -> None:
    """Attend for the sequences of several rows."""
    q_THD, cache, _, plan, _ = inputs
    rows, heads, _ = q_THD.shape
    sizes = q_THD.device, cache.value_dim, q_THD.element_size()
    tile = fixed_tile(*sizes, cache.k.element_size()) if plan.fixed else prefill_tile(*sizes)
    tiles = TileLayout.of(tile, q_THD, cache)
    programs = cache.k.shape[2] * tiles.parts
    tokens = tiles.rows * programs // heads
    sequences = len(plan.ragged.query_lens) - plan.decoding
    grid = ((rows - plan.decoding) // tokens + sequences, programs)
    launch(grid, tiles, result, cache.k_scale, inputs, 1, decoding=False)


def launch(
    grid: tuple[int, ...],
    tiles: TileLayout,
    result: Result,
    sums: Tensor,
    inputs: AttentionInputs,
    splits: int,
    *,
    decoding: bool,
) -> None:
    q_THD, cache, layer, plan, powers = inputs
    ragged, spans_N = plan.ragged, None if decoding else plan.ragged.spans_N
    assert q_THD.stride(2) == 1
    head_dim, kv_heads, tail = cache.value_dim, cache.k.shape[2], q_THD.shape[2] - cache.value_dim
    attention_kernel[grid](
        result.out,
        sums,
        *result.arguments,
        q_THD,
        *cache.layers[layer],
        ragged.query_starts_N1,
        ragged.context_lens_N,
        ragged.block_tables_NB,
        plan.decoding,
        len(ragged.query_lens) - plan.decoding,
        powers.factor,
        powers.cap or 0.0,
        cache.k_scale if powers.sinks_H is None else powers.sinks_H,
        ragged.query_starts_N1 if spans_N is None else spans_N,
        q_THD.stride(0),
        q_THD.stride(1),
        ragged.block_tables_NB.stride(0),
        abs(plan.window or 0),
        splits,
        kv_heads,
        GROUP=q_THD.shape[1] // kv_heads // tiles.parts,
        PARTS=tiles.parts,
        D=head_dim,
        D_PAD=max(16, power_of_two(head_dim)),
        TAIL=tail,
        TAIL_PAD=max(16, power_of_two(tail)),
        ROWS=tiles.rows,
        COLUMNS=tiles.tile.columns,
        PAGE=ragged.block_size,
        DECODING=decoding,
        SPLIT=splits > 1,
        LEAST_SPLIT=attention_plan.LEAST_SPLIT,
        FIXED_SPLIT=attention_plan.FIXED_SPLIT if plan.fixed else 0,
        WINDOW=0 if plan.window is None else WITH_CHUNKS.value if plan.window < 0 else WITH_WINDOW.value,
        CAPPED=powers.cap is not None,
        SINKS=powers.sinks_H is not None,
        SPANS=spans_N is not None,
        CONVERSION=conversion_mode(cache, q_THD.dtype),
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        **result.constants(head_dim),
        num_warps=tiles.tile.warps,
        num_stages=tiles.tile.stages,
        enable_fp_fusion=not plan.fixed,
    )


@triton.jit(
    do_not_specialize=["step", "decoding_sequences", "sequences", "table_row", "window", "splits"],
    do_not_specialize_on_alignment=["starts", "contexts", "tables", "spans"],
)
def attention_kernel(
    out: tl.tensor,
    sums: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    step: tl.tensor,
    given: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    starts: tl.tensor,
    contexts: tl.tensor,
    tables: tl.tensor,
    decoding_sequences: tl.tensor,
    sequences: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    sinks: tl.tensor,
    spans: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    table_row: tl.tensor,
    window: tl.tensor,
    splits: tl.tensor,
    kv_heads: tl.tensor,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    DECODING: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST_SPLIT: tl.constexpr,
    FIXED_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPANS: tl.constexpr,
    CONVERSION: tl.constexpr,
    PRECISION: tl.constexpr,
    EIGHT: tl.constexpr,
    LARGEST: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """Attend one tile of rows to its context: softmax(scale q k^T) v, masked, with softcap and sinks.

    PARTS programs share the query heads of a KV head, GROUP each. With TAIL a key has D numbers, which are
    its value too, and TAIL more: `v` is not read. With SPANS rows of a sequence may see those after them.

    Scores, the online softmax and sums are float32. With SPLIT the partial sums and (max, sum) of the piece
    are stored for `reduce_kernel`, otherwise the result; with EIGHT also its 8-bit codes and scales.
    Reference: `attention` in `kernels/reference/attention.py`.
    """
    TOKENS: tl.constexpr = ROWS // GROUP
    if DECODING:
        head = tl.program_id(0)
        split = tl.program_id(1)
        sequence = tl.program_id(2)
        first_row = sequence
        count = 1
        position = tl.load(contexts + sequence) - 1
    else:
        # Later tiles of a prompt see more keys: they start first, so that the last to end are short ones.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        head = tl.program_id(1)
        split = 0
        base = tl.load(starts + decoding_sequences)
        low = owner_of_tile(starts + decoding_sequences, sequences, tile, TOKENS)
        sequence = decoding_sequences + low
        start = tl.load(starts + sequence)
        rows = tl.load(starts + sequence + 1) - start
        skipped = (tile - ((start - base) // TOKENS + low)) * TOKENS
        first_row = start + skipped
        count = tl.minimum(rows - skipped, TOKENS)
        position = tl.load(contexts + sequence) - rows + skipped

    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = head * GROUP + row % GROUP
    real = token < count
    d = tl.arange(0, D_PAD)
    real_d = d < D
    q_offset = (first_row + token).to(tl.int64) * q_row + member * q_head
    q_tile = tl.load(q + q_offset[:, None] + d[None, :], mask=real[:, None] & real_d[None, :], other=0.0)

    q_tail = q_tile
    if TAIL:
        t = tl.arange(0, TAIL_PAD)
        in_tail = real[:, None] & (t < TAIL)[None, :]
        q_tail = tl.load(q + q_offset[:, None] + (D + t)[None, :], mask=in_tail, other=0.0)

    if CONVERSION == IN_FLOAT16:
        q_tile, q_tail, unit = to_float16(q_tile, q_tail)
        scale = scale * unit[:, None]

    # The tile's rows stand at position .. position + count - 1 and see keys from `begin` to before `end`.
    end = tl.where(count > 0, position + count, 0)
    row_position = position + token
    begin = 0
    oldest = row_position
    if WINDOW == WITH_WINDOW:
        oldest = tl.maximum(row_position - window + 1, 0)
        begin = tl.maximum(position - window + 1, 0) // COLUMNS * COLUMNS
    if WINDOW == WITH_CHUNKS:
        oldest = row_position // window * window
        begin = tl.maximum(position, 0) // window * window // COLUMNS * COLUMNS
    if SPANS:
        span = tl.load(spans + sequence)
        if (span == 1) | ((span == 2) & (WINDOW != 0)):
            end = tl.where(count > 0, tl.load(contexts + sequence), 0)
            row_position = tl.maximum(row_position, end - 1)
    kv_head = head // PARTS
    page_stride = kv_heads * PAGE * (D + TAIL)
    k_head, v_head = k + kv_head * (PAGE * (D + TAIL)), v + kv_head * (PAGE * (D + TAIL))
    scale_offset = kv_head * PAGE
    heads = kv_heads * PARTS * GROUP
    table = tables + sequence.to(tl.int64) * table_row

    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if FIXED_SPLIT:
        first_piece = split if SPLIT else begin // FIXED_SPLIT
        last_piece = split + 1 if SPLIT else tl.cdiv(end, FIXED_SPLIT)
        for piece in range(first_piece, last_piece):
            from_key = tl.maximum(begin, piece * FIXED_SPLIT)
            to_key = tl.minimum(end, (piece + 1) * FIXED_SPLIT)
            acc_b, top_b, total_b = attend(
                q_tile, q_tail, k_head, v_head, k_scale + scale_offset, v_scale + scale_offset, table,
                from_key, from_key, to_key, row_position, oldest, scale, cap, page_stride, kv_heads * PAGE, d,
                ROWS, COLUMNS, PAGE, D, D_PAD, TAIL, TAIL_PAD, WINDOW, CAPPED, CONVERSION, PRECISION,
            )  # fmt: skip
            acc, top, total = fold(acc, top, total, acc_b, top_b, total_b)
    else:
        from_key, to_key = begin, end
        if SPLIT:
            size = piece_size(end - begin, splits, COLUMNS, LEAST_SPLIT)
            from_key = begin + split * size
            to_key = tl.minimum(end, from_key + size)
        # Before `plain`, every row sees every key.
        plain = from_key
        if DECODING and not WINDOW:
            plain = tl.maximum(from_key, to_key // COLUMNS * COLUMNS)
        elif not WINDOW:
            plain = tl.minimum((position + 1) // COLUMNS * COLUMNS, end)
        acc, top, total = attend(
            q_tile, q_tail, k_head, v_head, k_scale + scale_offset, v_scale + scale_offset, table,
            from_key, plain, to_key, row_position, oldest, scale, cap, page_stride, kv_heads * PAGE, d,
            ROWS, COLUMNS, PAGE, D, D_PAD, TAIL, TAIL_PAD, WINDOW, CAPPED, CONVERSION, PRECISION,
        )  # fmt: skip

    stored = real[:, None] & real_d[None, :]
    if SPLIT:
        place = ((first_row + token).to(tl.int64) * heads + member) * splits + split
        tl.store(out + place[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(sums + place * 2, top, mask=real)
        tl.store(sums + place * 2 + 1, total, mask=real)
    else:
        if SINKS:
            total = add_sink(total, top, tl.load(sinks + member))
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # a free row has no keys: its result is 0
        result = acc.to(out.dtype.element_ty)
        row_place = (first_row + token).to(tl.int64)
        place = row_place * heads + member
        tl.store(out + place[:, None] * D + d[None, :], result, mask=stored)
        if EIGHT:
            store_eight_heads(
                numbers, scales, step, given, result, row_place, member, heads, real,
                ROWS, D, D_PAD, EIGHT, LARGEST, GIVEN,
            )  # fmt: skip
