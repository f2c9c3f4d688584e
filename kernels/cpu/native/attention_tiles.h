// The two products of attention with AMX, for up to 32 rows of bf16 or 16 of int8 at once.
//
// A strip of keys is one B after the other. Values of bf16 are multiplied strip by strip, 8 words at once: one block
// of 16 tokens has no more. Those of int8, whose sums are exact in any order, are gathered from four strips first.
#pragma once

#include "attention_work.h"

namespace llmbox {

// Some rows of a tile that share a softmax, and the strips of a chunk that any of them sees.
struct Band {
    int row, rows, strips;
    bool first;  // of the bands of its tile
};

// Where there is no AMX, and for float32.
template <class E> struct TileProducts {
    static constexpr bool POSSIBLE = false;
};

#if LLMBOX_TILES

// Two A tiles: rows `stride` bytes apart.
struct TileRows {
    const uint32_t *upper, *lower;
    size_t stride;

    TileRows from(int word) const { return {upper + word, lower + word, stride}; }
};

// A B tile and the bytes from row to row.
struct TileColumns {
    const uint8_t* data;
    size_t stride;
};

// The intrinsics want their registers spelt out. Few of them (tiles.h).
template <class E> INLINE void multiply_first() {
    if constexpr (E::PACK == 2) _tile_dpbf16ps(0, 4, 6);
    else _tile_dpbsud(0, 4, 6);
}
template <class E> INLINE void multiply_second() {
    if constexpr (E::PACK == 2) _tile_dpbf16ps(1, 4, 6);
    else _tile_dpbsud(1, 4, 6);
}

// C += both tiles of rows * one of columns.
template <class E> INLINE void add_down(TileRows rows, TileColumns columns) {
    _tile_loadd(6, columns.data, columns.stride);
    _tile_loadd(4, rows.upper, rows.stride);
    multiply_first<E>();
    _tile_loadd(4, rows.lower, rows.stride);
    multiply_second<E>();
}

// C += the upper rows * two tiles of columns.
INLINE void add_across(TileRows rows, TileColumns left, TileColumns right) {
    _tile_loadd(4, rows.upper, rows.stride);
    _tile_loadd(6, left.data, left.stride);
    multiply_first<BF16>();
    _tile_loadd(6, right.data, right.stride);
    multiply_second<BF16>();
}

// The same with the other registers, which can have a shape of their own.
INLINE void add_short_across(TileRows rows, TileColumns left, TileColumns right) {
    _tile_loadd(5, rows.upper, rows.stride);
    _tile_loadd(7, left.data, left.stride);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, right.data, right.stride);
    _tile_dpbf16ps(1, 5, 7);
}

INLINE void bring(const uint8_t* from, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) prefetch_to_l2(from + line);
}

// Scores of `strips` strips for both tiles of rows. With `first` their values are brought meanwhile.
template <class E, class T>
INLINE void multiply_keys_down(TileRows rows, int steps, const Chunk<E>& chunk, int strips, bool first, T* upper,
                               T* lower) {
    for (int s = 0; s < strips; s++) {
        clear_sums();
        for (int i = 0; i < steps; i++) {
            const size_t at = i * TILE_BYTES;
            if (first) bring(chunk.values[s] + at, TILE_BYTES);
            add_down<E>(rows.from(i * TILE_WORDS), {chunk.keys[s] + at, ROW_BYTES});
        }
        store_sums(upper + s * STRIP, lower + s * STRIP, Chunk<E>::SLOTS);
    }
}

// For one tile of rows, two strips at once.
INLINE void multiply_keys_across(TileRows rows, int steps, const Chunk<BF16>& chunk, int strips, bool first, float* to) {
    for (int s = 0; s < strips; s += 2) {
        clear_sums();
        for (int i = 0; i < steps; i++) {
            const size_t at = i * TILE_BYTES;
            if (first) {
                bring(chunk.values[s] + at, TILE_BYTES);
                bring(chunk.values[s + 1] + at, TILE_BYTES);
            }
            add_across(rows.from(i * TILE_WORDS), {chunk.keys[s] + at, ROW_BYTES}, {chunk.keys[s + 1] + at, ROW_BYTES});
        }
        store_sums(to + s * STRIP, to + (s + 1) * STRIP, Chunk<BF16>::SLOTS);
    }
}

