// The products of bf16 attention for a few rows, with vectors: the bits are those of tiles (attention_amx_blocked.h).
//
// A tile product of 16 words is, for each number of C: the even and the odd inputs summed apart from zero on, one fused
// multiply-add after the other, both sums added, then added to C. Denormals count as zero (Intel SDM, TDPBF16PS).
// Few rows read every value once, so that putting two strips together for tiles would cost more than it spares.
#pragma once

#include "attention/attention_state.h"
#include "vector/amx.h"

#if LLMBOX_TILES

namespace llmbox {

// As tile products treat them.
class WithoutDenormals {
public:
    WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before_); }
    WithoutDenormals(const WithoutDenormals&) = delete;
    WithoutDenormals& operator=(const WithoutDenormals&) = delete;

private:
    unsigned before_;
};

INLINE Floats even_of(Words words) { return (Floats)(words << 16); }
INLINE Floats odd_of(Words words) { return (Floats)(words & splat(0xffff0000u)); }

template <int ROWS> class FewRows {
public:
    static constexpr int MOST = 4;
    using Part = Chunk<BF16>;

    // The products of `strips` strips, to work.scores. Their values are brought meanwhile.
    static NOINLINE void score(const Work<BF16>& work, const Part& chunk, int strips) {
        constexpr int TOGETHER = 2;
        const WithoutDenormals mode;
        const float* q = unpack(work.q, work);
        const int words = work.q.part;
        for (int s = 0; s < strips; s += TOGETHER) {
            Floats sums[ROWS][TOGETHER] = {};
            for (int first = 0; first < words; first += TILE_WORDS) {
                Floats even[ROWS][TOGETHER] = {}, odd[ROWS][TOGETHER] = {};
                for (int w = first; w < first + TILE_WORDS; w++)
                    UNROLL for (int i = 0; i < TOGETHER; i++) {
                        const Words keys = load_as<Words>(chunk.keys[s + i] + static_cast<size_t>(w) * ROW_BYTES);
                        prefetch_to_l2(chunk.values[s + i] + static_cast<size_t>(w) * ROW_BYTES);
                        UNROLL for (int r = 0; r < ROWS; r++) {
                            const float* x = q + 2 * r * words + w;
                            even[r][i] = multiply_add(even_of(keys), splat(x[0]), even[r][i]);
                            odd[r][i] = multiply_add(odd_of(keys), splat(x[words]), odd[r][i]);
                        }
                    }
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int i = 0; i < TOGETHER; i++) sums[r][i] += even[r][i] + odd[r][i];
            }
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int i = 0; i < TOGETHER; i++)
                    store(work.scores + r * Part::SLOTS + (s + i) * STRIP, sums[r][i]);
        }
    }

    // work.out += weights * values. The keys of `next` are brought meanwhile.
    static NOINLINE void add(const Work<BF16>& work, const Part& chunk, const Part& next, int strips) {
        const WithoutDenormals mode;
        const float* p = unpack(work.p, work);
        int d = 0;
        if constexpr (ROWS <= 2)
            for (; d + 4 * LANES <= work.dim; d += 4 * LANES) add_columns<4>(work, p, chunk, next, strips, d);
        for (; d < work.dim; d += 2 * LANES) add_columns<2>(work, p, chunk, next, strips, d);
        const size_t bytes = static_cast<size_t>(work.q.part) * ROW_BYTES;
        for (int s = strips; s < Part::STRIPS; s++)
            for (size_t line = 0; line < bytes; line += 64) prefetch_to_l2(next.keys[s] + line);
    }

private:
    // To [row][even, odd][part] float32, where tiles gather values.
    static const float* unpack(const PackedRows<BF16>& x, const Work<BF16>& work) {
        auto* to = reinterpret_cast<float*>(work.values);
        for (int r = 0; r < ROWS; r++)
            for (int w = 0; w < x.part; w += LANES) {
                const Words words = load_as<Words>(x.row(r) + w);
                store(to + 2 * r * x.part + w, even_of(words));
                store(to + (2 * r + 1) * x.part + w, odd_of(words));
            }
        return to;
    }

    template <int VECTORS>
    static INLINE void add_columns(const Work<BF16>& work, const float* p, const Part& chunk, const Part& next,
                                   int strips, int d) {
        constexpr int WORDS = STRIP / BF16::PACK;
        const int part = work.p.part;
        for (int pair = 0; pair < strips; pair += 2) {
            Floats even[ROWS][VECTORS] = {}, odd[ROWS][VECTORS] = {};
            for (int s = pair; s < pair + 2; s++)
                for (int w = 0; w < WORDS; w++) {
                    const size_t at = (static_cast<size_t>(w) * work.dim + d) * 4;
                    const float* x = p + s * WORDS + w;
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        const Words values = load_as<Words>(chunk.values[s] + at + v * ROW_BYTES);
                        prefetch_to_l2(next.keys[s] + at + v * ROW_BYTES);
                        UNROLL for (int r = 0; r < ROWS; r++) {
                            even[r][v] = multiply_add(even_of(values), splat(x[2 * r * part]), even[r][v]);
                            odd[r][v] = multiply_add(odd_of(values), splat(x[(2 * r + 1) * part]), odd[r][v]);
                        }
                    }
                }
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* out = work.out + r * work.dim + d + v * LANES;
                    store(out, load(out) + (even[r][v] + odd[r][v]));
                }
        }
    }
};

}  // namespace llmbox

#endif
