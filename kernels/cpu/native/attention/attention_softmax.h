// The softmax of bf16 attention with AMX: scores of up to 32 rows become weights.
#pragma once

#include "attention/attention_state.h"
#include "vector/amx.h"

#if LLMBOX_TILES

namespace llmbox {

// 2^x, relative error below 4e-6 (weights become bf16, whose own is 2e-3); 0 below 2^-125, NaN for NaN. Additions
// take the integer from x: while tiles multiply, a core adds twice as fast as it multiplies.
INLINE Floats power_of_two_bf16(Floats x) {
    const Floats shift = splat(12582912.f);
    // Not below 2^-125, which NaN is not: results there would be denormal, some 100 cycles each.
    const __mmask16 large = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-125.f), _CMP_NLT_UQ);
    const Floats n = (x + shift) - shift, f = x - n;
    Floats p = splat(9.58285304e-3f);
    p = multiply_add(p, f, splat(5.59064247e-2f));
    p = multiply_add(p, f, splat(2.40240986e-1f));
    p = multiply_add(p, f, splat(6.93124193e-1f));
    p = multiply_add(p, f, splat(1.f));
    return (Floats)_mm512_maskz_scalef_ps(large, (__m512)p, (__m512)n);
}

// The largest number of each of 16 vectors.
INLINE Floats largest_of_each(Floats (&v)[16]) {
    const auto halves = [](Floats a, Floats b) {
        return max((Floats)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44),
                   (Floats)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
    };
    const auto quarters = [](Floats a, Floats b) {
        return max((Floats)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88),
                   (Floats)_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd));
    };
    const auto pairs = [](Floats a, Floats b) {
        return max((Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x44),
                   (Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xee));
    };
    const auto singles = [](Floats a, Floats b) {
        return max((Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88),
                   (Floats)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd));
    };
    // Four vectors become one, 128 bits of which are one of them: then four such, lane by lane.
    Floats fours[4];
    UNROLL for (int i = 0; i < 4; i++) fours[i] = quarters(halves(v[i], v[i + 4]), halves(v[i + 8], v[i + 12]));
    return singles(pairs(fours[0], fours[1]), pairs(fours[2], fours[3]));
}

// As `update_softmax`, whose weights differ in their last bits, without a branch or a sum across lanes for each row.
class SoftmaxUpdate {
public:
    static constexpr int SLOTS = Chunk<BF16>::SLOTS, VECTORS = SLOTS / LANES, TOGETHER = 16;

    // Of rows `first` .. `first + rows - 1` of the tile, whose scores and weights are the first in memory.
    SoftmaxUpdate(const Work<BF16>& work, const Chunk<BF16>& chunk, VisibleRanges visible, Powers powers, int first,
                  int rows)
        : work_(work), chunk_(chunk), visible_(visible), powers_(powers),
          factor_(powers.cap == 0 ? powers.factor : powers.cap), first_(first), rows_(rows),
          masked_(!all_seen(chunk, visible.common(first, first + rows))) {}

    NOINLINE void run() {
        if (powers_.cap != 0) cap();
        for (int begin = 0; begin < rows_; begin += TOGETHER) {
            const int end = std::min(rows_, begin + TOGETHER);
            find_largest(begin, end);
            for (int row = begin; row < end; row++) weigh(row);
        }
    }

private:
    // From here on a score is its tanh, and `factor_` the cap.
    NOINLINE void cap() {
        for (int row = 0; row < rows_; row++)
            for (int v = 0; v < VECTORS; v++) {
                float* at = work_.scores + row * SLOTS + v * LANES;
                store(at, tanh(load(at) * splat(powers_.factor)));
            }
    }

    // Of up to 16 rows, and what their sums so far are to be multiplied with.
    NOINLINE void find_largest(int begin, int end) {
        const int tile = first_ + begin;
        if (masked_)
            for (int row = begin; row < end; row++) mask(row);
        Floats largest;
        if (end - begin == TOGETHER) {
            Floats rows[TOGETHER];
            UNROLL for (int r = 0; r < TOGETHER; r++) rows[r] = lanes_of(begin + r);
            largest = largest_of_each(rows);
        } else {
            alignas(64) float each[TOGETHER] = {};
            for (int row = begin; row < end; row++) each[row - begin] = max(lanes_of(row));
            largest = load(each);
        }
        const Floats before = load(work_.most + tile), now = max(before, largest);
        // Nothing seen yet: all weights 0.
        const Floats zero = now == splat(NOTHING) ? splat(0.f) : now * splat(factor_);
        store(zero_, zero);
        store(work_.scale + tile, power_of_two_bf16(before * splat(factor_) - zero));  // 1 where `before` stays
        store(work_.most + tile, now);
    }

    INLINE Floats lanes_of(int row) const {
        const float* from = work_.scores + row * SLOTS;
        Floats most = load(from);
        UNROLL for (int v = 1; v < VECTORS; v++) most = max(most, load(from + v * LANES));
        return most;
    }

    void mask(int row) const {
        const VisibleRange range = visible_.of(first_ + row);
        for (int s = 0; s < Chunk<BF16>::STRIPS; s++) {
            float* at = work_.scores + row * SLOTS + s * STRIP;
            const int base = chunk_.positions[s], end = std::min(range.newest + 1 - base, chunk_.counts[s]);
            store(at, only(load(at), range.oldest - base, end));
        }
    }

    INLINE void weigh(int row) const {
        const Floats factor = splat(factor_), zero = splat(zero_[row % TOGETHER]);
        const float* from = work_.scores + row * SLOTS;
        uint32_t* to = work_.p.row(row);
        Floats total = splat(0.f);
        UNROLL for (int v = 0; v < VECTORS; v += 2) {
            const Floats low = power_of_two_bf16(multiply_add(load(from + v * LANES), factor, -zero));
            const Floats high = power_of_two_bf16(multiply_add(load(from + (v + 1) * LANES), factor, -zero));
            total += low + high;
            store_as(to + v * LANES / BF16::PACK, _mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        }
        const int r = first_ + row;
        const Floats scale = splat(work_.scale[r]);
        float* sums = work_.total + r * LANES;
        store(sums, multiply_add(load(sums), scale, total));
        if (work_.scale[r] == 1) return;
        float* out = work_.out + r * work_.dim;
        for (int d = 0; d < work_.dim; d += LANES) store(out + d, load(out + d) * scale);
    }

    const Work<BF16>& work_;
    const Chunk<BF16>& chunk_;
    const VisibleRanges visible_;
    const Powers powers_;
    const float factor_;
    const int first_, rows_;
    const bool masked_;
    alignas(64) float zero_[TOGETHER];
};

}  // namespace llmbox

#endif
