// Embedding lookup. It is packed for its use as output head too, so a row is gathered word by word.
#pragma once

#include "linear/gemm.h"
#include "quantized/quant_panels.h"

namespace llmbox {

// The rows `ids` of a weight packed for its use as output head, times `scale`.
template <class E> class EmbeddingOp : public Op {
public:
    using Element = typename E::Element;

    EmbeddingOp(const Linear& table, float scale, Element* out, int64_t out_stride)
        : table_(table), scale_(scale), out_(out), out_stride_(out_stride) {}

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const int64_t id = step.ids[row];
            if (id < 0 || id >= table_.outputs) {  // invalid id: its row becomes NaN
                std::fill_n(out_ + row * out_stride_, table_.inputs, from_float<Element>(NAN));
                continue;
            }
            const uint8_t* panel = table_.panel(static_cast<int>(id / PANEL));
            const int column = static_cast<int>(id % PANEL);
            Element* to = out_ + row * out_stride_;
            for (int i = 0; i < table_.inputs; i += E::PACK)
                memcpy(to + i, panel + panel_at<E>(i / E::PACK, column),
                       std::min(E::PACK, table_.inputs - i) * sizeof(Element));
            if (scale_ != 1) multiply(to);
        }
    }

private:
    void multiply(Element* x) const {
        for (int i = 0; i < table_.inputs; i += LANES) {
            const int left = table_.inputs - i;
            store(x + i, load(x + i, left) * splat(scale_), left);
        }
    }

    const Linear& table_;
    float scale_;
    Element* out_;
    int64_t out_stride_;
};

// The rows `ids` of a quantized table, times `scale`.
template <class Out> class QuantEmbeddingOp : public Op {
public:
    QuantEmbeddingOp(const QuantLinear& table, float scale, Out* out, int64_t out_stride)
        : table_(table), scale_(scale), out_(out), out_stride_(out_stride) {}

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const int64_t id = step.ids[row];
            Out* to = out_ + row * out_stride_;
            const bool known = id >= 0 && id < table_.outputs;
            for (int i = 0; i < table_.inputs; i++)
                to[i] = from_float<Out>(known ? table_.weight(id, i) * scale_ : NAN);
        }
    }

private:
    const QuantLinear& table_;
    float scale_;
    Out* out_;
    int64_t out_stride_;
};

}  // namespace llmbox
