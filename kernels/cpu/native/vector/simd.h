// Vectors of the width this library is compiled for, and the few operations that kernels need on them.
//
// Plain GCC vector types with + and *; intrinsics only where the compiler does worse. Fused multiply-adds are
// written out and -ffp-contract=off keeps the compiler from making others: left to itself it fuses in one
// instance of a template and not in the next, and then a row's bits depend on the tile it fell in.
//
// All widths give the same bits: sums over lanes are `LaneSums`, of 16 lanes on every instruction set, and each
// function here rounds in one way everywhere (docs/cpu-kernels.md, "One answer on any machine").
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
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

#if defined(LLMBOX_TRACED)  // by a test, which brings numbers that know how they were computed
constexpr int LANES = LLMBOX_TRACED;
#elif defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
#if defined(LLMBOX_TRACED)
using Floats = TracedFloats;
#else
typedef float Floats __attribute__((vector_size(LANES * 4)));
#endif

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

// Round to nearest even; NaN stays NaN (plain rounding could carry its payload into infinity), and denormals become
// zero, as the instruction for it does (Intel SDM, VCVTNEPS2BF16).
INLINE bf16 to_bf16(float x) {
    if (x != x) return {0x7fc0};
    uint32_t bits = as_bits(x);
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
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
    __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    rounded = _mm512_mask_and_epi32(rounded, tiny, bits, _mm512_set1_epi32(0x80000000));
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif
#elif defined(__aarch64__)
INLINE Floats load(const bf16* from) { return (Floats)vshll_n_u16(load_as<uint16x4_t>(from), 16); }
INLINE void store(bf16* to, Floats v) {
    const Words sign = (Words)v & splat(0x80000000u), tiny = (Words)(((Words)v & splat(0x7f800000u)) == splat(0u));
    const Words bits = tiny ? sign : (Words)v, rounded = bits + splat(0x7fffu) + (bits >> 16 & splat(1u));
    store_as(to, vshrn_n_u32((uint32x4_t)(v == v ? rounded : splat(0x7fc00000u)), 16));
}
#elif defined(__AVX2__) && !defined(LLMBOX_TRACED)
INLINE Floats load(const bf16* from) {
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
INLINE void store(bf16* to, Floats v) {
    const Words sign = (Words)v & splat(0x80000000u), tiny = (Words)(((Words)v & splat(0x7f800000u)) == splat(0u));
    const Words bits = tiny ? sign : (Words)v, rounded = bits + splat(0x7fffu) + (bits >> 16 & splat(1u));
    const __m256i halves = (__m256i)((v == v ? rounded : splat(0x7fc00000u)) >> 16);
    const __m256i packed = _mm256_packus_epi32(halves, halves);  // in each half of the vector
    store_as(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000)));
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

#if !defined(LLMBOX_TRACED)  // whose numbers bring these
// Lanes of `yes` where the mask is set, of `no` elsewhere.
INLINE Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }

