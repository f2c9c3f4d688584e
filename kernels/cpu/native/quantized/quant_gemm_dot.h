// The quantized linear with the dot instructions of vectors (dot_product.h): ROWS rows of x, some groups of a panel.
#pragma once

#include "quantized/quantize_activations.h"

namespace llmbox {

// What makes weights of a group's half bytes: where its steps or its zeros lie; null: n - 8.
struct Offsets4 {
    const uint8_t *steps, *zeros;
    bool e2m1;

    Offsets4(const QuantLinear& linear, const uint8_t* group)
        : steps(linear.has_steps() ? group + 2 * PANEL : nullptr),
          zeros(linear.has_zeros() ? group + 2 * PANEL : nullptr),
          e2m1(linear.is_e2m1()) {}
};

// Groups of a panel that are multiplied.
struct GroupSpan {
    int begin, end;
};

// Some groups of a panel, one behind the other: where the codes, offsets and scales of the first lie.
struct Groups {
    const uint8_t *codes, *scales;
    Offsets4 offsets;
    size_t codes_step, scales_step;  // to the next group; offsets lie with the scales
    int first, count;
    int shift = 0;  // of corrections, to the left
};

typedef uint16_t Halves __attribute__((vector_size(LANES * 4)));
typedef uint8_t Octets __attribute__((vector_size(LANES * 4)));

#if defined(__AVX512BW__)
// Shuffles of bytes inside words; 0x80 makes a zero.
struct BytePlaces {
    alignas(64) uint32_t halves[LANES], bytes[LANES];
    constexpr explicit BytePlaces(uint32_t i) : halves{}, bytes{} {
        for (uint32_t word = 0; word < LANES; word++) {
            const uint32_t byte = word % 4 * 4 + i;
            halves[word] = byte * 0x00010001u | 0x80008000u, bytes[word] = byte * 0x01010101u;
        }
    }
};
inline constexpr BytePlaces PLACES[4] = {BytePlaces(0), BytePlaces(1), BytePlaces(2), BytePlaces(3)};
#endif

// Byte `i` of each word at both halves of it, or four times.
INLINE Words byte_in_halves(Words words, int i) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8((__m512i)words, load_as<__m512i>(PLACES[i].halves));
#else
    const Words byte = words >> static_cast<uint32_t>(8 * i) & splat(0xffu);
    return byte | byte << 16;
#endif
}
INLINE Words byte_in_bytes(Words words, int i) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8((__m512i)words, load_as<__m512i>(PLACES[i].bytes));
#else
    const Words both = byte_in_halves(words, i);
    return both | both << 8;
#endif
}

// What half bytes of 16 inputs of 16 (8, 4) outputs are multiplied by, and what is taken off then.
struct WideSteps {
    Words step, zero;  // step in both halves of a word, zero in its four bytes

    // Two words of each output. A product of two half bytes stays in its byte.
    INLINE void widen(const uint8_t* from, Words* to) const {
        const Words both = load_as<Words>(from), low = splat(0x0f0f0f0fu);
        to[0] = (Words)((Octets)((Halves)(both & low) * (Halves)step) - (Octets)zero);
        to[1] = (Words)((Octets)((Halves)(both >> 4 & low) * (Halves)step) - (Octets)zero);
    }
};

// Those of four times 16 inputs: a byte of a word for each.
struct FourSteps {
    Words step, zero;

    // FLIP: 0x80 adds 128 to the bytes that come out.
    template <uint32_t FLIP> static INLINE FourSteps load(const uint8_t* from) {
        const Words all = load_as<Words>(from), low = splat(0x0f0f0f0fu), even = splat(0x00ff00ffu);
        const Words step = all & low, eight = (all >> 4 & low) + splat(0x08080808u);
        const Halves evens = (Halves)(step & even) * (Halves)(eight & even) >> 1;
        const Halves odds = (Halves)(step >> 8 & even) * (Halves)(eight >> 8 & even) >> 1;
        return {step, ((Words)evens | (Words)odds << 8) ^ splat(FLIP * 0x01010101u)};
    }
    // A byte of `from` is the zero of an output.
    template <uint32_t FLIP> static INLINE FourSteps of_zeros(const uint8_t* from) {
        return {splat(0x01010101u), (lane_bytes(from) * splat(0x01010101u)) ^ splat(FLIP * 0x01010101u)};
    }
    template <uint32_t FLIP> static INLINE FourSteps plain() {
        return {splat((PLAIN_STEP & 15) * 0x01010101u), splat((8 ^ FLIP) * 0x01010101u)};
    }
    INLINE WideSteps at(int i) const { return {byte_in_halves(step, i), byte_in_bytes(zero, i)}; }
};

