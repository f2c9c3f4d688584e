// The linear on GGUF's blocks (gguf_blocks.h).
//
// Few rows stream a panel, whose codes become bytes in registers. For more rows a slice of eight groups of 32 inputs
// becomes bytes and float32 scales in the L1 cache first, and all rows visit it there. Both give the same bits.
#include <climits>

#include "quantized/quant_gemm.h"

namespace llmbox {

// Values of a table as unsigned bytes.
template <Table TABLE> INLINE Words table_bytes(Words n) {
#if defined(__AVX2__) || defined(__aarch64__)
    alignas(16) static constexpr auto table = [] {
        struct {
            uint8_t of[16];
        } all{};
        for (int i = 0; i < 16; i++) all.of[i] = static_cast<uint8_t>(values_of(TABLE).values[i] + values_of(TABLE).zero);
        return all;
    }();
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load_as<__m128i>(table.of)), (__m512i)n);
#elif defined(__AVX2__)
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load_as<__m128i>(table.of)), (__m256i)n);
#else
    return (Words)vqtbl1q_u8(vld1q_u8(table.of), (uint8x16_t)n);
#endif
#else
    uint8_t bytes[sizeof(Words)];
    store_as(bytes, n);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(values_of(TABLE).values[byte & 15] + values_of(TABLE).zero);
    return load_as<Words>(bytes);
#endif
}

// Word `w` of the codes of 32 inputs: four inputs of each of 16 (8, 4) outputs, a byte each. Loads that words share are done
// once, as nothing is stored between them.
template <int BITS, Table TABLE> INLINE Words block_word(const uint8_t* codes, int w) {
    constexpr int LOW = BITS < 4 ? 2 : 4, HIGH = BITS - LOW;
    const uint32_t pair = w % 4 * 2;
    const auto plane = [&](int row) { return load_as<Words>(codes + row * PANEL_STRIDE); };
    Words n = LOW == 4 ? plane(w / 2) >> static_cast<uint32_t>(w % 2 * 4) & splat(0x0f0f0f0fu)
                       : plane(w / 4) >> pair & splat(0x03030303u);
    if (HIGH == 1) n |= (plane(LOW) >> static_cast<uint32_t>(w) & splat(0x01010101u)) << static_cast<uint32_t>(LOW);
    if (HIGH == 2) n |= (plane(LOW + w / 4) >> pair & splat(0x03030303u)) << static_cast<uint32_t>(LOW);
    if constexpr (TABLE != Table::NONE) return table_bytes<TABLE>(n);
    return n;
}

// Bytes as floats, a lane each.
INLINE Floats unsigned_bytes(const uint8_t* from) { return to_floats((Ints)lane_bytes(from)); }
INLINE Floats signed_bytes(const uint8_t* from) {
#if defined(__AVX512BW__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return to_floats(__builtin_convertvector(load_as<SignedBytes>(from), Ints));
#endif
}

// How a format's scales come about.
enum class Parts { NONE, BYTES, PAIRS, SIGNED };

// Scales and minimums of 16 (8, 4) outputs. The product of a float16 and a byte is exact.
template <Parts PARTS, bool MINIMUMS, Table TABLE> struct UnitScales {
    Floats scale, minimum = {};

    INLINE UnitScales(const uint8_t* unit, int column) {
        const auto* halves = reinterpret_cast<const uint16_t*>(unit) + column;
        scale = load_scales(halves);
        if (values_of(TABLE).factor != 1) scale *= splat(values_of(TABLE).factor);
        if (MINIMUMS) minimum = load_scales(halves + PANEL);
        if (MINIMUMS && PARTS != Parts::NONE) minimum = -minimum;
    }
    INLINE UnitScales(Floats scale, Floats minimum) : scale(scale), minimum(minimum) {}
    // `at`: the byte of the first of these outputs; those of minimums are `to_minimums` behind. No copy is changed: the
    // compiler would make it in memory, by halves of a vector that are then loaded as a whole, which waits.
    INLINE UnitScales of_part(const uint8_t* at, size_t to_minimums) const {
        if constexpr (PARTS == Parts::SIGNED) return {scale * signed_bytes(at), minimum};
        if constexpr (PARTS == Parts::BYTES) return {scale * unsigned_bytes(at), minimum * unsigned_bytes(at + to_minimums)};
        if constexpr (PARTS == Parts::PAIRS) {
            const Floats both = unsigned_bytes(at), high = to_floats(to_nearest(both * splat(1 / 16.f) - splat(15 / 32.f)));
            return {scale * (both - high * splat(16.f)), minimum * high};
        }
        return {scale, minimum};
    }
};

