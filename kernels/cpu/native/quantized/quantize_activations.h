// Activations: rows of x quantized to int8 as they arrive.
#pragma once

#include "quantized/quant_panels.h"

namespace llmbox {

// Values, and for each row and group (a cell) the scale and what 128 more in each weight adds. Rows lie in blocks
// as high as a tile, group after group, so that tiles read memory in one direction.
struct QuantRows {
    static constexpr int BLOCK = LLMBOX_TILES ? 16 : 1;

    int8_t* values;  // [blocks][groups][BLOCK][group]
    float* scales;   // [blocks][groups][BLOCK]
    int32_t* corrections;
    int groups, group;

    static size_t bytes(int rows, const QuantLinear& linear) {
        return static_cast<size_t>(round_up(rows, BLOCK)) * linear.groups * (linear.group + 8);
    }
    QuantRows(uint8_t* memory, int rows, const QuantLinear& linear) : groups(linear.groups), group(linear.group) {
        const size_t cells = static_cast<size_t>(round_up(rows, BLOCK)) * groups;
        scales = reinterpret_cast<float*>(memory);
        corrections = reinterpret_cast<int32_t*>(memory + 4 * cells);
        values = reinterpret_cast<int8_t*>(memory + 8 * cells);
    }
    size_t cell(int row, int g) const {
        return (static_cast<size_t>(row / BLOCK) * groups + g) * BLOCK + row % BLOCK;
    }
    QuantRows() = default;
};

// `count` numbers of x are there, the rest of the group is zero.
template <class In> INLINE void quantize_group(const In* x, int count, size_t cell, const QuantRows& rows) {
    const auto [most, finite] = range_of(x, count);
    // NaN or infinity must reach the result, where it is noticed: a scale of NaN carries it there.
    const Floats inverse = splat(finite && most > 0 ? 127 / most : 0);
    int8_t* to = rows.values + cell * rows.group;
    Ints codes_total = {};
    for (int k = 0; k < rows.group; k += LANES) {
        const Floats v = finite && k < count ? load(x + k, count - k) : splat(0.f);
        const Ints codes = to_nearest(v * inverse);
        codes_total += codes;
        store_bytes(to + k, codes);
    }
    rows.scales[cell] = finite ? most / 127 : NAN;
    rows.corrections[cell] = -128 * sum(codes_total);
}

}  // namespace llmbox
