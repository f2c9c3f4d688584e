// The two products of attention with AMX: what both types share, and those of int8, for up to 16 rows at once.
//
// A strip of keys is one B after the other. Values are gathered from as many strips as have 16 words first.
#pragma once

#include "attention/attention_state.h"

namespace llmbox {

// Some rows of a tile that share a softmax, and the strips of a chunk that any of them sees.
struct Band {
    int row, rows, strips;
    bool first;  // of the bands of its tile
};

// Where there is no AMX, and for float32.
template <class E> struct TileProducts {
    static constexpr bool POSSIBLE = false, OWN_SOFTMAX = false;
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

// The intrinsics want their registers spelt out. Few of them (amx.h).
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

// A row is two rows of bytes (attention_dot.h): the upper tiles are the high ones, the lower ones the low ones.
// As sums are exact, few rows may go the other way.
template <> struct TileProducts<INT8> {
    static constexpr bool POSSIBLE = true, OWN_SOFTMAX = false;
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

    static NOINLINE void score(const Work<INT8>& work, Band band, const Part& chunk, Tiles& tiles) {
        constexpr int SLOTS = Part::SLOTS;
        int32_t *high = work.sums, *low = high + TILE_ROWS * SLOTS;
        tiles.shape(TILE_ROWS, TILE_ROWS);
        give_back_unused();
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

    static NOINLINE void add(const Work<INT8>& work, Band band, const Part& chunk, const Part* next, Tiles& tiles) {
        const int dim = work.dim, groups = ceil_div(band.strips, GROUP);
        if (next) gather(work, chunk, *next);
        int32_t *high = work.sums, *low = high + TILE_ROWS * dim;
        tiles.shape(TILE_ROWS, TILE_ROWS);
        give_back_unused();
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