// Neighboring rows of a group.
template <int ROWS> struct BlockCells {
    RowCells<ROWS> cells;
    const float *scales, *sums;
    const int32_t* corrections;
    const int8_t* values[ROWS];

    INLINE BlockCells(const QuantRows& x, int row, int g)
        : cells(x, row, g), scales(x.scales + cells[0]), sums(x.sums + 2 * cells[0]), corrections(x.corrections + 2 * cells[0]) {
        const int8_t* first = x.values + cells[0] * BLOCK_GROUP;
        hide(first), hide(scales), hide(sums), hide(corrections);
        UNROLL for (int r = 0; r < ROWS; r++) values[r] = first + cells.from_first(r) * BLOCK_GROUP;
    }
    INLINE float scale(int r) const { return scales[cells.from_first(r)]; }
    INLINE float sum(int r, int span) const { return sums[2 * cells.from_first(r) + span]; }
    INLINE int32_t correction(int r, int span) const { return corrections[2 * cells.from_first(r) + span]; }
};

// tile[ROWS][PANEL] += x * one unit, for few rows: codes become bytes in registers.
template <int BITS, class Dot, int SPAN, bool MINIMUMS, Parts PARTS, Table TABLE, int ROWS>
INLINE void multiply_unit(const BlockLayout& layout, const uint8_t* unit, int first, const QuantRows& x, int row, float* tile,
                          Prefetch next) {
    constexpr int VECTORS = COLUMN_VECTORS, SPANS = BLOCK_GROUP / SPAN, GROUPS = PARTS == Parts::NONE ? 1 : 8;
    for (int column = 0; column < PANEL; column += VECTORS * LANES) {
        Floats totals[ROWS][VECTORS];
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) totals[r][v] = load(tile + r * PANEL + column + v * LANES);
        const uint8_t *codes = unit + layout.codes_at + 4 * column, *parts = unit + layout.parts_at + column;
        for (int g = 0; g < GROUPS; g++, codes += layout.group_bytes) {
            for (size_t offset = 0; offset < next.step; offset += 64) prefetch_stream(next.at + offset);
            next.at += next.step;
            const RowCells<ROWS> cells(x, row, first + g);
            UNROLL for (int s = 0; s < SPANS; s++, parts += PANEL) {
                Ints sums[ROWS][VECTORS];
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        sums[r][v] = MINIMUMS ? Ints{} : splat_int(x.corrections[2 * cells[r] + s]);
                UNROLL for (int w = s * SPAN / 4; w < (s + 1) * SPAN / 4; w++)
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        const Words weights = block_word<BITS, TABLE>(codes + v * LANES * 4, w);
                        UNROLL for (int r = 0; r < ROWS; r++)
                            Dot::dot(sums[r][v], weights, Dot::row(load_word(x.values + cells[r] * BLOCK_GROUP + 4 * w)));
                    }
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const auto scales = UnitScales<PARTS, MINIMUMS, TABLE>(unit, column + v * LANES)
                                            .of_part(parts + v * LANES, static_cast<size_t>(layout.parts) * PANEL);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const Floats scaled = to_floats(sums[r][v]) * splat(x.scales[cells[r]]);
                        totals[r][v] = multiply_add(scaled, scales.scale, totals[r][v]);
                        if (MINIMUMS)
                            totals[r][v] = multiply_add(splat(x.sums[2 * cells[r] + s]), scales.minimum, totals[r][v]);
                    }
                }
            }
        }
        next.step = 0;  // the first columns brought it all
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++) store(tile + r * PANEL + column + v * LANES, totals[r][v]);
    }
}

