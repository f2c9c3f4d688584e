// LoRA adapters beside a linear: y += scale B (A x) for the rows of each adapter of a step.
//
// Rows are taken adapter by adapter (SGMV). A row's numbers are summed in one order, whatever rows are beside it: those
// of A in ascending inputs, lane by lane, those of B in ascending ranks.
#pragma once

#include <algorithm>

#include "threads/command_buffer.h"

namespace llmbox {

constexpr int LORA_PANEL = 64;  // outputs of a panel of B
constexpr int LORA_RANKS = 8;   // of a block of A: they share the loads of x
constexpr int LORA_TAIL = 4;    // of the last block, if no more are left
constexpr int LORA_ROWS = 16;   // of one item of work
constexpr int LORA_AHEAD = 8192;  // bytes that A and B are requested ahead: each lies in one piece

// Numbers are of the model's type, or int8: then A has a scale for each rank, which is part of `scales`, and each panel
// of B one for each of its ranks.
struct LoraPiece {
    int64_t start, stop;  // outputs
    int64_t first, rank;  // of the ranks that it reads
    int64_t panels;       // address of [panels]([rank] scales in float32, padded to a cache line)[rank][LORA_PANEL]
};
struct LoraWeights {
    int64_t a;       // address of [blocks][inputs / LANES][ranks of a block][LANES], padded with zeros
    int64_t scales;  // address of [rank]
    int64_t rank, pieces;
    int64_t is_int8;

    const LoraPiece& piece(int i) const { return reinterpret_cast<const LoraPiece*>(this + 1)[i]; }
};

inline int panels_of(const LoraPiece& piece) {
    return ceil_div(static_cast<int>(piece.stop - piece.start), LORA_PANEL);
}
inline int panels_of(const LoraWeights& w) {
    int panels = 0;
    for (int i = 0; i < w.pieces; i++) panels += panels_of(w.piece(i));
    return panels;
}
inline int rank_blocks_of(const LoraWeights& w) { return ceil_div(static_cast<int>(w.rank), LORA_RANKS); }
// With its padding.
inline int ranks_of_block(int64_t rank, int block) { return rank - block * LORA_RANKS > LORA_TAIL ? LORA_RANKS : LORA_TAIL; }
// Bytes before the numbers of a panel of B, and of all of it.
template <class C> constexpr int64_t panel_scales(int64_t rank) {
    return sizeof(C) == 1 ? round_up(static_cast<int>(rank) * 4, 64) : 0;
}
template <class C> constexpr int64_t lora_panel_bytes(int64_t rank) {
    return panel_scales<C>(rank) + rank * LORA_PANEL * static_cast<int64_t>(sizeof(C));
}

template <class C, int RANKS, class T> INLINE void shrink_block(const C* a, const T* x, int inputs, float* low) {
    LaneSums sums[RANKS];
    const auto add = [&](int v, int i) {
        UNROLL for (size_t ahead = 0; ahead < RANKS * LANES * sizeof(C); ahead += 64)
            prefetch(reinterpret_cast<const uint8_t*>(a) + LORA_AHEAD + ahead);
        const Floats from = load(x + i, inputs - i);
        UNROLL for (int r = 0; r < RANKS; r++)
            sums[r].parts[v] = multiply_add(from, load(a + r * LANES), sums[r].parts[v]);
        a += RANKS * LANES;
    };
    for (int i = 0; i < inputs; i += SUM_LANES)
        UNROLL for (int v = 0; v < SUM_VECTORS; v++)
            if (i + v * LANES < inputs) add(v, i + v * LANES);
    UNROLL for (int r = 0; r < RANKS; r++) low[r] = sums[r].total();
}

template <class C, class T> inline void lora_shrink_as(const LoraWeights& w, int block, const T* x, int inputs, float* low) {
    const int first = block * LORA_RANKS, ranks = std::min(LORA_RANKS, static_cast<int>(w.rank) - first);
    const C* a = reinterpret_cast<const C*>(w.a) + static_cast<int64_t>(first) * round_up(inputs, LANES);
    const float* scales = reinterpret_cast<const float*>(w.scales) + first;
    float sums[LORA_RANKS];
    if (ranks > LORA_TAIL) shrink_block<C, LORA_RANKS>(a, x, inputs, sums);
    else shrink_block<C, LORA_TAIL>(a, x, inputs, sums);
    for (int r = 0; r < ranks; r++) low[first + r] = sums[r] * scales[r];
}

// low[r] = scale A x for the ranks of one block, r counted from the first of all.
template <class T> inline void lora_shrink(const LoraWeights& w, int block, const T* x, int inputs, float* low) {
    if (w.is_int8) lora_shrink_as<int8_t>(w, block, x, inputs, low);
    else lora_shrink_as<T>(w, block, x, inputs, low);
}

template <class C, class Out> inline void lora_expand_as(const LoraPiece& piece, int panel, const float* low, Out* y) {
    const auto* at = reinterpret_cast<const uint8_t*>(piece.panels) + panel * lora_panel_bytes<C>(piece.rank);
    const auto* scales = reinterpret_cast<const float*>(at);
    const C* b = reinterpret_cast<const C*>(at + panel_scales<C>(piece.rank));
    const int64_t column = piece.start + static_cast<int64_t>(panel) * LORA_PANEL;
    const int columns = static_cast<int>(std::min<int64_t>(LORA_PANEL, piece.stop - column));
    low += piece.first;
    y += column;
    Floats sums[LORA_PANEL / LANES] = {};
    for (int r = 0; r < piece.rank; r++, b += LORA_PANEL) {
        UNROLL for (size_t ahead = 0; ahead < LORA_PANEL * sizeof(C); ahead += 64)
            prefetch(reinterpret_cast<const uint8_t*>(b) + LORA_AHEAD + ahead);
        const Floats factor = splat(sizeof(C) == 1 ? low[r] * scales[r] : low[r]);
        UNROLL for (int i = 0; i < LORA_PANEL / LANES; i++) sums[i] = multiply_add(factor, load(b + i * LANES), sums[i]);
    }
    for (int i = 0; i < columns; i += LANES) store(y + i, load(y + i, columns - i) + sums[i / LANES], columns - i);
}

// y += B low for one panel of outputs.
template <class T, class Out> inline void lora_expand(const LoraWeights& w, int panel, const float* low, Out* y) {
    int number = 0;
    for (; panel >= panels_of(w.piece(number)); number++) panel -= panels_of(w.piece(number));
    if (w.is_int8) lora_expand_as<int8_t>(w.piece(number), panel, low, y);
    else lora_expand_as<T>(w.piece(number), panel, low, y);
}

template <class T, class Out> class LoraOp : public Op {
public:
    // `weights`: address of the weights of each slot, 0 where an adapter has none here.
    LoraOp(const int64_t* weights, const T* x, int64_t x_stride, int inputs, Out* y, int64_t y_stride)
        : weights_(weights), x_(x), x_stride_(x_stride), inputs_(inputs), y_(y), y_stride_(y_stride) {}

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        widest_ = 0;
        for (int run = 0; run < step.adapter_runs; run++)
            if (const LoraWeights* weights = of(step, run)) widest_ = std::max(widest_, static_cast<int>(weights->rank));
        if (widest_) pool.shared().template take<float>(static_cast<size_t>(step.adapter_starts[step.adapter_runs]) * widest_);
    }

