// Recurrent layers: short convolutions, the gated delta rule, scans of Mamba 1 and 2, and the gates around them.
//
// A sequence's rows are taken one after the other, so its state is a function of its tokens alone: whatever the chunks,
// the batch and the threads, the same bits. State is float32.
#pragma once

#include <cmath>

#include "elementwise.h"

namespace llmbox {

// The rows of one sequence, its slot, and the rows after which its state is also written to other slots.
struct SequenceRows {
    int begin, end;
    bool fresh;  // begins at position 0, or has no slot: there is nothing of it yet
    int slot;    // -1: none, as rows have that fill up a graph

    SequenceRows(const Step& step, int sequence)
        : begin(step.query_starts[sequence]),
          end(step.query_starts[sequence + 1]),
          fresh(step.contexts[sequence] == end - begin || step.state_slots[sequence] < 0),
          slot(step.state_slots[sequence]),
          next_(step.save_starts[sequence]),
          last_(step.save_starts[sequence + 1]),
          step_(step) {}

    // The slot to write the state after `row` to, or -1.
    int saved_after(int row) { return next_ < last_ && step_.save_rows[next_] == row ? step_.save_slots[next_++] : -1; }

private:
    int next_, last_;
    const Step& step_;
};

// x is [rows, channels], or gated [rows, 3 channels]; weight [width, channels], state [slots, width - 1, channels].
template <class T> class ShortConvOp : public Op {
public:
    OpKind kind() const override { return OpKind::RECURRENT; }
    static constexpr int MOST = 8;

    ShortConvOp(const T* x, int64_t x_stride, bool gated, const float* weight, const float* bias, int width, int channels,
                float* state, T* out)
        : x_(x), x_stride_(x_stride), gated_(gated), weight_(weight), bias_(bias), width_(width), channels_(channels),
          state_(state), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * channels_); }

    void run(const Step& step, Member& member) override {
        const int columns = ceil_div(channels_, LANES);
        const auto span = member.share(step.sequences * columns);
        for (int piece = span.begin; piece < span.end; piece++)
            column(SequenceRows(step, piece / columns), piece % columns * LANES);
    }

private:
    NOINLINE void column(SequenceRows rows, int channel) {
        const int left = channels_ - channel, past = width_ - 1;
        Floats window[MOST], weight[MOST];
        for (int k = 0; k < width_; k++) weight[k] = load(weight_ + k * channels_ + channel, left);
        for (int k = 0; k < past; k++)
            window[k] = rows.fresh ? splat(0.f) : load(slot(rows.slot) + k * channels_ + channel, left);
        const Floats bias = bias_ ? load(bias_ + channel, left) : splat(0.f);
        for (int row = rows.begin; row < rows.end; row++) {
            const T* x = x_ + row * x_stride_ + channel;
            window[past] = gated_ ? load(x, left) * load(x + 2 * channels_, left) : load(x, left);
            Floats total = bias;
            for (int k = 0; k < width_; k++) total = multiply_add(window[k], weight[k], total);
            total = gated_ ? total * load(x + channels_, left) : activated<SILU>(total);
            store(out_ + static_cast<int64_t>(row) * channels_ + channel, total, left);
            for (int k = 0; k < past; k++) window[k] = window[k + 1];
            if (const int to = rows.saved_after(row); to >= 0) keep(window, to, channel);
        }
        if (rows.slot >= 0) keep(window, rows.slot, channel);
    }

    void keep(const Floats* window, int to, int channel) {
        for (int k = 0; k < width_ - 1; k++) store(slot(to) + k * channels_ + channel, window[k], channels_ - channel);
    }

    float* slot(int number) const { return state_ + static_cast<int64_t>(number) * (width_ - 1) * channels_; }

    const T* x_;
    int64_t x_stride_;
    bool gated_;
    const float *weight_, *bias_;
    int width_, channels_;
    float* state_;
    T* out_;
};

struct ScanHeads {
    int heads, key_heads, key_dim, value_dim;
    float least, most;  // of a time step; of KDA the least logarithm of a decay, or 0
    float beta;         // multiplier of the delta rule's beta

    int keys() const { return key_heads * key_dim; }
    int values() const { return heads * value_dim; }
    int64_t state() const { return static_cast<int64_t>(heads) * key_dim * value_dim; }
};

enum ScanRule : int { DELTA = 0, SSM = 1, KDA = 2, S6 = 3 };  // as Python names them (kernels/cpu/recurrent.py)

