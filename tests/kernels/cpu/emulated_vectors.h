// Instructions of AVX-VNNI and AVX-512 in plain C++, so that their kernels run on a CPU with AVX2 (Intel SDM). To be included
// before the kernels and compiled for AVX2, with one of LLMBOX_EMULATED_AVX_VNNI, _AVX512, _AVX512_VNNI and _AVX512_BF16.
#pragma once

#if defined(LLMBOX_EMULATED_AVX_VNNI) || defined(LLMBOX_EMULATED_AVX512) || defined(LLMBOX_EMULATED_AVX512_VNNI) || \
    defined(LLMBOX_EMULATED_AVX512_BF16)

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <random>
#include <thread>

#define EMULATED inline __attribute__((noinline))  // or compilers take minutes

namespace emulated {

template <class To, class From> inline To cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// The elements of a vector.
template <class T, int COUNT> struct Elements {
    T at[COUNT];
    template <class Vector> static Elements of(const Vector& vector) { return cast<Elements>(vector); }
};
template <class T, int COUNT, class Of> inline Elements<T, COUNT> make(Of of) {
    Elements<T, COUNT> made;
    for (int i = 0; i < COUNT; i++) made.at[i] = of(i);
    return made;
}
// Vectors whose element i is of(i).
template <class T, class Of> inline __m512i integers(Of of) { return cast<__m512i>(make<T, 64 / sizeof(T)>(of)); }
template <class Of> inline __m512 floats(Of of) { return cast<__m512>(make<float, 16>(of)); }
template <class Of> inline __mmask16 mask(Of of) {
    unsigned bits = 0;
    for (int i = 0; i < 16; i++) bits |= of(i) ? 1u << i : 0u;
    return static_cast<__mmask16>(bits);
}
template <class Vector> inline auto words(const Vector& vector) { return Elements<uint32_t, sizeof(Vector) / 4>::of(vector); }
template <class Vector> inline auto singles(const Vector& vector) { return Elements<float, sizeof(Vector) / 4>::of(vector); }

template <class Sum, class Vector> EMULATED void dpbusd(Sum& sum, const Vector& a, const Vector& b) {
    auto sums = Elements<int32_t, sizeof(Sum) / 4>::of(sum);
    const auto left = Elements<uint8_t, sizeof(Sum)>::of(a);
    const auto right = Elements<int8_t, sizeof(Sum)>::of(b);
    for (unsigned i = 0; i < sizeof(Sum); i++) sums.at[i / 4] += left.at[i] * right.at[i];
    sum = cast<Sum>(sums);
}

inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }
inline float number(uint16_t bf16) { return flushed(cast<float>(static_cast<uint32_t>(bf16) << 16)); }
template <class Sum, class Vector> EMULATED void dpbf16(Sum& sum, const Vector& a, const Vector& b) {
    auto sums = singles(sum);
    const auto left = Elements<uint16_t, sizeof(Sum) / 2>::of(a), right = Elements<uint16_t, sizeof(Sum) / 2>::of(b);
    for (int i : {1, 0})
        for (unsigned n = i; n < sizeof(Sum) / 2; n += 2)
            sums.at[n / 2] = flushed(std::fma(number(left.at[n]), number(right.at[n]), flushed(sums.at[n / 2])));
    sum = cast<Sum>(sums);
}
inline uint16_t bf16(float x) {
    if (std::isnan(x)) return static_cast<uint16_t>(cast<uint32_t>(x) >> 16 | 0x40);
    const uint32_t bits = cast<uint32_t>(flushed(x));
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Intrinsics by their names without _mm512.

EMULATED __m512i _set1_epi32(int x) { return integers<int>([&](int) { return x; }); }
EMULATED __m512i _and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _add_epi32(__m512i a, __m512i b) {
    return integers<uint32_t>([&](int i) { return words(a).at[i] + words(b).at[i]; });
}
EMULATED __m512i _slli_epi32(__m512i x, int by) {
    return integers<uint32_t>([&](int i) { return words(x).at[i] << by; });
}
EMULATED __m512i _srli_epi32(__m512i x, int by) {
    return integers<uint32_t>([&](int i) { return words(x).at[i] >> by; });
}
EMULATED __m512i _broadcast_i32x4(__m128i x) { return integers<uint32_t>([&](int i) { return words(x).at[i % 4]; }); }
EMULATED __m512i _shuffle_epi8(__m512i from, __m512i places) {
    const auto bytes = Elements<uint8_t, 64>::of(from), at = Elements<uint8_t, 64>::of(places);
    return integers<uint8_t>([&](int i) -> uint8_t { return at.at[i] & 0x80 ? 0 : bytes.at[i / 16 * 16 + at.at[i] % 16]; });
}
EMULATED __m512i _madd_epi16(__m512i a, __m512i b) {
    const auto x = Elements<int16_t, 32>::of(a), y = Elements<int16_t, 32>::of(b);
    return integers<int32_t>([&](int i) { return x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1]; });
}
EMULATED __m512i _maddubs_epi16(__m512i a, __m512i b) {
    const auto x = Elements<uint8_t, 64>::of(a);
    const auto y = Elements<int8_t, 64>::of(b);
    return integers<int16_t>([&](int i) {
        return static_cast<int16_t>(std::clamp(x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1], -32768, 32767));
    });
}
EMULATED int32_t _reduce_add_epi32(__m512i x) {
    uint32_t total = 0;
    for (uint32_t each : words(x).at) total += each;
    return static_cast<int32_t>(total);
}