    void run(const Step& step, Member& member) override {
        if (!widest_) return;
        float* low = member.pool.shared().template get<float>();
        each_item(step, member, [](const LoraWeights& w) { return rank_blocks_of(w); },
                  [&](const LoraWeights& w, int item, int begin, int end) { shrink(step, w, item, begin, end, low); });
        member.barrier();
        each_item(step, member, [](const LoraWeights& w) { return panels_of(w); },
                  [&](const LoraWeights& w, int item, int begin, int end) { expand(step, w, item, begin, end, low); });
    }

private:
    const LoraWeights* of(const Step& step, int run) const {
        return reinterpret_cast<const LoraWeights*>(weights_[step.adapter_slots[run]]);
    }

    // Calls work(weights, item, first entry of the rows, their end) for this member's share of all runs.
    template <class Count, class Work> void each_item(const Step& step, Member& member, Count count, Work work) const {
        int total = 0;
        for (int run = 0; run < step.adapter_runs; run++)
            if (const LoraWeights* w = of(step, run)) total += count(*w) * blocks(step, run);
        const auto mine = member.share(total);
        int passed = 0;
        for (int run = 0; run < step.adapter_runs && passed < mine.end; run++) {
            const LoraWeights* w = of(step, run);
            if (!w) continue;
            const int rows = blocks(step, run), items = count(*w) * rows;
            for (int i = std::max(mine.begin - passed, 0); i < std::min(mine.end - passed, items); i++) {
                const int begin = step.adapter_starts[run] + i % rows * LORA_ROWS;
                work(*w, i / rows, begin, std::min(begin + LORA_ROWS, step.adapter_starts[run + 1]));
            }
            passed += items;
        }
    }
    static int blocks(const Step& step, int run) {
        return ceil_div(step.adapter_starts[run + 1] - step.adapter_starts[run], LORA_ROWS);
    }

    NOINLINE void shrink(const Step& step, const LoraWeights& w, int block, int begin, int end, float* low) const {
        for (int entry = begin; entry < end; entry++)
            lora_shrink(w, block, x_ + step.adapter_rows[entry] * x_stride_, inputs_, low + static_cast<int64_t>(entry) * widest_);
    }

    NOINLINE void expand(const Step& step, const LoraWeights& w, int panel, int begin, int end, const float* low) const {
        for (int entry = begin; entry < end; entry++)
            lora_expand<T>(w, panel, low + static_cast<int64_t>(entry) * widest_, y_ + step.adapter_rows[entry] * y_stride_);
    }

    const int64_t* weights_;
    const T* x_;
    int64_t x_stride_;
    int inputs_;
    Out* y_;
    int64_t y_stride_;
    int widest_ = 0;  // ranks of an adapter of the step
};

// x = row of the adapter's own embedding * scale, for adapters that have one.
template <class T> class LoraEmbeddingOp : public Op {
public:
    LoraEmbeddingOp(const int64_t* tables, float scale, T* x, int64_t x_stride, int width)
        : tables_(tables), scale_(scale), x_(x), x_stride_(x_stride), width_(width) {}

    void run(const Step& step, Member& member) override {
        for (int run = 0; run < step.adapter_runs; run++) {
            const T* table = reinterpret_cast<const T*>(tables_[step.adapter_slots[run]]);
            if (!table) continue;
            const int begin = step.adapter_starts[run];
            const auto mine = member.share(step.adapter_starts[run + 1] - begin);
            for (int entry = begin + mine.begin; entry < begin + mine.end; entry++) {
                const int row = step.adapter_rows[entry];
                const T* from = table + step.ids[row] * width_;
                T* to = x_ + row * x_stride_;
                for (int i = 0; i < width_; i += LANES) store(to + i, load(from + i, width_ - i) * splat(scale_), width_ - i);
            }
        }
    }

private:
    const int64_t* tables_;
    float scale_;
    T* x_;
    int64_t x_stride_;
    int width_;
};

}  // namespace llmbox
