// Linears of one shape that each read their own part of a row: those of each head in latent attention, all in one
// operation, because one of them is too little work to share. A router is one alone.
#pragma once

#include "linear/wide_gemm.h"
#include "moe/moe_rows.h"

namespace llmbox {

// Rows in float32, for weights of W: see moe_rows.h.
template <class W, class T> class WideCopies {
public:
    using In = T;
    using Shape = typename W::Shape;
    static constexpr int ALIGN = 1;

    static size_t bytes(int rows, const Shape& linear) { return rows * width_of(linear) * sizeof(float); }
    WideCopies(uint8_t* memory, int, const Shape& linear)
        : data_(reinterpret_cast<float*>(memory)), groups_(W::groups(linear)), width_(width_of(linear)) {}

    void fill(int row, const T* from, int inputs) const {
        float* to = data_ + row * width_;
        const int width = static_cast<int>(width_);
        for (int i = 0; i < width; i += LANES) store(to + i, load(from + i, std::max(0, inputs - i)), width - i);
    }
    void multiply(const Shape& linear, int panel, int row, int rows, float* tile, Member& member) const {
        float* wide = member.spare.template take<float>(MOST_WIDENED * PANEL);
        multiply_wide_panel<W>(W::panel(linear, panel), groups_, data_ + row * width_, width_, rows, tile, wide);
    }

private:
    static size_t width_of(const Shape& linear) { return static_cast<size_t>(W::groups(linear)) * WIDE_INPUTS<W>; }

    float* data_;
    int groups_;
    size_t width_;  // of a row, with zeros at its end
};

// Rows of all heads. Strides count elements: from row to row, from head to head.
template <class T> struct ByHead {
    T* data;
    int64_t stride, head;

    T* at(int row, int head_index) const { return data + row * stride + head_index * head; }
};

template <class Copies, class Out> class LinearByHeadOp : public Op {
public:
    using Shape = typename Copies::Shape;
    using In = typename Copies::In;

    LinearByHeadOp(std::vector<const Shape*> linears, ByHead<const In> x, ByHead<Out> out)
        : linears_(std::move(linears)), x_(x), out_(out) {}

    OpKind kind() const override { return OpKind::LINEAR; }
    OpWork work(const Step& step) const override {
        const double heads = count(), products = static_cast<double>(shape().inputs) * shape().outputs;
        return {heads * static_cast<double>(shape().packed_bytes()), heads * products * step.rows};
    }

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        pool.shared().template take<uint8_t>(Copies::bytes(room(step.rows) * heads_at_once(step.rows), shape()));
    }

    void run(const Step& step, Member& member) override {
        const int rows = step.rows, room = this->room(rows), most = heads_at_once(rows);
        for (int first = 0; first < count(); first += most) {
            const int heads = std::min(most, count() - first);
            const Copies copies(member.pool.shared().template get<uint8_t>(), room * most, shape());
            if (first) member.barrier();  // the copies before are still read
            const auto mine = member.share(heads * rows);
            for (int copy = mine.begin; copy < mine.end; copy++) {
                const int head = copy / rows, row = copy % rows;
                copies.fill(head * room + row, x_.at(row, first + head), shape().inputs);
            }
            if (member.index == 0) items_.deal(heads * shape().panels() * row_blocks(rows), member.size);
            member.barrier();
            multiply(copies, first, rows, member);
        }
    }

private:
    static constexpr int MOST_COPIES = 512;  // of rows that are made at once

    int count() const { return static_cast<int>(linears_.size()); }
    const Shape& shape() const { return *linears_[0]; }
    static int room(int rows) { return round_up(rows, Copies::ALIGN); }
    int heads_at_once(int rows) const { return std::clamp(MOST_COPIES / std::max(1, room(rows)), 1, count()); }

    void multiply(const Copies& copies, int first_head, int rows, Member& member) {
        float* tile = member.scratch.template take<float>(ROW_BLOCK * PANEL);
        const int panels = shape().panels(), blocks = row_blocks(rows), block = rows_of_block(rows);
        for (int item = items_.take(member.index); item >= 0; item = items_.take(member.index)) {
            const int head = item / (panels * blocks), panel = item / blocks % panels, row = item % blocks * block;
            const int size = std::min(block, rows - row), column = panel * PANEL;
            const Shape& linear = *linears_[first_head + head];
            copies.multiply(linear, panel, head * room(rows) + row, size, tile, member);
            const float* bias = linear.bias.empty() ? nullptr : linear.bias.data() + column;
            write_tile(tile, size, std::min(PANEL, linear.outputs - column), bias, out_.at(row, first_head + head) + column,
                       out_.stride);
        }
    }

    const std::vector<const Shape*> linears_;
    const ByHead<const In> x_;
    const ByHead<Out> out_;
    WorkPartition items_;  // of a head, a panel and a block of rows
};

}  // namespace llmbox
