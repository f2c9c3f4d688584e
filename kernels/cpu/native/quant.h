// Linear layers with int8 or int4 weights and int8 activations.
//
// Inputs are cut into groups of 32 or 128. A weight has one float16 scale for each output and group, a row of x
// one float32 scale for each group, found when it arrives. Inside a group sums are exact integers; across
// groups they are added in float32 in ascending order, so a row's result does not depend on its neighbours.
//
// A panel of 64 outputs is, group by group: 64 scales, then words of 4 neighbouring inputs of each output:
//   int8   [group / 4][64]   bytes hold weight + 128
//   int4   [group / 8][64]   low halves of the bytes are inputs k .. k + 3, high halves k + 4 .. k + 7, plus 8
// The dot instruction wants unsigned weights; what the offset adds is taken off before the sum starts.
// These are the grids of GGUF's Q8_0 and Q4_0 (with groups of 32), in another order.
#pragma once

#include <cmath>

#include "gemm.h"

namespace llmbox {

// float16 as the hardware converts it.
INLINE Floats load_scales(const uint16_t* from) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = static_cast<float>(load_as<_Float16>(from + i));
    return v;
#endif
}
INLINE uint16_t to_scale(float x) { return load_as<uint16_t>(&static_cast<const _Float16&>(static_cast<_Float16>(x))); }
INLINE float from_scale(uint16_t bits) { return static_cast<float>(load_as<_Float16>(&bits)); }

constexpr int MAX_GROUP = 128;

struct QuantLinear : LinearShape {
    int bits, group;
    int groups;
    size_t group_bytes;  // of a panel
    HugeBlock weights;

    QuantLinear(int inputs, int outputs, int bits, int group, uint8_t* packed = nullptr)
        : LinearShape(inputs, outputs),
          bits(bits),
          group(group),
          groups(ceil_div(inputs, group)),
          group_bytes(2 * PANEL + static_cast<size_t>(group) * PANEL * bits / 8),
          weights(group_bytes * groups * panels(), packed) {}

    const uint8_t* packed() const override { return weights.data(); }
    size_t packed_bytes() const override { return group_bytes * groups * panels(); }

