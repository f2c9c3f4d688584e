// The quantised linear with AMX, on the panels of quant_pack.h.
//
// Inside a group the sums are exact integers, and what follows is what quant_words.h computes, in the same order:
// both give the same bits, and each number of rows takes whichever is faster.
//
// Tiles and vectors work at the same time: while the sums of one block (16 rows, 32 columns, all groups of a slice)
// become floats, the tiles multiply the next one. A product is stored only after other work, because a store that
// waits for its product holds up everything behind it.
#pragma once

#include "quant_words.h"
#include "tiles.h"

#if LLMBOX_TILES

namespace llmbox {

constexpr int BLOCK_COLUMNS = 32;
constexpr int BLOCK_SUMS = TILE_ROWS * BLOCK_COLUMNS;
constexpr int BLOCK_VECTORS = BLOCK_COLUMNS / LANES;
constexpr int PASS_ROWS = 8;  // whose sums stay in registers from group to group
constexpr int PASSES = TILE_ROWS / PASS_ROWS;

// One slice of a panel: signed bytes, and scales as float32.
struct TileGroups {
    const uint8_t* codes;
    size_t codes_step;    // to the next group
    const float* scales;  // [groups][PANEL]
    int first, count;
};

// The products that come next: walks the groups of one block after the other.
template <int WORDS> struct BlockProducts {
    const TileGroups& groups;
    const QuantRows& x;
    int32_t* buffer;  // [2][groups][BLOCK_SUMS]
    Prefetch next;
    const uint8_t* codes = nullptr;
    const int8_t* values = nullptr;
    int32_t* to = nullptr;

    INLINE int32_t* sums(int block) const { return buffer + (block & 1) * groups.count * BLOCK_SUMS; }

    INLINE void start(int block, int row, int column) {
        codes = groups.codes + 4 * column;
        values = x.values + x.cell(row, groups.first) * x.group;
        to = sums(block);
    }

    // One group: into tiles 0 and 1 ...
    INLINE void multiply() {
        _tile_zero(0);
        _tile_zero(1);
        UNROLL for (int w = 0; w < WORDS; w += TILE_WORDS) {
            _tile_loadd(4, values + 4 * w, 4 * WORDS);
            bring();
            _tile_loadd(6, codes + w * PANEL_STRIDE, PANEL_STRIDE);
            _tile_dpbssd(0, 4, 6);
            bring();
            _tile_loadd(6, codes + w * PANEL_STRIDE + 64, PANEL_STRIDE);
            _tile_dpbssd(1, 4, 6);
        }
        codes += groups.codes_step;
        values += QuantRows::BLOCK * 4 * WORDS;
    }

    // Twice for each load of rows: of many requests at once the core forgets some.
    static constexpr int BRINGS = 2 * ceil_div(WORDS, TILE_WORDS);
    INLINE void bring() {
        for (size_t offset = 0; offset < next.step; offset += 64) prefetch_stream(next.at + offset);
        next.at += next.step;
    }

    // ... and from there to memory.
    INLINE void store() {
        _tile_stored(0, to, BLOCK_COLUMNS * 4);
        _tile_stored(1, to + 16, BLOCK_COLUMNS * 4);
        to += BLOCK_SUMS;
    }
};

// tile[ROWS][32 of PANEL] += the scaled sums[groups][ROWS][32] of all groups. `before` and `after` each.
template <int ROWS, class Before, class After>
INLINE void add_scaled(const TileGroups& groups, int column, const int32_t* sums, const float* scales, float* tile,
                       Before before, After after) {
    Floats totals[ROWS][BLOCK_VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) totals[r][v] = load(tile + r * PANEL + v * LANES);
    for (int g = 0; g < groups.count; g++) {
        before();
        Floats weight_scales[BLOCK_VECTORS];
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++)
            weight_scales[v] = load(groups.scales + g * PANEL + column + v * LANES);
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Floats scale = splat(scales[g * QuantRows::BLOCK + r]);
            UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) {
                const Ints sum = load_as<Ints>(sums + g * BLOCK_SUMS + r * BLOCK_COLUMNS + v * LANES);
                totals[r][v] = multiply_add(to_floats(sum) * scale, weight_scales[v], totals[r][v]);
            }
        }
        after();
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < BLOCK_VECTORS; v++) store(tile + r * PANEL + v * LANES, totals[r][v]);
}