// The same for tiles of more rows, whose sums fill the registers: totals stay in memory.
template <int BITS, class Dot, int SPAN, bool MINIMUMS, Parts PARTS, Table TABLE, int ROWS>
NOINLINE void multiply_unit_tile(const BlockLayout& layout, const uint8_t* unit, int first, const QuantRows& x, int row,
                                 float* tile, Prefetch next) {
    constexpr int VECTORS = ROWS > ROW_TILE ? COLUMN_VECTORS / 2 : COLUMN_VECTORS, SPANS = BLOCK_GROUP / SPAN;
    using Sums = ByteSums<Dot, ROWS, VECTORS>;
    const size_t to_minimums = static_cast<size_t>(layout.parts) * PANEL;
    for (int column = 0; column < PANEL; column += VECTORS * LANES) {
        const uint8_t *codes = unit + layout.codes_at + 4 * column, *parts = unit + layout.parts_at + column;
        for (int g = 0; g < BLOCK_UNIT / BLOCK_GROUP; g++, codes += layout.group_bytes) {
            for (size_t offset = 0; offset < next.step; offset += 64) prefetch_stream(next.at + offset);
            next.at += next.step;
            const BlockCells<ROWS> cells(x, row, first + g);
            UNROLL for (int s = 0; s < SPANS; s++, parts += PANEL) {
                Sums sums;
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        sums.begin(r, v, MINIMUMS ? Ints{} : splat_int(cells.correction(r, s)));
                UNROLL for (int w = s * SPAN / 4; w < (s + 1) * SPAN / 4; w += Sums::WORDS) {
                    Words weights[VECTORS][Sums::WORDS];
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        UNROLL for (int i = 0; i < Sums::WORDS; i++)
                            weights[v][i] = block_word<BITS, TABLE>(codes + v * LANES * 4, w + i);
                    sums.add(weights, cells.values, 4 * w);
                }
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    const auto scales =
                        UnitScales<PARTS, MINIMUMS, TABLE>(unit, column + v * LANES).of_part(parts + v * LANES, to_minimums);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        float* to = tile + r * PANEL + column + v * LANES;
                        const Floats scaled = to_floats(sums.total(r, v)) * splat(cells.scale(r));
                        Floats total = multiply_add(scaled, scales.scale, load(to));
                        if (MINIMUMS) total = multiply_add(splat(cells.sum(r, s)), scales.minimum, total);
                        store(to, total);
                    }
                }
                asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
            }
        }
        next.step = 0;  // the first columns brought it all
    }
}

// A slice as all formats have it then.
struct WideBlocks {
    static constexpr int GROUPS = BLOCK_UNIT / BLOCK_GROUP;
    static constexpr size_t GROUP_BYTES = static_cast<size_t>(BLOCK_GROUP) * PANEL;
    static constexpr size_t BYTES = GROUPS * GROUP_BYTES + 2 * MAX_PARTS * PANEL * sizeof(float);

    uint8_t* codes;             // [groups][8 words][64]
    float *scales, *minimums;   // [spans][64]

    explicit WideBlocks(uint8_t* memory)
        : codes(memory),
          scales(reinterpret_cast<float*>(memory + GROUPS * GROUP_BYTES)),
          minimums(scales + MAX_PARTS * PANEL) {}
};

template <int BITS, Table TABLE> INLINE void widen_block_group(const uint8_t* from, uint8_t* to) {
    for (int part = 0; part < PANEL / LANES; part++, from += LANES * 4, to += LANES * 4) {
        Words words[8];
        UNROLL for (int w = 0; w < 8; w++) words[w] = block_word<BITS, TABLE>(from, w);
        UNROLL for (int w = 0; w < 8; w++) store_as(to + w * PANEL_STRIDE, words[w]);
    }
}