    int offset() const { return 1 << (bits - 1); }
    uint8_t* at(int panel, int group) const {
        return weights.data() + (static_cast<size_t>(panel) * groups + group) * group_bytes;
    }
    // One weight as stored, offset included.
    int get(int panel, int g, int column, int k) const {
        const uint8_t* codes = at(panel, g) + 2 * PANEL;
        if (bits == 8) return codes[(k / 4 * PANEL + column) * 4 + k % 4];
        return codes[(k / 8 * PANEL + column) * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
    }
    void set(int panel, int g, int column, int k, int code) const {
        uint8_t* codes = at(panel, g) + 2 * PANEL;
        if (bits == 8) codes[(k / 4 * PANEL + column) * 4 + k % 4] = static_cast<uint8_t>(code);
        else codes[(k / 8 * PANEL + column) * 4 + k % 4] |= static_cast<uint8_t>(code << (k % 8 < 4 ? 0 : 4));
    }
};

// ------------------------------------------------------------------ packing

INLINE Floats clamp(Floats x, float lowest, float highest) {
    const Floats low = splat(lowest), high = splat(highest);
    x = x > low ? x : low;
    return x < high ? x : high;
}

// The scale for int4 that fits a group best. Rounding to nearest with the largest weight at the end of the
// range is the start; then scales around it are tried, each with its least-squares correction, and the one with
// the smallest error weighted by x^2 wins (large weights matter more; as llama.cpp's `make_qx_quants` does).
inline float best_int4_scale(const float* x, int group) {
    float extreme = 0;
    for (int k = 0; k < group; k++)
        if (std::fabs(x[k]) > std::fabs(extreme)) extreme = x[k];
    if (extreme == 0) return 0;
    float best_scale = extreme / -8, best_gain = 0;
    for (int step = -5; step <= 5; step++) {
        const Floats inverse = splat(-(8 + 0.2f * static_cast<float>(step)) / extreme);
        Floats crosses = splat(0.f), squares = splat(0.f);
        for (int k = 0; k < group; k += LANES) {
            const Floats v = load(x + k), code = to_floats(to_nearest(clamp(v * inverse, -8, 7))), weight = v * v;
            crosses = multiply_add(weight * v, code, crosses);
            squares = multiply_add(weight * code, code, squares);
        }
        // error = sum weight x^2 - cross^2 / square for the best scale, cross / square
        const float cross = sum(crosses), square = sum(squares);
        if (square > 0 && cross * cross > best_gain * square) {
            best_gain = cross * cross / square;
            best_scale = cross / square;
        }
    }
    return best_scale;
}

inline float int8_scale(const float* x, int group) {
    float most = 0;
    for (int k = 0; k < group; k++) most = std::max(most, std::fabs(x[k]));
    return most / 127;
}

// Rounds one group x[group]: codes from -2^(bits - 1) on; the result is the scale as stored.
inline uint16_t round_group(const float* x, int group, int bits, int8_t* codes) {
    const uint16_t stored = to_scale(bits == 8 ? int8_scale(x, group) : best_int4_scale(x, group));
    const float scale = from_scale(stored), inverse = scale == 0 ? 0 : 1 / scale;
    const auto most = static_cast<float>(1 << (bits - 1));
    for (int k = 0; k < group; k += LANES) {
        const Ints rounded = to_nearest(clamp(load(x + k) * splat(inverse), -most, most - 1));
        store_bytes(codes + k, rounded);
    }
    return stored;
}

// Packs one panel, group by group: `make(row, g, codes)` fills codes[group] and returns the scale.
template <class Make> void pack_quant_panel(const QuantLinear& linear, int panel, Make make) {
    std::vector<int8_t> codes(linear.group);
    for (int g = 0; g < linear.groups; g++) {
        auto* scales = reinterpret_cast<uint16_t*>(linear.at(panel, g));
        for (int column = 0; column < PANEL; column++) {
            const int row = panel * PANEL + column;
            std::fill(codes.begin(), codes.end(), int8_t{0});
            scales[column] = row < linear.outputs ? make(row, g, codes.data()) : uint16_t{0};
            for (int k = 0; k < linear.group; k++) linear.set(panel, g, column, k, codes[k] + linear.offset());
        }
    }
}

// Rounds group g of a row of `inputs` numbers.
template <class In>
uint16_t round_row_group(const In* row, int inputs, int g, int group, int bits, int8_t* codes) {
    float x[MAX_GROUP] = {};
    const int begin = g * group, count = std::min(group, inputs - begin);
    for (int k = 0; k < count; k++) x[k] = to_float(row[begin + k]);
    return round_group(x, group, bits, codes);
}

// ------------------------------------------------------------------ rows

// Rows of x as int8: values, and for each row and group the scale and what the offset of the weights adds.
struct QuantRows {
    int8_t* values;  // [rows][groups * group]
    float* scales;   // [rows][groups]
    int32_t* corrections;
    int groups, group;

