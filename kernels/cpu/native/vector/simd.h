// Vectors of the width this library is compiled for, and the few operations that kernels need on them.
//
// Plain GCC vector types with + and *; intrinsics only where the compiler does worse. Fused multiply-adds are
// written out and -ffp-contract=off keeps the compiler from making others: left to itself it fuses in one
// instance of a template and not in the next, and then a row's bits depend on the tile it fell in.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// On Arm g++ has it in C++ only from 13 on. As far as numbers are converted to and from it, this is the same.
#if defined(__aarch64__) && !defined(__clang__) && __GNUC__ < 13
#define _Float16 __fp16
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))
// Where a loop shall have the registers to itself: inlined into its caller, GCC 12 spills.
#define NOINLINE __attribute__((noinline))

namespace llmbox {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

struct bf16 {
    uint16_t bits;
};

constexpr int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }
constexpr int ceil_div(int value, int by) { return (value + by - 1) / by; }

// ------------------------------------------------------------------ broadcast and memory

// A scalar beside a vector is broadcast; subtracting 0 and or-ing 0 are then folded away. (A loop that sets the
// lanes one by one becomes one masked instruction a lane.)
INLINE Floats splat(float x) { return x - Floats{}; }
INLINE Words splat(uint32_t x) { return x | Words{}; }

template <class Vector> INLINE Vector load_as(const void* from) {
    Vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

template <class Vector> INLINE void store_as(void* to, Vector v) { memcpy(to, &v, sizeof v); }

INLINE uint32_t load_word(const void* from) { return load_as<uint32_t>(from); }

INLINE Floats load(const float* from) { return load_as<Floats>(from); }
INLINE void store(float* to, Floats v) { store_as(to, v); }

INLINE float as_float(uint32_t bits) { return load_as<float>(&bits); }
INLINE uint32_t as_bits(float x) { return load_word(&x); }

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return as_float(static_cast<uint32_t>(x.bits) << 16); }

