// Rounding weights to int8 or int4: a float16 scale for each group.
#pragma once

#include <cmath>

#include "simd.h"

namespace llmbox {

// float16 as the hardware converts it.
INLINE Floats load_scales(const uint16_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = static_cast<float>(load_as<_Float16>(from + i));
    return v;
#endif
}
INLINE uint16_t to_scale(float x) { return load_as<uint16_t>(&static_cast<const _Float16&>(static_cast<_Float16>(x))); }
INLINE float from_scale(uint16_t bits) { return static_cast<float>(load_as<_Float16>(&bits)); }

constexpr int MAX_GROUP = 128;

INLINE Floats clamp(Floats x, float lowest, float highest) {
    const Floats low = splat(lowest), high = splat(highest);
    x = x > low ? x : low;
    return x < high ? x : high;
}

// The root of the mean square of x[group].
inline float root_mean_square(const float* x, int group) {
    Floats squares = splat(0.f);
    for (int k = 0; k < group; k += LANES) {
        const Floats v = load(x + k);
        squares = multiply_add(v, v, squares);
    }
    return std::sqrt(sum(squares) / static_cast<float>(group));
}

// The scale for int4 that fits a group best. Rounding to nearest with the largest weight at the end of the
// range is the start; then scales around it are tried, each with its least-squares correction, and the one with
// the smallest error wins. An error counts |x| + the group's root mean square: large weights matter more, but by
// x^2 they left the others too far off (llama.cpp's K-quants weigh so too).
inline float best_int4_scale(const float* x, int group) {
    float extreme = 0;
    for (int k = 0; k < group; k++)
        if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
    if (extreme == 0) return 0;
    const Floats typical = splat(root_mean_square(x, group));
    float best_scale = extreme / -8, best_gain = 0;
    for (int step = -5; step <= 5; step++) {
        const Floats inverse = splat(-(8 + 0.2f * static_cast<float>(step)) / extreme);
        Floats crosses = splat(0.f), squares = splat(0.f);
        for (int k = 0; k < group; k += LANES) {
            const Floats v = load(x + k), code = to_floats(to_nearest(clamp(v * inverse, -8, 7)));
            const Floats weighted = (abs(v) + typical) * code;
            crosses = multiply_add(weighted, v, crosses);
            squares = multiply_add(weighted, code, squares);
        }
        // error = sum weight x^2 - cross^2 / square for the best scale, cross / square
        const float cross = sum(crosses), square = sum(squares);
        if (square > 0 && cross * cross > best_gain * square) {
            best_gain = cross * cross / square;
            best_scale = cross / square;
        }
    }
    return best_scale;
}

inline float int8_scale(const float* x, int group) {
    float most = 0;
    for (int k = 0; k < group; k++) most = std::max(most, std::fabs(x[k]));
    return most / 127;
}

// Rounds one group x[group]: codes from -2^(bits - 1) on; the result is the scale as stored.
inline uint16_t round_group(const float* x, int group, int bits, int8_t* codes) {
    const uint16_t stored = to_scale(bits == 8 ? int8_scale(x, group) : best_int4_scale(x, group));
    const float scale = from_scale(stored), inverse = scale == 0 ? 0 : 1 / scale;
    const auto most = static_cast<float>(1 << (bits - 1));
    for (int k = 0; k < group; k += LANES) {
        const Ints rounded = to_nearest(clamp(load(x + k) * splat(inverse), -most, most - 1));
        store_bytes(codes + k, rounded);
    }
    return stored;
}

// Rounds group g of a row of `inputs` numbers.
template <class In>
uint16_t round_row_group(const In* row, int inputs, int g, int group, int bits, int8_t* codes) {
    float x[MAX_GROUP] = {};
    const int begin = g * group, count = std::min(group, inputs - begin);
    for (int k = 0; k < count; k++) x[k] = to_float(row[begin + k]);
    return round_group(x, group, bits, codes);
}

}  // namespace llmbox
