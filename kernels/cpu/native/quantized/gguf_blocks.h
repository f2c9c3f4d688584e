// Panels of GGUF's blocks: the numbers, scales and minimums of the file, rearranged and never rounded.
//
//   weight = scale * (n - zero) + minimum        n: 2 to 6 bits, or the place of a value in a table of up to 16
//
// A unit of a panel is 32 or 256 inputs of 64 outputs: float16 scales, float16 minimums where there are some, then in units
// of 256 a byte for each output and 16 or 32 inputs, which multiplies the scale (and one which multiplies the minimum).
// Codes follow by groups of 32 inputs, as planes of words of 4 inputs of each output:
//   4 bits  [4][64] words  low halves of the bytes are inputs k .. k + 3, high halves k + 4 .. k + 7
//   2 bits  [2][64] words  two bits of a byte are inputs k .. k + 3, the next two k + 4 .. k + 7
//   1 bit      [64] words  a bit of each byte is 4 inputs
// 3 bits are planes of 2 and 1, 5 of 4 and 1, 6 of 4 and 2.
#pragma once

#include "linear/gemm.h"
#include "quantized/quantize_weights.h"

namespace llmbox {

constexpr int BLOCK_GROUP = 32, BLOCK_UNIT = 256;
constexpr int MAX_PARTS = BLOCK_UNIT / 16;

// Values of numbers, the bias that makes them unsigned, and a power of two that scales are multiplied by. Values of IQ4 need
// all eight bits; with the others a byte stays below 128.
struct BlockTable {
    int8_t values[16];
    int zero;
    float factor;
};
enum class Table { NONE, IQ4, IQ1, IQ2, IQ3_XXS, IQ3_S };
constexpr BlockTable BLOCK_TABLES[] = {
    {{}, 0, 1},
    {{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}, Bytes::FLIP, 1},
    {{-9, -7, -1, 1, 7, 9}, 64, 1 / 8.f},
    {{-43, -25, -8, 8, 25, 43}, 64, 1 / 8.f},
    {{-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62}, 64, 1 / 4.f},
    {{-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15}, 64, 1},
};
constexpr const BlockTable& values_of(Table table) { return BLOCK_TABLES[static_cast<int>(table)]; }
constexpr Table table_of(Grid4 grid) {
    switch (grid) {
        case Grid4::TABLE:
        case Grid4::K_TABLE: return Table::IQ4;
        case Grid4::K_IQ1: return Table::IQ1;
        case Grid4::K_IQ2: return Table::IQ2;
        case Grid4::K_IQ3_XXS: return Table::IQ3_XXS;
        case Grid4::K_IQ3_S: return Table::IQ3_S;
        default: return Table::NONE;
    }
}
constexpr bool is_by_16(Grid4 grid) {
    return grid == Grid4::K_PAIRS || grid == Grid4::K_SIGNED || grid == Grid4::K_IQ1 || grid == Grid4::K_IQ2;
}

struct BlockLayout {
    int bits;
    bool has_parts;      // units of 256 whose scale is multiplied by bytes
    bool has_minimums;
    bool are_paired;     // a byte holds the factors of scale and minimum, 4 bits each
    Table table;
    int span;            // inputs that share a scale
    int zero;
    int groups_per_unit, parts;  // parts: spans of a unit
    size_t parts_at, codes_at, group_bytes, unit_bytes;

    explicit BlockLayout(const QuantFormat& format)
        : bits(format.bits),
          has_parts(format.grid >= Grid4::K_MINIMUMS),
          has_minimums(format.grid == Grid4::MINIMUMS || format.grid == Grid4::K_MINIMUMS || format.grid == Grid4::K_PAIRS),
          are_paired(format.grid == Grid4::K_PAIRS),
          table(table_of(format.grid)),
          span(is_by_16(format.grid) ? 16 : BLOCK_GROUP),
          zero(table != Table::NONE ? values_of(table).zero : has_minimums ? 0 : bits == 2 ? 1 : 1 << (bits - 1)),
          groups_per_unit(has_parts ? BLOCK_UNIT / BLOCK_GROUP : 1),
          parts(has_parts ? BLOCK_UNIT / span : 0),
          parts_at((has_minimums ? 4 : 2) * PANEL),
          codes_at(parts_at + static_cast<size_t>(parts) * PANEL * (has_minimums && has_parts && !are_paired ? 2 : 1)),
          group_bytes(static_cast<size_t>(BLOCK_GROUP) * PANEL / 8 * bits),
          unit_bytes(codes_at + groups_per_unit * group_bytes) {}

