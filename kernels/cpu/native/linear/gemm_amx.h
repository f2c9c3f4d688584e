// The plain linear of gemm.h with AMX: bf16, on panels and rows that are made of tiles.
//
// A panel is [16 words of the inputs][4 tiles of 16 outputs]. More rows than one tile has are packed as
// tiles, [16 rows][16 words], before they are multiplied.
#pragma once

#include "linear/gemm.h"
#include "vector/amx.h"

namespace llmbox {

template <class E, class Out> struct PlainLinear {
    using Op = PlainLinearOp<E, Out>;
};

#if LLMBOX_TILES

constexpr size_t TILE_STEP = TILE_WORDS * PANEL_STRIDE;  // of a panel, from four tiles to the next ones
constexpr int TILES_ACROSS = PANEL / TILE_WORDS;

// Rows of x: those of a tile lie `stride` bytes apart.
struct RowTiles {
    const uint8_t* data;
    size_t stride, across, down;  // to the next row, to the next 16 words, to the next 16 rows

    static RowTiles plain(const void* x, size_t stride) {
        return {static_cast<const uint8_t*>(x), stride, ROW_BYTES, TILE_ROWS * stride};
    }
    static RowTiles packed(const void* x, int words) {
        return {static_cast<const uint8_t*>(x), ROW_BYTES, TILE_BYTES, words / TILE_WORDS * TILE_BYTES};
    }
    RowTiles from(int row, int word) const {
        return {data + row / TILE_ROWS * down + word / TILE_WORDS * across, stride, across, down};
    }
};

// One row of x into the tiles of all: `memory` holds rows of `words`, a multiple of 16.
inline void pack_row(const bf16* from, int inputs, int row, uint8_t* memory, int words) {
    constexpr int NUMBERS = TILE_WORDS * BF16::PACK;
    uint8_t* to = memory + row / TILE_ROWS * RowTiles::packed(memory, words).down + row % TILE_ROWS * ROW_BYTES;
    const int whole = inputs / NUMBERS * NUMBERS;
    for (int i = 0; i < whole; i += NUMBERS, to += TILE_BYTES) store_as(to, load_as<Words>(from + i));
    if (whole == inputs) return;
    memset(to, 0, ROW_BYTES);
    memcpy(to, from + whole, (inputs - whole) * sizeof(bf16));
}

// What packed rows take.
inline size_t packed_room(int rows, int words) { return static_cast<size_t>(round_up(rows, TILE_ROWS)) * words * 4; }

// Both products below call this four times for each 16 words: of many requests at once the core forgets some.
INLINE void bring(Prefetch& next) {
    for (size_t offset = 0; offset < next.step; offset += 64) prefetch_to_l2(next.at + offset);
    next.at += next.step;
}
constexpr int BRINGS = 4;

// Up to 16 rows of x with two tiles of columns: sums[rows][32 of PANEL] (+)= x * weights over `words` words.
INLINE void multiply_across(const uint8_t* weights, int words, RowTiles x, float* sums, bool fresh, Prefetch next) {
    if (fresh) clear_sums();
    else load_sums(sums, sums + TILE_WORDS, PANEL);
    for (int w = 0; w < words; w += TILE_WORDS, weights += TILE_STEP, x.data += x.across) {
        bring(next);
        _tile_loadd(4, x.data, x.stride);
        bring(next);
        _tile_loadd(6, weights, ROW_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        bring(next);
        _tile_loadd(6, weights + TILE_BYTES, ROW_BYTES);
        bring(next);
        _tile_dpbf16ps(1, 4, 6);
    }
    store_sums(sums, sums + TILE_WORDS, PANEL);
}

// 16 rows and up to 16 more (FULL: as many) with one tile of columns.
template <bool FULL>
INLINE void multiply_down(const uint8_t* weights, int words, RowTiles x, float* sums, bool fresh, Prefetch next) {
    float* lower = sums + TILE_ROWS * PANEL;
    if (fresh) clear_sums();
    else load_sums(sums, lower, PANEL);
    for (int w = 0; w < words; w += TILE_WORDS, weights += TILE_STEP, x.data += x.across) {
        bring(next);
        _tile_loadd(6, weights, ROW_BYTES);
        bring(next);
        _tile_loadd(4, x.data, x.stride);
        _tile_dpbf16ps(0, 4, 6);
        bring(next);
        if constexpr (FULL) {
            _tile_loadd(4, x.data + x.down, x.stride);
            bring(next);
            _tile_dpbf16ps(1, 4, 6);
        } else {
            _tile_loadd(5, x.data + x.down, x.stride);
            bring(next);
            _tile_dpbf16ps(1, 5, 6);
        }
    }
    store_sums(sums, lower, PANEL);
}

// sums[rows][PANEL] = x * panel. `words` is a multiple of 16.
inline void multiply_panel(Tiles& tiles, const uint8_t* panel, int words, RowTiles x, int rows, float* sums) {
    // As in gemm.h all rows visit a slice before the next one, which is prefetched meanwhile. 32 rows of a slice stay
    // in the L1 cache for all columns. Sums go to memory between slices.
    constexpr int pair = 2 * TILE_ROWS;
    const int slice = rows <= TILE_ROWS ? 512 : 256;
    const int last = rows % pair;
    const int turns = rows / pair * TILES_ACROSS + (last > TILE_ROWS ? TILES_ACROSS : last ? TILES_ACROSS / 2 : 0);
    const size_t step = round_up(ceil_div(TILE_STEP, turns * BRINGS), 64);
    for (int word = 0; word < words; word += slice) {
        const int count = std::min(slice, words - word);
        const uint8_t* weights = panel + word * PANEL_STRIDE;
        const uint8_t *coming = weights + count * PANEL_STRIDE, *end = coming + count * PANEL_STRIDE;
        for (int row = 0; row < rows; row += pair) {
            const int upper = std::min(TILE_ROWS, rows - row);
            const int lower = std::min(TILE_ROWS, rows - row - upper);
            tiles.shape(upper, lower ? lower : upper);
            give_back_unused();
            for (int tile = 0; tile < TILES_ACROSS; tile += lower ? 1 : 2) {
                const Prefetch next = {coming, coming < end ? step : 0};
                coming += next.step * BRINGS * (count / TILE_WORDS);
                const uint8_t* columns = weights + tile * TILE_BYTES;
                float* to = sums + row * PANEL + tile * TILE_WORDS;
                const RowTiles from = x.from(row, word);
                if (!lower) multiply_across(columns, count, from, to, word == 0, next);
                else if (lower == TILE_ROWS) multiply_down<true>(columns, count, from, to, word == 0, next);
                else multiply_down<false>(columns, count, from, to, word == 0, next);
            }
        }
    }
}

template <class Out> class TileLinearOp : public LinearOp<Out> {
public:
    TileLinearOp(const Linear& linear, const bf16* x, int64_t x_stride, Out* out, int64_t out_stride)
        : LinearOp<Out>(linear, out, out_stride), linear_(linear), x_(x), x_stride_(x_stride) {}

    void prepare(const Step& step, Pool& pool) override {
        LinearOp<Out>::prepare(step, pool);
        if (packs(step.rows)) pool.shared().template take<uint8_t>(packed_room(step.rows, linear_.words));
        else tiles_ = RowTiles::plain(x_, x_stride_ * sizeof(bf16));
    }

    void run(const Step& step, Member& member) override {
        if (packs(step.rows)) {
            auto* memory = member.pool.shared().template get<uint8_t>();
            const auto rows = member.share(step.rows);
            for (int row = rows.begin; row < rows.end; row++)
                pack_row(x_ + row * x_stride_, linear_.inputs, row, memory, linear_.words);
            if (member.index == 0) tiles_ = RowTiles::packed(memory, linear_.words);
            member.barrier();
        }
        this->run_panels(step, member);
    }

protected:
    void multiply(int panel, int row, int rows, float* tile, Member& member) override {
        multiply_panel(member.tiles, linear_.panel(panel), linear_.words, tiles_.from(row, 0), rows, tile);
    }

private:
    // A few rows are read as they are, if their last words do not reach beyond them.
    bool packs(int rows) const { return rows > TILE_ROWS || linear_.inputs != linear_.words * BF16::PACK; }

    const Linear& linear_;
    const bf16* x_;
    int64_t x_stride_;
    RowTiles tiles_{};
};

template <class Out> struct PlainLinear<BF16, Out> {
    using Op = TileLinearOp<Out>;
};

#endif

// The operation of a linear with weights of type E.
template <class E, class Out> using PlainLinearOf = typename PlainLinear<E, Out>::Op;

}  // namespace llmbox
