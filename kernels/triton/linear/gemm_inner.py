"""Inner loop of GEMMs with plain or group-quantized weights: a tile's sum over inputs."""

import triton
import triton.language as tl


@triton.jit
def owner_of_tile(starts: tl.tensor, count: tl.tensor, tile: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Return which of `count` runs of rows has this tile of ROWS rows: the last one whose tiles start at or
    before it. Run n has the rows starts[n] .. starts[n + 1] - 1, counted from starts[0]; its tiles start at
    (starts[n] - starts[0]) // ROWS + n, so the last ones of a run may be empty.
    """
    base = tl.load(starts)
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - base) // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def sum_grouped(
    x_rows: tl.tensor,
    real_m: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    n: tl.tensor,
    real_n: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    BITS: tl.constexpr,
    GRID: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the float32 sums [ROWS, COLUMNS] of rows at the addresses `x_rows` and the outputs `n` of all
    `outputs`.

    Loop steps `first` to `last` - 1 take UNROLL groups each. BITS 0: weights have x's dtype. See `gemm.py`.
    """
    HALF: tl.constexpr = GROUP // 2
    groups = tl.cdiv(inputs, GROUP)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(first, last):
        for part in tl.static_range(UNROLL):
            g = step * UNROLL + part
            real_w = real_n & (g < groups)
            if BITS == 0:
                i = g * GROUP + tl.arange(0, GROUP)
                x_tile = tl.load(x_rows + i[None, :], mask=real_m[:, None] & (i < inputs)[None, :], other=0.0)
                w_place = n.to(tl.int64)[:, None] * inputs + i[None, :]
                w_tile = tl.load(weight + w_place, mask=real_n[:, None] & (i < inputs)[None, :], other=0.0)
                acc = tl.dot(x_tile, tl.trans(w_tile), acc, input_precision=PRECISION)
            elif BITS == 8:
                i = g * GROUP + tl.arange(0, GROUP)
                x_tile = tl.load(x_rows + i[None, :], mask=real_m[:, None] & (i < inputs)[None, :], other=0.0)
                place = (tl.cast(g, tl.int64) * outputs + n)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                w_tile = tl.load(weight + place, mask=real_w[:, None], other=0)
                scale = tl.load(scales + tl.cast(g, tl.int64) * outputs + n, mask=real_w, other=0.0)
                if WIDE:
                    wide = (w_tile.to(tl.float32) * scale.to(tl.float32)[:, None]).to(x_tile.dtype)
                    acc = tl.dot(x_tile, tl.trans(wide), acc, input_precision=PRECISION)
                else:
                    sums = tl.dot(x_tile, tl.trans(w_tile.to(x_tile.dtype)), input_precision=PRECISION)
                    acc += sums * scale.to(tl.float32)[None, :]
            else:
                i = g * GROUP + tl.arange(0, HALF)
                low_x = tl.load(x_rows + i[None, :], mask=real_m[:, None] & (i < inputs)[None, :], other=0.0)
                j = i + HALF
                high_x = tl.load(x_rows + j[None, :], mask=real_m[:, None] & (j < inputs)[None, :], other=0.0)
                cell = tl.cast(g, tl.int64) * outputs + n
                words = load_words(weight, cell, real_w, HALF)
                scale = tl.load(scales + cell, mask=real_w, other=0.0)
                low_w = codes_of(words, 0, offsets, cell, real_w, GROUP, GRID, low_x.dtype)
                high_w = codes_of(words, 4, offsets, cell, real_w, GROUP, GRID, low_x.dtype)
                if WIDE:
                    scales_n = scale.to(tl.float32)[:, None]
                    low_w = (low_w.to(tl.float32) * scales_n).to(low_x.dtype)
                    high_w = (high_w.to(tl.float32) * scales_n).to(low_x.dtype)
                if ROWS > 32:  # warps share the rows: each would convert the same weights
                    low_w = hold_layout(low_w)
                    high_w = hold_layout(high_w)
                    acc = tl.dot(low_x, tl.trans(low_w), acc, input_precision=PRECISION)
                    acc = tl.dot(high_x, tl.trans(high_w), acc, input_precision=PRECISION)
                else:
                    sums = tl.dot(low_x, tl.trans(low_w), input_precision=PRECISION)
                    sums = tl.dot(high_x, tl.trans(high_w), sums, input_precision=PRECISION)
                    acc += sums * scale.to(tl.float32)[None, :]
    return acc


@triton.jit
def hold_layout(tile: tl.tensor) -> tl.tensor:
    """Return `tile`, converted before its layout changes for a product, not after.

    Splitting and joining moves nothing, but the compiler does not move the change of layout across it.
    """
    halves = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
    return tl.reshape(tl.join(halves[0], halves[1]), tile.shape)


@triton.jit
def load_words(weight: tl.tensor, cell: tl.tensor, real: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Load WIDTH bytes of nibbles for each `cell` as 32-bit words."""
    place = cell[:, None] * (WIDTH // 4) + tl.arange(0, WIDTH // 4)[None, :]
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(words + place, mask=real[:, None], other=0)


@triton.jit
def codes_of(
    words: tl.tensor,
    SHIFT: tl.constexpr,
    offsets: tl.tensor,
    cell: tl.tensor,
    real: tl.tensor,
    GROUP: tl.constexpr,
    GRID: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return the codes of half a group of nibbles, one row for each `cell`; SHIFT 0: the first half, 4: the
    second.

    GRID 0: n - 8; 1: n - zero, one for each cell; 2: doubled E2M1; 3: step * n - zero (`numbers_of`).
    Reference: `QuantizedWeight.nibbles` in `kernels/weight_packing.py`, which this inverts.
    """
    if GRID == 2:
        n = nibbles_of(words, SHIFT, 0)
        m = n & 7
        size = m + tl.where(m == 5, 1, 0) + tl.where(m == 6, 2, 0) + tl.where(m == 7, 5, 0)
        return tl.where(n > 7, -size, size).to(dtype)
    # 16-bit dtypes need no conversion instruction, which runs at a quarter of the speed of logic: the bits of
    # 128 (bfloat16) or 1024 (float16) with a nibble in the last places are that sum.
    BASE: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0 if dtype == tl.float16 else 0.0
    if dtype == tl.bfloat16:
        n = nibbles_of(words, SHIFT, 0x43004300).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        n = nibbles_of(words, SHIFT, 0x64006400).to(tl.float16, bitcast=True)
    else:
        n = nibbles_of(words, SHIFT, 0).to(dtype)
    if GRID == 3:
        return numbers_of(n - BASE, SHIFT, offsets, cell, real, GROUP, dtype)
    if GRID == 1:
        zero = tl.load(offsets + cell, mask=real, other=0).to(dtype)
        return n - (zero + BASE)[:, None]
    return n - (BASE + 8.0)


@triton.jit
def nibbles_of(words: tl.tensor, SHIFT: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Return the nibbles at bit SHIFT of each byte, with the other BITS of their words: int16 [rows, 4 *
    words].

    Each operation on a word makes two neighbors (`pack_nibbles` in `weight_packing.py`).
    """
    first = (words >> SHIFT) & 0x000F000F | BITS
    second = (words >> (SHIFT + 8)) & 0x000F000F | BITS
    low = tl.join(first.to(tl.int16), second.to(tl.int16))
    high = tl.join((first >> 16).to(tl.int16), (second >> 16).to(tl.int16))
    return tl.reshape(tl.join(low, high), (words.shape[0], 4 * words.shape[1]))


@triton.jit
def numbers_of(
    n: tl.tensor,
    SHIFT: tl.constexpr,
    steps: tl.tensor,
    cell: tl.tensor,
    real: tl.tensor,
    GROUP: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Dequantize half a group of nibbles with steps, one row for each `cell`: step * n - zero.

    Reference: `to_numbers` in `kernels/weight_packing.py`.
    """
    HALF: tl.constexpr = GROUP // 2
    RUNS: tl.constexpr = HALF // 16
    run = (SHIFT // 4) * RUNS + tl.arange(0, RUNS)
    byte = tl.load(steps + cell[:, None] * (2 * RUNS) + run[None, :], mask=real[:, None], other=0)
    step = (byte & 15).to(tl.int16)
    zero = step * ((byte >> 4).to(tl.int16) + 8) >> 1
    runs = tl.reshape(n, (n.shape[0], RUNS, 16))
    return tl.reshape(runs * step.to(dtype)[:, :, None] - zero.to(dtype)[:, :, None], (n.shape[0], HALF))
