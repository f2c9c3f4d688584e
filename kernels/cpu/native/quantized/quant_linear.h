// Linear layers with int8 or int4 weights and int8 activations.
//
// Inputs are cut into groups of 32 or 128. A weight has one float16 scale for each output and group, a row of x
// one float32 scale for each group, found when it arrives. Inside a group sums are exact integers; across
// groups they are added in float32 in ascending order, so a row's result does not depend on its neighbors.
#pragma once

#include "quantized/quant_gemm.h"

namespace llmbox {

// In: type of x. `shares`: parts of the inputs whose sums are added in pairs, which divide the groups; 1: one sum.
template <class In, class Out> class QuantLinearOp : public LinearOp<Out> {
public:
    QuantLinearOp(const QuantLinear& linear, const In* x, int64_t x_stride, Out* out, int64_t out_stride, int shares = 1)
        : LinearOp<Out>(linear, out, out_stride, shares), linear_(linear), x_(x), x_stride_(x_stride) {}

    void prepare(const Step& step, Pool& pool) override {
        LinearOp<Out>::prepare(step, pool);
        pool.shared().template take<uint8_t>(QuantRows::bytes(step.rows, linear_));
    }

    void run(const Step& step, Member& member) override {
        const QuantRows rows(member.pool.shared().template get<uint8_t>(), step.rows, linear_);
        Upcoming own = this->upcoming(step, member);
        own.begin();
        const auto cells = member.share(step.rows * linear_.groups);
        for (int cell = cells.begin; cell < cells.end; cell++) {
            const int begin = cell % linear_.groups * linear_.group;
            const In* from = x_ + cell / linear_.groups * x_stride_ + begin;
            const size_t to = rows.cell(cell / linear_.groups, cell % linear_.groups);
            const int count = std::min(linear_.group, linear_.inputs - begin);
            if (const int32_t* order = linear_.order()) {
                In gathered[MAX_GROUP];
                gather(from - begin, order + begin, count, gathered);
                quantize_group(gathered, count, to, rows);
            } else {
                quantize_group(from, count, to, rows);
            }
        }
        if (member.index == 0) rows_ = rows;
        member.barrier(own);
        this->run_panels(step, member);
    }

protected:
    void multiply(int panel, int row, int rows, float* tile, Member& member) override {
        if (this->tiles_ == 1) return multiply_quant_panel(linear_, panel, rows_, row, rows, tile, member);
        multiply_quant_shares(linear_, panel, rows_, row, rows, tile, this->tiles_, this->bias(panel), member);
    }

private:
    const QuantLinear& linear_;
    const In* x_;
    int64_t x_stride_;
    QuantRows rows_;  // of the step
};

}  // namespace llmbox
