// Products with int8 and int4 weights: with vectors or with AMX, by the number of rows.
#include "quantized/quant_gemm.h"
#include "quantized/quant_gemm_amx.h"
#include "quantized/quant_gemm_dot.h"

namespace llmbox {

namespace {

class PanelProduct {
public:
    PanelProduct(const QuantLinear& linear, const QuantRows& rows) : linear_(linear), rows_(rows) {}

    // All rows visit a slice of some groups before the next one: its weights stay in the L1 cache.
    void add_groups(int panel, GroupSpan span, int row, int rows, float* tile, Member& member) const {
        if constexpr (STREAMED_ROWS > 0)
            if (linear_.bits == 8 && rows <= STREAMED_ROWS) {
                const auto stream = rows == 1   ? stream_groups<1>
                                    : rows == 2 ? stream_groups<2>
                                    : rows == 3 ? stream_groups<3>
                                                : stream_groups<4>;
                return stream(linear_, linear_.at(panel, span.begin), span, rows_, row, tile);
            }
#if LLMBOX_TILES
        if (rows >= TILES_FROM) {
            const auto with_words = linear_.group == 32 ? multiply_tiles<8> : multiply_tiles<32>;
            return with_words(linear_, panel, span, rows_, row, rows, tile, member);
        }
#endif
        if (linear_.bits == 8) multiply_slices<8>(panel, span, row, rows, tile, nullptr);
        else if (rows <= WIDEN_ROWS && linear_.is_e2m1()) multiply_slices<FP4>(panel, span, row, rows, tile, nullptr);
        else if (rows <= WIDEN_ROWS && linear_.is_plain4()) {
            if (linear_.has_zeros() && rows > linear_.group / INPUTS_A_ROW)
                multiply_slices<ZEROS4>(panel, span, row, rows, tile, nullptr);
            else multiply_slices<PLAIN4>(panel, span, row, rows, tile, nullptr);
        }
        else if (rows <= WIDEN_ROWS) multiply_slices<4>(panel, span, row, rows, tile, nullptr);
        else multiply_slices<8>(panel, span, row, rows, tile, member.spare.take<uint8_t>(SLICE * PANEL));
    }

private:
    static constexpr int SLICE = 256;  // inputs
    static_assert(SLICE >= MAX_GROUP);
    // int4: more rows than these find a slice widened in memory, fewer widen it as they load it.
    static constexpr int WIDEN_ROWS = WIDENED_TILE;
    static constexpr int TILES_FROM = 7;  // with AMX
    // None is widened in memory then, where INT8_FLIP is not what the vectors need.
    static_assert(!LLMBOX_TILES || TILES_FROM <= WIDEN_ROWS + 1);
    // Up to one row for so many inputs of a group takes zeros off its sum. For more they are taken off the weights.
    static constexpr int INPUTS_A_ROW = 8;

    // BITS are those of the codes that are multiplied: 8 also for int4 that goes through `widened`.
    template <int BITS>
    void multiply_slices(int panel, GroupSpan span, int row, int rows, float* tile, uint8_t* widened) const {
        const int highest = BITS == 8 ? ROW_TILE : WIDENED_TILE;
        const int tiles = ceil_div(rows, highest), slice = SLICE / linear_.group;
        for (int g = span.begin; g < span.end; g += slice) {
            const uint8_t* at = linear_.at(panel, g);
            const int count = std::min(slice, span.end - g);
            const size_t bytes = count * linear_.group_bytes;
            const uint8_t *coming = at + std::max(AHEAD, bytes), *end = coming + bytes;
            Groups groups{at + linear_.codes_offset, at, Offsets4(linear_, at), linear_.group_bytes,
                          linear_.group_bytes, g, count};
            if (linear_.has_zeros() && BITS != PLAIN4) groups.times = OVER_ZERO;
            if (widened) {
                groups.codes = widened;
                groups.codes_step = static_cast<size_t>(linear_.group) * PANEL;
                for (int i = 0; i < count; i++) {
                    const uint8_t* from = at + i * linear_.group_bytes;
                    widen_group<INT8_FLIP>(from + linear_.codes_offset, Offsets4(linear_, from), linear_.group,
                                           widened + i * groups.codes_step, coming);
                    coming += linear_.group * PANEL / 4;
                }
            }
            // Each tile brings its part of what comes later; slices are small, so look further ahead.
            const int turns = count * linear_.group / (4 * Codes<BITS>::WORDS);
            const size_t step = round_up(ceil_div(static_cast<int>(end - coming), turns * tiles), 64);
            for (int r = 0; r < rows;) {
                const int tile_rows = next_tile(rows - r, highest);
                const Prefetch next = {coming, coming < end ? step : 0};
                multiply_tile<BITS>(tile_rows, groups, row + r, tile + r * PANEL, next);
                coming += step * turns;
                r += tile_rows;
            }
        }
    }

    template <int BITS>
    void multiply_tile(int rows, const Groups& groups, int row, float* tile, Prefetch next) const {
        switch (rows) {
            case 1: return multiply_groups<BITS, 1>(groups, rows_, row, tile, next);
            case 2: return multiply_groups<BITS, 2>(groups, rows_, row, tile, next);
            case 3: return multiply_groups<BITS, 3>(groups, rows_, row, tile, next);
            case 4: return multiply_groups<BITS, 4>(groups, rows_, row, tile, next);
            case 5: return multiply_groups<BITS, 5>(groups, rows_, row, tile, next);
            case 6: return multiply_groups<BITS, 6>(groups, rows_, row, tile, next);
            default: break;
        }
        if constexpr (BITS != 8 && WIDENED_TILE > ROW_TILE) switch (rows) {
            case 7: return multiply_groups<BITS, 7>(groups, rows_, row, tile, next);
            case 8: return multiply_groups<BITS, 8>(groups, rows_, row, tile, next);
            case 9: return multiply_groups<BITS, 9>(groups, rows_, row, tile, next);
            case 10: return multiply_groups<BITS, 10>(groups, rows_, row, tile, next);
            case 11: return multiply_groups<BITS, 11>(groups, rows_, row, tile, next);
            default: return multiply_groups<BITS, 12>(groups, rows_, row, tile, next);
        }
    }

    const QuantLinear& linear_;
    const QuantRows& rows_;
};

}  // namespace

void multiply_quant_panel(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile,
                          Member& member) {
    std::fill_n(tile, rows * PANEL, 0.f);
    if (linear.is_blocks()) return multiply_blocks(linear, panel, x, row, rows, tile, member);
    PanelProduct(linear, x).add_groups(panel, {0, linear.groups}, row, rows, tile, member);
}

void multiply_quant_shares(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile, int shares,
                           const float* bias, Member& member) {
    const int size = rows * PANEL, groups = linear.groups / shares;
    std::fill_n(tile, shares * size, 0.f);
    for (int s = 0; s < shares; s++)
        PanelProduct(linear, x).add_groups(panel, {s * groups, (s + 1) * groups}, row, rows, tile + s * size, member);
    for (int i = 0; bias && i < size; i += LANES) store(tile + i, load(tile + i) + load(bias + i % PANEL));
    for (int step = 1; step < shares; step *= 2)
        for (int s = 0; s < shares; s += 2 * step) {
            float *to = tile + s * size, *from = to + step * size;
            for (int i = 0; i < size; i += LANES) store(to + i, load(to + i) + load(from + i));
        }
}

}  // namespace llmbox
