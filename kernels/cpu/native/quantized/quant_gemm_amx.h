// The quantized linear with AMX, on the panels of quant_panels.h.
//
// Inside a group the sums are exact integers, and what follows is what quant_gemm_dot.h computes, in the same order:
// both give the same bits, and each number of rows takes whichever is faster.
//
// Tiles and vectors work at the same time. A unit is a block (16 rows, 32 columns) of one group: while the tiles
// multiply one, the vectors make floats of the sums of the unit before it and bytes of int4 for the slice after it, a
// quarter after each product. A product is stored only after other work, because a store that waits for its product
// holds up everything behind it.
#pragma once

#include "quantized/quant_gemm_dot.h"
#include "vector/amx.h"

#if LLMBOX_TILES

namespace llmbox {

constexpr int BLOCK_COLUMNS = 32;
constexpr int BLOCK_SUMS = TILE_ROWS * BLOCK_COLUMNS;
constexpr int BLOCK_VECTORS = BLOCK_COLUMNS / LANES;
constexpr int ACROSS = PANEL / BLOCK_COLUMNS;
constexpr int QUARTERS = 4;

// The exact sums of one unit, to be scaled and added to `to`[rows][32 of PANEL].
struct UnitSums {
    const int32_t* sums;
    const uint16_t* weight_scales;
    const float* scales;
    float* to;
    bool is_e2m1 = false;
    int rows = 0;  // none before the first unit

    INLINE void add_quarter(int quarter) const {
        if (rows == TILE_ROWS) return add<TILE_ROWS / QUARTERS>(quarter * (TILE_ROWS / QUARTERS));
        const int share = ceil_div(rows, QUARTERS), end = std::min(rows, (quarter + 1) * share);
        for (int r = quarter * share; r < end; r++) add<1>(r);
    }

    template <int ROWS> INLINE void add(int first) const {
        const int32_t* sum = sums + first * BLOCK_COLUMNS;
        const float* scale = scales + first;
        float* total = to + first * PANEL;
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++, sum += LANES, total += LANES) {
            const Floats weights = load_scales(weight_scales + v * LANES, is_e2m1);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats scaled = to_floats(load_as<Ints>(sum + r * BLOCK_COLUMNS)) * splat(scale[r]);
                store(total + r * PANEL, multiply_add(scaled, weights, load(total + r * PANEL)));
            }
        }
    }
};

// Some groups of a panel as bytes.
struct TileGroups {
    const uint8_t* codes;
    size_t codes_step;  // to the next group
    int first, count;
};

// Memory of one thread: the sums of two units, and of int4 two slices as bytes.
struct TileScratch {
    int32_t* sums;
    uint8_t* codes;

    TileScratch(Scratch& scratch, int widened_inputs) {
        auto* memory = scratch.take<uint8_t>(2 * (BLOCK_SUMS * sizeof(int32_t) + widened_inputs * PANEL));
        sums = reinterpret_cast<int32_t*>(memory);
        codes = memory + 2 * BLOCK_SUMS * sizeof(int32_t);
    }
};

