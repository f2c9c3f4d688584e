// Linear layers: out[rows, outputs] = x[rows, inputs] * weight[outputs, inputs]^T + bias.
//
// Weights are packed into panels of 64 outputs. A panel is [words of the inputs][64 outputs], a word holding
// PACK neighboring inputs (dot_product.h): one broadcast word of x meets vectors of outputs, and memory is read in
// one direction. Inputs and outputs are padded with zeros. With AMX panels of bf16 are made of tiles (gemm_amx.h).
//
// Every output is one sum over the inputs in ascending order, in one float32 accumulator: the number of rows,
// the tile and the thread change which sums are computed side by side, never the order inside one.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "huge_pages.h"
#include "threads/command_buffer.h"
#include "threads/work_partition.h"
#include "vector/dot_product.h"

namespace llmbox {

constexpr int PANEL = 64;
constexpr size_t PANEL_STRIDE = PANEL * 4;  // bytes from one word of the inputs to the next

// A register tile is ROW_TILE rows by COLUMN_VECTORS vectors: as many accumulators as registers hold beside
// the operands (32 registers with AVX512, 16 with AVX2).
constexpr int ROW_TILE = 6;
constexpr int COLUMN_VECTORS = LANES == 16 ? 4 : 2;

// Rows that share one pass over a panel: their x stays in the L2 cache.
constexpr int ROW_BLOCK = 192;
constexpr int ROW_STEP = 32;  // whole tiles with AMX

struct LinearShape {
    int inputs, outputs;
    std::vector<float> bias;  // empty, or padded to whole panels

    LinearShape(int inputs, int outputs) : inputs(inputs), outputs(outputs) {}
    virtual ~LinearShape() = default;
    // The packed weights, and how many bytes.
    virtual const uint8_t* packed() const = 0;
    virtual size_t packed_bytes() const = 0;
    int panels() const { return ceil_div(outputs, PANEL); }
};

struct Linear : LinearShape {
    int words;  // of one row, padded
    size_t panel_bytes;
    HugeBlock weights;

    // `words` as words_of<E>(inputs).
    Linear(int inputs, int outputs, int words, uint8_t* packed = nullptr)
        : LinearShape(inputs, outputs),
          words(words),
          panel_bytes(words * PANEL_STRIDE),
          weights(panel_bytes * panels(), packed) {}

    const uint8_t* packed() const override { return weights.data(); }
    size_t packed_bytes() const override { return panel_bytes * panels(); }

    uint8_t* panel(int index) const { return weights.data() + panel_bytes * index; }
};

// Of a row of `inputs` numbers, padded.
template <class E> constexpr int words_of(int inputs) { return round_up(ceil_div(inputs, E::PACK), E::STEP); }

// Where a word of an output lies in its panel, in bytes. Of words that come in tiles (amx.h) 16 by 16 are one piece.
template <class E> INLINE size_t panel_at(int word, int column) {
    if constexpr (E::STEP > 1)
        return word / E::STEP * (E::STEP * PANEL_STRIDE) + column / E::STEP * (E::STEP * E::STEP * 4) +
               (word % E::STEP * E::STEP + column % E::STEP) * 4;
    return word * PANEL_STRIDE + 4 * column;
}

// Packs one panel of a row-major weight.
template <class E> void pack_panel(const Linear& linear, int index, const typename E::Element* weight) {
    uint8_t* panel = linear.panel(index);
    int columns = std::min(PANEL, linear.outputs - index * PANEL);
    for (int column = 0; column < columns; column++) {
        const auto* row = weight + static_cast<size_t>(index * PANEL + column) * linear.inputs;
        for (int i = 0; i < linear.inputs; i++) {
            auto* word = reinterpret_cast<typename E::Element*>(panel + panel_at<E>(i / E::PACK, column));
            word[i % E::PACK] = row[i];
        }
    }
}

// Rows of x, padded to whole words. A row starts `stride` numbers after the one before.
template <class E> struct WordRows {
    const typename E::RowNumber* data;
    size_t stride;

    INLINE const typename E::RowNumber* at(int row, int word) const {
        return data + stride * row + static_cast<size_t>(word) * E::PACK;
    }
    WordRows from(int row, int word) const { return {at(row, word), stride}; }
};

// What to bring into the cache meanwhile: `step` bytes for each word of the loop.
struct Prefetch {
    const uint8_t* at;
    size_t step;
};

// The innermost loop: tile[ROWS][VECTORS] (+)= x * weights over `words` words.
template <class E, int ROWS, int VECTORS>
INLINE void multiply(const uint8_t* weights, int words, WordRows<E> x, float* tile, bool fresh, Prefetch next) {
    Floats sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sums[r][v] = fresh ? splat(0.f) : load(tile + r * PANEL + v * LANES);
    for (int w = 0; w < words; w++) {
        for (size_t offset = 0; offset < next.step; offset += 64) prefetch(next.at + offset);
        next.at += next.step;
        UNROLL for (int part = 0; part < E::PARTS; part++) {
            decltype(E::columns(weights, part)) columns[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) columns[v] = E::columns(weights + v * LANES * 4, part);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const auto row = E::row(x.at(r, w), part);
                UNROLL for (int v = 0; v < VECTORS; v++) E::dot(sums[r][v], columns[v], row);
            }
            end_turn<E::PARTS>();
        }
        weights += PANEL_STRIDE;
    }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(tile + r * PANEL + v * LANES, sums[r][v]);
}