// kernels/recurrent.py::ScanShape says what is computed. Rows are first brought into float32 with their decays and
// factors, [q | k | decay | factor], the decays of KDA key by key; then each thread takes some columns of a head's state
// through all rows. S6 has factors value by value, and decays of which each is used once, so that they are not stored.
template <class T, ScanRule RULE> class ScanOp : public Op {
public:
    OpKind kind() const override { return OpKind::RECURRENT; }
    ScanOp(const T* rows, int64_t stride, const T* gates, int64_t gates_stride, const float* rate, const float* bias,
           const float* skip, const ScanHeads& shape, float* state, T* out)
        : rows_(rows), stride_(stride), gates_(gates), gates_stride_(gates_stride), rate_(rate), bias_(bias), skip_(skip),
          shape_(shape), state_(state), out_(out) {}

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        pool.shared().take<float>(static_cast<size_t>(step.rows) * width());
    }

    void run(const Step& step, Member& member) override {
        float* wide = member.pool.shared().get<float>();
        const auto own = member.share(step.rows);
        for (int row = own.begin; row < own.end; row++) widen(row, wide + static_cast<int64_t>(row) * width());
        member.barrier();
        const int tiles = ceil_div(shape_.value_dim, COLUMNS), each = shape_.heads * tiles;
        const auto span = member.share(step.sequences * each);
        for (int piece = span.begin; piece < span.end; piece++) {
            const int head = piece % each / tiles;
            tile(SequenceRows(step, piece / each), head, piece % tiles * COLUMNS, wide, member);
        }
    }