// Masks.

EMULATED __mmask16 _cmp_ps_mask(__m512 a, __m512 b, int how) {
    const auto x = singles(a), y = singles(b);
    return mask([&](int i) {
        return how == _CMP_UNORD_Q ? std::isnan(x.at[i]) || std::isnan(y.at[i]) : !(x.at[i] < y.at[i]);
    });
}
EMULATED __mmask16 _testn_epi32_mask(__m512i a, __m512i b) {
    return mask([&](int i) { return !(words(a).at[i] & words(b).at[i]); });
}
EMULATED __m512i _mask_blend_epi32(__mmask16 mask, __m512i a, __m512i b) {
    return integers<uint32_t>([&](int i) { return words(mask >> i & 1 ? b : a).at[i]; });
}
EMULATED __m512i _mask_and_epi32(__m512i other, __mmask16 mask, __m512i a, __m512i b) {
    return _mask_blend_epi32(mask, other, a & b);
}

// Floats.

EMULATED __m512 _fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return floats([&](int i) { return std::fma(singles(a).at[i], singles(b).at[i], singles(c).at[i]); });
}
// x minus the integer below it, rounded down; 0 of infinities.
EMULATED __m512 _reduce_ps(__m512 x, int) {
    return floats([&](int i) {
        const float all = singles(x).at[i], whole = std::floor(all), part = all - whole;
        if (std::isinf(all)) return 0.f;
        return static_cast<double>(part) + whole > all ? std::nextafter(part, -1.f) : part;
    });
}
EMULATED __m512 _maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 by) {
    return floats([&](int i) {
        const float from = singles(x).at[i], power = singles(by).at[i];
        if (!(mask >> i & 1)) return 0.f;
        if (std::isnan(from) || std::isnan(power)) return from + power;
        return std::ldexp(from, static_cast<int>(std::clamp(std::floor(power), -400.f, 400.f)));
    });
}
EMULATED __m512 _scalef_ps(__m512 x, __m512 by) { return _maskz_scalef_ps(0xffff, x, by); }
EMULATED float _reduce_max_ps(__m512 x) {
    const auto numbers = singles(x);
    return *std::max_element(numbers.at, numbers.at + 16);
}
// Quarters of two vectors, or neighbors in each quarter, by two bits of `order` each.
EMULATED __m512 _shuffle_f32x4(__m512 a, __m512 b, int order) {
    return floats([&](int i) { return singles(i < 8 ? a : b).at[(order >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
EMULATED __m512 _shuffle_ps(__m512 a, __m512 b, int order) {
    return floats([&](int i) { return singles(i % 4 < 2 ? a : b).at[i / 4 * 4 + (order >> i % 4 * 2 & 3)]; });
}
EMULATED __m256 _extractf32x8_ps(__m512 x, int half) {
    return cast<__m256>(make<float, 8>([&](int i) { return singles(x).at[8 * half + i]; }));
}
EMULATED __m256 _castps512_ps256(__m512 x) { return _extractf32x8_ps(x, 0); }

// Conversions.

template <class T, class Vector> inline __m512i widen(const Vector& x) {
    const auto small = Elements<T, 16>::of(x);
    return integers<int32_t>([&](int i) { return static_cast<int32_t>(small.at[i]); });
}
EMULATED __m512i _cvtepi8_epi32(__m128i x) { return widen<int8_t>(x); }
EMULATED __m512i _cvtepu8_epi32(__m128i x) { return widen<uint8_t>(x); }
EMULATED __m512i _cvtepu16_epi32(__m256i x) { return widen<uint16_t>(x); }
EMULATED __m256i _cvtepi32_epi16(__m512i x) {
    return cast<__m256i>(make<uint16_t, 16>([&](int i) { return static_cast<uint16_t>(words(x).at[i]); }));
}
EMULATED __m512 _cvtepi32_ps(__m512i x) {
    return floats([&](int i) { return static_cast<float>(static_cast<int32_t>(words(x).at[i])); });
}
EMULATED __m512 _cvtph_ps(__m256i x) {
    const auto halves = Elements<uint16_t, 16>::of(x);
    return floats([&](int i) { return _cvtsh_ss(halves.at[i]); });
}
EMULATED __m256bh _cvtneps_pbh(__m512 x) {
    return cast<__m256bh>(make<uint16_t, 16>([&](int i) { return bf16(singles(x).at[i]); }));
}
EMULATED __m512bh _cvtne2ps_pbh(__m512 high, __m512 low) {
    return cast<__m512bh>(make<uint16_t, 32>([&](int i) { return bf16(singles(i < 16 ? low : high).at[i % 16]); }));
}

}  // namespace emulated

#define LLMBOX_DPBUSD emulated::dpbusd
#define LLMBOX_DPBF16 emulated::dpbf16

#if defined(LLMBOX_EMULATED_AVX_VNNI)
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#if defined(LLMBOX_EMULATED_AVX512_BF16)
#define __AVX512BF16__ 1
#endif
#if !defined(LLMBOX_EMULATED_AVX512)
#define __AVX512VNNI__ 1
#endif
#define asm(...) ((void)0)  // hints to the compiler, about registers that are not here

#undef _mm512_set1_epi32
#undef _mm512_and_si512
#undef _mm512_add_epi32
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_broadcast_i32x4
#undef _mm512_shuffle_epi8
#undef _mm512_madd_epi16
#undef _mm512_maddubs_epi16
#undef _mm512_reduce_add_epi32
#undef _mm512_cmp_ps_mask
#undef _mm512_testn_epi32_mask
#undef _mm512_mask_blend_epi32
#undef _mm512_mask_and_epi32
#undef _mm512_fmadd_ps
#undef _mm512_reduce_ps
#undef _mm512_maskz_scalef_ps
#undef _mm512_scalef_ps
#undef _mm512_reduce_max_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_castps512_ps256
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtph_ps
#undef _mm512_cvtneps_pbh
#undef _mm512_cvtne2ps_pbh
#define _mm512_set1_epi32 emulated::_set1_epi32
#define _mm512_and_si512 emulated::_and_si512
#define _mm512_add_epi32 emulated::_add_epi32
#define _mm512_slli_epi32 emulated::_slli_epi32
#define _mm512_srli_epi32 emulated::_srli_epi32
#define _mm512_broadcast_i32x4 emulated::_broadcast_i32x4
#define _mm512_shuffle_epi8 emulated::_shuffle_epi8
#define _mm512_madd_epi16 emulated::_madd_epi16
#define _mm512_maddubs_epi16 emulated::_maddubs_epi16
#define _mm512_reduce_add_epi32 emulated::_reduce_add_epi32
#define _mm512_cmp_ps_mask emulated::_cmp_ps_mask
#define _mm512_testn_epi32_mask emulated::_testn_epi32_mask
#define _mm512_mask_blend_epi32 emulated::_mask_blend_epi32
#define _mm512_mask_and_epi32 emulated::_mask_and_epi32
#define _mm512_fmadd_ps emulated::_fmadd_ps
#define _mm512_reduce_ps emulated::_reduce_ps
#define _mm512_maskz_scalef_ps emulated::_maskz_scalef_ps
#define _mm512_scalef_ps emulated::_scalef_ps
#define _mm512_reduce_max_ps emulated::_reduce_max_ps
#define _mm512_shuffle_f32x4 emulated::_shuffle_f32x4
#define _mm512_shuffle_ps emulated::_shuffle_ps
#define _mm512_extractf32x8_ps emulated::_extractf32x8_ps
#define _mm512_castps512_ps256 emulated::_castps512_ps256
#define _mm512_cvtepi8_epi32 emulated::_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated::_cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated::_cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated::_cvtepi32_epi16
#define _mm512_cvtepi32_ps emulated::_cvtepi32_ps
#define _mm512_cvtph_ps emulated::_cvtph_ps
#define _mm512_cvtneps_pbh emulated::_cvtneps_pbh
#define _mm512_cvtne2ps_pbh emulated::_cvtne2ps_pbh

#endif
#endif
