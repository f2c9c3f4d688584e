// Mixture of experts (MoE): each row goes through the few that its router logits choose, down(activation(gate(x)) * up(x)), and
// their results are summed by their shares, the best first, and what all rows share last.
//
// Rows are copied together by expert, and panels of all experts that have rows are assigned at once: experts alone would
// be too little work for many threads. A copy's bits are those of the linears alone, and a row's sum has one order, so who
// else is in the step does not matter, nor which rank computed the copy: ranks that divide the experts exchange copies
// between `ExpertsOp` and `CombineOp`.
#pragma once

#include "elementwise.h"
#include "moe/expert_adapters.h"
#include "moe/moe_routing.h"
#include "moe/moe_rows.h"

namespace llmbox {

// Linears of the experts that are held here.
template <class Shape> struct ExpertLinears {
    std::vector<const Shape*> gate_ups, downs;

    int hidden() const { return gate_ups[0]->inputs; }
    int inner() const { return downs[0]->inputs; }
    int gates() const { return gate_ups[0]->outputs; }
    int count() const { return static_cast<int>(downs.size()); }
};

// Inputs and outputs of an MoE layer. Strides count elements.
template <class T> struct ExpertsCall {
    const T* x;
    int64_t x_stride;
    const float* logits;
    int64_t logits_stride;
    int experts;    // of which rows choose
    HeldExperts here;
    int64_t* load;  // counts rows of each expert; may be null
    int per_row;
    bool normalized;
    Routing routing;
    int activation;
    float limit;  // of it
    const T* shared;  // may be null
    int64_t shared_stride;
    const float* shared_gate;  // its sigmoid multiplies a row of `shared`; may be null
    int64_t shared_gate_stride;
    T* out;
    int64_t out_stride;
    const int64_t *gate_up_adapters, *down_adapters;  // of LoRA: see `ExpertAdapters`; may be null
    // Of each copy, where they are not added up: its share and the rank that computes it. `out` then has a row for each copy,
    // of zeros for those of other ranks. Null: `out` is the sum.
    float* shares;
    int32_t* owners;
};

// One row's sum: its results by their shares, the best first, then what all rows share. `result_of(k)` may be null: no result.
template <class T> struct RowSum {
    const float* shares;
    int per_row;
    const T* shared;  // may be null
    const float* shared_gate;  // may be null

    template <class ResultOf> void write(ResultOf result_of, int begin, int end, T* out) const {
        Floats gate = splat(1.f);
        if (shared_gate) {
            const Floats x = splat(*shared_gate), e = exp_negative(-abs(x));
            gate = (x < splat(0.f) ? e : splat(1.f)) / (splat(1.f) + e);
        }
        for (int i = begin; i < end; i += LANES) {
            Floats total = splat(0.f);
            for (int k = 0; k < per_row; k++)
                if (const T* from = result_of(k)) total = multiply_add(splat(shares[k]), load(from + i, end - i), total);
            if (shared) total = multiply_add(gate, load(shared + i, end - i), total);
            store(out + i, total, end - i);
        }
    }
};

constexpr int SUM_PIECE = 256;  // of a row that is added up

// Adds up copies that `ExpertsOp` left apart.
template <class T> class CombineOp : public Op {
public:
    OpKind kind() const override { return OpKind::EXPERTS; }

    // `results`: [rows * per_row][width]; `per_row` 0: of no experts.
    CombineOp(const T* results, const float* shares, int per_row, int width, const T* shared, int64_t shared_stride,
              const float* shared_gate, int64_t shared_gate_stride, T* out, int64_t out_stride)
        : results_(results), shares_(shares), per_row_(per_row), width_(width), shared_(shared),
          shared_stride_(shared_stride), shared_gate_(shared_gate), shared_gate_stride_(shared_gate_stride), out_(out),
          out_stride_(out_stride) {}

    void run(const Step& step, Member& member) override {
        const int pieces = ceil_div(width_, SUM_PIECE);
        const auto mine = member.share(step.rows * pieces);
        for (int piece = mine.begin; piece < mine.end; piece++) {
            const int row = piece / pieces, begin = piece % pieces * SUM_PIECE;
            const T* results = results_ + static_cast<size_t>(row) * per_row_ * width_;
            const RowSum<T> sum{shares_ + static_cast<size_t>(row) * per_row_, per_row_,
                                shared_ ? shared_ + row * shared_stride_ : nullptr,
                                shared_gate_ ? shared_gate_ + row * shared_gate_stride_ : nullptr};
            sum.write([&](int k) { return results + static_cast<size_t>(k) * width_; }, begin,
                      std::min(width_, begin + SUM_PIECE), out_ + row * out_stride_);
        }
    }

private:
    const T* results_;
    const float* shares_;
    const int per_row_, width_;
    const T* shared_;
    const int64_t shared_stride_;
    const float* shared_gate_;
    const int64_t shared_gate_stride_;
    T* out_;
    const int64_t out_stride_;
};

// Copies: how rows become what the linears multiply (moe_rows.h).
template <class Copies> class ExpertsOp : public Op {
public:
    OpKind kind() const override { return OpKind::EXPERTS; }
    using T = typename Copies::In;
    using Shape = typename Copies::Shape;

    ExpertsOp(ExpertLinears<Shape> linears, const ExpertsCall<T>& call)
        : linears_(std::move(linears)), call_(call),
          routes_(call.experts, call.here, linears_.count(), call.per_row, Copies::ALIGN) {}

    void prepare(const Step& step, Pool& pool) override {
        routes_.begin(step.rows);
        adapters_.begin(step, call_.gate_up_adapters, call_.down_adapters, linears_.count());
        pool.shared().template take<uint8_t>(memory_of(step.rows, nullptr).bytes);
    }

    // The experts are not known before; but what a linear behind them reads would not stay in the caches.
    Upcoming upcoming(const Step&, const Member&) const override {
        const uint8_t* none = linears_.gate_ups[0]->packed();
        return {none, none};
    }

    void run(const Step& step, Member& member) override {
        const Memory memory = memory_of(step.rows, member.pool.shared().template get<uint8_t>());
        const Copies rows(memory.rows, routes_.room(step.rows), *linears_.gate_ups[0]);
        const bool one = step.rows == 1 && !call_.routing.scales_inputs;  // its copies are equal: they are one
        if (one) {
            route_one(rows, member);
            member.barrier();
        } else {
            choose(step.rows, member);
            member.barrier();
            if (member.index == 0) place(step.rows, member);
            member.barrier();
            copy(step.rows, rows, member);
            Upcoming gate_ups = upcoming_of(linears_.gate_ups, gate_up_items_, member);
            member.barrier(gate_ups);
        }
        multiply(linears_.gate_ups, rows, one, memory.gate_ups, gate_up_items_, member);
        const int hidden = linears_.hidden(), gates = linears_.gates();
        Upcoming downs = upcoming_of(linears_.downs, down_items_, member);
        if (adapters_) shrink_gate_ups(memory.low, member);
        member.barrier(downs);
        if (adapters_) {
            adapters_.template expand<T>(call_.gate_up_adapters, memory.low, memory.gate_ups, gates, member);
            member.barrier();
        }
        const Copies inner(memory.inner, routes_.room(step.rows), *linears_.downs[0]);
        gate(step.rows, memory.gate_ups, inner, member);
        member.barrier(downs);
        multiply(linears_.downs, inner, false, memory.results, down_items_, member);
        if (adapters_) {
            const auto x = [&](int, int place) { return memory.gate_ups + static_cast<size_t>(place) * gates; };
            adapters_.template shrink<T>(call_.down_adapters, x, linears_.inner(), memory.low, member);
        }
        member.barrier();
        if (adapters_) {
            adapters_.template expand<T>(call_.down_adapters, memory.low, memory.results, hidden, member);
            member.barrier();
        }
        if (call_.owners) hand_out(step.rows, memory.results, member);
        else add_up(step.rows, memory.results, member);
    }

private:
    // Of one step, one after the other.
    struct Memory {
        uint8_t *rows, *inner;
        T *gate_ups, *results;  // [room][gates and ups], [room][hidden]
        float* low;             // of adapters: [copies][their most ranks]
        size_t bytes;
    };

    Memory memory_of(int rows, uint8_t* at) const {
        const int room = routes_.room(rows);
        size_t used = 0;
        const auto next = [&](size_t bytes) {
            uint8_t* begin = at + used;
            used += (bytes + 63) / 64 * 64;
            return begin;
        };
        Memory memory{};
        memory.rows = next(Copies::bytes(room, *linears_.gate_ups[0]));
        memory.inner = next(Copies::bytes(room, *linears_.downs[0]));
        memory.gate_ups = reinterpret_cast<T*>(next(static_cast<size_t>(room) * linears_.gates() * sizeof(T)));
        memory.results = reinterpret_cast<T*>(next(static_cast<size_t>(room) * linears_.hidden() * sizeof(T)));
        if (adapters_)
            memory.low = reinterpret_cast<float*>(
                next(static_cast<size_t>(routes_.copies(rows)) * adapters_.widest() * sizeof(float)));
        memory.bytes = used;
        return memory;
    }

    int items(const Shape& linear) const { return static_cast<int>(routes_.runs().size()) * linear.panels(); }

    // The first weights that this thread reads of those experts.
    Upcoming upcoming_of(const std::vector<const Shape*>& linears, const WorkPartition& items, const Member& member) const {
        const int panels = linears[0]->panels();
        const size_t item = items.first(member.index);
        if (item / panels >= routes_.runs().size()) return {};
        const Shape& linear = *linears[routes_.runs()[item / panels].expert];
        const size_t bytes = linear.packed_bytes(), begin = bytes / panels * (item % panels);
        return {linear.packed() + begin, linear.packed() + std::min(bytes, begin + Upcoming::MOST)};
    }

    // By one thread.
    void place(int rows, Member& member) {
        routes_.place(rows, call_.load);
        if (adapters_) adapters_.place(rows, call_.per_row, routes_);
        gate_up_items_.deal(items(*linears_.gate_ups[0]), member.size);
        down_items_.deal(items(*linears_.downs[0]), member.size);
    }

    // One thread routes the only row; the others make it what linears multiply.
    void route_one(const Copies& to, Member& member) {
        if (member.index == 0) {
            routes_.choose(0, call_.logits, call_.normalized, call_.routing,
                           member.scratch.template take<float>(4 * call_.experts));
            place(1, member);
        }
        const int others = std::max(1, member.size - 1), index = member.index - (member.size > 1);
        if (index < 0) return;
        const int parts = Copies::parts(*linears_.gate_ups[0]);
        for (int part = parts * index / others; part < parts * (index + 1) / others; part++)
            to.fill_part(0, part, call_.x, linears_.hidden());
    }

    void choose(int rows, Member& member) {
        float* scratch = member.scratch.template take<float>(4 * call_.experts);
        const auto mine = member.share(rows);
        for (int row = mine.begin; row < mine.end; row++)
            routes_.choose(row, call_.logits + row * call_.logits_stride, call_.normalized, call_.routing,
                           scratch);
    }

    void copy(int rows, const Copies& to, Member& member) const {
        const int hidden = linears_.hidden();
        T* scaled = call_.routing.scales_inputs ? member.scratch.template take<T>(hidden) : nullptr;
        const auto mine = member.share(routes_.copies(rows));
        for (int copy = mine.begin; copy < mine.end; copy++) {
            if (routes_.place_of(copy) < 0) continue;
            const T* x = call_.x + copy / call_.per_row * call_.x_stride;
            for (int i = 0; scaled && i < hidden; i += LANES)
                store(scaled + i, load(x + i, hidden - i) * splat(routes_.share_of(copy)), hidden - i);
            for (int part = 0; part < Copies::parts(*linears_.gate_ups[0]); part++)
                to.fill_part(routes_.place_of(copy), part, scaled ? scaled : x, hidden);
        }
    }

    void shrink_gate_ups(float* low, Member& member) const {
        const auto x = [&](int copy, int) { return call_.x + copy / call_.per_row * call_.x_stride; };
        const bool scaled = call_.routing.scales_inputs;
        adapters_.template shrink<T>(call_.gate_up_adapters, x, linears_.hidden(), low, member,
                                     [&](int copy) { return scaled ? routes_.share_of(copy) : 1.f; });
    }

    // out[place][outputs] of all copies: an item is one panel of one expert. `one`: all copies are those of row 0.
    void multiply(const std::vector<const Shape*>& linears, const Copies& rows, bool one, T* out, WorkPartition& items,
                  Member& member) const {
        float* tile = member.scratch.template take<float>(ROW_BLOCK * PANEL);
        const int panels = linears[0]->panels(), outputs = linears[0]->outputs;
        for (int item = items.take(member.index); item >= 0; item = items.take(member.index)) {
            const auto& run = routes_.runs()[item / panels];
            const int panel = item % panels, columns = std::min(PANEL, outputs - panel * PANEL);
            const int block = rows_of_block(run.rows);
            for (int row = 0; row < run.rows; row += block) {
                const int first = run.first + row, count = std::min(block, run.rows - row);
                const Shape& linear = *linears[run.expert];
                const float* bias = linear.bias.empty() ? nullptr : linear.bias.data() + panel * PANEL;
                rows.multiply(linear, panel, one ? 0 : first, count, tile, member);
                T* to = out + static_cast<size_t>(first) * outputs + panel * PANEL;
                write_tile<T>(tile, count, columns, bias, to, outputs);
            }
        }
    }

    void gate(int rows, T* gate_ups, const Copies& to, Member& member) const {
        // Parts, because one row may have fewer copies than there are threads.
        const int inner = linears_.inner(), parts = Copies::parts(*linears_.downs[0]);
        const int size = Copies::part_size(*linears_.downs[0]);
        const auto mine = member.share(routes_.copies(rows) * parts);
        for (int i = mine.begin; i < mine.end; i++) {
            const int place = routes_.place_of(i / parts), part = i % parts, begin = part * size;
            if (place < 0) continue;
            T* row = gate_ups + static_cast<size_t>(place) * linears_.gates();
            T *gates = row + begin, *ups = gates + inner;
            const int count = std::min(size, inner - begin);
            const float limit = call_.limit;
            if (call_.activation == GELU_TANH) gate_mul<GELU_TANH>(gates, ups, count, limit);
            else if (call_.activation == RELU2) gate_mul<RELU2>(gates, gates, count, limit);
            else if (call_.activation == SWIGLU_OAI) gate_mul<SWIGLU_OAI>(gates, ups, count, limit);
            else if (call_.activation == SWIGLU_LIMITED) gate_mul<SWIGLU_LIMITED>(gates, ups, count, limit);
            else gate_mul<SILU>(gates, ups, count, limit);
            to.fill_part(place, part, row, inner);
        }
    }

    const T* result_of(int copy, const T* results) const {
        const int place = routes_.place_of(copy);
        return place < 0 ? nullptr : results + static_cast<size_t>(place) * linears_.hidden();
    }

    float share_of(int copy) const { return call_.routing.scales_inputs ? 1.f : routes_.share_of(copy); }

    void hand_out(int rows, const T* results, Member& member) const {
        const size_t hidden = linears_.hidden();
        const auto mine = member.share(routes_.copies(rows));
        for (int copy = mine.begin; copy < mine.end; copy++) {
            T* to = call_.out + copy * hidden;
            if (const T* from = result_of(copy, results)) std::copy_n(from, hidden, to);
            else std::fill_n(to, hidden, T{});
            call_.shares[copy] = share_of(copy);
            call_.owners[copy] = routes_.owner_of(copy);
        }
    }

    void add_up(int rows, const T* results, Member& member) const {
        const int hidden = linears_.hidden(), pieces = ceil_div(hidden, SUM_PIECE);
        float* shares = member.scratch.template take<float>(call_.per_row);
        const auto mine = member.share(rows * pieces);
        for (int piece = mine.begin; piece < mine.end; piece++) {
            const int row = piece / pieces, begin = piece % pieces * SUM_PIECE, first = row * call_.per_row;
            for (int k = 0; k < call_.per_row; k++) shares[k] = share_of(first + k);
            const RowSum<T> sum{shares, call_.per_row, call_.shared ? call_.shared + row * call_.shared_stride : nullptr,
                                call_.shared_gate ? call_.shared_gate + row * call_.shared_gate_stride : nullptr};
            sum.write([&](int k) { return result_of(first + k, results); }, begin, std::min(hidden, begin + SUM_PIECE),
                      call_.out + row * call_.out_stride);
        }
    }

    const ExpertLinears<Shape> linears_;
    const ExpertsCall<T> call_;
    ExpertRoutes routes_;
    ExpertAdapters adapters_;
    WorkPartition gate_up_items_, down_items_;
};

}  // namespace llmbox