    int unit() const { return groups_per_unit * BLOCK_GROUP; }
    int low_bits() const { return bits < 4 ? 2 : 4; }

    // Calls visit(byte, shift, bits, shift of n) for each plane that holds bits of number k of a group.
    template <class Visit> void visit(int column, int k, Visit visit) const {
        const int word = k / 4, low = low_bits(), high = bits - low;
        const auto byte = [&](int row) { return static_cast<size_t>(row * PANEL + column) * 4 + k % 4; };
        if (low == 4) visit(byte(word / 2), word % 2 * 4, 4, 0);
        else visit(byte(word / 4), word % 4 * 2, 2, 0);
        const size_t plane = static_cast<size_t>(BLOCK_GROUP) * PANEL / 8 * low;
        if (high == 2) visit(plane + byte(word / 4), word % 4 * 2, 2, low);
        if (high == 1) visit(plane + byte(0), word, 1, low);
    }
    int get(const uint8_t* codes, int column, int k) const {
        int n = 0;
        visit(column, k, [&](size_t at, int shift, int count, int to) {
            n |= (codes[at] >> shift & ((1 << count) - 1)) << to;
        });
        return n;
    }
    void set(uint8_t* codes, int column, int k, int n) const {
        visit(column, k, [&](size_t at, int shift, int count, int from) {
            codes[at] |= static_cast<uint8_t>((n >> from & ((1 << count) - 1)) << shift);
        });
    }

    // Scale and minimum of input k of a unit.
    float scale(const uint8_t* unit, int column, int k) const {
        const float scale = from_scale(reinterpret_cast<const uint16_t*>(unit)[column]) * values_of(table).factor;
        if (!has_parts) return scale;
        const uint8_t part = unit[parts_at + static_cast<size_t>(k / span) * PANEL + column];
        return scale * static_cast<float>(are_paired ? part & 15 : has_minimums ? part : static_cast<int8_t>(part));
    }
    float minimum(const uint8_t* unit, int column, int k) const {
        if (!has_minimums) return 0;
        const float minimum = from_scale(reinterpret_cast<const uint16_t*>(unit)[PANEL + column]);
        if (!has_parts) return minimum;
        const uint8_t* at = unit + parts_at + static_cast<size_t>(k / span) * PANEL + column;
        return -minimum * static_cast<float>(are_paired ? *at >> 4 : at[static_cast<size_t>(parts) * PANEL]);
    }
    // One weight, as ggml dequantizes it.
    float weight(const uint8_t* unit, int column, int k) const {
        const int n = get(unit + codes_at + k / BLOCK_GROUP * group_bytes, column, k % BLOCK_GROUP);
        const auto number = static_cast<float>(table != Table::NONE ? values_of(table).values[n] : n - zero);
        const float product = scale(unit, column, k) * number;
        return has_minimums ? product + minimum(unit, column, k) : product;
    }
};

// What is packed, by rows: numbers[outputs][inputs], scales and minimums[outputs][units], and factors[outputs][parts of all
// units]. Null where the format has none.
struct BlockRows {
    const uint8_t* numbers;
    const uint16_t *scales, *minimums;
    const uint8_t *scale_parts, *minimum_parts;
};

// Packs one unit of one output.
inline void pack_block(const BlockLayout& layout, const BlockRows& from, size_t unit_index, uint8_t* unit, int column) {
    auto* scales = reinterpret_cast<uint16_t*>(unit);
    scales[column] = from.scales[unit_index];
    if (layout.has_minimums) scales[PANEL + column] = from.minimums[unit_index];
    for (int part = 0; part < layout.parts; part++) {
        uint8_t* at = unit + layout.parts_at + static_cast<size_t>(part) * PANEL + column;
        *at = from.scale_parts[unit_index * layout.parts + part];
        if (layout.has_minimums && !layout.are_paired)
            at[static_cast<size_t>(layout.parts) * PANEL] = from.minimum_parts[unit_index * layout.parts + part];
    }
    const uint8_t* numbers = from.numbers + unit_index * layout.unit();
    for (int k = 0; k < layout.unit(); k++)
        layout.set(unit + layout.codes_at + k / BLOCK_GROUP * layout.group_bytes, column, k % BLOCK_GROUP, numbers[k]);
}

}  // namespace llmbox
