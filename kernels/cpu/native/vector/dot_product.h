// Words: 32 bits of neighbors along the summed dimension.
//
// A word is one float, two bf16 or four bytes. Matrix products and attention broadcast one word of a row against
// a vector of words, one for each output column, so one loop serves all types. `columns` and `row` give those
// two. Words are multiplied in PARTS, one for all outputs before the next, so that sums and operands fit into registers.
// Rows hold `RowNumber`s, which are broadcast without more to do.
#pragma once

#include <algorithm>

#include "vector/amx.h"
#include "vector/simd.h"

#if defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace llmbox {

// Hides where a value comes from. The compiler then adds constants to a pointer, rather than keep a pointer for each sum,
// and loads a vector of one number from memory, rather than through a register of integers.
template <class T> INLINE void hide(const T*& pointer) { asm("" : "+r"(pointer)); }
template <class Vector>
    requires(sizeof(Vector) == LANES * 4)
INLINE void hide([[maybe_unused]] Vector& vector) {
#if defined(LLMBOX_TRACED)
#elif defined(__aarch64__)
    asm("" : "+w"(vector));
#elif defined(__AVX512F__)
    asm("" : "+v"(vector));
#else
    asm("" : "+x"(vector));
#endif
}

// Where words are multiplied in several turns: keeps the compiler from loading the operands of all turns together, for which
// there are no registers.
template <int TURNS> INLINE void end_turn() {
    if constexpr (TURNS > 1) asm volatile("" ::: "memory");
}

// g++ 12 moves the accumulators of AVX-512's intrinsics through memory; an asm keeps them in registers. Tests bring these
// instructions in C++.
#ifndef LLMBOX_DPBUSD
#define LLMBOX_DPBF16(sum, a, b) asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#if defined(__AVX512VNNI__)
#define LLMBOX_DPBUSD(sum, a, b) asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define LLMBOX_DPBUSD(sum, a, b) (sum = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b))
#endif
#endif

struct F32 {
    using Element = float;
    using RowNumber = float;
    static constexpr int PACK = 1;
    static constexpr int STEP = 1;  // words that a packed linear comes in
    static constexpr int PARTS = 1;
    static INLINE Floats columns(const void* from, int) { return load_as<Floats>(from); }
    static INLINE Floats row(const RowNumber* from, int) { return splat(*from); }
    static INLINE void dot(Floats& sum, Floats columns, Floats row) { sum = multiply_add_loosely(columns, row, sum); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

struct BF16 {
    using Element = bf16;
    using RowNumber = bf16;
    static constexpr int PACK = 2;
    static constexpr int STEP = LLMBOX_TILES ? TILE_WORDS : 1;
    static constexpr int PARTS = 1;
    static INLINE Words columns(const void* from, int) { return load_as<Words>(from); }
    static INLINE Words row(const RowNumber* from, int) { return splat(load_word(from)); }
    static INLINE void dot(Floats& sum, Words columns, Words row) { LLMBOX_DPBF16(sum, columns, row); }
};

#else

struct BF16 {
    using Element = bf16;
    using RowNumber = float;
    static constexpr int PACK = 2;
    static constexpr int STEP = 1;
    static constexpr int PARTS = 2;  // even numbers, odd ones
    static INLINE Floats columns(const void* from, int part) {
        const Words words = load_as<Words>(from);
        return (Floats)(part ? words & splat(0xffff0000u) : words << 16);
    }
    static INLINE Floats row(const RowNumber* from, int part) { return splat(from[part]); }
    static INLINE void dot(Floats& sum, Floats columns, Floats row) { sum = multiply_add_loosely(columns, row, sum); }
};

#endif

// Whether the CPU has Arm's instructions for bytes, where this library is compiled with them.
inline bool has_byte_products() {
#if defined(__ARM_FEATURE_DOTPROD) && defined(__linux__)
    constexpr unsigned long ASIMDDP = 1ul << 20, I8MM = 1ul << 13;  // of HWCAP and of HWCAP2
    if (!(getauxval(AT_HWCAP) & ASIMDDP)) return false;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (!(getauxval(AT_HWCAP2) & I8MM)) return false;
#endif
#endif
    return true;
}

// Whether one instruction multiplies the four bytes of each word: x86's, or that or Arm's.
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(__AVXVNNI__) && !defined(__AVX512BW__))
#define LLMBOX_VNNI 1
#else
#define LLMBOX_VNNI 0
#endif
#if LLMBOX_VNNI || defined(__ARM_FEATURE_DOTPROD)
#define LLMBOX_BYTE_DOT 1
#else
#define LLMBOX_BYTE_DOT 0
#endif

INLINE Ints splat_int(int32_t x) { return x | Ints{}; }

// A byte for each lane. Conversions of vectors by g++ 12 take many steps.
INLINE Words lane_bytes(const uint8_t* from) {
#if defined(__AVX512BW__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
    typedef uint8_t LaneBytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(load_as<LaneBytes>(from), Words);
#endif
}

// a[i] * b[i] + a[i + 1] * b[i + 1] of each word, whose halves are signed.
INLINE Ints multiply_pairs(Words a, Words b) {
#if defined(__AVX512BW__)
    return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16) + ((Ints)a >> 16) * ((Ints)b >> 16);
#endif
}

