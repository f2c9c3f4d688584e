// Four bits with steps: 16 neighboring inputs of an output share a step and a zero, 128 share a scale.
//
//   weight = scale * (step * n - zero)        n: 0 .. 15
//   a byte for 16 of them: step (1 .. 15) and, in its high half, z; zero = step * (z + 8) / 2, rounded down
//
// step * n - zero fits a signed byte, so products are those of int8 in groups of 128, and steps cost something only where
// halves of bytes become bytes. Zeros of their own for so few weights are what GGUF's K types gain by, too.
#pragma once

#include <algorithm>
#include <cmath>

#include "vector/simd.h"

namespace llmbox {

constexpr int MAX_GROUP = 128;
constexpr int STEP_INPUTS = 16, STEPS = MAX_GROUP / STEP_INPUTS;
constexpr uint8_t PLAIN_STEP = 0x81;  // step 1, zero 8: what formats without steps have

// 1 / step, times 2^16 and rounded up.
constexpr int64_t RECIPROCALS[16] = {0,    65537, 32769, 21846, 16385, 13108, 10923, 9363,
                                     8193, 7282,  6554,  5958,  5462,  5042,  4682,  4370};

struct Step4 {
    int step, zero;
    explicit Step4(uint8_t byte) : step(byte & 15), zero(step * ((byte >> 4) + 8) >> 1) {}

    int number(int n) const { return step * n - zero; }
    // (number + zero) / step, exact as both are small. Whatever a checkpoint says it is 0 .. 15, and no step is divided by.
    int half_byte(int number) const { return static_cast<int>((number + zero) * RECIPROCALS[step] >> 16) & 15; }
};

// Twice the floats that four bits of a sign, two of an exponent and one of a mantissa hold (OCP's E2M1).
constexpr int8_t E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

INLINE int e2m1_half_byte(int value) {
    int n = 0;
    while (n < 15 && E2M1_VALUES[n] != value) n++;
    return n;
}

INLINE Floats clamp(Floats x, float lowest, float highest) {
    const Floats low = splat(lowest), high = splat(highest);
    x = select(x > low, x, low);
    return select(x < high, x, high);
}
// As to_nearest, and a float still.
INLINE Floats nearest(Floats x) { return x + splat(12582912.f) - splat(12582912.f); }

// What a step and a zero make of numbers: a lane may have those of its own.
struct Grid {
    Floats step, inverse, below, shift;  // below: -zero; shift: zero / step
    Floats lowest, highest;              // of n, so that step * n - zero fits a signed byte

