// Probabilities as integers, floor(2^40 exp((logit - best) / temperature)): sums over the vocabulary depend neither on
// their order nor on the thread that computes them. As in kernels/reference/sampling.py.
#pragma once

#include <cmath>

#include "sampling/logits.h"

namespace llmbox {

constexpr int HALF_BITS = 20;
constexpr float HALF = 1 << HALF_BITS;
constexpr int64_t WEIGHT_ONE = int64_t{1} << 2 * HALF_BITS;

// e^x for -50 <= x <= 0, by the formula of Sleef (expf_u10): error below 1 ulp.
INLINE Floats exp_fine(Floats x) {
    const Ints n = to_nearest(x * splat(1.44269504f));
    const Floats by = to_floats(n);
    Floats s = multiply_add(by, splat(-0.693145751953125f), x);
    s = multiply_add(by, splat(-1.428606765330187045e-06f), s);
    Floats p = splat(0.000198527617612853646278381f);
    p = multiply_add(p, s, splat(0.00139304355252534151077271f));
    p = multiply_add(p, s, splat(0.00833336077630519866943359f));
    p = multiply_add(p, s, splat(0.0416664853692054748535156f));
    p = multiply_add(p, s, splat(0.166666671633720397949219f));
    p = multiply_add(p, s, splat(0.5f));
    p = splat(1.f) + multiply_add(s * s, p, s);
    return (Floats)((Ints)p + (n << 23));
}

// Weights of one row's logits, none of which is NaN or above `best`.
class IntegerSoftmax {
public:
    // `least`: lighter ones become 0.
    IntegerSoftmax(float best, float temperature, int64_t least)
        : best_(splat(best)), temperature_(splat(temperature)), least_(splat(at_least(least))) {}

    // Of 2^20 and of 1: two halves of LANES weights.
    struct Halves {
        Ints high, low;
    };

    INLINE Halves operator()(Floats logits) const { return halves(depth(logits)); }

    // (logit - best) / temperature, of which lower ones than -50 weigh nothing.
    INLINE Floats depth(Floats logits) const {
        const Floats lowest = splat(-50.f);
        return max((logits - best_) / temperature_, lowest);
    }

    INLINE Halves halves(Floats depth) const {
        Floats weight = exp_fine(depth) * splat(HALF);
        weight = weight >= least_ ? weight : splat(0.f);
        const Ints high = __builtin_convertvector(weight, Ints);
        const Floats rest = (weight - to_floats(high)) * splat(HALF);  // exact: digits of the same number
        return {high, __builtin_convertvector(rest, Ints)};
    }

    static constexpr int AT_ONCE = 1024;  // sums of so many halves fit into 32 bits

    // Sum over at most AT_ONCE logits.
    int64_t total(const float* logits, int count) const {
        Ints high{}, low{};
        for (int i = 0; i < count; i += LANES) {
            const Halves halves = (*this)(load_logits(logits + i, count - i));
            high += halves.high;
            low += halves.low;
        }
        return join(sum(high), sum(low));
    }

    // Each of `count` logits.
    void all(const float* logits, int count, int64_t* weights) const {
        for (int i = 0; i < count; i += LANES) {
            int32_t high[LANES], low[LANES];
            store(high, low, (*this)(load_logits(logits + i, count - i)));
            for (int lane = 0; lane < std::min(LANES, count - i); lane++)
                weights[i + lane] = join(high[lane], low[lane]);
        }
    }

    static void store(int32_t* high, int32_t* low, const Halves& halves) {
        store_as(high, halves.high);
        store_as(low, halves.low);
    }

    static int64_t join(int32_t high, int32_t low) { return (static_cast<int64_t>(high) << HALF_BITS) + low; }

private:
    // The smallest float that is not below an integer, in units of 2^20.
    static float at_least(int64_t least) {
        float rounded = static_cast<float>(least);
        if (static_cast<double>(rounded) < static_cast<double>(least))
            rounded = std::nextafterf(rounded, __builtin_inff());
        return rounded / HALF;
    }

    Floats best_, temperature_, least_;
};

}  // namespace llmbox
