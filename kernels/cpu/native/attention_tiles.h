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

// Two B tiles and the bytes from row to row.
struct TileColumns {
    const uint8_t *left, *right;
    size_t stride;
};

// The intrinsics want their registers spelt out.
template <class E, bool LOWER> INLINE void multiply_square() {
    if constexpr (E::PACK == 2) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (LOWER) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    } else {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
}

// C += rows * columns.
template <class E, bool LOWER> INLINE void add_product(TileRows rows, TileColumns columns) {
    _tile_loadd(4, rows.upper, rows.stride);
    _tile_loadd(6, columns.left, columns.stride);
    _tile_loadd(7, columns.right, columns.stride);
    if constexpr (LOWER) _tile_loadd(5, rows.lower, rows.stride);
    multiply_square<E, LOWER>();
}

// The same with registers that few rows leave free, so that these can have a shape of their own.
INLINE void add_short_product(TileRows rows, TileColumns columns) {
    _tile_loadd(5, rows.upper, rows.stride);
    _tile_loadd(7, columns.left, columns.stride);
    _tile_dpbf16ps(0, 5, 7);
    _tile_loadd(7, columns.right, columns.stride);
    _tile_dpbf16ps(1, 5, 7);
}

INLINE void add_long_product(TileRows rows, TileColumns columns) {
    _tile_loadd(4, rows.upper, rows.stride);
    _tile_loadd(6, columns.left, columns.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, columns.right, columns.stride);
    _tile_dpbf16ps(1, 4, 6);
}

INLINE void bring(const uint8_t* from, size_t bytes) {
    for (size_t line = 0; line < bytes; line += 64) prefetch_to_l2(from + line);
}

// Scores of `strips` strips, in pairs. With `first` their values are brought meanwhile.
template <class E, bool LOWER, class T>
INLINE void multiply_key_tiles(TileRows rows, int steps, const Chunk<E>& chunk, int strips, bool first, T* upper,
                               T* lower) {
    for (int s = 0; s < strips; s += 2) {
        clear_sums<LOWER>();
        for (int i = 0; i < steps; i++) {
            const size_t at = i * TILE_BYTES;
            if (first) {
                bring(chunk.values[s] + at, TILE_BYTES);
                bring(chunk.values[s + 1] + at, TILE_BYTES);
            }
            const TileColumns keys{chunk.keys[s] + at, chunk.keys[s + 1] + at, 64};
            if constexpr (E::PACK == 2 && !LOWER) add_long_product(rows.from(i * TILE_WORDS), keys);
            else add_product<E, LOWER>(rows.from(i * TILE_WORDS), keys);
        }
        store_sums<LOWER>(upper + s * STRIP, lower + s * STRIP, Chunk<E>::SLOTS);
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
        shape<LOWER>(tiles, band.rows, TILE_WORDS);
        finish_stores();
        multiply_key_tiles<BF16, LOWER>(rows, work.q.part / TILE_WORDS, chunk, band.strips, band.first, to,
                                        to + TILE_ROWS * Part::SLOTS);
    }

    // Two columns of tiles for one strip after the other. Brings the keys of `next` meanwhile, if any.
    template <bool LOWER>
    static NOINLINE void add(const Work<BF16>& work, Band band, const Part& chunk, const Part* next, Tiles& tiles) {
        const TileRows rows{work.p.row(band.row), work.p.row(band.row + TILE_ROWS), 4u * work.p.part};
        float *upper = work.out + band.row * work.dim, *lower = upper + TILE_ROWS * work.dim;
        shape<LOWER>(tiles, band.rows, WORDS);
        finish_stores();
        for (int d = 0; d < work.dim; d += 2 * TILE_WORDS) {
            const size_t column = 4 * static_cast<size_t>(d), share = 4 * 2 * TILE_WORDS * WORDS;
            load_sums<LOWER>(upper + d, lower + d, work.dim);
            for (int s = 0; s < band.strips; s++) {
                const uint8_t* left = chunk.values[s] + column;
                const TileColumns values{left, left + 4 * TILE_WORDS, 4u * work.dim};
                if (next) bring(next->keys[s] + column * WORDS, share);
                if constexpr (LOWER) add_product<BF16, true>(rows.from(s * WORDS), values);
                else add_short_product(rows.from(s * WORDS), values);
            }
            store_sums<LOWER>(upper + d, lower + d, work.dim);
        }
        for (int s = band.strips; next && s < Part::STRIPS; s++)
            bring(next->keys[s], static_cast<size_t>(STRIP) * work.dim * sizeof(bf16));
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
        multiply_key_tiles<INT8, true>(both(work.q, band.row), work.q.part / TILE_WORDS, chunk, band.strips,
                                       band.first, high, low);
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
        for (int d = 0; d < dim; d += 2 * TILE_WORDS) {
            clear_sums<true>();
            for (int g = 0; g < groups; g++) {
                const uint8_t* left = work.values + 4 * (static_cast<size_t>(g) * TILE_WORDS * dim + d);
                add_product<INT8, true>(both(work.p, band.row).from(g * TILE_WORDS),
                                        {left, left + 4 * TILE_WORDS, 4u * dim});
            }
            store_sums<true>(high + d, low + d, dim);
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