template <class E, int ROWS>
void multiply_rows(const uint8_t* weights, int words, WordRows<E> x, float* tile, bool fresh, Prefetch next) {
    // A single row has registers to spare: more columns side by side hide the latency of the sums.
    constexpr int VECTORS = ROWS == 1 && LANES < 16 ? 2 * COLUMN_VECTORS : COLUMN_VECTORS;
    for (int column = 0; column < PANEL; column += VECTORS * LANES) {
        multiply<E, ROWS, VECTORS>(weights + 4 * column, words, x, tile + column, fresh, next);
        next.step = 0;  // the first pass brought it all
    }
}

template <class E>
void multiply_tile(
    int rows, const uint8_t* weights, int words, WordRows<E> x, float* tile, bool fresh, Prefetch next) {
    switch (rows) {
        case 1: return multiply_rows<E, 1>(weights, words, x, tile, fresh, next);
        case 2: return multiply_rows<E, 2>(weights, words, x, tile, fresh, next);
        case 3: return multiply_rows<E, 3>(weights, words, x, tile, fresh, next);
        case 4: return multiply_rows<E, 4>(weights, words, x, tile, fresh, next);
        case 5: return multiply_rows<E, 5>(weights, words, x, tile, fresh, next);
        default: return multiply_rows<E, 6>(weights, words, x, tile, fresh, next);
    }
}

// Cuts `rows` into nearly equal tiles: 13 rows are 5 + 4 + 4, not 6 + 6 + 1.
INLINE int next_tile(int rows, int highest = ROW_TILE) { return ceil_div(rows, ceil_div(rows, highest)); }

constexpr size_t AHEAD = 3072;  // bytes that one stream is prefetched ahead

// tile[rows][PANEL] = x * panel.
template <class E> void multiply_panel(const uint8_t* panel, int words, WordRows<E> x, int rows, float* tile) {
    if (rows <= ROW_TILE) {
        multiply_tile<E>(rows, panel, words, x, tile, true, {panel + AHEAD, PANEL_STRIDE});
        return;
    }
    // All rows visit a slice of the panel before the next one, which is prefetched meanwhile. Two tiles need it so
    // soon that both slices must fit the L1 cache: 8 KB. A few more share 16 KB. Many rows amortise reading 128 KB
    // from L2, and load and store their sums less often.
    const int slice = rows <= 2 * ROW_TILE ? 32 : rows <= 64 ? 64 : 512;
    const int tiles = ceil_div(rows, ROW_TILE);
    for (int word = 0; word < words; word += slice) {
        const int count = std::min(slice, words - word);
        const uint8_t* weights = panel + word * PANEL_STRIDE;
        // Each tile brings its part of the next slice.
        const size_t step = round_up(ceil_div(PANEL_STRIDE, tiles), 64);
        const uint8_t *coming = weights + count * PANEL_STRIDE, *end = coming + count * PANEL_STRIDE;
        for (int row = 0; row < rows;) {
            const int tile_rows = next_tile(rows - row);
            Prefetch next = {coming, coming < end ? step : 0};
            multiply_tile<E>(tile_rows, weights, count, x.from(row, word), tile + row * PANEL, word == 0, next);
            coming += next.step * count;
            row += tile_rows;
        }
    }
}

// A row of x, with zeros up to `width`.
template <class T, class To> void pad_row(const T* from, int inputs, To* to, size_t width) {
    if constexpr (std::is_same_v<T, To>) std::copy_n(from, inputs, to);
    else
        for (int i = 0; i < inputs; i += LANES) store(to + i, load(from + i, inputs - i), inputs - i);
    std::fill(to + inputs, to + width, To{});
}

constexpr int row_blocks(int rows) { return ceil_div(rows, ROW_BLOCK); }
// Nearly equal ones, of at most ROW_BLOCK rows.
constexpr int rows_of_block(int rows) { return round_up(ceil_div(rows, row_blocks(rows)), ROW_STEP); }

// out[rows][columns] = tile[rows][PANEL] + bias, which may be null. `stride`: from row to row of out.
template <class Out>
void write_tile(const float* tile, int rows, int columns, const float* bias, Out* out, int64_t stride) {
    for (int r = 0; r < rows; r++, tile += PANEL, out += stride) {
        for (int i = 0; i < columns; i += LANES) {
            Floats value = load(tile + i);
            if (bias) value += load(bias + i);
            store(out + i, value, columns - i);
        }
    }
}