// a[i] + b[i] of 16 bits, which may wrap.
INLINE Words add_pairs(Words a, Words b) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * 4)));
    return (Words)((Halves)a + (Halves)b);
}

// Row bytes as 16-bit numbers, and products of those: exact for all unsigned bytes of weights. FLIP as for `Bytes`.
struct SplitBytes {
    static constexpr uint32_t FLIP = 0x80;
    // First and third byte, second and fourth.
    struct Row {
        Words even, odd;
    };
    static INLINE Row row(uint32_t word) {
        const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<int8_t>(word >> 8 * i)) & 0xffff; };
        return {splat(byte(0) | byte(2) << 16), splat(byte(1) | byte(3) << 16)};
    }
    static INLINE void dot(Ints& sum, Words weights, Row row) {
        const Words mask = splat(0x00ff00ffu);
        sum += multiply_pairs(weights & mask, row.even) + multiply_pairs((weights >> 8) & mask, row.odd);
    }
};

#if defined(__AVX2__)
// a[2i] * b[2i] + a[2i + 1] * b[2i + 1] of unsigned and signed bytes; sums that exceed 16 bits saturate.
INLINE Words multiply_byte_pairs(Words a, Words b) {
#if defined(__AVX512BW__)
    return (Words)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    return (Words)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#endif
}
// The sum of both halves of each word.
INLINE Ints add_halves(Words pairs) { return multiply_pairs(pairs, splat(0x00010001u)); }
#endif

// sum += the four products of weight bytes and signed row bytes, lane by lane; exact. Row bytes are -127 to 127. FLIP: what
// makes the bytes of signed weights: 0x80 adds 128 where the instruction takes unsigned ones.
#if defined(__ARM_FEATURE_DOTPROD)
struct Bytes {
    static constexpr uint32_t FLIP = 0;
    using Row = Words;
    static INLINE Row row(uint32_t word) { return splat(word); }
    static INLINE void dot(Ints& sum, Words weights, Row row) {
        sum = (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)row);
    }
};
#elif LLMBOX_VNNI
struct Bytes {
    static constexpr uint32_t FLIP = 0x80;
    using Row = Words;
    static INLINE Row row(uint32_t word) { return splat(word); }
    static INLINE void dot(Ints& sum, Words weights, Row row) { LLMBOX_DPBUSD(sum, weights, row); }
};
#elif defined(__AVX2__) && !defined(__AVX512BW__)
// Of |w| and x with the sign of w a sum of two products fits 16 bits: at most 2 * 128 * 127.
struct Bytes {
    static constexpr uint32_t FLIP = 0;
    using Row = Words;
    static INLINE Row row(uint32_t word) { return splat(word); }
    static INLINE void dot(Ints& sum, Words weights, Row row) {
        const auto signs = (Words)_mm256_sign_epi8((__m256i)row, (__m256i)weights);
        sum += add_halves(multiply_byte_pairs((Words)_mm256_abs_epi8((__m256i)weights), signs));
    }
};
#else
using Bytes = SplitBytes;
#endif

// Dot products with unsigned weights of at most MOST < 128: sums of two fit 16 bits. Exact as those of Bytes.
#if defined(__AVX2__) && !LLMBOX_VNNI
template <int MOST> struct PairBytes {
    static constexpr int DEPTH = std::min(4, INT16_MAX / (2 * 127 * MOST));  // words of an output that are added in 16 bits
    using Row = Words;
    static INLINE Row row(uint32_t word) { return splat(word); }
    static INLINE void dot(Ints& sum, Words weights, Row row) { sum += add_halves(multiply_byte_pairs(weights, row)); }
};
template <int MOST> using SmallBytes = PairBytes<MOST>;
#else
template <int> using SmallBytes = Bytes;
#endif