// tile[rows][PANEL] += rows of x from `row` on (the first of a block) * some groups, a word of 4 inputs each.
template <int WORDS>
inline void multiply_slice(const TileGroups& groups, const QuantRows& x, int row, int rows, float* tile,
                           int32_t* buffer, Prefetch next) {
    constexpr int ACROSS = PANEL / BLOCK_COLUMNS;
    const int blocks = ceil_div(rows, TILE_ROWS) * ACROSS;
    BlockProducts<WORDS> products{groups, x, buffer, next};
    const auto start = [&](int block) {
        products.start(block, row + block / ACROSS * TILE_ROWS, block % ACROSS * BLOCK_COLUMNS);
    };
    start(0);
    for (int g = 0; g < groups.count; g++) products.multiply(), products.store();
    for (int block = 0; block < blocks; block++) {
        const int r = block / ACROSS * TILE_ROWS, column = block % ACROSS * BLOCK_COLUMNS;
        const int count = std::min(TILE_ROWS, rows - r);
        const int32_t* sums = products.sums(block);
        const float* scales = x.scales + x.cell(row + r, groups.first);
        float* to = tile + r * PANEL + column;
        // A group of the next block goes with each group of both passes.
        int left = 0;
        if (block + 1 < blocks) start(block + 1), left = groups.count * PASSES;
        bool due = false;
        const auto before = [&]() __attribute__((always_inline)) {
            if (left && left % PASSES == 0) products.multiply();
            due = left && left % PASSES == 1;
            left -= left > 0;
        };
        const auto after = [&]() __attribute__((always_inline)) {
            if (due) products.store();
        };
        int i = 0;
        for (; i + PASS_ROWS <= count; i += PASS_ROWS)
            add_scaled<PASS_ROWS>(groups, column, sums + i * BLOCK_COLUMNS, scales + i, to + i * PANEL, before, after);
        for (; i < count; i++)
            add_scaled<1>(groups, column, sums + i * BLOCK_COLUMNS, scales + i, to + i * PANEL, [] {}, [] {});
        while (left) before(), after();
    }
}

// Memory of one thread for a slice: int4 as bytes, the sums of two blocks, scales.
struct TileScratch {
    // Inputs: two groups of 128 for many rows, else what keeps the sums of two blocks in the L1 cache.
    static constexpr int SLICE = 128, LONG_SLICE = 256, LONG_FROM = 65;
    uint8_t* codes;
    int32_t* sums;
    float* scales;

    static int slice(int group, int rows) { return group == MAX_GROUP && rows >= LONG_FROM ? LONG_SLICE : SLICE; }

    TileScratch(Scratch& scratch, int group, int slice) {
        const int groups = slice / group, sums_count = 2 * groups * BLOCK_SUMS;
        codes = scratch.take<uint8_t>(slice * PANEL + 4 * (sums_count + groups * PANEL));
        sums = reinterpret_cast<int32_t*>(codes + slice * PANEL);
        scales = reinterpret_cast<float*>(sums + sums_count);
    }
};

// tile[rows][PANEL] += x * panel.
template <int WORDS>
inline void multiply_tiles(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile,
                           Member& member) {
    const int inputs = TileScratch::slice(linear.group, rows);
    const TileScratch scratch(member.spare, linear.group, inputs);
    const int tile_rows = std::min(rows, TILE_ROWS), slice = inputs / linear.group;
    member.tiles.shape(tile_rows, tile_rows, std::min(WORDS, TILE_WORDS));
    for (int g = 0; g < linear.groups; g += slice) {
        const uint8_t* at = linear.at(panel, g);
        const int count = std::min(slice, linear.groups - g);
        const size_t bytes = count * linear.group_bytes;
        const uint8_t *coming = at + std::max(AHEAD, bytes), *end = coming + bytes;
        TileGroups groups{at + linear.codes_offset, linear.group_bytes, scratch.scales, g, count};
        if (linear.bits == 4) groups.codes = scratch.codes, groups.codes_step = linear.group * PANEL;
        for (int i = 0; i < count; i++) {
            const uint8_t* from = at + i * linear.group_bytes;
            for (int v = 0; v < PANEL; v += LANES)
                store(scratch.scales + i * PANEL + v, load_scales(reinterpret_cast<const uint16_t*>(from) + v));
            if (linear.bits == 4) {
                widen_group<0>(from + linear.codes_offset, linear.steps ? from + 2 * PANEL : nullptr, linear.group,
                               scratch.codes + i * groups.codes_step, coming);
                coming += linear.group * PANEL / 4;
            }
        }
        asm volatile("" ::: "memory");  // the compiler does not know what tile loads read
        const int turns = count * ceil_div(rows, TILE_ROWS) * (PANEL / BLOCK_COLUMNS) * BlockProducts<WORDS>::BRINGS;
        const size_t step = round_up(ceil_div(static_cast<int>(end - coming), turns), 64);
        multiply_slice<WORDS>(groups, x, row, rows, tile, scratch.sums, {coming, step});
    }
}

}  // namespace llmbox

#endif