private:
    static constexpr int VECTORS = 4, COLUMNS = VECTORS * LANES;

    static constexpr bool IS_DELTA = RULE == DELTA || RULE == KDA;

    int decays() const { return RULE == KDA ? shape_.keys() : RULE == S6 ? 0 : shape_.heads; }
    int factors() const { return RULE == S6 ? shape_.values() : shape_.heads; }
    int width() const { return 2 * shape_.keys() + decays() + factors(); }

    NOINLINE void widen(int row, float* to) {
        const int keys = shape_.keys(), dim = shape_.key_dim;
        const T *from = rows_ + row * stride_, *gate = gates_ + row * gates_stride_;
        const T* pairs = RULE == S6 ? gate : from;  // (k, q) behind as many numbers as there are values
        const T *q = IS_DELTA ? from : pairs + shape_.values() + keys, *k = IS_DELTA ? from + keys : pairs + shape_.values();
        for (int head = 0; head < shape_.key_heads; head++) {
            const float scale = IS_DELTA ? 1.f / std::sqrt(static_cast<float>(dim)) : 1.f;
            copy_head(q + head * dim, to + head * dim, scale);
            copy_head(k + head * dim, to + keys + head * dim, 1.f);
        }
        float *decay = to + 2 * keys, *factor = decay + decays();
        const int heads = factors();
        for (int head = 0; RULE == KDA && head < heads; head++)
            for (int i = head * dim, end = i + dim; i < end; i += LANES) {
                const Floats x = load(gate + heads + i, end - i) + load(bias_ + i, end - i);
                const Floats rate = splat(rate_[head]), least = splat(shape_.least);
                store(decay + i, exp_negative(shape_.least < 0.f ? least * sigmoid(-rate * x) : rate * softplus(x)), end - i);
            }
        for (int head = 0; head < heads; head += LANES) {
            const int left = heads - head;
            Floats step = splat(0.f);
            if constexpr (RULE != KDA)
                step = softplus(load(gate + (IS_DELTA ? heads : 0) + head, left) + load(bias_ + head, left));
            if constexpr (RULE == SSM) {
                const Floats least = splat(shape_.least), most = splat(shape_.most);
                step = select(step < least, least, select(step > most, most, step));
            }
            if constexpr (RULE == DELTA || RULE == SSM) store(decay + head, exp_negative(load(rate_ + head, left) * step), left);
            store(factor + head, IS_DELTA ? splat(shape_.beta) * sigmoid(load(gate + head, left)) : step, left);
        }
    }

    void copy_head(const T* from, float* to, float scale) {
        const int dim = shape_.key_dim;
        Floats by = splat(scale);
        if constexpr (IS_DELTA) {
            by = splat(scale / std::sqrt(sum_of_squares(from, dim) + 1e-6f));
        }
        for (int i = 0; i < dim; i += LANES) store(to + i, load(from + i, dim - i) * by, dim - i);
    }

    // COLUMNS columns of one head's state, or the last ones, which are padded with zeros.
    void tile(SequenceRows rows, int head, int column, const float* wide, Member& member) {
        const int dim = shape_.key_dim, left = shape_.value_dim - column;
        float* own = at(rows.slot, head, column);
        const bool in_place = left >= COLUMNS && rows.end - rows.begin < 4 && !rows.fresh;
        float* state = in_place ? own : member.scratch.template take<float>(static_cast<size_t>(dim) * COLUMNS);
        const int stride = in_place ? shape_.value_dim : COLUMNS;
        if (!in_place) {
            for (int i = 0; i < dim; i++)
                for (int v = 0; v < VECTORS; v++) {
                    const int rest = left - v * LANES;
                    const bool there = !rows.fresh && rest > 0;
                    store(state + i * COLUMNS + v * LANES,
                          there ? load(own + static_cast<int64_t>(i) * shape_.value_dim + v * LANES, rest) : splat(0.f));
                }
        }
        for (int row = rows.begin; row < rows.end; row++) {
            advance(wide + static_cast<int64_t>(row) * width(), row, head, column, state, stride);
            if (const int to = rows.saved_after(row); to >= 0) keep(state, stride, at(to, head, column), left);
        }
        if (!in_place && rows.slot >= 0) keep(state, stride, own, left);
    }

    NOINLINE void advance(const float* wide, int row, int head, int column, float* state, int stride) {
        const int dim = shape_.key_dim, left = shape_.value_dim - column, group = shape_.heads / shape_.key_heads;
        const float *q = wide + head / group * dim, *k = q + shape_.keys(), *gates = wide + 2 * shape_.keys();
        const float* decays = gates + (RULE == KDA ? head * dim : head);  // one for each key, or one
        const Floats decay = splat(decays[0]), factor = splat(gates[this->decays() + (RULE == S6 ? 0 : head)]);
        const int first = head * shape_.value_dim + column;  // of the values
        const float* rates = rate_ + static_cast<int64_t>(head) * dim * shape_.value_dim + column;
        Floats steps[VECTORS];
        const T* v = rows_ + row * stride_ + (IS_DELTA ? 2 * shape_.keys() : 0) + first;
        Floats value[VECTORS], change[VECTORS], total[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; j++) {
            const int rest = left - j * LANES;
            value[j] = rest > 0 ? load(v + j * LANES, rest) : splat(0.f);
            total[j] = splat(0.f);
        }
        if constexpr (IS_DELTA) {
            const auto seen = [&](int i) { return splat(RULE == KDA ? k[i] * decays[i] : k[i]); };
            Floats even[VECTORS], odd[VECTORS];  // two sums each: one would wait for itself
            UNROLL for (int j = 0; j < VECTORS; j++) even[j] = odd[j] = splat(0.f);
            int i = 0;
            for (; i + 1 < dim; i += 2) {
                const float *s = state + static_cast<int64_t>(i) * stride, *next = s + stride;
                const Floats key = seen(i), next_key = seen(i + 1);
                UNROLL for (int j = 0; j < VECTORS; j++) {
                    even[j] = multiply_add(load(s + j * LANES), key, even[j]);
                    odd[j] = multiply_add(load(next + j * LANES), next_key, odd[j]);
                }
            }
            if (i < dim) {
                const float* s = state + static_cast<int64_t>(i) * stride;
                const Floats key = seen(i);
                UNROLL for (int j = 0; j < VECTORS; j++) even[j] = multiply_add(load(s + j * LANES), key, even[j]);
            }
            UNROLL for (int j = 0; j < VECTORS; j++)
                change[j] = (value[j] - (RULE == KDA ? even[j] + odd[j] : (even[j] + odd[j]) * decay)) * factor;
        } else {
            UNROLL for (int j = 0; j < VECTORS; j++) {
                const int rest = left - j * LANES;
                if constexpr (RULE == S6) steps[j] = rest > 0 ? load(gates + first + j * LANES, rest) : splat(0.f);
                change[j] = value[j] * (RULE == S6 ? steps[j] : factor);
            }
        }
        for (int i = 0; i < dim; i++) {
            float* s = state + static_cast<int64_t>(i) * stride;
            const Floats key = splat(k[i]), query = splat(q[i]), rest = RULE == KDA ? splat(decays[i]) : decay;
            UNROLL for (int j = 0; j < VECTORS; j++) {
                Floats kept = rest;
                if constexpr (RULE == S6) {
                    const int there = left - j * LANES;
                    const float* rate = rates + static_cast<int64_t>(i) * shape_.value_dim + j * LANES;
                    kept = there > 0 ? exp_negative(load(rate, there) * steps[j]) : splat(0.f);
                }
                const Floats now = multiply_add(key, change[j], load(s + j * LANES) * kept);
                store(s + j * LANES, now);
                total[j] = multiply_add(now, query, total[j]);
            }
        }
        T* out = out_ + static_cast<int64_t>(row) * shape_.values() + first;
        for (int j = 0; j < VECTORS && j * LANES < left; j++) {
            const int rest = left - j * LANES;
            if constexpr (RULE == S6) total[j] = multiply_add(value[j], load(skip_ + first + j * LANES, rest), total[j]);
            else if (skip_) total[j] = multiply_add(value[j], splat(skip_[head]), total[j]);
            store(out + j * LANES, total[j], rest);
        }
    }

    void keep(const float* state, int stride, float* to, int left) {
        for (int i = 0; i < shape_.key_dim; i++)
            for (int j = 0; j < COLUMNS && j < left; j += LANES)
                store(to + static_cast<int64_t>(i) * shape_.value_dim + j, load(state + static_cast<int64_t>(i) * stride + j),
                      left - j);
    }

    float* at(int slot, int head, int column) const {
        return state_ + slot * shape_.state() + static_cast<int64_t>(head) * shape_.key_dim * shape_.value_dim + column;
    }

    const T* rows_;
    int64_t stride_;
    const T* gates_;
    int64_t gates_stride_;
    const float *rate_, *bias_, *skip_;
    ScanHeads shape_;
    float* state_;
    T* out_;
};