template <> struct TileProducts<BF16> {
    static constexpr bool POSSIBLE = true;
    static constexpr int BAND = 2 * TILE_ROWS;  // rows that share a softmax
    static constexpr int WORDS = STRIP / BF16::PACK;
    using Part = Chunk<BF16>;

    static bool wanted(int, int) { return true; }  // one order of summation for all

    // Registers of both shapes are there for few rows; for more they change with the product, some 200 cycles.
    template <bool LOWER> static void shape(Tiles& tiles, int rows, int words) {
        if (LOWER) tiles.shape(TILE_ROWS, TILE_ROWS, words);
        else tiles.shape(rows, rows, TILE_WORDS, WORDS);
    }

    template <bool LOWER>
    static NOINLINE void score(const Work<BF16>& work, Band band, const Part& chunk, Tiles& tiles) {
        float* to = work.scores + band.row * Part::SLOTS;
        const TileRows rows{work.q.row(band.row), work.q.row(band.row + TILE_ROWS), 4u * work.q.part};
        const int steps = work.q.part / TILE_WORDS;
        shape<LOWER>(tiles, band.rows, TILE_WORDS);
        finish_stores();
        if constexpr (LOWER) {
            float* lower = to + TILE_ROWS * Part::SLOTS;
            multiply_keys_down<BF16>(rows, steps, chunk, band.strips, band.first, to, lower);
        } else {
            multiply_keys_across(rows, steps, chunk, band.strips, band.first, to);
            _tile_zero(4);  // as if never written (tiles.h)
            _tile_zero(6);
        }
    }

    // One strip after the other. Brings the keys of `next` meanwhile, if any.
    template <bool LOWER>
    static NOINLINE void add(const Work<BF16>& work, Band band, const Part& chunk, const Part* next, Tiles& tiles) {
        constexpr int COLUMNS = LOWER ? TILE_WORDS : 2 * TILE_WORDS;
        const TileRows rows{work.p.row(band.row), work.p.row(band.row + TILE_ROWS), 4u * work.p.part};
        const size_t stride = 4u * work.dim;
        float* upper = work.out + band.row * work.dim;
        shape<LOWER>(tiles, band.rows, WORDS);
        finish_stores();
        for (int d = 0; d < work.dim; d += COLUMNS) {
            const size_t column = 4 * static_cast<size_t>(d);
            float *first = upper + d, *second = first + (LOWER ? TILE_ROWS * work.dim : TILE_WORDS);
            load_sums(first, second, work.dim);
            for (int s = 0; s < band.strips; s++) {
                const uint8_t* values = chunk.values[s] + column;
                if (next) bring(next->keys[s] + column * WORDS, 4 * COLUMNS * WORDS);
                if constexpr (LOWER) add_down<BF16>(rows.from(s * WORDS), {values, stride});
                else add_short_across(rows.from(s * WORDS), {values, stride}, {values + ROW_BYTES, stride});
            }
            store_sums(first, second, work.dim);
        }
        for (int s = band.strips; next && s < Part::STRIPS; s++)
            bring(next->keys[s], static_cast<size_t>(STRIP) * work.dim * sizeof(bf16));
        if constexpr (!LOWER) {
            _tile_zero(5);
            _tile_zero(7);
        }
    }
};

// A row is two rows of bytes (attention_words.h): the upper tiles are the high ones, the lower ones the low ones.
// As sums are exact, few rows may go the other way.
template <> struct TileProducts<INT8> {
    static constexpr bool POSSIBLE = true;
    static constexpr int BAND = TILE_ROWS;
    static constexpr int GROUP = TILE_WORDS * INT8::PACK / STRIP;  // strips to a tile
    using W = AttentionWords<INT8>;
    using Part = Chunk<INT8>;

    static bool wanted(int rows, int dim) { return rows > 4 && dim % (TILE_WORDS * INT8::PACK) == 0; }

    static TileRows both(const PackedRows<INT8>& x, int row) {
        return {x.row(row), x.row(row) + x.part, 4u * W::PARTS * x.part};
    }
    static Floats total(const int32_t* high, const int32_t* low, int32_t offset) {
        return W::total({load_as<Ints>(high), load_as<Ints>(low)}, offset);
    }

    template <bool>
    static NOINLINE void score(const Work<INT8>& work, Band band, const Part& chunk, Tiles& tiles) {
        constexpr int SLOTS = Part::SLOTS;
        int32_t *high = work.sums, *low = high + TILE_ROWS * SLOTS;
        tiles.shape(TILE_ROWS, TILE_ROWS);
        finish_stores();
        multiply_keys_down<INT8>(both(work.q, band.row), work.q.part / TILE_WORDS, chunk, band.strips, band.first, high,
                                 low);
        for (int r = 0; r < band.rows; r++) {
            float* to = work.scores + (band.row + r) * SLOTS;
            const int32_t offset = work.q.packed[band.row + r].offset;
            for (int i = 0; i < band.strips * STRIP; i += LANES)
                store(to + i, total(high + r * SLOTS + i, low + r * SLOTS + i, offset));
        }
    }

    template <bool>
    static NOINLINE void add(const Work<INT8>& work, Band band, const Part& chunk, const Part* next, Tiles& tiles) {
        const int dim = work.dim, groups = ceil_div(band.strips, GROUP);
        if (next) gather(work, chunk, *next);
        int32_t *high = work.sums, *low = high + TILE_ROWS * dim;
        tiles.shape(TILE_ROWS, TILE_ROWS);
        finish_stores();
        for (int d = 0; d < dim; d += TILE_WORDS) {
            clear_sums();
            for (int g = 0; g < groups; g++) {
                const uint8_t* values = work.values + 4 * (static_cast<size_t>(g) * TILE_WORDS * dim + d);
                add_down<INT8>(both(work.p, band.row).from(g * TILE_WORDS), {values, 4u * dim});
            }
            store_sums(high + d, low + d, dim);
        }
        for (int r = 0; r < band.rows; r++) {
            const auto [factor, offset] = work.p.packed[band.row + r];
            const Floats scale = splat(work.scale[band.row + r]);
            float* out = work.out + (band.row + r) * dim;
            for (int d = 0; d < dim; d += LANES) {
                const Floats added = total(high + r * dim + d, low + r * dim + d, offset) * splat(factor);
                store(out + d, multiply_add(load(out + d), scale, added));
            }
        }
    }

    // The first band does it for all. Brings the keys of `next` meanwhile.
    static void gather(const Work<INT8>& work, const Part& chunk, const Part& next) {
        const size_t bytes = static_cast<size_t>(STRIP) * work.dim;
        for (int s = 0; s < Part::STRIPS; s++)
            for (size_t i = 0; i < bytes; i += 64) {
                prefetch_to_l2(next.keys[s] + i);
                memcpy(work.values + s * bytes + i, chunk.values[s] + i, 64);
            }
    }
};

#endif

}  // namespace llmbox
