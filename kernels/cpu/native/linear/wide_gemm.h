// Products in float32 of weights that are kept smaller and become float32 as they are read: bf16, or int8 with a scale for
// each 32 inputs.
//
// Rows are float32. Every output is one sum that walks the inputs upwards and is rounded once for each, so that its bits are
// those of float32 weights in memory, and the same on all instruction sets, where products of two bf16 differ.
#pragma once

#include "quantized/quant_panels.h"

namespace llmbox {

// A panel is, group by group of inputs: scales, then [WORDS][64 outputs] words of PACK neighboring inputs of an output.

// Pairs of bf16, as `pack_panel` packs them for this type, with AMX too.
struct WideBF16 {
    using Element = bf16;
    using Shape = Linear;
    static constexpr int PACK = 2, STEP = 1, WORDS = 1;
    static constexpr size_t SCALES = 0;

    static int groups(const Linear& linear) { return linear.words; }
    static const uint8_t* panel(const Linear& linear, int index) { return linear.panel(index); }
    static INLINE Floats scale(const uint8_t*) { return splat(1.f); }
    static INLINE Floats number(Words words, int i, Floats) { return (Floats)(i == 0 ? words << 16 : words & splat(0xffff0000u)); }
};

// Bytes, as `QuantLinear` packs int8 in groups of 32: those of GGUF's Q8_0.
struct WideInt8 {
    using Shape = QuantLinear;
    static constexpr int PACK = 4, WORDS = 8;
    static constexpr size_t SCALES = 2 * PANEL;

    static int groups(const QuantLinear& linear) { return linear.groups; }
    static const uint8_t* panel(const QuantLinear& linear, int index) { return linear.at(index, 0); }
    static INLINE Floats scale(const uint8_t* from) { return load_scales(reinterpret_cast<const uint16_t*>(from)); }
    static INLINE Floats number(Words words, int i, Floats scale) {
        const Words flipped = words ^ splat(INT8_FLIP * 0x01010101u);
        return to_floats((Ints)(flipped << static_cast<uint32_t>(24 - 8 * i)) >> 24) * scale;
    }
};

template <class W> constexpr int WIDE_INPUTS = W::WORDS * W::PACK;  // of a group
template <class W> constexpr size_t WIDE_BYTES = W::SCALES + W::WORDS * PANEL_STRIDE;

// Brings what lies AHEAD of word `w` of a group: all words together bring a group.
template <class W> INLINE void bring_wide(const uint8_t* group, int w) {
    constexpr int LINES = WIDE_BYTES<W> / 64;
    for (int line = LINES * w / W::WORDS; line < LINES * (w + 1) / W::WORDS; line++) prefetch_stream(group + AHEAD + 64 * line);
}

// tile[ROWS][PANEL] = x * panel, some columns from `column` on. Rows of x lie `stride` numbers apart.
template <class W, int ROWS, int VECTORS>
INLINE void multiply_wide(const uint8_t* group, int groups, int column, const float* x, size_t stride, float* tile) {
    Floats sums[ROWS][VECTORS] = {};
    for (int g = 0; g < groups; g++, group += WIDE_BYTES<W>) {
        Floats scales[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) scales[v] = W::scale(group + 2 * (column + v * LANES));
        UNROLL for (int w = 0; w < W::WORDS; w++) {
            Words words[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++)
                words[v] = load_as<Words>(group + W::SCALES + w * PANEL_STRIDE + 4 * (column + v * LANES));
            if (column == 0) bring_wide<W>(group, w);
            UNROLL for (int i = 0; i < W::PACK; i++, x++) {
                Floats numbers[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) numbers[v] = W::number(words[v], i, scales[v]);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Floats row = splat(x[r * stride]);
                    UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add(numbers[v], row, sums[r][v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(tile + r * PANEL + column + v * LANES, sums[r][v]);
}

template <class W, int ROWS>
NOINLINE void multiply_wide_rows(const uint8_t* panel, int groups, const float* x, size_t stride, float* tile) {
    for (int column = 0; column < PANEL; column += COLUMN_VECTORS * LANES)
        multiply_wide<W, ROWS, COLUMN_VECTORS>(panel, groups, column, x, stride, tile);
}

// Some groups in float32, [inputs][PANEL].
template <class W> INLINE void widen_groups(const uint8_t* group, int groups, float* to) {
    for (int g = 0; g < groups; g++, group += WIDE_BYTES<W>)
        UNROLL for (int w = 0; w < W::WORDS; w++, to += W::PACK * PANEL) {
            bring_wide<W>(group, w);
            UNROLL for (int column = 0; column < PANEL; column += LANES) {
                const Words words = load_as<Words>(group + W::SCALES + w * PANEL_STRIDE + 4 * column);
                const Floats scale = W::scale(group + 2 * column);
                UNROLL for (int i = 0; i < W::PACK; i++) store(to + i * PANEL + column, W::number(words, i, scale));
            }
        }
}

// float32 weights whose sums are rounded alike on all CPUs.
struct FusedF32 : F32 {
    static INLINE void dot(Floats& sum, Floats columns, Floats row) { sum = multiply_add(columns, row, sum); }
};

constexpr int MOST_WIDENED = 256;  // inputs

// tile[rows][PANEL] = x * panel. `wide` has room for MOST_WIDENED inputs of a panel.
template <class W>
NOINLINE void multiply_wide_panel(const uint8_t* panel, int groups, const float* x, size_t stride, int rows, float* tile,
                                  float* wide) {
    switch (rows) {
        case 1: return multiply_wide_rows<W, 1>(panel, groups, x, stride, tile);
        case 2: return multiply_wide_rows<W, 2>(panel, groups, x, stride, tile);
        case 3: return multiply_wide_rows<W, 3>(panel, groups, x, stride, tile);
        case 4: return multiply_wide_rows<W, 4>(panel, groups, x, stride, tile);
        case 5: return multiply_wide_rows<W, 5>(panel, groups, x, stride, tile);
        case 6: return multiply_wide_rows<W, 6>(panel, groups, x, stride, tile);
        default: break;
    }
    // More rows find a slice widened: in the L1 cache, or many in L2, where they load and store their sums less often.
    const int slice = (rows <= 64 ? 64 : MOST_WIDENED) / WIDE_INPUTS<W>;
    for (int first = 0; first < groups; first += slice) {
        const int count = std::min(slice, groups - first), words = count * WIDE_INPUTS<W>;
        widen_groups<W>(panel + first * WIDE_BYTES<W>, count, wide);
        const WordRows<FusedF32> from{x + first * WIDE_INPUTS<W>, stride};
        for (int row = 0; row < rows;) {
            const int tile_rows = next_tile(rows - row);
            multiply_tile<FusedF32>(tile_rows, reinterpret_cast<const uint8_t*>(wide), words, from.from(row, 0),
                                    tile + row * PANEL, first == 0, {});
            row += tile_rows;
        }
    }
}

}  // namespace llmbox
