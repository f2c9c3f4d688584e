// Panels of int8 or int4 weights.
//
// A panel of 64 outputs is, group by group: 64 scales, with steps [2][64] words of 4 of those, with zeros 64 bytes of
// them, then words of 4 neighboring inputs of each output:
//   int8   [group / 4][64]   bytes hold weight + 128 (with AMX and on Arm the weight)
//   int4   [group / 8][64]   low halves of the bytes are inputs k .. k + 3, high halves k + 4 .. k + 7
// Most dot instructions want unsigned weights; what the offset adds is taken off before the sum starts. Four bits become
// the same bytes as they are read (quant_gemm_dot.h).
#pragma once

#include "quantized/gguf_blocks.h"

namespace llmbox {

// + 128 flips the highest bit. Tiles multiply signed bytes too, and need no correction then.
constexpr uint32_t INT8_FLIP = LLMBOX_TILES ? 0 : Bytes::FLIP;

struct QuantLinear : LinearShape, QuantFormat {
    int groups;
    int units;                         // of GGUF's blocks; 0: others
    bool is_ordered;                   // weights of input i belong to input order()[i] of a row
    size_t codes_offset, group_bytes;  // of a group of a panel: where its codes begin, all of it
    HugeBlock weights;

    QuantLinear(int inputs, int outputs, const QuantFormat& format, bool is_ordered = false, uint8_t* packed = nullptr)
        : LinearShape(inputs, outputs),
          QuantFormat(format),
          groups(ceil_div(inputs, group)),
          units(is_blocks() ? ceil_div(inputs, blocks().unit()) : 0),
          is_ordered(is_ordered),
          codes_offset(2 * PANEL + (has_steps() ? STEPS * PANEL : has_zeros() ? PANEL : 0)),
          group_bytes(codes_offset + static_cast<size_t>(group) * PANEL * bits / 8),
          weights(packed_bytes(), packed) {}

    bool has_steps() const { return grid == Grid4::STEPS; }
    bool has_zeros() const { return grid == Grid4::ZEROS; }
    bool is_e2m1() const { return grid == Grid4::E2M1; }
    bool is_blocks() const { return grid >= Grid4::CENTERED; }
    // Whether four bits n are multiplied as they are, and what they are more than the weight is taken off the sum.
    bool is_plain4() const { return bits == 4 && (grid == Grid4::PLAIN || has_zeros()); }
    // What the bytes that are multiplied are more than weights. With zeros it is theirs, in units of which it is given.
    int surplus() const {
        if (is_blocks()) return blocks().zero;
        return !is_plain4() ? static_cast<int>(Bytes::FLIP) : has_zeros() ? 1 : 8;
    }
    BlockLayout blocks() const { return BlockLayout(*this); }

    const uint8_t* packed() const override { return weights.data(); }
    size_t panels_bytes() const {
        return is_blocks() ? blocks().unit_bytes * units * panels() : group_bytes * groups * panels();
    }
    size_t packed_bytes() const override {
        return panels_bytes() + (is_ordered ? round_up(inputs * static_cast<int>(sizeof(int32_t)), 64) : 0);
    }
    // Behind the panels; null where inputs are in the order of rows.
    int32_t* order() const {
        return is_ordered ? reinterpret_cast<int32_t*>(weights.data() + panels_bytes()) : nullptr;
    }

    uint8_t* at(int panel, int group) const {
        return weights.data() + (static_cast<size_t>(panel) * groups + group) * group_bytes;
    }
    uint8_t* unit_at(int panel, int unit) const {
        return weights.data() + (static_cast<size_t>(panel) * units + unit) * blocks().unit_bytes;
    }
    Step4 step_at(int panel, int g, int column, int k) const {
        return Step4(has_steps() ? *step_byte(panel, g, column, k / STEP_INPUTS) : PLAIN_STEP);
    }
    uint8_t* zero_byte(int panel, int g, int column) const { return at(panel, g) + 2 * PANEL + column; }
    uint8_t* step_byte(int panel, int g, int column, int s) const {
        return at(panel, g) + 2 * PANEL + (s / 4 * PANEL + column) * 4 + s % 4;
    }
    float weight(int64_t output, int input) const {
        const int panel = static_cast<int>(output / PANEL), column = static_cast<int>(output % PANEL);
        if (is_blocks()) {
            const BlockLayout layout = blocks();
            return layout.weight(unit_at(panel, input / layout.unit()), column, input % layout.unit());
        }
        const int g = input / group;
        const uint16_t bits = reinterpret_cast<const uint16_t*>(at(panel, g))[column];
        const float scale = is_e2m1() ? to_float(bf16{bits}) : from_scale(bits);
        return static_cast<float>(get(panel, g, column, input % group)) * scale;
    }
    // One weight, without its scale.
    int get(int panel, int g, int column, int k) const {
        const uint8_t* codes = at(panel, g) + codes_offset;
        if (bits == 8) return static_cast<int8_t>(codes[(k / 4 * PANEL + column) * 4 + k % 4] ^ INT8_FLIP);
        const int n = codes[(k / 8 * PANEL + column) * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
        if (is_e2m1()) return E2M1_VALUES[n];
        if (has_zeros()) return n - *zero_byte(panel, g, column);
        return step_at(panel, g, column, k).number(n);
    }
    // Steps come first.
    void set(int panel, int g, int column, int k, int weight) const {
        uint8_t* codes = at(panel, g) + codes_offset;
        if (bits == 8) {
            codes[(k / 4 * PANEL + column) * 4 + k % 4] = static_cast<uint8_t>(weight ^ INT8_FLIP);
            return;
        }
        const int n = is_e2m1()     ? e2m1_half_byte(weight)
                      : has_zeros() ? (weight + *zero_byte(panel, g, column)) & 15
                                    : step_at(panel, g, column, k).half_byte(weight);
        codes[(k / 8 * PANEL + column) * 4 + k % 4] |= static_cast<uint8_t>(n << (k % 8 < 4 ? 0 : 4));
    }
};

// Packs one panel, group by group: `make(row, g, numbers, steps)` fills numbers[group] and steps[8] and returns the scale.
// With zeros the first of the steps is the group's zero.
template <class Make> void pack_quant_panel(const QuantLinear& linear, int panel, Make make) {
    int8_t numbers[MAX_GROUP];
    uint8_t steps[STEPS];
    for (int g = 0; g < linear.groups; g++) {
        uint8_t* at = linear.at(panel, g);
        for (int column = 0; column < PANEL; column++) {
            const int row = panel * PANEL + column;
            std::fill_n(numbers, MAX_GROUP, int8_t{0});
            std::fill_n(steps, STEPS, linear.has_zeros() ? uint8_t{0} : PLAIN_STEP);
            const uint16_t scale = row < linear.outputs ? make(row, g, numbers, steps) : uint16_t{0};
            reinterpret_cast<uint16_t*>(at)[column] = scale;
            if (linear.has_zeros()) *linear.zero_byte(panel, g, column) = steps[0] & 15;
            for (int s = 0; linear.has_steps() && s < STEPS; s++) *linear.step_byte(panel, g, column, s) = steps[s];
            for (int k = 0; k < linear.group; k++) linear.set(panel, g, column, k, numbers[k]);
        }
    }
}

}  // namespace llmbox