template <Parts PARTS, bool MINIMUMS, Table TABLE>
INLINE void widen_scales(const BlockLayout& layout, const uint8_t* unit, float* scales, float* minimums) {
    for (int column = 0; column < PANEL; column += LANES) {
        const UnitScales<PARTS, MINIMUMS, TABLE> whole(unit, column);
        const uint8_t* at = unit + layout.parts_at + column;
        const int parts = PARTS == Parts::NONE ? 1 : layout.parts;
        for (int part = 0; part < parts; part++, at += PANEL) {
            const auto scale = whole.of_part(at, static_cast<size_t>(layout.parts) * PANEL);
            store(scales + part * PANEL + column, scale.scale);
            if (MINIMUMS) store(minimums + part * PANEL + column, scale.minimum);
        }
    }
}

// tile[ROWS][PANEL] += the sums of `groups` groups. SPAN inputs share a scale.
template <class Dot, int SPAN, bool MINIMUMS, int ROWS>
INLINE void multiply_wide(const WideBlocks& wide, int first, int groups, const QuantRows& x, int row, float* tile,
                          Prefetch next) {
    constexpr int VECTORS = COLUMN_VECTORS, SPANS = BLOCK_GROUP / SPAN;
    using Sums = ByteSums<Dot, ROWS, VECTORS>;
    for (int g = 0; g < groups; g++) {
        for (size_t offset = 0; offset < next.step; offset += 64) prefetch_stream(next.at + offset);
        next.at += next.step;
        const BlockCells<ROWS> cells(x, row, first + g);
        for (int column = 0; column < PANEL; column += VECTORS * LANES) {
            const uint8_t* from = wide.codes + g * WideBlocks::GROUP_BYTES + 4 * column;
            UNROLL for (int s = 0; s < SPANS; s++) {
                Sums sums;
                UNROLL for (int r = 0; r < ROWS; r++)
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        sums.begin(r, v, MINIMUMS ? Ints{} : splat_int(cells.correction(r, s)));
                UNROLL for (int k = s * SPAN; k < (s + 1) * SPAN; k += 4 * Sums::WORDS) {
                    Words weights[VECTORS][Sums::WORDS];
                    UNROLL for (int w = 0; w < Sums::WORDS; w++, from += PANEL_STRIDE)
                        UNROLL for (int v = 0; v < VECTORS; v++) weights[v][w] = load_as<Words>(from + v * LANES * 4);
                    sums.add(weights, cells.values, k);
                }
                const int at = (g * SPANS + s) * PANEL + column;
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const Floats scale = splat(cells.scale(r));
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        float* to = tile + r * PANEL + column + v * LANES;
                        const Floats weight_scale = load(wide.scales + at + v * LANES);
                        Floats total = multiply_add(to_floats(sums.total(r, v)) * scale, weight_scale, load(to));
                        if (MINIMUMS)
                            total = multiply_add(splat(cells.sum(r, s)), load(wide.minimums + at + v * LANES), total);
                        store(to, total);
                    }
                }
                asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
            }
        }
    }
}

// Formats with the same products share this code.
template <class Dot, int SPAN, bool MINIMUMS>
NOINLINE void multiply_wide_blocks(const WideBlocks& wide, int first, int groups, const QuantRows& x, int row, int rows,
                                 float* tile, Prefetch next) {
    switch (rows) {
        case 3: return multiply_wide<Dot, SPAN, MINIMUMS, 3>(wide, first, groups, x, row, tile, next);
        case 4: return multiply_wide<Dot, SPAN, MINIMUMS, 4>(wide, first, groups, x, row, tile, next);
        case 5: return multiply_wide<Dot, SPAN, MINIMUMS, 5>(wide, first, groups, x, row, tile, next);
        default: return multiply_wide<Dot, SPAN, MINIMUMS, 6>(wide, first, groups, x, row, tile, next);
    }
}

