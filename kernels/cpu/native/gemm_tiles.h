// The plain linear of gemm.h with AMX: bf16, on the same panels.
#pragma once

#include "gemm.h"
#include "tiles.h"

#if LLMBOX_TILES

namespace llmbox {

constexpr int TILE_BYTES = TILE_WORDS * 4;                       // of one row of a tile
constexpr size_t TILE_STEP = TILE_WORDS * PANEL_STRIDE;          // of a panel, from one B to the next words

// `rows` of x, at most 16, with all 64 columns: sums[rows][PANEL] (+)= x * weights over `words` words.
INLINE void multiply_wide(const uint8_t* weights, int words, WordRows x, float* sums, bool fresh, Prefetch next) {
    constexpr size_t STRIDE = PANEL * sizeof(float);
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, STRIDE);
        _tile_loadd(1, sums + 16, STRIDE);
        _tile_loadd(2, sums + 32, STRIDE);
        _tile_loadd(3, sums + 48, STRIDE);
    }
    for (int w = 0; w < words; w += TILE_WORDS, weights += TILE_STEP) {
        _tile_loadd(4, x.data + 4 * static_cast<size_t>(w), x.stride);
        _tile_loadd(6, weights, PANEL_STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + 64, PANEL_STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        for (size_t offset = 0; offset < next.step; offset += 64) prefetch_to_l2(next.at + offset);
        next.at += next.step;
        _tile_loadd(6, weights + 128, PANEL_STRIDE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, weights + 192, PANEL_STRIDE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + 16, STRIDE);
    _tile_stored(2, sums + 32, STRIDE);
    _tile_stored(3, sums + 48, STRIDE);
}

// 16 rows and up to 16 more, with 32 columns.
INLINE void multiply_square(const uint8_t* weights, int words, WordRows x, float* sums, bool fresh, Prefetch next) {
    constexpr size_t STRIDE = PANEL * sizeof(float);
    float* lower = sums + TILE_ROWS * PANEL;
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, STRIDE);
        _tile_loadd(1, sums + 16, STRIDE);
        _tile_loadd(2, lower, STRIDE);
        _tile_loadd(3, lower + 16, STRIDE);
    }
    for (int w = 0; w < words; w += TILE_WORDS, weights += TILE_STEP) {
        const uint8_t* from = x.data + 4 * static_cast<size_t>(w);
        _tile_loadd(4, from, x.stride);
        _tile_loadd(6, weights, PANEL_STRIDE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, from + TILE_ROWS * x.stride, x.stride);
        _tile_dpbf16ps(2, 5, 6);
        for (size_t offset = 0; offset < next.step; offset += 64) prefetch_to_l2(next.at + offset);
        next.at += next.step;
        _tile_loadd(7, weights + 64, PANEL_STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + 16, STRIDE);
    _tile_stored(2, lower, STRIDE);
    _tile_stored(3, lower + 16, STRIDE);
}

// sums[rows][PANEL] = x * panel. `words` is a multiple of 16.
template <>
inline void multiply_panel<BF16>(
    Tiles& tiles, const uint8_t* panel, int words, WordRows x, int rows, float* sums) {
    if (rows <= TILE_ROWS) {
        tiles.shape(rows, rows);
        multiply_wide(panel, words, x, sums, true, {panel + 2 * TILE_STEP, TILE_STEP});
        return;
    }
    // As in gemm.h: all rows visit a slice before the next one. Half of its columns fit the L1 cache.
    constexpr int slice = 256;
    const int turns = 2 * ceil_div(rows, 2 * TILE_ROWS);
    for (int word = 0; word < words; word += slice) {
        const int count = std::min(slice, words - word);
        const uint8_t* weights = panel + word * PANEL_STRIDE;
        const uint8_t *coming = weights + count * PANEL_STRIDE, *end = coming + count * PANEL_STRIDE;
        const size_t step = round_up(ceil_div(TILE_STEP, turns), 64);
        for (int column = 0; column < PANEL; column += PANEL / 2)
            for (int row = 0; row < rows; row += 2 * TILE_ROWS) {
                const int upper = std::min(TILE_ROWS, rows - row);
                const int lower = std::min(TILE_ROWS, rows - row - upper);
                const Prefetch next = {coming, coming < end ? step : 0};
                coming += step * (count / TILE_WORDS);
                float* to = sums + row * PANEL;
                if (lower) {
                    tiles.shape(upper, lower);
                    multiply_square(weights + 4 * column, count, x.from(row, word), to + column, word == 0, next);
                } else if (column == 0) {
                    tiles.shape(upper, upper);
                    multiply_wide(weights, count, x.from(row, word), to, word == 0, next);
                }
            }
    }
}

}  // namespace llmbox

#endif