    static size_t bytes(int rows, const QuantLinear& linear) {
        return static_cast<size_t>(rows) * linear.groups * (linear.group + 8);
    }
    QuantRows(uint8_t* memory, int rows, const QuantLinear& linear) : groups(linear.groups), group(linear.group) {
        const size_t cells = static_cast<size_t>(rows) * groups;
        scales = reinterpret_cast<float*>(memory);
        corrections = reinterpret_cast<int32_t*>(memory + 4 * cells);
        values = reinterpret_cast<int8_t*>(memory + 8 * cells);
    }
    QuantRows() = default;
};

// `count` numbers of x are there, the rest of the group is zero.
template <class In> INLINE void quantize_group(const In* x, int count, int offset, int cell, const QuantRows& rows) {
    const auto [most, finite] = range_of(x, count);
    // NaN or infinity must reach the result, where it is noticed: a scale of NaN carries it there.
    const Floats inverse = splat(finite && most > 0 ? 127 / most : 0);
    int8_t* to = rows.values + static_cast<size_t>(cell) * rows.group;
    Ints codes_total = {};
    for (int k = 0; k < rows.group; k += LANES) {
        const Floats v = finite && k < count ? load(x + k, count - k) : splat(0.f);
        const Ints codes = to_nearest(v * inverse);
        codes_total += codes;
        store_bytes(to + k, codes);
    }
    rows.scales[cell] = finite ? most / 127 : NAN;
    rows.corrections[cell] = -offset * sum(codes_total);
}

// Some groups of a panel, one behind the other: where the codes and scales of the first lie.
struct Groups {
    const uint8_t *codes, *scales;
    size_t codes_step, scales_step;  // to the next group
    int first, count;
};

// What one vector of memory holds of 16 (8, 4) outputs: a word of each in int8, two in int4.
template <int BITS> struct Codes;
template <> struct Codes<8> {
    static constexpr int WORDS = 1;
    static INLINE void load(const uint8_t* from, Words* to) { to[0] = load_as<Words>(from); }
};
template <> struct Codes<4> {
    static constexpr int WORDS = 2;
    static INLINE void load(const uint8_t* from, Words* to) {
        const Words both = load_as<Words>(from), low = splat(0x0f0f0f0fu);
        to[0] = both & low;
        to[1] = (both >> 4) & low;
    }
};

// tile[ROWS][PANEL] += the sums of some groups.
template <int BITS, int ROWS>
INLINE void multiply_groups(const Groups& groups, const QuantRows& x, int row, float* tile, Prefetch next) {
    constexpr int VECTORS = COLUMN_VECTORS, WORDS = Codes<BITS>::WORDS;
    for (int i = 0; i < groups.count; i++) {
        const int cell = row * x.groups + groups.first + i;  // of the first row
        const int8_t* values = x.values + static_cast<size_t>(cell) * x.group;
        const size_t row_step = static_cast<size_t>(x.groups) * x.group;
        const auto* scales = reinterpret_cast<const uint16_t*>(groups.scales + i * groups.scales_step);
        for (int column = 0; column < PANEL; column += VECTORS * LANES) {
            Ints sums[ROWS][VECTORS];
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = (Ints)splat(static_cast<uint32_t>(x.corrections[cell + r * x.groups]));
            const uint8_t* from = groups.codes + i * groups.codes_step + 4 * column;
            const Prefetch coming = column ? Prefetch{} : next;  // the first columns bring it all
            const uint8_t* ahead = coming.at;
            for (int k = 0; k < x.group; k += 4 * WORDS) {
                Words weights[VECTORS][WORDS];
                UNROLL for (int v = 0; v < VECTORS; v++) Codes<BITS>::load(from + v * LANES * 4, weights[v]);
                for (size_t offset = 0; offset < coming.step; offset += 64) prefetch(ahead + offset);
                ahead += coming.step;
                from += PANEL_STRIDE;
                UNROLL for (int w = 0; w < WORDS; w++)
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const Bytes::Row broadcast = Bytes::row(load_word(values + r * row_step + k + 4 * w));
                        UNROLL for (int v = 0; v < VECTORS; v++) Bytes::dot(sums[r][v], weights[v][w], broadcast);
                    }
            }
            if (column == 0) next.at = ahead;
            Floats weight_scales[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weight_scales[v] = load_scales(scales + column + v * LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Floats scale = splat(x.scales[cell + r * x.groups]);
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    float* to = tile + r * PANEL + column + v * LANES;
                    store(to, multiply_add(to_floats(sums[r][v]) * scale, weight_scales[v], load(to)));
                }
            }
        }
        asm volatile("" ::: "memory");  // or the compiler keeps the tile on the stack, for want of registers
    }
}

// In: type of x.
template <class In, class Out> class QuantLinearOp : public LinearOp<Out> {
public:
    QuantLinearOp(const QuantLinear& linear, const In* x, int64_t x_stride, Out* out, int64_t out_stride)
        : LinearOp<Out>(linear, out, out_stride), linear_(linear), x_(x), x_stride_(x_stride) {}

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        pool.shared().template take<uint8_t>(QuantRows::bytes(step.rows, linear_));
    }

    void run(const Step& step, Member& member) override {
        const QuantRows rows(member.pool.shared().template get<uint8_t>(), step.rows, linear_);
        const auto cells = member.share(step.rows * linear_.groups);
        for (int cell = cells.begin; cell < cells.end; cell++) {
            const int begin = cell % linear_.groups * linear_.group;
            const In* from = x_ + cell / linear_.groups * x_stride_ + begin;
            quantize_group(from, std::min(linear_.group, linear_.inputs - begin), linear_.offset(), cell, rows);
        }
        if (member.index == 0) rows_ = rows;
        member.barrier();
        this->run_panels(step, member);
    }

protected:
    // All rows visit a slice of some groups before the next one: its weights stay in the L1 cache.
    void multiply(int panel, int row, int rows, float* tile, Member& member) override {
        std::fill_n(tile, rows * PANEL, 0.f);
        if (linear_.bits == 8) multiply_slices<8>(panel, row, rows, tile, nullptr);
        else if (rows <= UNPACK_ROWS) multiply_slices<4>(panel, row, rows, tile, nullptr);
        else multiply_slices<8>(panel, row, rows, tile, member.spare.take<uint8_t>(SLICE * PANEL));
    }

