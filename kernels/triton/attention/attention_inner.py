"""Inner loop of attention: one tile of query rows over a range of keys, with the online softmax.

Dao, "FlashAttention-2", 2023. Scores are kept in base 2: exp2 is one instruction.
"""

import triton
import triton.language as tl

from ..elementwise import tanh
from ..linear.gemm_inner import hold_layout
from . import kv_cache

LOG2_E = tl.constexpr(1.4426950408889634)
IN_FLOAT16 = tl.constexpr(kv_cache.IN_FLOAT16)
"""Value of CONVERSION: see `conversion_mode`."""
LEAST_SCALE = tl.constexpr(2.0**-100)
"""A row of zeros has scale 0, which has no exponent."""
EXPONENT = tl.constexpr(0x7F800000)
"""Bits of a float32 that hold its exponent: alone, those of a power of two."""


@triton.jit
def attend(
    q_tile: tl.tensor,
    q_tail: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    table: tl.tensor,
    from_key: tl.tensor,
    plain: tl.tensor,
    to_key: tl.tensor,
    row_position: tl.tensor,
    oldest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    page_stride: tl.tensor,
    scale_stride: tl.tensor,
    d: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    CONVERSION: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the sum of exp2(score - top) v, top, and the sum of exp2(score - top), over keys from_key ..
    to_key - 1, float32.

    `from_key` and `plain` are multiples of COLUMNS; keys before `plain` are seen by all rows. `oldest`: with
    WINDOW the first key that each row sees.
    """
    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(from_key, plain, COLUMNS):
        acc, top, total = step(
            acc, top, total, q_tile, q_tail, k, v, k_scale, v_scale, table, start, to_key, row_position,
            oldest, scale, cap, page_stride, scale_stride, d, COLUMNS, PAGE, D, D_PAD, TAIL, TAIL_PAD,
            False, WINDOW, CAPPED, CONVERSION, PRECISION,
        )  # fmt: skip
    for start in range(plain, to_key, COLUMNS):
        acc, top, total = step(
            acc, top, total, q_tile, q_tail, k, v, k_scale, v_scale, table, start, to_key, row_position,
            oldest, scale, cap, page_stride, scale_stride, d, COLUMNS, PAGE, D, D_PAD, TAIL, TAIL_PAD,
            True, WINDOW, CAPPED, CONVERSION, PRECISION,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def step(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    q_tile: tl.tensor,
    q_tail: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    table: tl.tensor,
    start: tl.tensor,
    to_key: tl.tensor,
    row_position: tl.tensor,
    oldest: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    page_stride: tl.tensor,
    scale_stride: tl.tensor,
    d: tl.tensor,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    CONVERSION: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Add one tile of keys to the online softmax: rescale the sums to the new maximum, then add exp2(score -
    top) v.

    Values are the first D numbers of keys where there is a TAIL. Scores and sums are float32. 8-bit keys and
    values are scaled after the products, one scale a key.
    """
    key = start + tl.arange(0, COLUMNS)
    real = key < to_key
    page = load_pages(table, start, to_key, COLUMNS, PAGE, MASKED)
    first = page * page_stride + key % PAGE * (D + TAIL)
    place = first[:, None] + d[None, :]
    # Slots past the context are never read: they may hold anything, and 0 times NaN would be NaN.
    k_tile = load_tile(k + place, real, d, MASKED, D, D_PAD)
    if TAIL == 0:
        v_tile = load_tile(v + place, real, d, MASKED, D, D_PAD)

    k_tile = convert_tile(k_tile, q_tile.dtype, CONVERSION)
    v_tile = k_tile if TAIL else convert_tile(v_tile, q_tile.dtype, CONVERSION)
    score = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if TAIL:
        t = tl.arange(0, TAIL_PAD)
        in_tail = (t < TAIL)[None, :]
        if MASKED:
            in_tail = in_tail & real[:, None]
        tail = tl.load(k + first[:, None] + (D + t)[None, :], mask=in_tail, other=0.0)
        tail = convert_tile(tail, q_tile.dtype, CONVERSION)
        score = tl.dot(q_tail, tl.trans(tail), score, input_precision=PRECISION)
    if CONVERSION:
        scale_place = page * scale_stride + key % PAGE
        if MASKED:
            k_scales = tl.load(k_scale + scale_place, mask=real, other=0.0)
            v_scales = tl.load(v_scale + scale_place, mask=real, other=0.0)
        else:
            k_scales = tl.load(k_scale + scale_place)
            v_scales = tl.load(v_scale + scale_place)
        score = score * k_scales[None, :]
    score = score * scale
    if CAPPED:
        score = cap * tanh(score)
    if MASKED:
        seen = (key[None, :] <= row_position[:, None]) & real[None, :]
        if WINDOW:
            seen = seen & (key[None, :] >= oldest[:, None])
        score = tl.where(seen, score, float("-inf"))

    if CONVERSION == IN_FLOAT16:
        # The exponent of its value's scale is part of a score, so that weights are below 2 in any case.
        power = tl.maximum(v_scales, LEAST_SCALE).to(tl.int32, bitcast=True) & EXPONENT
        inverse = (2 * 0x3F800000 - power).to(tl.float32, bitcast=True)
        score = score + ((power >> 23) - 127).to(tl.float32)[None, :]
        new_top, weight, keep = weigh(score, top)
        total = total * keep + tl.sum(weight * inverse[None, :], 1)
        weight = weight * (v_scales * inverse)[None, :]
    else:
        new_top, weight, keep = weigh(score, top)
        total = total * keep + tl.sum(weight, 1)
        if CONVERSION:
            weight = weight * v_scales[None, :]
    acc = tl.dot(weight.to(q_tile.dtype), v_tile, acc * keep[:, None], input_precision=PRECISION)
    return acc, new_top, total


@triton.jit
def load_pages(
    table: tl.tensor,
    start: tl.tensor,
    to_key: tl.tensor,
    COLUMNS: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return the page of each key of a tile, int64; with MASKED 0 for those from `to_key` on.

    One load a page, where a tile has whole pages: a load a key would ask for each number PAGE times.
    """
    if COLUMNS % PAGE == 0:
        b = tl.arange(0, COLUMNS // PAGE)
        if MASKED:
            page_B = tl.load(table + start // PAGE + b, mask=start + b * PAGE < to_key, other=0)
        else:
            page_B = tl.load(table + start // PAGE + b)
        page = tl.reshape(tl.broadcast_to(page_B[:, None], (COLUMNS // PAGE, PAGE)), (COLUMNS,))
        page = tl.max_constancy(page, [PAGE])
    else:
        key = start + tl.arange(0, COLUMNS)
        page = tl.load(table + key // PAGE, mask=key < to_key, other=0)
    return page.to(tl.int64)


@triton.jit
def weigh(score: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return the new maximum of each row, exp2 of the scores less it, and the factor of earlier sums."""
    new_top = tl.maximum(top, tl.max(score, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: the row has seen no key yet
    return new_top, tl.exp2(score - shift[:, None]), tl.exp2(top - shift)


@triton.jit
def load_tile(
    place: tl.tensor,
    real: tl.tensor,
    d: tl.tensor,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
) -> tl.tensor:
    """Load the first D numbers of keys or values, zeros beyond; with MASKED `real` rows only."""
    if MASKED and D == D_PAD:
        return tl.load(place, mask=real[:, None], other=0.0)
    if MASKED:
        return tl.load(place, mask=real[:, None] & (d < D)[None, :], other=0.0)
    if D == D_PAD:
        return tl.load(place)
    return tl.load(place, mask=(d < D)[None, :], other=0.0)


@triton.jit
def convert_tile(tile: tl.tensor, dtype: tl.constexpr, CONVERSION: tl.constexpr) -> tl.tensor:
    """Convert a tile of the cache to the dtype of the queries."""
    if CONVERSION == 0:
        return tile.to(dtype)
    # After the change of layout for the product, single bytes of shared memory would be read.
    return hold_layout(tile.to(dtype))


@triton.jit
def to_float16(rows: tl.tensor, tails: tl.tensor) -> tl.tensor:
    """Return bfloat16 rows and their tails as float16, and the float32 powers of two they are divided by.

    Float16 has fewer exponents: what is left of a row, at most 2, is exact in it but for tiny numbers.
    """
    unit = tl.maximum(power_below(rows), power_below(tails))
    by = unit[:, None]
    return (rows.to(tl.float32) / by).to(tl.float16), (tails.to(tl.float32) / by).to(tl.float16), unit


@triton.jit
def power_below(rows: tl.tensor) -> tl.tensor:
    """Return the power of two at or below the largest magnitude of each row, float32; 1 for zeros."""
    largest = tl.max(tl.abs(rows.to(tl.float32)), 1)
    power = (largest.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
    return tl.where(power > 0, power, 1.0)


@triton.jit
def fold(
    acc_a: tl.tensor,
    top_a: tl.tensor,
    total_a: tl.tensor,
    acc_b: tl.tensor,
    top_b: tl.tensor,
    total_b: tl.tensor,
) -> tl.tensor:
    """Combine two key ranges as if they were one. An empty range leaves the bits of the other unchanged."""
    top = tl.maximum(top_a, top_b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    a, b = tl.exp2(top_a - shift), tl.exp2(top_b - shift)
    return acc_a * a[:, None] + acc_b * b[:, None], top, total_a * a + total_b * b


@triton.jit
def add_sink(total: tl.tensor, top: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Add the weight of one more score (a sink), which has no value. Rows that see no key stay 0."""
    return tl.where(total > 0, total + tl.exp2(sink * LOG2_E - top), total)


@triton.jit
def piece_size(
    keys: tl.tensor, splits: tl.tensor, COLUMNS: tl.constexpr, LEAST_SPLIT: tl.constexpr
) -> tl.tensor:
    """Return the keys per program: whole tiles, about the same number for every program."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), COLUMNS) * COLUMNS, LEAST_SPLIT)