// Rounded rows times a panel of blocks of one format.
template <int BITS, class Dot, int SPAN, bool MINIMUMS, Parts PARTS, Table TABLE> struct BlockPanel {
    // 32 registers hold the sums of four rows; elsewhere, and with AMX, more than two were not measured.
    static constexpr int DIRECT_ROWS = LANES == 16 && LLMBOX_BYTE_DOT && !LLMBOX_TILES ? 4 : 2;
    static constexpr size_t FAR_AHEAD = 6144;  // bytes; half or twice as many were slower by a tenth
    // Up to so many rows each tile makes bytes of the codes in registers for itself. 0: not for this format, or not measured.
    static constexpr int TILED_ROWS = DIRECT_ROWS < 4                            ? 0
                                      : PARTS == Parts::BYTES                ? INT_MAX
                                      : PARTS == Parts::SIGNED && BITS == 6 ? 32
                                                                             : 0;

    const QuantLinear& linear;
    const BlockLayout layout;
    const QuantRows& x;

    // tile[rows][PANEL] += x * panel.
    NOINLINE void multiply(int panel, int row, int rows, float* tile, uint8_t* memory) const {
        const uint8_t* unit = linear.unit_at(panel, 0);
        if (rows == 1) return multiply_units<1>(unit, row, tile);
        if (rows == 2) return multiply_units<2>(unit, row, tile);
        if constexpr (DIRECT_ROWS == 4) {
            if (rows == 3) return multiply_units<3>(unit, row, tile);
            if (rows == 4) return multiply_units<4>(unit, row, tile);
        }
        if constexpr (TILED_ROWS > 0)
            if (rows <= TILED_ROWS) return multiply_tiled(unit, row, rows, tile);
        const WideBlocks wide(memory);
        for (int first = 0; first < linear.groups; first += WideBlocks::GROUPS) {
            const int groups = std::min(WideBlocks::GROUPS, linear.groups - first);
            // Half of the slice after this one is brought here, the other half by the tiles.
            const size_t bytes = groups / layout.groups_per_unit * layout.unit_bytes, half = round_up(bytes / 2, 64);
            const uint8_t *coming = unit + bytes + half, *end = unit + 2 * bytes;
            unit = widen(unit, wide, groups, half);
            const int tiles = ceil_div(rows, ROW_TILE);
            const size_t step = round_up(ceil_div(static_cast<int>(bytes - half), groups * tiles), 64);
            for (int r = 0; r < rows;) {
                const int tile_rows = next_tile(rows - r);
                const Prefetch next = {coming, coming < end ? step : 0};
                multiply_wide_blocks<Dot, SPAN, MINIMUMS>(wide, first, groups, x, row + r, tile_rows, tile + r * PANEL, next);
                coming += step * groups;
                r += tile_rows;
            }
        }
    }

private:
    template <int ROWS> void multiply_units(const uint8_t* unit, int row, float* tile) const {
        constexpr int GROUPS = PARTS == Parts::NONE ? 1 : 8;
        const size_t step = round_up(ceil_div(static_cast<int>(layout.unit_bytes), GROUPS), 64);
        for (int first = 0; first < linear.groups; first += GROUPS, unit += layout.unit_bytes)
            multiply_unit<BITS, Dot, SPAN, MINIMUMS, PARTS, TABLE, ROWS>(layout, unit, first, x, row, tile, {unit + FAR_AHEAD, step});
    }

    void multiply_tiled(const uint8_t* unit, int row, int rows, float* tile) const {
        constexpr int GROUPS = BLOCK_UNIT / BLOCK_GROUP, HIGHEST = 2 * ROW_TILE;
        const int tiles = ceil_div(rows, HIGHEST);
        const size_t step = round_up(ceil_div(static_cast<int>(layout.unit_bytes), GROUPS * tiles), 64);
        [&]<int... LESS>(std::integer_sequence<int, LESS...>) {
            static constexpr decltype(&multiply_unit_tile<BITS, Dot, SPAN, MINIMUMS, PARTS, TABLE, 1>) TILES[] = {
                &multiply_unit_tile<BITS, Dot, SPAN, MINIMUMS, PARTS, TABLE, 5 + LESS>...};
            for (int first = 0; first < linear.groups; first += GROUPS, unit += layout.unit_bytes) {
                const uint8_t *coming = unit + std::max(FAR_AHEAD, layout.unit_bytes), *end = coming + layout.unit_bytes;
                for (int r = 0; r < rows; coming += step * GROUPS) {
                    const int tile_rows = next_tile(rows - r, HIGHEST);
                    TILES[tile_rows - 5](layout, unit, first, x, row + r, tile + r * PANEL, {coming, coming < end ? step : 0});
                    r += tile_rows;
                }
            }
        }(std::make_integer_sequence<int, HIGHEST - 4>());
    }

    // Returns the unit behind these groups.
    const uint8_t* widen(const uint8_t* unit, const WideBlocks& wide, int groups, size_t coming_bytes) const {
        const int units = groups / layout.groups_per_unit;
        const size_t each = round_up(ceil_div(static_cast<int>(coming_bytes), groups), 64);
        const uint8_t* coming = unit + units * layout.unit_bytes;  // the slice after this one, which may be the next panel's
        for (int index = 0; index < units; index++, unit += layout.unit_bytes) {
            const int spans = index * BLOCK_GROUP / SPAN;
            widen_scales<PARTS, MINIMUMS, TABLE>(layout, unit, wide.scales + spans * PANEL, wide.minimums + spans * PANEL);
            for (int g = 0; g < layout.groups_per_unit; g++) {
                for (size_t offset = 0; offset < each; offset += 64) prefetch_stream(coming + offset);
                coming += each;
                widen_block_group<BITS, TABLE>(unit + layout.codes_at + g * layout.group_bytes,
                                               wide.codes + (index * layout.groups_per_unit + g) * WideBlocks::GROUP_BYTES);
            }
        }
        return unit;
    }

};