private:
    static constexpr int SLICE = 256;  // inputs
    static_assert(SLICE >= MAX_GROUP);
    // int4: more rows than these find a slice unpacked in memory, fewer unpack it as they load it.
    static constexpr int UNPACK_ROWS = 2 * ROW_TILE;

    // BITS are those of the codes that are multiplied: 8 also for int4 that goes through `unpacked`.
    template <int BITS> void multiply_slices(int panel, int row, int rows, float* tile, uint8_t* unpacked) const {
        const int tiles = ceil_div(rows, ROW_TILE), slice = SLICE / linear_.group;
        for (int g = 0; g < linear_.groups; g += slice) {
            const uint8_t* at = linear_.at(panel, g);
            const int count = std::min(slice, linear_.groups - g);
            Groups groups{at + 2 * PANEL, at, linear_.group_bytes, linear_.group_bytes, g, count};
            if (unpacked) {
                groups.codes = unpacked;
                groups.codes_step = static_cast<size_t>(linear_.group) * PANEL;
                for (int i = 0; i < count; i++)
                    unpack(at + i * linear_.group_bytes + 2 * PANEL, unpacked + i * groups.codes_step);
            }
            // Each tile brings its part of what comes later; slices are small, so look further ahead.
            const size_t bytes = count * linear_.group_bytes;
            const int turns = count * linear_.group / (4 * Codes<BITS>::WORDS);
            const size_t step = round_up(ceil_div(static_cast<int>(bytes), turns * tiles), 64);
            const uint8_t *coming = at + std::max(AHEAD, bytes), *end = coming + bytes;
            for (int r = 0; r < rows;) {
                const int tile_rows = next_tile(rows - r);
                const Prefetch next = {coming, coming < end ? step : 0};
                multiply_tile<BITS>(tile_rows, groups, row + r, tile + r * PANEL, next);
                coming += step * turns;
                r += tile_rows;
            }
        }
    }

    template <int BITS>
    void multiply_tile(int rows, const Groups& groups, int row, float* tile, Prefetch next) const {
        switch (rows) {
            case 1: return multiply_groups<BITS, 1>(groups, rows_, row, tile, next);
            case 2: return multiply_groups<BITS, 2>(groups, rows_, row, tile, next);
            case 3: return multiply_groups<BITS, 3>(groups, rows_, row, tile, next);
            case 4: return multiply_groups<BITS, 4>(groups, rows_, row, tile, next);
            case 5: return multiply_groups<BITS, 5>(groups, rows_, row, tile, next);
            default: return multiply_groups<BITS, 6>(groups, rows_, row, tile, next);
        }
    }

    // One group of int4 as bytes.
    void unpack(const uint8_t* codes, uint8_t* to) const {
        for (int w = 0; w < linear_.group / 8; w++)
            for (int i = 0; i < static_cast<int>(PANEL_STRIDE); i += LANES * 4) {
                Words words[2];
                Codes<4>::load(codes + w * PANEL_STRIDE + i, words);
                store_as(to + 2 * w * PANEL_STRIDE + i, words[0]);
                store_as(to + (2 * w + 1) * PANEL_STRIDE + i, words[1]);
            }
    }

    const QuantLinear& linear_;
    const In* x_;
    int64_t x_stride_;
    QuantRows rows_;
};

// The rows `ids` of a quantised table.
template <class Out> class QuantEmbeddingOp : public Op {
public:
    QuantEmbeddingOp(const QuantLinear& table, Out* out, int64_t out_stride)
        : table_(table), out_(out), out_stride_(out_stride) {}

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const int64_t id = step.ids[row];
            Out* to = out_ + row * out_stride_;
            const bool known = id >= 0 && id < table_.outputs;
            for (int i = 0; i < table_.inputs; i++) to[i] = from_float<Out>(known ? weight(id, i) : NAN);
        }
    }

private:
    float weight(int64_t output, int input) const {
        const int panel = static_cast<int>(output / PANEL), column = static_cast<int>(output % PANEL);
        const int g = input / table_.group;
        const float scale = from_scale(reinterpret_cast<const uint16_t*>(table_.at(panel, g))[column]);
        return static_cast<float>(table_.get(panel, g, column, input % table_.group) - table_.offset()) * scale;
    }

    const QuantLinear& table_;
    Out* out_;
    int64_t out_stride_;
};

}  // namespace llmbox
