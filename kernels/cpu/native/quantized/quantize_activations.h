// Activations: rows of x quantized to int8 as they arrive.
#pragma once

#include "quantized/quant_panels.h"

namespace llmbox {

// Values, and for each row and group (a cell) the scale and what takes off the surplus of each weight. All rows of a group
// lie behind each other, so that constants lead from a row of a tile to the next. With AMX rows lie in blocks as high as a
// tile, group after group, so that tiles read memory in one direction.
struct QuantRows {
    static constexpr int BLOCK = LLMBOX_TILES ? 16 : 1;

    int8_t* values;  // [groups][rows][group]; with AMX [blocks][groups][BLOCK][group]
    float* scales;   // [groups][rows]; with AMX [blocks][groups][BLOCK]
    int32_t* corrections;
    int rows, groups, group;
    int surplus = 0;  // of QuantLinear
    // For blocks of GGUF there are two of each, for the spans of a cell: what the surplus adds, and the sum of the row.
    int span = 0;
    float* sums = nullptr;

    static size_t bytes(int rows, const QuantLinear& linear) {
        const int more = linear.is_blocks() ? 12 : 0;
        return static_cast<size_t>(round_up(rows, BLOCK)) * linear.groups * (linear.group + 8 + more);
    }
    QuantRows(uint8_t* memory, int rows, const QuantLinear& linear)
        : rows(rows), groups(linear.groups), group(linear.group), surplus(linear.surplus()) {
        const size_t cells = static_cast<size_t>(round_up(rows, BLOCK)) * groups;
        scales = reinterpret_cast<float*>(memory);
        corrections = reinterpret_cast<int32_t*>(memory + 4 * cells);
        values = reinterpret_cast<int8_t*>(memory + 8 * cells);
        if (!linear.is_blocks()) return;
        span = linear.blocks().span;
        sums = reinterpret_cast<float*>(memory + 12 * cells);
        values += 12 * cells;
    }
    size_t cell(int row, int g) const {
        if (BLOCK == 1) return static_cast<size_t>(g) * rows + row;
        return (static_cast<size_t>(row / BLOCK) * groups + g) * BLOCK + row % BLOCK;
    }
    QuantRows() = default;
};

// The cells of ROWS neighboring rows. With AMX they may belong to two blocks.
template <int ROWS> struct RowCells {
    size_t cells[LLMBOX_TILES ? ROWS : 1];

    INLINE RowCells(const QuantRows& x, int row, int g) {
        UNROLL for (int r = 0; r < (LLMBOX_TILES ? ROWS : 1); r++) cells[r] = x.cell(row + r, g);
    }
    INLINE size_t operator[](int r) const { return cells[0] + from_first(r); }
    INLINE size_t from_first(int r) const { return LLMBOX_TILES ? cells[r] - cells[0] : r; }
};

// to[i] = x[order[i]], in stores of eight bytes: vectors that are loaded next do not wait for as many as there are numbers.
template <class In> INLINE void gather(const In* x, const int32_t* order, int count, In* to) {
    constexpr int EACH = sizeof(uint64_t) / sizeof(In);
    using Bits = std::conditional_t<sizeof(In) == 2, uint16_t, uint32_t>;
    int i = 0;
    for (; i + EACH <= count; i += EACH) {
        uint64_t word = 0;
        UNROLL for (int j = 0; j < EACH; j++)
            word |= static_cast<uint64_t>(load_as<Bits>(x + order[i + j])) << j * 8 * sizeof(In);
        store_as(to + i, word);
    }
    for (; i < count; i++) to[i] = x[order[i]];
}

// `count` numbers of x are there, the rest of the group is zero.
template <class In> INLINE void quantize_group(const In* x, int count, size_t cell, const QuantRows& rows) {
    const auto [most, finite] = range_of(x, count);
    // NaN or infinity must reach the result, where it is noticed: a scale of NaN carries it there.
    const Floats inverse = splat(finite && most > 0 ? 127 / most : 0);
    int8_t* to = rows.values + cell * rows.group;
    Ints halves[2] = {};  // of each 32 inputs
    for (int k = 0; k < rows.group; k += LANES) {
        const Floats v = finite && k < count ? load(x + k, count - k) : splat(0.f);
        const Ints codes = to_nearest(v * inverse);
        halves[k / 16 & 1] += codes;
        store_bytes(to + k, codes);
    }
    rows.scales[cell] = finite ? most / 127 : NAN;
    if (!rows.sums) {
        rows.corrections[cell] = -rows.surplus * sum(halves[0] + halves[1]);
        return;
    }
    const int32_t first = sum(halves[0]), second = sum(halves[1]);
    const int32_t spans[2] = {rows.span == 16 ? first : first + second, second};
    for (int s = 0; s < 2; s++) {
        rows.corrections[2 * cell + s] = -rows.surplus * spans[s];
        rows.sums[2 * cell + s] = rows.scales[cell] * static_cast<float>(spans[s]);
    }
}

}  // namespace llmbox