void multiply_blocks(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile, Member& member) {
    uint8_t* memory = member.spare.take<uint8_t>(WideBlocks::BYTES);
    const auto with = [&]<int BITS, class Dot, int SPAN, bool MINIMUMS, Parts PARTS, Table TABLE = Table::NONE>() {
        const BlockPanel<BITS, Dot, SPAN, MINIMUMS, PARTS, TABLE> blocks{linear, linear.blocks(), x};
        blocks.multiply(panel, row, rows, tile, memory);
    };
    switch (linear.grid) {
        case Grid4::CENTERED:
            if (linear.bits == 2) return with.template operator()<2, SmallBytes<3>, 32, false, Parts::NONE>();
            return with.template operator()<5, SmallBytes<31>, 32, false, Parts::NONE>();
        case Grid4::TABLE: return with.template operator()<4, Bytes, 32, false, Parts::NONE, Table::IQ4>();
        case Grid4::K_PAIRS: return with.template operator()<2, SmallBytes<3>, 16, true, Parts::PAIRS>();
        case Grid4::K_TABLE: return with.template operator()<4, Bytes, 32, false, Parts::SIGNED, Table::IQ4>();
        case Grid4::K_IQ1: return with.template operator()<3, SmallBytes<127>, 16, false, Parts::SIGNED, Table::IQ1>();
        case Grid4::K_IQ2: return with.template operator()<3, SmallBytes<127>, 16, false, Parts::SIGNED, Table::IQ2>();
        case Grid4::K_IQ3_XXS: return with.template operator()<4, SmallBytes<127>, 32, false, Parts::SIGNED, Table::IQ3_XXS>();
        case Grid4::K_IQ3_S: return with.template operator()<4, SmallBytes<127>, 32, false, Parts::SIGNED, Table::IQ3_S>();
        case Grid4::MINIMUMS:
            if (linear.bits == 4) return with.template operator()<4, SmallBytes<15>, 32, true, Parts::NONE>();
            return with.template operator()<5, SmallBytes<31>, 32, true, Parts::NONE>();
        case Grid4::K_SIGNED:
            if (linear.bits == 3) return with.template operator()<3, SmallBytes<7>, 16, false, Parts::SIGNED>();
            return with.template operator()<6, SmallBytes<63>, 16, false, Parts::SIGNED>();
        default:
            if (linear.bits == 4) return with.template operator()<4, SmallBytes<15>, 32, true, Parts::BYTES>();
            return with.template operator()<5, SmallBytes<31>, 32, true, Parts::BYTES>();
    }
}

}  // namespace llmbox