// Round to nearest even; NaN stays NaN (plain rounding could carry its payload into infinity).
INLINE bf16 to_bf16(float x) {
    if (x != x) return {0x7fc0};
    uint32_t bits = as_bits(x);
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <class T> INLINE T from_float(float x);
template <> INLINE float from_float<float>(float x) { return x; }
template <> INLINE bf16 from_float<bf16>(float x) { return to_bf16(x); }

#if defined(__AVX512F__) && defined(__AVX512BW__)
INLINE Floats load(const bf16* from) {
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
#if defined(__AVX512BF16__)
INLINE void store(bf16* to, Floats v) { store_as(to, _mm512_cvtneps_pbh((__m512)v)); }
#else
INLINE void store(bf16* to, Floats v) {
    __m512i bits = (__m512i)v;
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    rounded = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7fc00000));
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif
#elif defined(__aarch64__)
INLINE Floats load(const bf16* from) { return (Floats)vshll_n_u16(load_as<uint16x4_t>(from), 16); }
INLINE void store(bf16* to, Floats v) {
    const Words bits = (Words)v, rounded = bits + splat(0x7fffu) + (bits >> 16 & splat(1u));
    store_as(to, vshrn_n_u32((uint32x4_t)(v == v ? rounded : splat(0x7fc00000u)), 16));
}
#else
INLINE Floats load(const bf16* from) {
    Floats v;
    UNROLL for (int i = 0; i < LANES; i++) v[i] = to_float(from[i]);
    return v;
}
INLINE void store(bf16* to, Floats v) {
    UNROLL for (int i = 0; i < LANES; i++) to[i] = to_bf16(v[i]);
}
#endif

INLINE Floats load(const int8_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(load_as<Bytes>(from), Floats);
#endif
}

// The last vector of a row: `count` elements are there, the rest reads as zero and is not written.
template <class T> INLINE Floats load(const T* from, int count) {
    if (count >= LANES) return load(from);
    T padded[LANES] = {};
    memcpy(padded, from, count * sizeof(T));
    return load(padded);
}
template <class T> INLINE void store(T* to, Floats v, int count) {
    if (count >= LANES) return store(to, v);
    T padded[LANES];
    store(padded, v);
    memcpy(to, padded, count * sizeof(T));
}

INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
INLINE void prefetch_to_l2(const void* address) { __builtin_prefetch(address, 0, 2); }
// Of a stream that is read once. Cores with AMX wait for more lines at a time in L2 than in L1 (measured on a Xeon: one
// row of int8 1.07, of int4 1.1 times as fast); elsewhere L1 was as good.
INLINE void prefetch_stream(const void* address) {
#if defined(__AMX_TILE__)
    prefetch_to_l2(address);
#else
    prefetch(address);
#endif
}

// ------------------------------------------------------------------ arithmetic

// a * b + c, rounded once where the hardware can.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
    return (Floats)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats abs(Floats a) { return (Floats)((Words)a & splat(0x7fffffffu)); }

// Sums pairwise, in one order for all rows.
INLINE float sum(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[LANES];
    store(x, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

INLINE int32_t sum(Ints v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

INLINE float max(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// The largest size among `count` numbers, and whether all are finite: what symmetric rounding to integers asks.
struct Range {
    float most;
    bool finite;
};
template <class In> INLINE Range range_of(const In* x, int count) {
    Floats most = splat(0.f), total = splat(0.f);
    for (int i = 0; i < count; i += LANES) {
        const Floats size = abs(load(x + i, count - i));
        most = max(size, most);
        total += size;
    }
    return {max(most), sum(total) < __builtin_inff()};
}

// e^x for x <= 0, relative error below 2e-7; 0 below -87, NaN for NaN.
// 2^t = 2^n * 2^f with n = round(t): adding 1.5 * 2^23 leaves n in the low bits of the sum.
INLINE Floats exp_negative(Floats x) {
    const Floats shift = splat(12582912.f), lowest = splat(-87.f);
    Floats t = max(x, lowest) * splat(1.44269504f);
    Floats shifted = t + shift;
    Ints n = (Ints)shifted - (Ints)shift;
    Floats f = t - (shifted - shift);
    Floats p = splat(1.535336188319500e-4f);
    p = multiply_add(p, f, splat(1.339887440266574e-3f));
    p = multiply_add(p, f, splat(9.618437357674640e-3f));
    p = multiply_add(p, f, splat(5.550332471162809e-2f));
    p = multiply_add(p, f, splat(2.402264791363012e-1f));
    p = multiply_add(p, f, splat(6.931472028550421e-1f));
    p = multiply_add(p, f, splat(1.f));
    Floats result = (Floats)((Ints)p + (n << 23));
    result = x < lowest ? splat(0.f) : result;
    return x == x ? result : x;
}

// Relative error below 1e-6; NaN for NaN. Near 0 a series: 1 - e^-2|x| would lose what is small.
INLINE Floats tanh(Floats x) {
    const Floats size = abs(x), e = exp_negative(size * splat(-2.f)), one = splat(1.f);
    const Words sign = (Words)x & splat(0x80000000u);
    const Floats far = (Floats)((Words)((one - e) / (one + e)) | sign);
    const Floats square = x * x;
    Floats p = splat(2.18694885e-2f);
    p = multiply_add(p, square, splat(-5.39682540e-2f));
    p = multiply_add(p, square, splat(1.33333333e-1f));
    p = multiply_add(p, square, splat(-3.33333333e-1f));
    return size < splat(0.25f) ? multiply_add(p * square, x, x) : far;
}

// Nearest integer: adding 1.5 * 2^23 leaves it in the low bits of the sum. For |x| < 2^22.
INLINE Ints to_nearest(Floats x) {
    const Floats shift = splat(12582912.f);
    return (Ints)(x + shift) - (Ints)shift;
}

INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
INLINE void store_bytes(void* to, Ints v) { store_as(to, __builtin_convertvector(v, SignedBytes)); }

}  // namespace llmbox