// Bytes of twice the floats in half bytes (E2M1). FLIP: 0x80 adds 128.
template <uint32_t FLIP> INLINE Words e2m1_bytes(Words n) {
#if defined(__AVX2__) || defined(__aarch64__)
    constexpr uint32_t ALL = FLIP * 0x01010101u;
    // Four neighbors of E2M1_VALUES a word.
    constexpr uint32_t A = 0x03020100u ^ ALL, B = 0x0c080604u ^ ALL, C = 0xfdfeff00u ^ ALL, D = 0xf4f8fafcu ^ ALL;
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8((__m512i)Words{A, B, C, D, A, B, C, D, A, B, C, D, A, B, C, D}, (__m512i)n);
#elif defined(__AVX2__)
    return (Words)_mm256_shuffle_epi8((__m256i)Words{A, B, C, D, A, B, C, D}, (__m256i)n);
#else
    return (Words)vqtbl1q_u8((uint8x16_t)Words{A, B, C, D}, (uint8x16_t)n);
#endif
#else
    const Octets x = (Octets)n, m = x & (Octets)splat(0x07070707u), one = (Octets)splat(0x01010101u);
    const Octets more = ((Octets)(m == 5 * one) & one) + ((Octets)(m == 6 * one) & (2 * one)) + ((Octets)(m == 7 * one) & (5 * one));
    const Octets sign = (Octets)(x > 7 * one), value = m + more;
    return (Words)((value ^ sign) - sign) ^ splat(FLIP * 0x01010101u);
#endif
}
template <uint32_t FLIP> INLINE void widen_e2m1(const uint8_t* from, Words* to) {
    const Words both = load_as<Words>(from), low = splat(0x0f0f0f0fu);
    to[0] = e2m1_bytes<FLIP>(both & low), to[1] = e2m1_bytes<FLIP>(both >> 4 & low);
}
template <int COUNT, uint32_t FLIP> INLINE void widen_e2m1_piece(const uint8_t* codes, uint8_t* to) {
    UNROLL for (int i = 0; i < 2 * COUNT; i++) {
        Words words[2];
        widen_e2m1<FLIP>(codes, words);
        store_as(to, words[0]), store_as(to + PANEL_STRIDE, words[1]);
        codes += PANEL_STRIDE;
        to += 2 * PANEL_STRIDE;
    }
}

// Half bytes n as bytes, plus `more` in each.
INLINE void split_halves(const uint8_t* from, Words more, Words* to) {
    const Words both = load_as<Words>(from), low = splat(0x0f0f0f0fu);
    to[0] = (both & low) + more, to[1] = (both >> 4 & low) + more;
}
// What makes n - zero + 16 of n, for four inputs: no byte is below 0.
constexpr int OVER_ZERO_BITS = 4, OVER_ZERO = 1 << OVER_ZERO_BITS;
INLINE Words above_zeros(const uint8_t* zeros) {
    return splat(OVER_ZERO * 0x01010101u) - lane_bytes(zeros) * splat(0x01010101u);
}

// int4 as bytes: COUNT times 16 inputs, those from the `first` of `four` on, of 16 (8, 4) outputs.
template <int COUNT> INLINE void widen_piece(const uint8_t* codes, const FourSteps& four, int first, uint8_t* to) {
    UNROLL for (int i = 0; i < COUNT; i++) {
        const WideSteps wide = four.at(first + i);
        Words words[4];
        wide.widen(codes, words);
        wide.widen(codes + PANEL_STRIDE, words + 2);
        UNROLL for (int w = 0; w < 4; w++) store_as(to + w * PANEL_STRIDE, words[w]);
        codes += 2 * PANEL_STRIDE;
        to += 4 * PANEL_STRIDE;
    }
}

