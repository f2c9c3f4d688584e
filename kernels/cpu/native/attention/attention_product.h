// The two products of attention over one chunk of the context: rows with keys, softmax weights with values.
#pragma once

#include "attention/attention_dot.h"

namespace llmbox {

// The strips of one chunk: where they lie, the position of their first token, how many slots are real.
template <class E> struct Chunk {
    static constexpr int STRIPS = Walked<E>::STRIPS, SLOTS = STRIP * STRIPS;
    const uint8_t* keys[STRIPS];
    const uint8_t* values[STRIPS];
    int positions[STRIPS];
    int counts[STRIPS];
};

// `rows` of packed words (attention_dot.h), `part` words to a part, and how their sums are read.
template <class E> struct PackedRows {
    uint32_t* words;
    int part;
    Packed* packed;

    uint32_t* row(int index) const { return words + static_cast<size_t>(index) * part * AttentionWords<E>::PARTS; }
    PackedRows from(int index) const { return {row(index), part, packed + index}; }
    template <class In> void pack(int index, const In* x, int count) const {
        packed[index] = AttentionWords<E>::pack(x, count, part * E::PACK, row(index));
    }
};

// scores[ROWS][SLOTS] = q * keys, up to the factors of both. With `bring`, the values are brought into the cache
// meanwhile: blocks are scattered, so the hardware cannot guess.
template <class E, int ROWS>
INLINE void multiply_keys(PackedRows<E> q, int words, const Chunk<E>& chunk, bool bring, float* scores) {
    using W = AttentionWords<E>;
    constexpr int VECTORS = STRIP / LANES;                    // of one strip
    constexpr int TOGETHER = LANES == 16 ? 4 : 1;  // strips in registers at once
    for (int first = 0; first < Chunk<E>::STRIPS; first += TOGETHER) {
        typename W::Sum sums[ROWS][TOGETHER][VECTORS] = {};
        for (int w = 0; w < words; w++) {
            const size_t at = static_cast<size_t>(w) * STRIP * 4;
            UNROLL for (int s = 0; s < TOGETHER; s++)
                if (bring) prefetch_to_l2(chunk.values[first + s] + at);
            UNROLL for (int turn = 0; turn < W::TURNS; turn++) {
                decltype(W::columns(nullptr, turn)) keys[TOGETHER][VECTORS];
                UNROLL for (int s = 0; s < TOGETHER; s++)
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        keys[s][v] = W::columns(chunk.keys[first + s] + at + v * LANES * 4, turn);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const auto row = W::row(q.row(r), w, q.part, turn);
                    UNROLL for (int s = 0; s < TOGETHER; s++)
                        UNROLL for (int v = 0; v < VECTORS; v++) W::dot(sums[r][s][v], keys[s][v], row);
                }
                end_turn<W::TURNS>();
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int s = 0; s < TOGETHER; s++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    store(scores + r * Chunk<E>::SLOTS + (first + s) * STRIP + v * LANES,
                          W::total(sums[r][s][v], q.packed[r].offset));
    }
}

// out[ROWS][VECTORS of `dim`] = out * scale + p * values. Brings the keys of `next`, if any.
template <class E, int ROWS, int VECTORS>
INLINE void multiply_values(PackedRows<E> p, const Chunk<E>& chunk, const Chunk<E>* next, int column, int dim,
                            const float* scale, float* out) {
    using W = AttentionWords<E>;
    constexpr int WORDS = STRIP / E::PACK;
    typename W::Sum sums[ROWS][VECTORS] = {};
    for (int s = 0; s < Chunk<E>::STRIPS; s++)
        for (int w = 0; w < WORDS; w++) {
            const size_t at = (static_cast<size_t>(w) * dim + column) * 4;
            UNROLL for (int v = 0; v < VECTORS; v++)
                if (next) prefetch_to_l2(next->keys[s] + at + v * LANES * 4);
            UNROLL for (int turn = 0; turn < W::TURNS; turn++) {
                decltype(W::columns(nullptr, turn)) values[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) values[v] = W::columns(chunk.values[s] + at + v * LANES * 4, turn);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const auto row = W::row(p.row(r), s * WORDS + w, p.part, turn);
                    UNROLL for (int v = 0; v < VECTORS; v++) W::dot(sums[r][v], values[v], row);
                }
                end_turn<W::TURNS>();
            }
        }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            float* to = out + r * dim + column + v * LANES;
            const Floats added = W::total(sums[r][v], p.packed[r].offset) * splat(p.packed[r].factor);
            store(to, multiply_add(load(to), splat(scale[r]), added));
        }
}

template <class E, int ROWS>
void multiply_all_values(
    PackedRows<E> p, const Chunk<E>& chunk, const Chunk<E>* next, int dim, const float* scale, float* out) {
    constexpr int VECTORS = LANES == 16 ? 4 : 2;
    int column = 0;
    for (; column + VECTORS * LANES <= dim; column += VECTORS * LANES)
        multiply_values<E, ROWS, VECTORS>(p, chunk, next, column, dim, scale, out);
    for (; column < dim; column += LANES)
        multiply_values<E, ROWS, 1>(p, chunk, next, column, dim, scale, out);
}

// Calls `tile(std::integral_constant<int, ROWS>, first row)` until all rows are done, at most MOST at once.
template <int MOST, class Tile> INLINE void in_tiles(int rows, Tile tile) {
    for (int row = 0; row < rows; row += MOST) {
        const int left = rows - row;
        [&]<int... N>(std::integer_sequence<int, N...>) {
            ((left == N + 1 || (N + 1 == MOST && left > MOST) ? tile(std::integral_constant<int, N + 1>{}, row) : void()),
             ...);
        }(std::make_integer_sequence<int, MOST>{});
    }
}

}  // namespace llmbox
