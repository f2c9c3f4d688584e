// Quantizes weights to int8 or int4: a float16 scale for each group.
#pragma once

#include "quantized/int4_superblock.h"

namespace llmbox {

// float16 as the hardware converts it.
INLINE Floats load_scales(const uint16_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    return (Floats)vcvt_f32_f16(load_as<float16x4_t>(from));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = static_cast<float>(load_as<_Float16>(from + i));
    return v;
#endif
}
// Those of E2M1 are powers of two, which bfloat16 holds all of.
INLINE Floats load_scales(const uint16_t* from, bool is_e2m1) {
    return is_e2m1 ? load(reinterpret_cast<const bf16*>(from)) : load_scales(from);
}
INLINE uint16_t to_scale(float x) { return load_as<uint16_t>(&static_cast<const _Float16&>(static_cast<_Float16>(x))); }
INLINE float from_scale(uint16_t bits) { return static_cast<float>(load_as<_Float16>(&bits)); }

// Parameters of the quantization. `grid`: what the halves of a byte mean where weights have four bits.
enum class Grid4 {
    PLAIN,  // n - 8
    ZEROS,  // n - zero, one of 0 to 15 for each group and output
    E2M1,   // twice a float of four bits; scales are bfloat16
    STEPS,  // those of int4_superblock.h, in groups of 128
    // Blocks of GGUF files, in groups of 32 (gguf_blocks.h):
    CENTERED,    // n - 2^(bits - 1), of two bits n - 1
    TABLE,       // n is the place of a value in a table
    MINIMUMS,    // a minimum is added
    // The same with factors of scales and minimums, in units of 256:
    K_MINIMUMS,  // for each 32 inputs
    K_PAIRS,     // for each 16 inputs
    K_SIGNED,    // centered, for each 16 inputs
    K_TABLE,     // for each 32 inputs
    K_IQ1,       // tables of their own; for each 16 inputs
    K_IQ2,
    K_IQ3_XXS,   // for each 32 inputs
    K_IQ3_S,
};
struct QuantFormat {
    int bits, group;
    Grid4 grid = Grid4::PLAIN;
};

// The root of the mean square of x[group].
inline float root_mean_square(const float* x, int group) {
    return std::sqrt(sum_of_squares(x, group) / static_cast<float>(group));
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
        LaneSums crosses, squares;
        for (int k = 0; k < group; k += SUM_LANES)
            UNROLL for (int v = 0; v < SUM_VECTORS; v++) {
                const Floats w = load(x + k + v * LANES), code = to_floats(to_nearest(clamp(w * inverse, -8, 7)));
                const Floats weighted = (abs(w) + typical) * code;
                crosses.parts[v] = multiply_add(weighted, w, crosses.parts[v]);
                squares.parts[v] = multiply_add(weighted, code, squares.parts[v]);
            }
        // error = sum weight x^2 - cross^2 / square for the best scale, cross / square
        const float cross = crosses.total(), square = squares.total();
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

// Rounds one group x[group]: numbers (of four bits without steps from -8 on, as with PLAIN_STEP); the result is the scale
// as stored.
inline uint16_t round_group(const float* x, const QuantFormat& format, int8_t* numbers, uint8_t* steps) {
    if (format.grid == Grid4::STEPS) {
        const SteppedCodes codes = round_with_steps(x);
        std::copy_n(codes.numbers, MAX_GROUP, numbers);
        std::copy_n(codes.steps, STEPS, steps);
        return to_scale(codes.scale);
    }
    const int group = format.group;
    const uint16_t stored = to_scale(format.bits == 8 ? int8_scale(x, group) : best_int4_scale(x, group));
    const float scale = from_scale(stored), inverse = scale == 0 ? 0 : 1 / scale;
    const auto most = static_cast<float>(1 << (format.bits - 1));
    for (int k = 0; k < group; k += LANES) {
        const Ints rounded = to_nearest(clamp(load(x + k) * splat(inverse), -most, most - 1));
        store_bytes(numbers + k, rounded);
    }
    return stored;
}

// Rounds group g of a row of `inputs` numbers.
template <class In>
uint16_t round_row_group(const In* row, int inputs, int g, const QuantFormat& format, int8_t* numbers, uint8_t* steps) {
    float x[MAX_GROUP] = {};
    const int begin = g * format.group, count = std::min(format.group, inputs - begin);
    for (int k = 0; k < count; k++) x[k] = to_float(row[begin + k]);
    const uint16_t scale = round_group(x, format, numbers, steps);
    std::fill(numbers + count, numbers + format.group, int8_t{0});  // nothing is multiplied with these
    return scale;
}

}  // namespace llmbox