// A whole group: n without steps, or n - zero + 16. `coming` is brought meanwhile, a line for two that are read.
template <uint32_t FLIP>
INLINE void widen_group(const uint8_t* codes, Offsets4 offsets, int group, uint8_t* to, const uint8_t* coming) {
    Words more[PANEL / LANES] = {};
    for (int part = 0; offsets.zeros && part < PANEL / LANES; part++) more[part] = above_zeros(offsets.zeros + part * LANES);
    for (int step = 0; step < group / STEP_INPUTS; step++)
        for (int part = 0; part < PANEL / LANES; part++, coming += 64) {
            const size_t column = part * static_cast<size_t>(LANES * 4);
            prefetch_stream(coming);
            if (offsets.e2m1) {
                widen_e2m1_piece<1, FLIP>(
                    codes + step * 2 * PANEL_STRIDE + column, to + step * 4 * PANEL_STRIDE + column);
                continue;
            }
            if (!offsets.steps) {
                UNROLL for (int i = 0; i < 2; i++) {
                    Words words[2];
                    uint8_t* at = to + (2 * step + i) * 2 * PANEL_STRIDE + column;
                    split_halves(codes + (2 * step + i) * PANEL_STRIDE + column, more[part], words);
                    store_as(at, words[0]), store_as(at + PANEL_STRIDE, words[1]);
                }
                continue;
            }
            const auto four = FourSteps::load<FLIP>(offsets.steps + step / 4 * PANEL_STRIDE + column);
            widen_piece<1>(codes + step * 2 * PANEL_STRIDE + column, four, step % 4, to + step * 4 * PANEL_STRIDE + column);
        }
}

// What one vector of memory holds of 16 (8, 4) outputs: a word of each in int8, two in int4 with steps and in what
// templates call FP4, four bits of E2M1; PLAIN4, which are multiplied as n; and ZEROS4, as n - zero + 16.
// SMALL8 are bytes below 128, as the last two are when they are widened in memory.
constexpr int FP4 = 3, PLAIN4 = 5, ZEROS4 = 6, SMALL8 = std::is_same_v<SmallBytes<31>, Bytes> ? 8 : 9;
template <int BITS>
using DotOf = std::conditional_t<BITS == PLAIN4, SmallBytes<15>,
                                 std::conditional_t<BITS == ZEROS4 || BITS == SMALL8, SmallBytes<15 + OVER_ZERO>, Bytes>>;
template <int BITS> struct Codes;
template <> struct Codes<FP4> {
    static constexpr int WORDS = 2;
    INLINE void load(const uint8_t* from, Words* to) const { widen_e2m1<Bytes::FLIP>(from, to); }
};
template <> struct Codes<8> {
    static constexpr int WORDS = 1;
    INLINE void load(const uint8_t* from, Words* to) const {
        to[0] = load_as<Words>(from);
        if (INT8_FLIP != Bytes::FLIP) to[0] ^= splat(0x80808080u);
    }
};
template <> struct Codes<9> {
    static constexpr int WORDS = 1;
    INLINE void load(const uint8_t* from, Words* to) const { to[0] = load_as<Words>(from); }
};
template <> struct Codes<PLAIN4> {
    static constexpr int WORDS = 2;
    INLINE void load(const uint8_t* from, Words* to) const { split_halves(from, Words{}, to); }
};
template <> struct Codes<ZEROS4> {
    static constexpr int WORDS = 2;
    Words more;
    INLINE void load(const uint8_t* from, Words* to) const { split_halves(from, more, to); }
};
template <> struct Codes<4> {
    static constexpr int WORDS = 2;
    FourSteps four;
    WideSteps wide;
    INLINE void load(const uint8_t* from, Words* to) const { wide.widen(from, to); }
};

// Rows of a tile that widens its weights in registers: each vector of them is widened once for all rows. With 32 registers
// and one instruction for a product of words, a tile of half as many columns has room for twice the rows. Tiles of AMX are
// faster from 7 rows on.
constexpr int WIDENED_TILE = LANES == 16 && LLMBOX_BYTE_DOT && !LLMBOX_TILES ? 2 * ROW_TILE : ROW_TILE;

