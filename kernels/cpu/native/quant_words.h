// The quantised linear with the dot instructions of vectors (words.h): ROWS rows of x, some groups of a panel.
#pragma once

#include "quant_rows.h"

namespace llmbox {

// Some groups of a panel, one behind the other: where the codes, steps and scales of the first lie.
struct Groups {
    const uint8_t *codes, *steps, *scales;  // steps: null where there are none
    size_t codes_step, scales_step;         // to the next group; steps lie with the scales
    int first, count;
};

typedef uint16_t Halves __attribute__((vector_size(LANES * 4)));
typedef uint8_t Octets __attribute__((vector_size(LANES * 4)));

// Byte i of each word, four times.
INLINE Words spread_byte(Words words, int i) {
#if defined(__AVX512BW__)
    Words places = splat(static_cast<uint32_t>(i) * 0x01010101u);
    UNROLL for (int word = 0; word < LANES; word++) places[word] += word % 4 * 0x04040404u;
    return (Words)_mm512_shuffle_epi8((__m512i)words, (__m512i)places);
#else
    const Words byte = words >> static_cast<uint32_t>(8 * i) & splat(0xffu), two = byte | byte << 8;
    return two | two << 16;
#endif
}

// Steps and zeros of 16 (8, 4) outputs, as what halves of bytes are multiplied by and what is taken off then.
struct WideSteps {
    Words step, zero;  // step in both 16 bits of a word, zero in its four bytes

    // Those of byte `s % 4` of each word. FLIP: 0x80 adds 128 to the bytes that come out.
    template <uint32_t FLIP> static INLINE WideSteps load(const uint8_t* from, int s) {
        const Words all = spread_byte(load_as<Words>(from), s % 4), low = splat(0x000f000fu);
        const Words step = all & low, z = all >> 4 & low;
        const Halves zero = (Halves)step * ((Halves)z + (Halves)splat(0x00080008u)) >> 1;
        return {step, ((Words)zero | (Words)zero << 8) ^ splat(FLIP * 0x01010101u)};
    }
    template <uint32_t FLIP> static INLINE WideSteps plain() {
        return {splat((PLAIN_STEP & 15) * 0x00010001u), splat((8 ^ FLIP) * 0x01010101u)};
    }

    // Two words of each output. A product of two half bytes stays in its byte.
    INLINE void widen(const uint8_t* from, Words* to) const {
        const Words both = load_as<Words>(from), low = splat(0x0f0f0f0fu);
        to[0] = (Words)((Octets)((Halves)(both & low) * (Halves)step) - (Octets)zero);
        to[1] = (Words)((Octets)((Halves)(both >> 4 & low) * (Halves)step) - (Octets)zero);
    }
};

// int4 as the bytes of int8, plus FLIP: 16 inputs, the `step`th of their group, of the `part`th 16 (8, 4) outputs.
template <uint32_t FLIP>
INLINE void widen_piece(const uint8_t* codes, const uint8_t* steps, int step, int part, uint8_t* to) {
    const size_t column = part * static_cast<size_t>(LANES * 4);
    const WideSteps wide = steps ? WideSteps::load<FLIP>(steps + step / 4 * PANEL_STRIDE + column, step)
                                 : WideSteps::plain<FLIP>();
    codes += step * 2 * PANEL_STRIDE + column;
    to += step * 4 * PANEL_STRIDE + column;
    Words words[4];
    wide.widen(codes, words);
    wide.widen(codes + PANEL_STRIDE, words + 2);
    UNROLL for (int w = 0; w < 4; w++) store_as(to + w * PANEL_STRIDE, words[w]);
}

// A whole group. `coming` is brought meanwhile, a line for two that are read.
template <uint32_t FLIP>
INLINE void widen_group(const uint8_t* codes, const uint8_t* steps, int group, uint8_t* to, const uint8_t* coming) {
    for (int step = 0; step < group / STEP_INPUTS; step++)
        for (int part = 0; part < PANEL / LANES; part++, coming += 64) {
            prefetch_stream(coming);
            widen_piece<FLIP>(codes, steps, step, part, to);
        }
}

// What one vector of memory holds of 16 (8, 4) outputs: a word of each in int8, two in int4.
template <int BITS> struct Codes;
template <> struct Codes<8> {
    static constexpr int WORDS = 1;
    INLINE void steps(const uint8_t*, int) {}
    INLINE void load(const uint8_t* from, Words* to) const {
        to[0] = load_as<Words>(from);
        if (!INT8_FLIP) to[0] ^= splat(0x80808080u);
    }
};
template <> struct Codes<4> {
    static constexpr int WORDS = 2;
    WideSteps wide = WideSteps::plain<0x80>();
    INLINE void steps(const uint8_t* from, int s) { wide = WideSteps::load<0x80>(from, s); }
    INLINE void load(const uint8_t* from, Words* to) const { wide.widen(from, to); }
};

// tile[ROWS][PANEL] += the sums of some groups.
template <int BITS, int ROWS>
INLINE void multiply_groups(const Groups& groups, const QuantRows& x, int row, float* tile, Prefetch next) {
    constexpr int VECTORS = COLUMN_VECTORS, WORDS = Codes<BITS>::WORDS;
    for (int i = 0; i < groups.count; i++) {
        // Of the rows; they may belong to two blocks.
        size_t cells[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) cells[r] = x.cell(row + r, groups.first + i);
        const int8_t* values[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) values[r] = x.values + cells[r] * x.group;
        const auto* scales = reinterpret_cast<const uint16_t*>(groups.scales + i * groups.scales_step);
        for (int column = 0; column < PANEL; column += VECTORS * LANES) {
            Ints sums[ROWS][VECTORS];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = (Ints)splat(static_cast<uint32_t>(x.corrections[cells[r]]));
            const uint8_t* from = groups.codes + i * groups.codes_step + 4 * column;
            const uint8_t* steps = groups.steps ? groups.steps + i * groups.scales_step + 4 * column : nullptr;
            Codes<BITS> codes[VECTORS];
            const Prefetch coming = column ? Prefetch{} : next;  // the first columns bring it all
            const uint8_t* ahead = coming.at;
            for (int k = 0; k < x.group; k += STEP_INPUTS) {
                if (BITS == 4 && steps)
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        codes[v].steps(steps + k / (4 * STEP_INPUTS) * PANEL_STRIDE + v * LANES * 4, k / STEP_INPUTS);
                UNROLL for (int part = 0; part < STEP_INPUTS; part += 4 * WORDS) {
                    Words weights[VECTORS][WORDS];
                    UNROLL for (int v = 0; v < VECTORS; v++) codes[v].load(from + v * LANES * 4, weights[v]);
                    for (size_t offset = 0; offset < coming.step; offset += 64) prefetch_stream(ahead + offset);
                    ahead += coming.step;
                    from += PANEL_STRIDE;
                    UNROLL for (int w = 0; w < WORDS; w++)
                        UNROLL for (int r = 0; r < ROWS; r++) {
                            const Bytes::Row broadcast = Bytes::row(load_word(values[r] + k + part + 4 * w));
                            UNROLL for (int v = 0; v < VECTORS; v++) Bytes::dot(sums[r][v], weights[v][w], broadcast);
                        }
                }
            }
            if (column == 0) next.at = ahead;
            Floats weight_scales[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weight_scales[v] = load_scales(scales + column + v * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats scale = splat(x.scales[cells[r]]);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* to = tile + r * PANEL + column + v * LANES;
                    store(to, multiply_add(to_floats(sums[r][v]) * scale, weight_scales[v], load(to)));
                }
            }
        }
        asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
    }
}

}  // namespace llmbox