// Of a CPU that cannot multiply and add in one instruction: a * b + c in float64, where the product is exact, rounded
// to odd, so that rounding to float32 is the only one that counts (Boldo and Melquiond, 2008).
#if !defined(__AVX2__) && !defined(__FMA__) && !defined(__aarch64__)
#define LLMBOX_FUSED 0
#define FUNCTION_UNLESS_FUSED [[maybe_unused]] static NOINLINE
typedef float HalfFloats __attribute__((vector_size(LANES * 2)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef int64_t Longs __attribute__((vector_size(LANES * 4)));
INLINE HalfFloats fused_half(HalfFloats a, HalfFloats b, HalfFloats c) {
    const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
    const Doubles added = __builtin_convertvector(c, Doubles), sum = product + added, back = sum - product;
    const Doubles lost = (product - (sum - back)) + (added - back), zero = {};  // exact: TwoSum (Knuth)
    const Longs inexact = (lost > zero) | (lost < zero), even = ((Longs)sum & 1) - 1;
    const Longs step = ((lost > zero) ^ (sum > zero)) | 1;  // away from zero or towards it
    return __builtin_convertvector((Doubles)((Longs)sum + (step & inexact & even)), HalfFloats);
}
#else
#define LLMBOX_FUSED 1
#define FUNCTION_UNLESS_FUSED INLINE
#endif

// a * b + c, rounded once.
INLINE Floats multiply_add_inline(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
    return (Floats)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    HalfFloats parts[3][2];
    store_as(parts[0], a), store_as(parts[1], b), store_as(parts[2], c);
    for (int i = 0; i < 2; i++) parts[0][i] = fused_half(parts[0][i], parts[1][i], parts[2][i]);
    return load_as<Floats>(parts[0]);
#endif
}
// Some sixty instructions where the CPU has none for it: they are inlined into the polynomials below, and called elsewhere.
// At each place they took most of the time of the compile.
FUNCTION_UNLESS_FUSED Floats multiply_add(Floats a, Floats b, Floats c) { return multiply_add_inline(a, b, c); }
#else
#define FUNCTION_UNLESS_FUSED INLINE
INLINE Floats multiply_add_inline(Floats a, Floats b, Floats c) { return multiply_add(a, b, c); }
#endif

// a * b + c, rounded once where the hardware can: for sums of float weights, which would take many times as long.
INLINE Floats multiply_add_loosely(Floats a, Floats b, Floats c) { return LLMBOX_FUSED ? multiply_add(a, b, c) : a * b + c; }

INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
INLINE Floats max(Floats a, Floats b) { return select(a > b, a, b); }
INLINE Floats abs(Floats a) { return (Floats)((Words)a & splat(0x7fffffffu)); }

// Adds the upper half of the lanes to the lower one until one is left.
INLINE float sum(Floats v) {
#if defined(__AVX2__)
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    const __m256 eight = (__m256)v;
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float x[LANES];
    store(x, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
#endif
}

// A sum over many numbers in an order that does not depend on LANES: number i goes to partial sum i % 16, and those are
// added as lanes are.
constexpr int SUM_LANES = 16, SUM_VECTORS = SUM_LANES / LANES;
struct LaneSums {
    Floats parts[SUM_VECTORS] = {};

    // `add`(part, i) adds the numbers from i on to a part, for all i below `count`.
    template <class Add> INLINE void add_each(int count, Add add) {
        int i = 0;
        for (; i + SUM_LANES <= count; i += SUM_LANES)
            UNROLL for (int v = 0; v < SUM_VECTORS; v++) add(parts[v], i + v * LANES);
        UNROLL for (int v = 0; v < SUM_VECTORS; v++)
            if (i + v * LANES < count) add(parts[v], i + v * LANES);
    }
    INLINE float total() const {
        Floats sums[SUM_VECTORS];
        UNROLL for (int v = 0; v < SUM_VECTORS; v++) sums[v] = parts[v];
        UNROLL for (int half = SUM_VECTORS / 2; half; half /= 2)
            UNROLL for (int v = 0; v < half; v++) sums[v] += sums[v + half];
        return sum(sums[0]);
    }
};

// Of `count` numbers.
template <class T> INLINE float sum_of_squares(const T* x, int count) {
    LaneSums squares;
    squares.add_each(count, [&](Floats& part, int i) __attribute__((always_inline)) {
        const Floats v = load(x + i, count - i);
        part = multiply_add(v, v, part);
    });
    return squares.total();
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
    Floats most = splat(0.f);
    LaneSums total;
    total.add_each(count, [&](Floats& part, int i) __attribute__((always_inline)) {
        const Floats size = abs(load(x + i, count - i));
        most = max(size, most);
        part += size;
    });
    return {max(most), total.total() < __builtin_inff()};
}

// e^x for x <= 0, relative error below 2e-7; 0 below -87, NaN for NaN.
// 2^t = 2^n * 2^f with n = round(t): adding 1.5 * 2^23 leaves n in the low bits of the sum.
FUNCTION_UNLESS_FUSED Floats exp_negative(Floats x) {
    const Floats shift = splat(12582912.f), lowest = splat(-87.f);
    Floats t = max(x, lowest) * splat(1.44269504f);
    Floats shifted = t + shift;
    Ints n = (Ints)shifted - (Ints)shift;
    Floats f = t - (shifted - shift);
    Floats p = splat(1.535336188319500e-4f);
    p = multiply_add_inline(p, f, splat(1.339887440266574e-3f));
    p = multiply_add_inline(p, f, splat(9.618437357674640e-3f));
    p = multiply_add_inline(p, f, splat(5.550332471162809e-2f));
    p = multiply_add_inline(p, f, splat(2.402264791363012e-1f));
    p = multiply_add_inline(p, f, splat(6.931472028550421e-1f));
    p = multiply_add_inline(p, f, splat(1.f));
    Floats result = (Floats)((Ints)p + (n << 23));
    result = select(x < lowest, splat(0.f), result);
    return select(x == x, result, x);
}

// Relative error below 1e-6; NaN for NaN. Near 0 a series: 1 - e^-2|x| would lose what is small.
FUNCTION_UNLESS_FUSED Floats tanh(Floats x) {
    const Floats size = abs(x), e = exp_negative(size * splat(-2.f)), one = splat(1.f);
    const Words sign = (Words)x & splat(0x80000000u);
    const Floats far = (Floats)((Words)((one - e) / (one + e)) | sign);
    const Floats square = x * x;
    Floats p = splat(2.18694885e-2f);
    p = multiply_add_inline(p, square, splat(-5.39682540e-2f));
    p = multiply_add_inline(p, square, splat(1.33333333e-1f));
    p = multiply_add_inline(p, square, splat(-3.33333333e-1f));
    return select(size < splat(0.25f), multiply_add_inline(p * square, x, x), far);
}

// 2^x, relative error below 2e-7; 0 for -infinity, NaN for NaN. Others compute what two instructions of AVX-512 do.
FUNCTION_UNLESS_FUSED Floats power_of_two(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, 9);  // above the integer below x; rounded down
#else
    x = select(splat(-160.f) > x, splat(-160.f), select(x > splat(160.f), splat(160.f), x));
#if defined(__AVX2__)
    const Floats whole = (Floats)_mm256_floor_ps((__m256)x);
#else
    Floats whole = to_floats(__builtin_convertvector(x, Ints));
    whole = select(whole > x, whole - splat(1.f), whole);
#endif
    Floats f = x - whole;
    f = select(f + whole > x, (Floats)((Ints)f - 1), f);  // between -0.5 and 0 it is not exact
#endif
    Floats p = splat(1.87757667e-3f);
    p = multiply_add_inline(p, f, splat(8.98934009e-3f));
    p = multiply_add_inline(p, f, splat(5.58263181e-2f));
    p = multiply_add_inline(p, f, splat(2.40153617e-1f));
    p = multiply_add_inline(p, f, splat(6.93153073e-1f));
    p = multiply_add_inline(p, f, splat(9.99999925e-1f));
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    // In two factors, as one may be denormal: only the second product is rounded.
    const Ints n = __builtin_convertvector(whole, Ints), first = n >> 1, second = n - first;
    return p * (Floats)((first + 127) << 23) * (Floats)((second + 127) << 23);
#endif
}

// ln(1 + x) for 0 <= x <= 1, relative error below 3e-7: twice the inverse hyperbolic tangent of x / (2 + x).
FUNCTION_UNLESS_FUSED Floats log_one_plus(Floats x) {
    const Floats z = x / (splat(2.f) + x), square = z * z;
    Floats p = splat(1.f / 13);
    for (const float factor : {1.f / 11, 1.f / 9, 1.f / 7, 1.f / 5, 1.f / 3}) p = multiply_add_inline(p, square, splat(factor));
    return multiply_add_inline(p * square, z + z, z + z);
}

// ln(1 + e^x); NaN for NaN.
INLINE Floats softplus(Floats x) {
    const Floats positive = select(x < splat(0.f), splat(0.f), x);
    return positive + log_one_plus(exp_negative(-abs(x)));
}

INLINE Floats sigmoid(Floats x) {
    const Floats e = exp_negative(-abs(x)), one = splat(1.f);
    return select(x < splat(0.f), e, one) / (one + e);
}

// Nearest integer: adding 1.5 * 2^23 leaves it in the low bits of the sum. For |x| < 2^22.
INLINE Ints to_nearest(Floats x) {
    const Floats shift = splat(12582912.f);
    return (Ints)(x + shift) - (Ints)shift;
}

typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
INLINE void store_bytes(void* to, Ints v) { store_as(to, __builtin_convertvector(v, SignedBytes)); }

}  // namespace llmbox