// Shared part of all linears: panels times blocks of rows are assigned to threads, and sums are written with the bias.
// Out: type of the result.
template <class Out> class LinearOp : public Op {
public:
    OpKind kind() const override { return OpKind::LINEAR; }
    OpWork work(const Step& step) const override {
        return {static_cast<double>(shape_.packed_bytes()), static_cast<double>(shape_.inputs) * shape_.outputs * step.rows};
    }
    Upcoming upcoming(const Step& step, const Member& member) const override {
        const size_t bytes = shape_.packed_bytes();
        const int panel = runs_.first(member.index) / row_blocks(step.rows);
        const size_t begin = bytes / shape_.panels() * panel;
        return {shape_.packed() + begin, shape_.packed() + std::min(bytes, begin + Upcoming::MOST)};
    }
    // `tiles`: room for so many tiles of sums. With more than one `multiply` adds the bias.
    LinearOp(const LinearShape& shape, Out* out, int64_t out_stride, int tiles = 1)
        : tiles_(tiles), shape_(shape), out_(out), out_stride_(out_stride) {}

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        runs_.deal(shape_.panels() * row_blocks(step.rows), pool.threads());
    }

protected:
    // tile[rows][PANEL] = rows of x from `row` on * panel.
    virtual void multiply(int panel, int row, int rows, float* tile, Member& member) = 0;

    void run_panels(const Step& step, Member& member) {
        const int blocks = row_blocks(step.rows), block = rows_of_block(step.rows);
        float* tile = member.scratch.template take<float>(static_cast<size_t>(tiles_) * block * PANEL);
        for (int item = runs_.take(member.index); item >= 0; item = runs_.take(member.index)) {
            const int panel = item / blocks, row = item % blocks * block;
            const int rows = std::min(step.rows - row, block);
            bring(panel, row, rows);
            multiply(panel, row, rows, tile, member);
            write(panel, row, rows, tile);
        }
    }

    const float* bias(int panel) const { return shape_.bias.empty() ? nullptr : shape_.bias.data() + panel * PANEL; }

    const int tiles_;

private:
    // What will be written: lines far apart, each of which is read from memory first.
    void bring(int panel, int row, int rows) const {
        for (int r = 0; r < rows; r++) {
            const auto* to = reinterpret_cast<const uint8_t*>(out_ + (row + r) * out_stride_ + panel * PANEL);
            for (size_t i = 0; i < PANEL * sizeof(Out); i += 64) prefetch_to_l2(to + i);
        }
    }

    void write(int panel, int row, int rows, const float* tile) {
        const int column = panel * PANEL, columns = std::min(PANEL, shape_.outputs - column);
        const float* added = tiles_ == 1 ? bias(panel) : nullptr;
        write_tile(tile, rows, columns, added, out_ + row * out_stride_ + column, out_stride_);
    }

    const LinearShape& shape_;
    Out* out_;
    int64_t out_stride_;
    WorkPartition runs_;  // of panels, each with all its blocks of rows
};

// Weights and rows of the same type.
template <class E, class Out> class PlainLinearOp : public LinearOp<Out> {
public:
    using In = typename E::Element;
    using RowNumber = typename E::RowNumber;

    PlainLinearOp(const Linear& linear, const In* x, int64_t x_stride, Out* out, int64_t out_stride)
        : LinearOp<Out>(linear, out, out_stride), linear_(linear), x_(x), x_stride_(x_stride) {}

    void prepare(const Step& step, Pool& pool) override {
        LinearOp<Out>::prepare(step, pool);
        if (copied()) {
            pool.shared().template take<RowNumber>(step.rows * padded_width());
            return;
        }
        if constexpr (SAME) rows_ = {x_, static_cast<size_t>(x_stride_)};
    }

    void run(const Step& step, Member& member) override {
        if (copied()) {
            auto* padded = member.pool.shared().template get<RowNumber>();
            pad_rows(member.share(step.rows), padded);
            if (member.index == 0) rows_ = {padded, padded_width()};
            member.barrier();
        }
        this->run_panels(step, member);
    }

protected:
    void multiply(int panel, int row, int rows, float* tile, Member&) override {
        multiply_panel<E>(linear_.panel(panel), linear_.words, rows_.from(row, 0), rows, tile);
    }

private:
    static constexpr bool SAME = std::is_same_v<In, RowNumber>;

    // The last words of a row would reach beyond it, or its numbers are of another type.
    bool copied() const { return !SAME || linear_.inputs != linear_.words * E::PACK; }
    size_t padded_width() const { return static_cast<size_t>(linear_.words) * E::PACK; }

    void pad_rows(Member::Span rows, RowNumber* padded) {
        for (int row = rows.begin; row < rows.end; row++)
            pad_row(x_ + row * x_stride_, linear_.inputs, padded + row * padded_width(), padded_width());
    }

    const Linear& linear_;
    const In* x_;
    int64_t x_stride_;
    WordRows<E> rows_{};  // of x
};

}  // namespace llmbox
