// Panels of int8 or int4 weights.
//
// A panel of 64 outputs is, group by group: 64 scales, then words of 4 neighbouring inputs of each output:
//   int8   [group / 4][64]   bytes hold weight + 128 (with AMX the weight)
//   int4   [group / 8][64]   low halves of the bytes are inputs k .. k + 3, high halves k + 4 .. k + 7, plus 8
// The dot instruction wants unsigned weights; what the offset adds is taken off before the sum starts.
// These are the grids of GGUF's Q8_0 and Q4_0 (with groups of 32), in another order.
#pragma once

#include "gemm.h"
#include "quant_round.h"

namespace llmbox {

// + 128 flips the highest bit. Tiles multiply signed bytes too, and need no correction then.
constexpr int INT8_FLIP = LLMBOX_TILES ? 0 : 0x80;

struct QuantLinear : LinearShape {
    int bits, group;
    int groups;
    size_t group_bytes;  // of a panel
    HugeBlock weights;

    QuantLinear(int inputs, int outputs, int bits, int group, uint8_t* packed = nullptr)
        : LinearShape(inputs, outputs),
          bits(bits),
          group(group),
          groups(ceil_div(inputs, group)),
          group_bytes(2 * PANEL + static_cast<size_t>(group) * PANEL * bits / 8),
          weights(group_bytes * groups * panels(), packed) {}

    const uint8_t* packed() const override { return weights.data(); }
    size_t packed_bytes() const override { return group_bytes * groups * panels(); }

    int offset() const { return 1 << (bits - 1); }
    uint8_t* at(int panel, int group) const {
        return weights.data() + (static_cast<size_t>(panel) * groups + group) * group_bytes;
    }
    // One weight, without its scale.
    int get(int panel, int g, int column, int k) const {
        const uint8_t* codes = at(panel, g) + 2 * PANEL;
        if (bits == 8) return static_cast<int8_t>(codes[(k / 4 * PANEL + column) * 4 + k % 4] ^ INT8_FLIP);
        return (codes[(k / 8 * PANEL + column) * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15) - 8;
    }
    void set(int panel, int g, int column, int k, int weight) const {
        uint8_t* codes = at(panel, g) + 2 * PANEL;
        if (bits == 8) codes[(k / 4 * PANEL + column) * 4 + k % 4] = static_cast<uint8_t>(weight ^ INT8_FLIP);
        else codes[(k / 8 * PANEL + column) * 4 + k % 4] |= static_cast<uint8_t>((weight + 8) << (k % 8 < 4 ? 0 : 4));
    }
};

// Packs one panel, group by group: `make(row, g, codes)` fills codes[group] and returns the scale.
template <class Make> void pack_quant_panel(const QuantLinear& linear, int panel, Make make) {
    std::vector<int8_t> codes(linear.group);
    for (int g = 0; g < linear.groups; g++) {
        auto* scales = reinterpret_cast<uint16_t*>(linear.at(panel, g));
        for (int column = 0; column < PANEL; column++) {
            const int row = panel * PANEL + column;
            std::fill(codes.begin(), codes.end(), int8_t{0});
            scales[column] = row < linear.outputs ? make(row, g, codes.data()) : uint16_t{0};
            for (int k = 0; k < linear.group; k++) linear.set(panel, g, column, k, codes[k]);
        }
    }
}

}  // namespace llmbox
