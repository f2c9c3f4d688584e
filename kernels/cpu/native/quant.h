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

typedef int8_t SignedBytes __attribute__((vector_size(LANES)));

INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

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

struct QuantLinear : LinearShape {
    int bits, group;
    int groups;
    size_t group_bytes;  // of a panel
    HugeBlock weights;

    QuantLinear(int inputs, int outputs, int bits, int group)
        : LinearShape(inputs, outputs),
          bits(bits),
          group(group),
          groups(ceil_div(inputs, group)),
          group_bytes(2 * PANEL + static_cast<size_t>(group) * PANEL * bits / 8),
          weights(group_bytes * groups * panels()) {}

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

// Nearest integer: adding 1.5 * 2^23 leaves it in the low bits of the sum. For |x| < 2^22.
INLINE Ints to_nearest(Floats x) {
    const Floats shift = splat(12582912.f);
    return (Ints)(x + shift) - (Ints)shift;
}

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

template <class In> void quantize_panel(const QuantLinear& linear, int panel, const In* weight) {
    const int columns = std::min(PANEL, linear.outputs - panel * PANEL), offset = linear.offset();
    std::vector<float> x(linear.group);
    for (int g = 0; g < linear.groups; g++) {
        auto* scales = reinterpret_cast<uint16_t*>(linear.at(panel, g));
        const int begin = g * linear.group, count = std::min(linear.group, linear.inputs - begin);
        for (int column = 0; column < PANEL; column++) {
            std::fill(x.begin(), x.end(), 0.f);
            if (column < columns)
                for (int k = 0; k < count; k++)
                    x[k] = to_float(weight[static_cast<size_t>(panel * PANEL + column) * linear.inputs + begin + k]);
            const float wanted = linear.bits == 8 ? int8_scale(x.data(), linear.group)
                                                  : best_int4_scale(x.data(), linear.group);
            scales[column] = to_scale(wanted);
            const float scale = from_scale(scales[column]), inverse = scale == 0 ? 0 : 1 / scale;
            const auto lowest = static_cast<float>(-offset), highest = static_cast<float>(offset - 1);
            for (int k = 0; k < linear.group; k += LANES) {
                const Ints codes = to_nearest(clamp(load(x.data() + k) * splat(inverse), lowest, highest));
                for (int i = 0; i < LANES; i++) linear.set(panel, g, column, k + i, codes[i] + offset);
            }
        }
    }
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
    Floats largest = splat(0.f), total = splat(0.f);
    for (int k = 0; k < count; k += LANES) {
        const Floats size = abs(load(x + k, count - k));
        largest = max(size, largest);
        total += size;
    }
    const float most = max(largest);
    // NaN or infinity must reach the result, where it is noticed: a scale of NaN carries it there.
    const bool finite = sum(total) < std::numeric_limits<float>::infinity();
    const Floats inverse = splat(finite && most > 0 ? 127 / most : 0);
    int8_t* to = rows.values + static_cast<size_t>(cell) * rows.group;
    Ints codes_total = {};
    for (int k = 0; k < rows.group; k += LANES) {
        const Floats v = finite && k < count ? load(x + k, count - k) : splat(0.f);
        const Ints codes = to_nearest(v * inverse);
        codes_total += codes;
        store_as(to + k, __builtin_convertvector(codes, SignedBytes));
    }
    int32_t codes_sum = 0;
    for (int i = 0; i < LANES; i++) codes_sum += codes_total[i];
    rows.scales[cell] = finite ? most / 127 : NAN;
    rows.corrections[cell] = -offset * codes_sum;
}

// tile[ROWS][PANEL] (+)= one group's sums. `codes` are words of 4 weights, one a byte.
template <int ROWS>
INLINE void multiply_group(const uint8_t* codes, const uint16_t* scales, const QuantRows& x, int row, int g,
                           float* tile, Prefetch next) {
    constexpr int VECTORS = COLUMN_VECTORS;
    const int8_t* values[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++)
        values[r] = x.values + (static_cast<size_t>(row + r) * x.groups + g) * x.group;
    for (int column = 0; column < PANEL; column += VECTORS * LANES) {
        Ints sums[ROWS][VECTORS];
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                sums[r][v] = (Ints)splat(static_cast<uint32_t>(x.corrections[(row + r) * x.groups + g]));
        const uint8_t* from = codes + 4 * column;
        for (int w = 0; w < x.group / 4; w++) {
            Words weights[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load_as<Words>(from + v * LANES * 4);
            for (size_t offset = 0; offset < next.step; offset += 64) prefetch(next.at + offset);
            next.at += next.step;
            from += PANEL_STRIDE;
            UNROLL for (int r = 0; r < ROWS; r++) {
                const Bytes::Row broadcast = Bytes::row(load_word(values[r] + 4 * w));
                UNROLL for (int v = 0; v < VECTORS; v++) Bytes::dot(sums[r][v], weights[v], broadcast);
            }
        }
        next.step = 0;
        UNROLL for (int r = 0; r < ROWS; r++) {
            const Floats scale = splat(x.scales[(row + r) * x.groups + g]);
            UNROLL for (int v = 0; v < VECTORS; v++) {
                float* to = tile + r * PANEL + column + v * LANES;
                const Floats sum = to_floats(sums[r][v]) * scale, before = g ? load(to) : splat(0.f);
                store(to, multiply_add(sum, load_scales(scales + column + v * LANES), before));
            }
        }
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
    // All rows visit a group before the next one: its weights stay in the L1 cache.
    void multiply(int panel, int row, int rows, float* tile, Scratch& spare) override {
        const int tiles = ceil_div(rows, ROW_TILE), words = linear_.group / 4;
        uint8_t* unpacked = linear_.bits == 4 ? spare.take<uint8_t>(linear_.group * PANEL) : nullptr;
        for (int g = 0; g < linear_.groups; g++) {
            const uint8_t* at = linear_.at(panel, g);
            const auto* scales = reinterpret_cast<const uint16_t*>(at);
            const uint8_t* codes = at + 2 * PANEL;
            if (unpacked) {
                unpack(codes, unpacked);
                codes = unpacked;
            }
            // Each tile brings its part of what comes later; groups are small, so look further ahead.
            const size_t step = round_up(ceil_div(static_cast<int>(linear_.group_bytes), words * tiles), 64);
            const uint8_t *coming = at + std::max(AHEAD, linear_.group_bytes), *end = coming + linear_.group_bytes;
            for (int r = 0; r < rows;) {
                const int count = next_tile(rows - r);
                multiply_tile(count, codes, scales, row + r, g, tile + r * PANEL, {coming, coming < end ? step : 0});
                coming += step * words;
                r += count;
            }
        }
    }

private:
    void multiply_tile(
        int rows, const uint8_t* codes, const uint16_t* scales, int row, int g, float* tile, Prefetch next) const {
        switch (rows) {
            case 1: return multiply_group<1>(codes, scales, rows_, row, g, tile, next);
            case 2: return multiply_group<2>(codes, scales, rows_, row, g, tile, next);
            case 3: return multiply_group<3>(codes, scales, rows_, row, g, tile, next);
            case 4: return multiply_group<4>(codes, scales, rows_, row, g, tile, next);
            case 5: return multiply_group<5>(codes, scales, rows_, row, g, tile, next);
            default: return multiply_group<6>(codes, scales, rows_, row, g, tile, next);
        }
    }

    // One group of int4 as bytes.
    void unpack(const uint8_t* codes, uint8_t* to) const {
        const Words low = splat(0x0f0f0f0fu);
        for (int w = 0; w < linear_.group / 8; w++)
            for (int i = 0; i < static_cast<int>(PANEL_STRIDE); i += LANES * 4) {
                const Words both = load_as<Words>(codes + w * PANEL_STRIDE + i);
                store_as(to + 2 * w * PANEL_STRIDE + i, both & low);
                store_as(to + (2 * w + 1) * PANEL_STRIDE + i, (both >> 4) & low);
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
