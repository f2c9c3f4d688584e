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
    using Columns = typename E::Columns;
    using Row = typename E::Row;
    using Sum = Floats;
    static constexpr bool SCALED = false;  // whether stored rows have a scale of their own
    static constexpr int PARTS = 1;        // words of a row for one stored word, a part apart
    static constexpr int ROWS = 6;         // whose sums fit into registers

    static INLINE Columns columns(const void* from) { return E::columns(from); }
    static INLINE Row row(const uint32_t* at, int) { return E::row(*at); }
    static INLINE void dot(Floats& sum, Columns columns, Row row) { E::dot(sum, columns, row); }
    static INLINE Floats total(Floats sum, int32_t) { return sum; }

    template <class In> static INLINE Packed pack(const In* x, int count, int padded, uint32_t* to) {
        auto* elements = reinterpret_cast<typename E::Element*>(to);
        for (int i = 0; i < padded; i += LANES)
            store(elements + i, i < count ? load(x + i, count - i) : splat(0.f));
        return {1, 0};
    }
};

template <> struct AttentionWords<INT8> {
    using Columns = Words;
    static constexpr bool SCALED = true;
    static constexpr int PARTS = 2;
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
    static INLINE Row row(const uint32_t* at, int part) { return {splat(at[0]), splat(at[part])}; }
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
    static INLINE Row row(const uint32_t* at, int part) { return {splat(at[0]), splat(at[part])}; }
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

    static INLINE Columns columns(const void* from) {
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
