// AVX-VNNI's product of bytes in plain C++, so that its kernels run on a CPU with AVX2 (Intel SDM, VPDPBUSD). To be included
// before the kernels, and compiled for AVX2.
#pragma once

#if defined(LLMBOX_EMULATED_VNNI)

#include <cstdint>
#include <cstring>
#include <immintrin.h>

inline __m256i emulated_dpbusd(__m256i sum, __m256i a, __m256i b) {
    int32_t sums[8];
    uint8_t unsigned_bytes[32];
    int8_t signed_bytes[32];
    memcpy(sums, &sum, sizeof sums);
    memcpy(unsigned_bytes, &a, sizeof unsigned_bytes);
    memcpy(signed_bytes, &b, sizeof signed_bytes);
    for (int i = 0; i < 32; i++) sums[i / 4] += unsigned_bytes[i] * signed_bytes[i];
    memcpy(&sum, sums, sizeof sums);
    return sum;
}

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

#endif