    INLINE Grid(Floats step, Floats zero) : step(step), inverse(splat(1.f) / step), below(-zero), shift(zero * inverse) {
        const Floats first = nearest((zero - splat(128.f)) * inverse + splat(0.499f));
        const Floats last = nearest((zero + splat(127.f)) * inverse - splat(0.499f));
        lowest = max(first, splat(0.f));
        highest = select(last < splat(15.f), last, splat(15.f));
    }
    INLINE Floats operator()(Floats x) const {
        Floats n = max(nearest(multiply_add(x, inverse, shift)), lowest);
        n = select(n < highest, n, highest);
        return multiply_add(step, n, below);
    }
};

// One group on its way: x[128], and how much the error of each counts.
struct SteppedGroup {
    const float* x;
    float weights[MAX_GROUP];
    float need[STEPS];    // the step that spans 16 of x, times the scale
    float middle[STEPS];  // of their range
};

struct SteppedCodes {
    int8_t numbers[MAX_GROUP];
    uint8_t steps[STEPS];
    float scale;
};

// The step and zero whose error is smallest, near those that span x[16] (in units of the scale). 15 pairs are tried, a
// lane each, so that no sum goes across lanes.
inline uint8_t best_step(const float* x, const float* weights, float need, float middle) {
    alignas(64) static constexpr float TIMES[16] = {-1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0};
    alignas(64) static constexpr float ZEROS[16] = {-2, -1, 0, 1, 2, -2, -1, 0, 1, 2, -2, -1, 0, 1, 2, 0};
    alignas(64) float steps[16], zs[16];
    alignas(64) int32_t errors[16];  // with the lane in their lowest bits: floats from 0 on are in order as integers
    for (int i = 0; i < 16; i += LANES) {
        const Floats step = clamp(nearest(splat(need)) + load(TIMES + i), 1, 15);
        const Floats z = clamp(nearest(splat(7.f) - splat(2 * middle) / step) + load(ZEROS + i), 0, 15);
        const Floats zero = nearest(step * (z + splat(8.f)) * splat(0.5f) - splat(0.25f));
        const Grid grid(step, zero);
        Floats error = splat(0.f);
        for (int k = 0; k < STEP_INPUTS; k++) {
            const Floats wanted = splat(x[k]), off = grid(wanted) - wanted;
            error = multiply_add(off * splat(weights[k]), off, error);
        }
        store_as(errors + i, (Words)error & splat(~15u)), store(steps + i, step), store(zs + i, z);
    }
    int best = errors[0];
    for (int i = 1; i < 16; i++) best = std::min(best, errors[i] | i);
    best &= 15;
    return static_cast<uint8_t>(static_cast<int>(steps[best]) | static_cast<int>(zs[best]) << 4);
}

// Steps and numbers for a scale, then the scale that fits them best. Returns how much of the weighted squares they explain.
inline float try_scale(const SteppedGroup& group, float scale, SteppedCodes& out) {
    alignas(64) float x[MAX_GROUP];
    const float inverse = 1 / scale;
    LaneSums crosses, squares;
    for (int k = 0; k < MAX_GROUP; k += LANES) store(x + k, load(group.x + k) * splat(inverse));
    for (int s = 0; s < STEPS; s++) {
        const int begin = s * STEP_INPUTS;
        out.steps[s] = best_step(x + begin, group.weights + begin, group.need[s] * inverse, group.middle[s] * inverse);
        const Step4 code(out.steps[s]);
        const Grid grid(splat(static_cast<float>(code.step)), splat(static_cast<float>(code.zero)));
        UNROLL for (int v = 0; v < SUM_VECTORS; v++) {
            const int k = begin + v * LANES;
            const Floats w = load(x + k), number = grid(w), weighted = number * load(group.weights + k);
            store_bytes(out.numbers + k, to_nearest(number));
            crosses.parts[v] = multiply_add(weighted, w, crosses.parts[v]);
            squares.parts[v] = multiply_add(weighted, number, squares.parts[v]);
        }
    }
    const float cross = crosses.total(), square = squares.total();
    out.scale = square > 0 ? scale * cross / square : 0;
    return square > 0 ? scale * scale * cross * cross / square : 0;
}

// Rounds x[128]. An error counts |x| + the root mean square of its 16. The coarsest step is tried near 12, which leaves
// the others room; larger scales make it smaller.
inline SteppedCodes round_with_steps(const float* x) {
    SteppedGroup group{x, {}, {}, {}};
    float coarsest = 0;
    for (int s = 0; s < STEPS; s++) {
        const float* from = x + s * STEP_INPUTS;
        const auto [low, high] = std::minmax_element(from, from + STEP_INPUTS);
        float squares = 0;
        for (int k = 0; k < STEP_INPUTS; k++) squares += from[k] * from[k];
        const float typical = std::sqrt(squares / STEP_INPUTS);
        for (int k = 0; k < STEP_INPUTS; k++) group.weights[s * STEP_INPUTS + k] = std::fabs(from[k]) + typical;
        // A zero lies 4 to 11.5 steps above the lowest number.
        group.need[s] = std::max({(*high - *low) / 15, *high / 11, *low / -11.5f});
        group.middle[s] = (*high + *low) / 2;
        coarsest = std::max({coarsest, group.need[s], 12 * *high / 127, -12 * *low / 127});
    }
    SteppedCodes best{{}, {}, 0}, tried;
    std::fill_n(best.steps, STEPS, PLAIN_STEP);
    if (coarsest == 0) return best;
    float most = 0;
    for (const float share : {0.84f, 0.94f, 1.04f}) {
        const float explained = try_scale(group, share * coarsest / 12, tried);
        if (explained > most) most = explained, best = tried;
    }
    return best;
}

}  // namespace llmbox
