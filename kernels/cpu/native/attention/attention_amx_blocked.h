// Attention over a bf16 cache with AMX, in bands of 32 rows, whose scores stay in the L1 cache.
//
// A strip of keys is one B after the other. A B of values takes two strips, which lie in different blocks: the first
// band puts them together for all. Up to 4 rows: attention_small_batch.h.
#pragma once

#include "attention/attention_amx.h"
#include "attention/attention_small_batch.h"
#include "attention/attention_softmax.h"

#if LLMBOX_TILES

namespace llmbox {

// Asks for what comes next, some lines at a time (docs/cpu-kernels.md: requests are spread).
class Prefetcher {
public:
    // A chunk's keys and values, `strip` bytes each, `lines` at a time.
    Prefetcher(const Chunk<BF16>& chunk, size_t strip, int lines)
        : chunk_(chunk), strip_(strip), part_(static_cast<size_t>(lines) * 64) {}

    INLINE void bring_some() {
        if (index_ == 2 * Chunk<BF16>::STRIPS) return;
        const int s = index_ / 2;
        const uint8_t* from = (index_ % 2 ? chunk_.values[s] : chunk_.keys[s]) + at_;
        const size_t bytes = std::min(part_, strip_ - at_);
        for (size_t line = 0; line < bytes; line += 64) prefetch_to_l2(from + line);
        if ((at_ += part_) >= strip_) at_ = 0, index_++;
    }
    void finish() {
        while (index_ < 2 * Chunk<BF16>::STRIPS) bring_some();
    }

private:
    const Chunk<BF16>& chunk_;
    const size_t strip_, part_;
    size_t at_ = 0;
    int index_ = 0;
};

template <> struct TileProducts<BF16> {
    static constexpr bool POSSIBLE = true, OWN_SOFTMAX = true;
    static constexpr int BAND = 2 * TILE_ROWS;
    static constexpr int SLOTS = Chunk<BF16>::SLOTS;
    static constexpr int PAIRS = Chunk<BF16>::STRIPS / 2;  // of strips: one B
    using Part = Chunk<BF16>;

    static bool wanted(int, int) { return true; }  // one order of summation for all

    // From the last rows on: they see all that others see.
    static void add_chunk(const Work<BF16>& work, const Part& chunk, const Part& next, VisibleRanges visible, Powers powers,
                          Tiles& tiles) {
        if (work.rows <= FewRows<1>::MOST) return add_few(work, chunk, next, visible, powers);
        const int bands = ceil_div(work.rows, BAND);
        // So many beside each product that all is asked for when the last band ends.
        int lines = work.rows > TILE_ROWS ? 16 : 32;
        for (int n = 1; n < bands; n *= 2) lines = std::max(1, lines / 2);
        Prefetcher prefetcher(next, static_cast<size_t>(STRIP) * work.dim * sizeof(bf16), lines);
        for (int index = bands - 1; index >= 0; index--) {
            const Band band = band_at(work, chunk, visible, index);
            if (band.strips == 0) break;
            if (band.rows > TILE_ROWS) score<true>(work, band, chunk, prefetcher, tiles);
            else score<false>(work, band, chunk, prefetcher, tiles);
            SoftmaxUpdate(work, chunk, visible, powers, band.row, band.rows).run();
            if (band.rows > TILE_ROWS) add<true>(work, band, chunk, prefetcher, tiles);
            else add<false>(work, band, chunk, prefetcher, tiles);
        }
        prefetcher.finish();
    }

private:
    static void add_few(const Work<BF16>& work, const Part& chunk, const Part& next, VisibleRanges visible, Powers powers) {
        const int strips = strips_seen(chunk, visible.newest(work.rows - 1));
        in_tiles<FewRows<1>::MOST>(work.rows, [&](auto rows, int) {
            FewRows<rows>::score(work, chunk, strips);
            SoftmaxUpdate(work, chunk, visible, powers, 0, rows).run();
            FewRows<rows>::add(work, chunk, next, strips);
        });
    }

    static Band band_at(const Work<BF16>& work, const Part& chunk, VisibleRanges visible, int index) {
        const int row = index * BAND, rows = std::min(BAND, work.rows - row);
        return {row, rows, strips_seen(chunk, visible.newest(row + rows - 1)), row + rows == work.rows};
    }

    template <bool LOWER>
    static NOINLINE void score(const Work<BF16>& work, Band band, const Part& chunk, Prefetcher& prefetcher, Tiles& tiles) {
        constexpr int STRIPS = LOWER ? 1 : 2;  // at once
        float* to = work.scores;
        const TileRows rows{work.q.row(band.row), work.q.row(band.row + TILE_ROWS), 4u * work.q.part};
        const int steps = work.q.part / TILE_WORDS, shaped = LOWER ? TILE_ROWS : band.rows;
        tiles.shape(shaped, shaped);
        give_back_unused();
        finish_stores();
        for (int s = 0; s < band.strips; s += STRIPS) {
            clear_sums();
            for (int i = 0; i < steps; i++) {
                const size_t at = i * TILE_BYTES;
                const TileColumns keys{chunk.keys[s] + at, ROW_BYTES};
                if constexpr (LOWER) add_down<BF16>(rows.from(i * TILE_WORDS), keys);
                else add_across(rows.from(i * TILE_WORDS), keys, {chunk.keys[s + 1] + at, ROW_BYTES});
                prefetcher.bring_some();
            }
            float* first = to + s * STRIP;
            store_sums(first, LOWER ? first + TILE_ROWS * SLOTS : first + STRIP, SLOTS);
        }
        finish_stores();
    }

    // The first band gathers for all.
    template <bool LOWER>
    static NOINLINE void add(const Work<BF16>& work, Band band, const Part& chunk, Prefetcher& prefetcher, Tiles& tiles) {
        constexpr int COLUMNS = LOWER ? TILE_WORDS : 2 * TILE_WORDS;
        const TileRows rows{work.p.row(0), work.p.row(TILE_ROWS), 4u * work.p.part};
        const int pairs = band.strips / 2, shaped = LOWER ? TILE_ROWS : band.rows;
        float* upper = work.out + band.row * work.dim;
        tiles.shape(shaped, shaped);
        give_back_unused();
        const int kept = work.rows > TILE_ROWS ? work.dim : 2 * COLUMNS;  // columns: for other bands, or near
        if (band.first) gather<COLUMNS>(work, chunk, pairs, 0, 0);
        for (int d = 0; d < work.dim; d += COLUMNS) {
            const int after = d + COLUMNS;
            if (band.first && after < work.dim) gather<COLUMNS>(work, chunk, pairs, after, after % kept);
            finish_stores();
            float *first = upper + d, *second = first + (LOWER ? TILE_ROWS * work.dim : TILE_WORDS);
            const uint8_t* values = work.values + static_cast<size_t>(d % kept) * PAIRS * ROW_BYTES;
            load_sums(first, second, work.dim);
            for (int g = 0; g < pairs; g++, values += TILE_BYTES) {
                const TileColumns columns{values, ROW_BYTES};
                if constexpr (LOWER) add_down<BF16>(rows.from(g * TILE_WORDS), columns);
                else add_across(rows.from(g * TILE_WORDS), columns, {values + PAIRS * TILE_BYTES, ROW_BYTES});
                prefetcher.bring_some();
            }
            store_sums(first, second, work.dim);
        }
        finish_stores();
    }

    // Values of pairs of strips, as many columns from d on, to tiles of 16 words: [column / 16][pair], from `at` on.
    template <int COLUMNS>
    static INLINE void gather(const Work<BF16>& work, const Part& chunk, int pairs, int d, int at) {
        constexpr int WORDS = STRIP / BF16::PACK;
        for (int column = 0; column < COLUMNS; column += TILE_WORDS)
            for (int s = 0; s < 2 * pairs; s++) {
                const uint8_t* from = chunk.values[s] + 4 * static_cast<size_t>(d + column);
                uint8_t* to = work.values + static_cast<size_t>(at + column) * PAIRS * ROW_BYTES + s * TILE_BYTES / 2;
                UNROLL for (int w = 0; w < WORDS; w++)
                    store_as(to + w * ROW_BYTES, load_as<Words>(from + static_cast<size_t>(w) * work.dim * 4));
            }
    }
};

}  // namespace llmbox

#endif
