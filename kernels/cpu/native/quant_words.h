// The quantised linear with the dot instructions of vectors (words.h): ROWS rows of x, some groups of a panel.
#pragma once

#include "quant_rows.h"

namespace llmbox {

// Some groups of a panel, one behind the other: where the codes and scales of the first lie.
struct Groups {
    const uint8_t *codes, *scales;
    size_t codes_step, scales_step;  // to the next group
    int first, count;
};

// What one vector of memory holds of 16 (8, 4) outputs: a word of each in int8, two in int4.
template <int BITS> struct Codes;
template <> struct Codes<8> {
    static constexpr int WORDS = 1;
    static INLINE void load(const uint8_t* from, Words* to) {
        to[0] = load_as<Words>(from);
        if (!INT8_FLIP) to[0] ^= splat(0x80808080u);
    }
};
template <> struct Codes<4> {
    static constexpr int WORDS = 2;
    static INLINE void load(const uint8_t* from, Words* to) {
        const Words both = load_as<Words>(from), low = splat(0x0f0f0f0fu);
        to[0] = both & low;
        to[1] = (both >> 4) & low;
    }
};

// tile[ROWS][PANEL] += the sums of some groups.
template <int BITS, int ROWS>
INLINE void multiply_groups(const Groups& groups, const QuantRows& x, int row, float* tile, Prefetch next) {
    constexpr int VECTORS = COLUMN_VECTORS, WORDS = Codes<BITS>::WORDS;
    for (int i = 0; i < groups.count; i++) {
        // Of the rows; they may belong to two blocks.
        size_t cells[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) cells[r] = x.cell(row + r, groups.first + i);
        const int8_t* values[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) values[r] = x.values + cells[r] * x.group;
        const auto* scales = reinterpret_cast<const uint16_t*>(groups.scales + i * groups.scales_step);
        for (int column = 0; column < PANEL; column += VECTORS * LANES) {
            Ints sums[ROWS][VECTORS];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = (Ints)splat(static_cast<uint32_t>(x.corrections[cells[r]]));
            const uint8_t* from = groups.codes + i * groups.codes_step + 4 * column;
            const Prefetch coming = column ? Prefetch{} : next;  // the first columns bring it all
            const uint8_t* ahead = coming.at;
            for (int k = 0; k < x.group; k += 4 * WORDS) {
                Words weights[VECTORS][WORDS];
                UNROLL for (int v = 0; v < VECTORS; v++) Codes<BITS>::load(from + v * LANES * 4, weights[v]);
                for (size_t offset = 0; offset < coming.step; offset += 64) prefetch_stream(ahead + offset);
                ahead += coming.step;
                from += PANEL_STRIDE;
                UNROLL for (int w = 0; w < WORDS; w++)
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const Bytes::Row broadcast = Bytes::row(load_word(values[r] + k + 4 * w));
                        UNROLL for (int v = 0; v < VECTORS; v++) Bytes::dot(sums[r][v], weights[v][w], broadcast);
                    }
            }
            if (column == 0) next.at = ahead;
            Floats weight_scales[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weight_scales[v] = load_scales(scales + column + v * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats scale = splat(x.scales[cells[r]]);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* to = tile + r * PANEL + column + v * LANES;
                    store(to, multiply_add(to_floats(sums[r][v]) * scale, weight_scales[v], load(to)));
                }
            }
        }
        asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
    }
}

}  // namespace llmbox
