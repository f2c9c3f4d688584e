// Words: 32 bits of neighbours along the summed dimension.
//
// A word is one float, two bf16 or four bytes. Matrix products and attention broadcast one word of a row against
// a vector of words, one for each output column, so one loop serves all types. `Columns` and `Row` are those two,
// unpacked as far as the instruction set needs it.
#pragma once

#include "vector/amx.h"
#include "vector/simd.h"

namespace llmbox {

struct F32 {
    using Element = float;
    static constexpr int PACK = 1;
    static constexpr int STEP = 1;  // words that a packed linear comes in
    using Columns = Floats;
    using Row = Floats;
    static INLINE Columns columns(const void* from) { return load_as<Floats>(from); }
    static INLINE Row row(uint32_t word) { return splat(as_float(word)); }
    static INLINE void dot(Floats& sum, Columns columns, Row row) { sum = multiply_add(columns, row, sum); }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

struct BF16 {
    using Element = bf16;
    static constexpr int PACK = 2;
    static constexpr int STEP = LLMBOX_TILES ? TILE_WORDS : 1;
    using Columns = Words;
    using Row = Words;
    static INLINE Columns columns(const void* from) { return load_as<Words>(from); }
    static INLINE Row row(uint32_t word) { return splat(word); }
    // g++ 12 moves the accumulators of the intrinsic through memory; an asm keeps them in registers.
    static INLINE void dot(Floats& sum, Columns columns, Row row) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(columns), "v"(row));
    }
};

#else

struct BF16 {
    using Element = bf16;
    static constexpr int PACK = 2;
    static constexpr int STEP = 1;
    struct Pair {
        Floats low, high;
    };
    using Columns = Pair;
    using Row = Pair;
    static INLINE Columns columns(const void* from) {
        Words words = load_as<Words>(from);
        return {(Floats)(words << 16), (Floats)(words & splat(0xffff0000u))};
    }
    static INLINE Row row(uint32_t word) {
        return {splat(as_float(word << 16)), splat(as_float(word & 0xffff0000u))};
    }
    static INLINE void dot(Floats& sum, Columns columns, Row row) {
        sum = multiply_add(columns.low, row.low, sum);
        sum = multiply_add(columns.high, row.high, sum);
    }
};

#endif

// sum += the four products of unsigned weight bytes and signed row bytes, lane by lane; exact.
struct Bytes {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    using Row = Words;
    static INLINE Row row(uint32_t word) { return splat(word); }
    static INLINE void dot(Ints& sum, Words weights, Row row) {  // asm: see BF16::dot
        asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(row));
    }
#else
    // As 16-bit pairs: first and third byte, second and fourth.
    struct Row {
        Words even, odd;
    };
    static INLINE Row row(uint32_t word) {
        const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<int8_t>(word >> 8 * i)) & 0xffff; };
        return {splat(byte(0) | byte(2) << 16), splat(byte(1) | byte(3) << 16)};
    }
    static INLINE void dot(Ints& sum, Words weights, Row row) {
        const Words mask = splat(0x00ff00ffu);
        sum += add_pairs(weights & mask, row.even) + add_pairs((weights >> 8) & mask, row.odd);
    }
    static INLINE Ints add_pairs(Words a, Words b) {
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
#endif
};

// As bytes plus 128; what they are multiplied with differs (attention_dot.h).
struct INT8 {
    using Element = uint8_t;
    static constexpr int PACK = 4;
};

}  // namespace llmbox
