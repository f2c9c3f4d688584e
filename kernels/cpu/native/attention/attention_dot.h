// What attention multiplies the stored words with: queries with keys, softmax weights with values.
//
// float32 and bf16 meet rows of their own type. int8 codes meet rows of 16-bit integers, 127 * 128 / max|x|
// times x, so that a product is an exact int32 whatever the instruction set, and nothing but the stored key or
// value itself is quantized to eight bits. Where an instruction multiplies four bytes a row is two rows of them, x = 128 * high + low.
#pragma once

#include "attention/kv_cache.h"

namespace llmbox {

// How a context is walked: strips that share one softmax, and the most rows of queries that walk together. With AMX
// both products are so fast that what is done once for a chunk (maxima, rescaled sums) would show. Sums are rounded at
// chunks: their length is part of the result.
template <class E> struct Walked {
    static constexpr int STRIPS = 4, ROWS = 48;
};
#if LLMBOX_TILES
template <> struct Walked<BF16> {
    static constexpr int STRIPS = 8, ROWS = 256;
};
template <> struct Walked<INT8> {
    static constexpr int STRIPS = 8, ROWS = 128;
};
#endif

// `pack` writes `padded` numbers (whole strips), the first `count` from x, the rest 0. A sum of products s stands for (s - offset) * factor.
struct Packed {
    float factor;
    int32_t offset;
};

template <class E> struct AttentionWords {
    using RowNumber = typename E::RowNumber;
    using Sum = Floats;
    static constexpr bool SCALED = false;  // whether stored rows have a scale of their own
    static constexpr int TURNS = E::PARTS;  // in which a word is multiplied
    static constexpr int PARTS = E::PACK * sizeof(RowNumber) / sizeof(uint32_t);  // words of a row for one stored word
    static constexpr int ROWS = 6;          // whose sums fit into registers

    static INLINE auto columns(const void* from, int turn) { return E::columns(from, turn); }
    // Word `w` of the row that begins at `at`.
    static INLINE auto row(const uint32_t* at, int w, int, int turn) {
        return E::row(reinterpret_cast<const RowNumber*>(at) + w * E::PACK, turn);
    }
    template <class Operand> static INLINE void dot(Floats& sum, Operand columns, Operand row) { E::dot(sum, columns, row); }
    static INLINE Floats total(Floats sum, int32_t) { return sum; }

    template <class In> static INLINE Packed pack(const In* x, int count, int padded, uint32_t* to) {
        auto* numbers = reinterpret_cast<RowNumber*>(to);
        for (int i = 0; i < padded; i += LANES) {
            const Floats v = i < count ? load(x + i, count - i) : splat(0.f);
            typename E::Element rounded[LANES];
            if constexpr (std::is_same_v<RowNumber, typename E::Element>) store(numbers + i, v);
            else store(rounded, v), store(numbers + i, load(rounded));
        }
        return {1, 0};
    }
};

template <> struct AttentionWords<INT8> {
    using Columns = Words;
    static constexpr bool SCALED = true;
    static constexpr int TURNS = 1, PARTS = 2;  // parts of a row lie one behind the other
    static constexpr float LARGEST = 127 * 128;

#if LLMBOX_BYTE_DOT
    using Products = Bytes;
    static constexpr int ROWS = 3;
    struct Sum {
        Ints high, low;
    };
    struct Row {
        Words high, low;
    };
    static INLINE Row row(const uint32_t* at, int w, int part, int) { return {splat(at[w]), splat(at[w + part])}; }
    static INLINE void dot(Sum& sum, Columns columns, Row row) {
        Bytes::dot(sum.high, columns, row.high);
        Bytes::dot(sum.low, columns, row.low);
    }
    static INLINE Floats total(const Sum& sum, int32_t offset) {
        const Words both = ((Words)sum.high << 7) + (Words)sum.low;
        return to_floats((Ints)(both - splat(static_cast<uint32_t>(offset))));
    }
    // Codes of LANES neighbors, from the word `at` on.
    static INLINE void put(Ints codes, int part, uint32_t* at) {
        const Ints high = (codes + 64) >> 7;
        store_bytes(at, high);
        store_bytes(at + part, codes - (high << 7));
    }
#else
    static constexpr int ROWS = 6;
    using Products = SplitBytes;
    using Sum = Ints;
    using Row = Products::Row;
    static INLINE Row row(const uint32_t* at, int w, int part, int) { return {splat(at[w]), splat(at[w + part])}; }
    static INLINE void dot(Sum& sum, Columns columns, Row row) { Products::dot(sum, columns, row); }
    static INLINE Floats total(Sum sum, int32_t offset) {
        return to_floats((Ints)((Words)sum - splat(static_cast<uint32_t>(offset))));
    }
    static INLINE void put(Ints codes, int part, uint32_t* at) {
        for (int i = 0; i < LANES; i += 4) {
            at[i / 4] = (codes[i] & 0xffff) | static_cast<uint32_t>(codes[i + 2]) << 16;
            at[part + i / 4] = (codes[i + 1] & 0xffff) | static_cast<uint32_t>(codes[i + 3]) << 16;
        }
    }
#endif

    static INLINE Columns columns(const void* from, int) {
        return Products::FLIP ? load_as<Words>(from) : load_as<Words>(from) ^ splat(0x80808080u);
    }

    template <class In> static INLINE Packed pack(const In* x, int count, int padded, uint32_t* to) {
        const auto [most, finite] = range_of(x, count);
        const Floats inverse = splat(finite && most > 0 ? LARGEST / most : 0);
        Ints total = {};
        for (int i = 0; i < padded; i += LANES) {
            const Ints codes = to_nearest(finite && i < count ? load(x + i, count - i) * inverse : splat(0.f));
            total += codes;
            put(codes, padded / 4, to + i / 4);
        }
        return {finite ? most / LARGEST : NAN, static_cast<int32_t>(Products::FLIP) * sum(total)};
    }
};

}  // namespace llmbox