// The sums of ROWS rows of bytes by VECTORS vectors of outputs.
template <class Dot, int ROWS, int VECTORS> struct ByteSums {
    // Partial sums of an output: with few rows, one of each would wait for the five cycles of AVX-VNNI's instruction.
    static constexpr int CHAINS = LLMBOX_VNNI && LANES == 8 ? std::max(1, 4 / ROWS) : 1;
    static constexpr int WORDS = CHAINS;  // of each output that are multiplied together, at least
    Ints sums[ROWS][VECTORS][CHAINS];

    INLINE void begin(int r, int v, Ints value) {
        sums[r][v][0] = value;
        UNROLL for (int i = 1; i < CHAINS; i++) sums[r][v][i] = Ints{};
    }
    // COUNT neighboring words; those of a row begin at x[r] + at.
    template <int COUNT> INLINE void add(const Words (&weights)[VECTORS][COUNT], const int8_t* const (&x)[ROWS], int at) {
        UNROLL for (int w = 0; w < COUNT; w++)
            UNROLL for (int r = 0; r < ROWS; r++) {
                const typename Dot::Row row = Dot::row(load_word(x[r] + at + 4 * w));
                UNROLL for (int v = 0; v < VECTORS; v++) Dot::dot(sums[r][v][w % CHAINS], weights[v][w], row);
            }
    }
    INLINE Ints total(int r, int v) const {
        Ints total = sums[r][v][0];
        UNROLL for (int i = 1; i < CHAINS; i++) total += sums[r][v][i];
        return total;
    }
};

#if defined(__AVX2__) && !LLMBOX_VNNI
// Products of several words are added in 16 bits first.
template <int MOST, int ROWS, int VECTORS> struct ByteSums<PairBytes<MOST>, ROWS, VECTORS> {
    static constexpr int WORDS = PairBytes<MOST>::DEPTH;
    Ints sums[ROWS][VECTORS];

    INLINE void begin(int r, int v, Ints value) { sums[r][v] = value; }
    template <int COUNT> INLINE void add(const Words (&weights)[VECTORS][COUNT], const int8_t* const (&x)[ROWS], int at) {
        static_assert(COUNT % WORDS == 0);
        UNROLL for (int first = 0; first < COUNT; first += WORDS)
            UNROLL for (int r = 0; r < ROWS; r++) {
                Words pairs[VECTORS];
                UNROLL for (int w = 0; w < WORDS; w++) {
                    const Words row = splat(load_word(x[r] + at + 4 * (first + w)));
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        const Words products = multiply_byte_pairs(weights[v][first + w], row);
                        pairs[v] = w == 0 ? products : add_pairs(pairs[v], products);
                    }
                }
                UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] += add_halves(pairs[v]);
            }
    }
    INLINE Ints total(int r, int v) const { return sums[r][v]; }
};
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// An instruction multiplies 8 bytes of two rows with those of two outputs.
template <int ROWS, int VECTORS>
    requires(ROWS > 1)
struct ByteSums<Bytes, ROWS, VECTORS> {
    static constexpr int WORDS = 2;
    int32x4_t sums[(ROWS + 1) / 2][VECTORS][2] = {};  // both rows with outputs 0 and 1 of a vector, with 2 and 3

    INLINE void begin(int r, int v, Ints value) {
        const int32x2_t none = {}, low = vget_low_s32((int32x4_t)value), high = vget_high_s32((int32x4_t)value);
        sums[r / 2][v][0] += r % 2 ? vcombine_s32(none, low) : vcombine_s32(low, none);
        sums[r / 2][v][1] += r % 2 ? vcombine_s32(none, high) : vcombine_s32(high, none);
    }
    template <int COUNT> INLINE void add(const Words (&weights)[VECTORS][COUNT], const int8_t* const (&x)[ROWS], int at) {
        UNROLL for (int w = 0; w < COUNT; w += 2) {
            int8x16_t outputs[VECTORS][2];
            UNROLL for (int v = 0; v < VECTORS; v++) {
                const auto one = (uint32x4_t)weights[v][w], two = (uint32x4_t)weights[v][w + 1];
                outputs[v][0] = (int8x16_t)vzip1q_u32(one, two), outputs[v][1] = (int8x16_t)vzip2q_u32(one, two);
            }
            UNROLL for (int r = 0; r < ROWS; r += 2) {
                const int8x8_t above = vld1_s8(x[r] + at + 4 * w);
                const int8x16_t rows = vcombine_s8(above, r + 1 < ROWS ? vld1_s8(x[(r + 1) % ROWS] + at + 4 * w) : above);
                UNROLL for (int v = 0; v < VECTORS; v++)
                    UNROLL for (int h = 0; h < 2; h++)
                        sums[r / 2][v][h] = vmmlaq_s32(sums[r / 2][v][h], rows, outputs[v][h]);
            }
        }
    }
    INLINE Ints total(int r, int v) const {
        const auto low = (int64x2_t)sums[r / 2][v][0], high = (int64x2_t)sums[r / 2][v][1];
        return (Ints)(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
    }
};
#endif

// As bytes plus 128; what they are multiplied with differs (attention_dot.h).
struct INT8 {
    using Element = uint8_t;
    static constexpr int PACK = 4;
};

}  // namespace llmbox