// tile[ROWS][PANEL] += the sums of some groups.
template <int BITS, int ROWS>
NOINLINE void multiply_groups(const Groups& groups, const QuantRows& x, int row, float* tile, Prefetch next) {
    constexpr int VECTORS = ROWS > ROW_TILE ? COLUMN_VECTORS / 2 : COLUMN_VECTORS, LOADED = Codes<BITS>::WORDS;
    using Sums = ByteSums<DotOf<BITS>, ROWS, VECTORS>;
    constexpr int WORDS = std::max(LOADED, Sums::WORDS);
    for (int i = 0; i < groups.count; i++) {
        // Of the rows; they may belong to two blocks.
        size_t cells[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) cells[r] = x.cell(row + r, groups.first + i);
        const int8_t* values[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) values[r] = x.values + cells[r] * x.group;
        const auto* scales = reinterpret_cast<const uint16_t*>(groups.scales + i * groups.scales_step);
        for (int column = 0; column < PANEL; column += VECTORS * LANES) {
            const uint8_t* from = groups.codes + i * groups.codes_step + 4 * column;
            const size_t skipped = i * groups.scales_step;
            Codes<BITS> codes[VECTORS];
            Sums sums;
            const auto zeros = [&](int v) { return groups.offsets.zeros + skipped + column + v * LANES; };
            if constexpr (BITS == ZEROS4) UNROLL for (int v = 0; v < VECTORS; v++) codes[v].more = above_zeros(zeros(v));
            if (BITS == PLAIN4 && groups.offsets.zeros) {
                Words zero[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) zero[v] = lane_bytes(zeros(v));
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Words sum = (Words)splat_int(x.corrections[cells[r]]);  // of 128 bytes: it fits half a word
                    UNROLL for (int v = 0; v < VECTORS; v++) sums.begin(r, v, multiply_pairs(zero[v], sum));
                }
            } else {
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Ints correction = splat_int(x.corrections[cells[r]] << groups.shift);
                    UNROLL for (int v = 0; v < VECTORS; v++) sums.begin(r, v, correction);
                }
            }
            const Prefetch coming = column ? Prefetch{} : next;  // the first columns bring it all
            const uint8_t* ahead = coming.at;
            for (int k = 0; k < x.group; k += STEP_INPUTS) {
                if constexpr (BITS == 4) {
                    const int step = k / STEP_INPUTS;
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        const uint8_t* steps = groups.offsets.steps + skipped + 4 * column;
                        if (step % 4 == 0)
                            codes[v].four = FourSteps::load<Bytes::FLIP>(steps + step / 4 * PANEL_STRIDE + v * LANES * 4);
                        codes[v].wide = codes[v].four.at(step % 4);
                    }
                }
                UNROLL for (int part = 0; part < STEP_INPUTS; part += 4 * WORDS) {
                    Words weights[VECTORS][WORDS];
                    UNROLL for (int w = 0; w < WORDS; w += LOADED) {
                        UNROLL for (int v = 0; v < VECTORS; v++) codes[v].load(from + v * LANES * 4, weights[v] + w);
                        for (size_t offset = 0; offset < coming.step; offset += 64) prefetch_stream(ahead + offset);
                        ahead += coming.step;
                        from += PANEL_STRIDE;
                    }
                    sums.add(weights, values, k + part);
                }
            }
            if (column == 0) next.at = ahead;
            Floats weight_scales[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) 
                weight_scales[v] = load_scales(scales + column + v * LANES, groups.offsets.e2m1);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats scale = splat(x.scales[cells[r]]);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* to = tile + r * PANEL + column + v * LANES;
                    store(to, multiply_add(to_floats(sums.total(r, v)) * scale, weight_scales[v], load(to)));
                }
            }
        }
        asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
    }
}