// All units of some groups of a panel for some rows, from `row` of x on (the first of a block). WORDS of 4 inputs to a group, BITS of
// the weights.
template <int WORDS, int BITS> class PanelUnits {
public:
    PanelUnits(const QuantLinear& linear, int panel, GroupSpan span, const QuantRows& x, int row, int rows, float* tile,
               Member& member)
        : linear_(linear),
          panel_(panel),
          span_(span),
          x_(x),
          row_(row),
          rows_(rows),
          blocks_(ceil_div(rows, TILE_ROWS) * ACROSS),
          slice_((linear.group == MAX_GROUP && rows >= LONG_FROM ? LONG_SLICE : SLICE) / linear.group),
          tile_(tile),
          scratch_(member.spare, BITS == 4 ? slice_ * linear.group : 0) {
        const int tile_rows = std::min(rows, TILE_ROWS);
        member.tiles.shape(tile_rows, tile_rows, std::min(WORDS, TILE_WORDS));
    }

    INLINE void run() {
        TileGroups groups = begin(span_.begin);
        while (widening_.left) widening_.some(1);
        while (groups.count) {
            const TileGroups next = begin(groups.first + groups.count);
            plan_prefetch(groups);
            widening_.share = ceil_div(widening_.left, blocks_ * groups.count * QUARTERS);
            finish_stores();
            give_back_unused();
            for (int block = 0; block < blocks_; block++)
                for (int g = 0; g < groups.count; g++) run_unit(groups, block, g);
            while (widening_.left) widening_.some(1);
            groups = next;
        }
        for (int quarter = 0; quarter < QUARTERS; quarter++) before_.add_quarter(quarter);
    }

private:
    // Inputs: more for many rows, which have their sums and x in the L2 cache.
    static constexpr int SLICE = 128, LONG_SLICE = 256, LONG_FROM = 65;
    // A group comes in steps of a tile each for every 16 outputs.
    static constexpr int STEPS = ceil_div(WORDS, TILE_WORDS), STEP_WORDS = WORDS / STEPS, PARTS = PANEL / TILE_WORDS;
    static constexpr size_t STEP_BYTES = STEP_WORDS * PANEL_STRIDE;

    // Bytes of int4, a piece after the other: what one tile holds.
    struct Widening {
        const uint8_t* from;  // the first group
        size_t group_bytes, codes_offset;
        uint8_t* to;
        const QuantLinear* linear;
        unsigned piece = 0;
        int left = 0, share = 0;

        INLINE void some(int count) {
            for (count = std::min(count, left), left -= count; count; count--, piece++) {
                const unsigned step = piece / PARTS, group = step / STEPS, column = piece % PARTS * ROW_BYTES;
                const uint8_t* at = from + group * group_bytes + column;
                const uint8_t* codes = at + codes_offset + step % STEPS * (STEP_BYTES / 2);
                uint8_t* bytes = to + step * STEP_BYTES + column;
                if (linear->is_e2m1()) {
                    widen_e2m1_piece<STEP_WORDS * 4 / STEP_INPUTS, 0>(codes, bytes);
                    continue;
                }
                const uint8_t* zeros = from + group * group_bytes + 2 * PANEL + column / 4;
                const FourSteps four = linear->has_steps()
                                           ? FourSteps::load<0>(at + 2 * PANEL + step % STEPS * PANEL_STRIDE)
                                       : linear->has_zeros() ? FourSteps::of_zeros<0>(zeros)
                                                             : FourSteps::plain<0>();
                widen_piece<STEP_WORDS * 4 / STEP_INPUTS>(codes, four, 0, bytes);
            }
        }
    };

    const uint8_t* at(int group) const { return linear_.at(panel_, group); }

    // A slice: bytes as they are, or int4 that is to be widened before it is multiplied.
    INLINE TileGroups begin(int first) {
        const int count = std::max(0, std::min(slice_, span_.end - first));
        if (BITS == 8) return {at(first) + linear_.codes_offset, linear_.group_bytes, first, count};
        uint8_t* to = scratch_.codes + first / slice_ % 2 * slice_ * (WORDS * PANEL_STRIDE);
        const int pieces = count * STEPS * PARTS;
        widening_ = {at(first), linear_.group_bytes, linear_.codes_offset, to, &linear_, 0, pieces};
        return {to, WORDS * PANEL_STRIDE, first, count};
    }

    // Each quarter of a unit brings its part of what is read for the first time in the slice after this one.
    INLINE void plan_prefetch(const TileGroups& groups) {
        const size_t bytes = groups.count * linear_.group_bytes;
        coming_ = at(groups.first) + std::max(AHEAD, (BITS == 8 ? 1 : 2) * bytes);
        end_ = coming_ + bytes;
        step_ = round_up(ceil_div(static_cast<int>(bytes), blocks_ * groups.count * QUARTERS), 64);
    }
    INLINE void bring() {
        for (const uint8_t* end = std::min(coming_ + step_, end_); coming_ < end; coming_ += 64)
            prefetch_to_l2(coming_);
    }

    // What the 16 rows after these will read of x: too much for the L1 cache while all rows pass through it.
    INLINE void plan_x(const int8_t* values, int block) {
        constexpr int SHARE = TILE_ROWS * WORDS * 4 / ACROSS;
        coming_x_ = values + static_cast<size_t>(x_.groups) * x_.group * TILE_ROWS + block % ACROSS * SHARE;
    }
    INLINE void bring_x(int quarter) const {
        constexpr int LINES = TILE_ROWS * WORDS * 4 / ACROSS / QUARTERS / 64;
        if (rows_ < LONG_FROM) return;
        UNROLL for (int i = 0; i < LINES; i++) prefetch(coming_x_ + (quarter * LINES + i) * 64);
    }

    INLINE void run_unit(const TileGroups& groups, int block, int g) {
        const int row = block / ACROSS * TILE_ROWS, column = block % ACROSS * BLOCK_COLUMNS;
        const int group = groups.first + g;
        const size_t cell = x_.cell(row_ + row, group);
        const uint8_t* codes = groups.codes + g * groups.codes_step + 4 * column;
        const int8_t* values = x_.values + cell * x_.group;
        plan_x(values, block);
        int32_t* sums = scratch_.sums + (units_++ & 1) * BLOCK_SUMS;
        clear_sums();
        UNROLL for (int s = 0; s < STEPS; s++, values += ROW_BYTES, codes += STEP_BYTES) {
            _tile_loadd(4, values, 4 * WORDS);
            _tile_loadd(6, codes, PANEL_STRIDE);
            _tile_dpbssd(0, 4, 6);
            work_beside(2 * s);
            _tile_loadd(6, codes + ROW_BYTES, PANEL_STRIDE);
            _tile_dpbssd(1, 4, 6);
            work_beside(2 * s + 1);
        }
        for (int quarter = 2 * STEPS; quarter < QUARTERS; quarter++) work_beside(quarter);
        store_sums(sums, sums + TILE_WORDS, BLOCK_COLUMNS);
        const auto* weight_scales = reinterpret_cast<const uint16_t*>(at(group)) + column;
        const int count = std::min(TILE_ROWS, rows_ - row);
        float* to = tile_ + row * PANEL + column;
        before_ = {sums, weight_scales, x_.scales + cell, to, BITS == 4 && linear_.is_e2m1(), count};
    }

    INLINE void work_beside(int quarter) {
        bring();
        bring_x(quarter);
        before_.add_quarter(quarter);
        if (BITS == 4) widening_.some(widening_.share);
    }

    const QuantLinear& linear_;
    const int panel_;
    const GroupSpan span_;
    const QuantRows& x_;
    const int row_, rows_, blocks_, slice_;  // slice: groups
    float* tile_;
    const TileScratch scratch_;
    Widening widening_{};
    UnitSums before_{};
    const uint8_t *coming_ = nullptr, *end_ = nullptr;
    size_t step_ = 0;
    const int8_t* coming_x_ = nullptr;
    unsigned units_ = 0;
};

// tile[rows][PANEL] += x * panel.
template <int WORDS>
inline void multiply_tiles(const QuantLinear& linear, int panel, GroupSpan span, const QuantRows& x, int row, int rows,
                           float* tile, Member& member) {
    if (linear.bits == 8) PanelUnits<WORDS, 8>(linear, panel, span, x, row, rows, tile, member).run();
    else PanelUnits<WORDS, 4>(linear, panel, span, x, row, rows, tile, member).run();
}

}  // namespace llmbox

#endif