// x [rows, groups * width] contiguous; gate with strided rows; weight [groups, width].
template <class T> class GatedNormOp : public Op {
public:
    OpKind kind() const override { return OpKind::RECURRENT; }
    GatedNormOp(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, const float* weight, int groups, int width,
                float eps, bool norm_first, T* out)
        : x_(x), x_stride_(x_stride), gate_(gate), gate_stride_(gate_stride), weight_(weight), groups_(groups), width_(width),
          eps_(eps), norm_first_(norm_first), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * groups_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto span = member.share(step.rows * groups_);
        for (int piece = span.begin; piece < span.end; piece++) {
            const int row = piece / groups_, offset = piece % groups_ * width_;
            norm(x_ + row * x_stride_ + offset, gate_ + row * gate_stride_ + offset, weight_ + offset,
                 out_ + static_cast<int64_t>(row) * groups_ * width_ + offset);
        }
    }

private:
    Floats gated(const T* x, const T* gate, int i) const {
        const Floats v = load(x + i, width_ - i);
        return norm_first_ ? v : v * activated<SILU>(load(gate + i, width_ - i));
    }

    NOINLINE void norm(const T* x, const T* gate, const float* weight, T* out) const {
        LaneSums squares;
        squares.add_each(width_, [&](Floats& part, int i) {
            const Floats v = gated(x, gate, i);
            part = multiply_add(v, v, part);
        });
        const Floats scale = splat(1.f / std::sqrt(squares.total() / static_cast<float>(width_) + eps_));
        for (int i = 0; i < width_; i += LANES) {
            const int left = width_ - i;
            Floats v = gated(x, gate, i) * scale * load(weight + i, left);
            if (norm_first_) v = v * activated<SILU>(load(gate + i, left));
            store(out + i, v, left);
        }
    }

    const T* x_;
    int64_t x_stride_;
    const T* gate_;
    int64_t gate_stride_;
    const float* weight_;
    int groups_, width_;
    float eps_;
    bool norm_first_;
    T* out_;
};

enum class Gate { SIGMOID, SILU, SOFTPLUS };

// x *= gate by one of these functions; rows of `width` numbers.
template <class T, Gate GATE> class GateRowsOp : public Op {
public:
    GateRowsOp(T* x, int64_t x_stride, const T* gate, int64_t gate_stride, int width)
        : x_(x), x_stride_(x_stride), gate_(gate), gate_stride_(gate_stride), width_(width) {}

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            T* x = x_ + row * x_stride_ + begin;
            const T* gate = gate_ + row * gate_stride_ + begin;
            for (int i = 0; i < count; i += LANES) {
                const Floats g = load(gate + i, count - i), share = GATE == Gate::SOFTPLUS ? softplus(g) : sigmoid(g);
                store(x + i, load(x + i, count - i) * (GATE == Gate::SILU ? share * g : share), count - i);
            }
        });
    }

private:
    T* x_;
    int64_t x_stride_;
    const T* gate_;
    int64_t gate_stride_;
    int width_;
};

// out = x * by + added, column by column; `added` may be null, or be `out`.
template <class T> class MulAddOp : public Op {
public:
    MulAddOp(const T* x, int64_t x_stride, const float* by, const T* added, int width, T* out)
        : x_(x), x_stride_(x_stride), by_(by), added_(added), width_(width), out_(out) {}

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            const T* x = x_ + row * x_stride_ + begin;
            const int64_t at = static_cast<int64_t>(row) * width_ + begin;
            for (int i = 0; i < count; i += LANES) {
                const int left = count - i;
                const Floats v = load(x + i, left), by = load(by_ + begin + i, left);
                store(out_ + at + i, added_ ? multiply_add(v, by, load(added_ + at + i, left)) : v * by, left);
            }
        });
    }

private:
    const T* x_;
    int64_t x_stride_;
    const float* by_;
    const T* added_;
    int width_;
    T* out_;
};

}  // namespace llmbox