// The same for groups of 32, where what each group takes besides its products is a large part: all of a group is one block
// of code without a loop, whose rows are constants away from the first.
template <int BITS, int ROWS>
NOINLINE void multiply_short_groups(const Groups& groups, const QuantRows& x, int row, float* tile, Prefetch next) {
    constexpr int VECTORS = ROWS > ROW_TILE ? COLUMN_VECTORS / 2 : COLUMN_VECTORS, LOADED = Codes<BITS>::WORDS, GROUP = 32;
    using Sums = ByteSums<DotOf<BITS>, ROWS, VECTORS>;
    constexpr int WORDS = std::max(LOADED, Sums::WORDS);
    const uint8_t *codes_at = groups.codes, *scales_at = groups.scales, *zeros_at = groups.offsets.zeros;
    const int shift = BITS == ZEROS4 ? OVER_ZERO_BITS : groups.shift;
    for (int i = 0; i < groups.count; i++) {
        const RowCells<ROWS> cells(x, row, groups.first + i);
        const float* row_scales = x.scales + cells[0];
        const int32_t* corrections = x.corrections + cells[0];
        const int8_t* first = x.values + cells[0] * GROUP;
        hide(first), hide(row_scales), hide(corrections);
        const int8_t* values[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) values[r] = first + cells.from_first(r) * GROUP;
        for (int column = 0; column < PANEL; column += VECTORS * LANES) {
            const uint8_t* from = codes_at + 4 * column;
            Codes<BITS> codes[VECTORS];
            Sums sums;
            if constexpr (BITS == ZEROS4)
                UNROLL for (int v = 0; v < VECTORS; v++) codes[v].more = above_zeros(zeros_at + column + v * LANES);
            if (BITS == PLAIN4 && zeros_at) {
                Words zero[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++) zero[v] = lane_bytes(zeros_at + column + v * LANES);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Words sum = (Words)splat_int(corrections[cells.from_first(r)]);
                    UNROLL for (int v = 0; v < VECTORS; v++) sums.begin(r, v, multiply_pairs(zero[v], sum));
                }
            } else {
                UNROLL for (int r = 0; r < ROWS; r++) {
                    Ints correction = splat_int(corrections[cells.from_first(r)]);
                    if (BITS == ZEROS4 || BITS == 8 || BITS == SMALL8) hide(correction), correction = correction << shift;
                    UNROLL for (int v = 0; v < VECTORS; v++) sums.begin(r, v, correction);
                }
            }
            UNROLL for (int k = 0; k < GROUP; k += 4 * WORDS) {
                Words weights[VECTORS][WORDS];
                UNROLL for (int w = 0; w < WORDS; w += LOADED) {
                    UNROLL for (int v = 0; v < VECTORS; v++) codes[v].load(from + v * LANES * 4, weights[v] + w);
                    from += PANEL_STRIDE;
                }
                if (column == 0) {  // the first columns bring it all
                    for (size_t offset = 0; offset < next.step * (WORDS / LOADED); offset += 64) prefetch_stream(next.at + offset);
                    next.at += next.step * (WORDS / LOADED);
                }
                sums.add(weights, values, k);
            }
            const auto* scales = reinterpret_cast<const uint16_t*>(scales_at) + column;
            Floats weight_scales[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weight_scales[v] = load_scales(scales + v * LANES, groups.offsets.e2m1);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats scale = splat(row_scales[cells.from_first(r)]);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* to = tile + r * PANEL + column + v * LANES;
                    store(to, multiply_add(to_floats(sums.total(r, v)) * scale, weight_scales[v], load(to)));
                }
            }
        }
        asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
        codes_at += groups.codes_step;
        scales_at += groups.scales_step;
        if (zeros_at) zeros_at += groups.scales_step;
    }
}

// So few rows stream int8: sums stay in registers from group to group, and a line is requested for each that is read, where
// several at once for later were a tenth slower on a Zen 5. Not with AMX, where it was not measured.
constexpr int STREAMED_ROWS = LANES == 16 && LLMBOX_BYTE_DOT && !LLMBOX_TILES ? 4 : 0;

// tile[ROWS][PANEL] += the sums of some groups, which lie at `from`.
template <int ROWS>
NOINLINE void stream_groups(const QuantLinear& linear, const uint8_t* from, GroupSpan span, const QuantRows& x, int row,
                            float* tile) {
    constexpr int VECTORS = PANEL / LANES;
    Floats totals[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) totals[r][v] = load(tile + r * PANEL + v * LANES);
    for (int g = span.begin; g < span.end; g++) {
        const auto* scales = reinterpret_cast<const uint16_t*>(from);
        const RowCells<ROWS> cells(x, row, g);
        Ints sums[ROWS][VECTORS];
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                sums[r][v] = splat_int(x.corrections[cells[r]]);
        for (size_t offset = 0; offset < linear.codes_offset; offset += 64) prefetch_stream(from + AHEAD + offset);
        from += linear.codes_offset;
        for (int k = 0; k < x.group; k += 4, from += PANEL_STRIDE)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                prefetch_stream(from + AHEAD + v * LANES * 4);
                Words weights;
                Codes<8>().load(from + v * LANES * 4, &weights);
                UNROLL for (int r = 0; r < ROWS; r++)
                    Bytes::dot(sums[r][v], weights, Bytes::row(load_word(x.values + cells[r] * x.group + k)));
            }
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const Floats weight_scales = load_scales(scales + v * LANES);
            UNROLL for (int r = 0; r < ROWS; r++)
                totals[r][v] = multiply_add(to_floats(sums[r][v]) * splat(x.scales[cells[r]]), weight_scales, totals[r][v]);
        }
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(tile + r * PANEL + v * LANES, totals[r][v]);
}

}  // namespace llmbox
