// Rows of several streams (AltUp), and gates of which few stay (AltUpOps in kernels/op_types.py).
#pragma once

#include <algorithm>
#include <cmath>

#include "threads/command_buffer.h"

namespace llmbox {

constexpr int MAX_STREAMS = 8;

// totals[j] = sum over k of coefs[j, k] * tanh(routed[k]).
inline void mix_coefs(const float* coefs, const float* routed, int streams, int count, float* totals) {
    float turned[MAX_STREAMS];
    for (int k = 0; k < streams; k++) turned[k] = tanh(splat(routed[k]))[0];
    for (int j = 0; j < count; j++) {
        totals[j] = 0.f;
        for (int k = 0; k < streams; k++) totals[j] += coefs[j * streams + k] * turned[k];
    }
}

// out stream j = x stream j + sum over i of coefficient [j, i] * x stream i.
template <class T> class PredictStreamsOp : public Op {
public:
    PredictStreamsOp(const T* x, const float* routed, const float* coefs, int streams, int width, T* out)
        : x_(x), routed_(routed), coefs_(coefs), streams_(streams), width_(width), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * streams_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        float mix[MAX_STREAMS * MAX_STREAMS];
        for (int row = rows.begin; row < rows.end; row++) {
            mix_coefs(coefs_, routed_ + static_cast<int64_t>(row) * streams_, streams_, streams_ * streams_, mix);
            const int64_t offset = static_cast<int64_t>(row) * streams_ * width_;
            for (int at = 0; at < width_; at += LANES) {
                const int left = width_ - at;
                Floats in[MAX_STREAMS];
                for (int i = 0; i < streams_; i++) in[i] = load(x_ + offset + i * width_ + at, left);
                for (int j = 0; j < streams_; j++) {
                    Floats total = in[j];
                    for (int i = 0; i < streams_; i++) total = multiply_add(splat(mix[j * streams_ + i]), in[i], total);
                    store(out_ + offset + j * width_ + at, total, left);
                }
            }
        }
    }

private:
    const T* x_;
    const float* routed_;
    const float* coefs_;
    int streams_, width_;
    T* out_;
};

// out stream j = predicted stream j + (1 + coefficient j) * (x - predicted stream `active`).
template <class T> class CorrectStreamsOp : public Op {
public:
    CorrectStreamsOp(const T* predicted, const T* x, const float* routed, const float* coefs, int streams, int active,
                     int width, T* out)
        : predicted_(predicted),
          x_(x),
          routed_(routed),
          coefs_(coefs),
          streams_(streams),
          active_(active),
          width_(width),
          out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * streams_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        float by[MAX_STREAMS];
        for (int row = rows.begin; row < rows.end; row++) {
            mix_coefs(coefs_, routed_ + static_cast<int64_t>(row) * streams_, streams_, streams_, by);
            const int64_t offset = static_cast<int64_t>(row) * streams_ * width_;
            const T* x = x_ + static_cast<int64_t>(row) * width_;
            for (int at = 0; at < width_; at += LANES) {
                const int left = width_ - at;
                const Floats change = load(x + at, left) - load(predicted_ + offset + active_ * width_ + at, left);
                for (int j = 0; j < streams_; j++) {
                    const Floats old = load(predicted_ + offset + j * width_ + at, left);
                    store(out_ + offset + j * width_ + at, multiply_add(splat(1.f + by[j]), change, old), left);
                }
            }
        }
    }

private:
    const T* predicted_;
    const T* x_;
    const float* routed_;
    const float* coefs_;
    int streams_, active_, width_;
    T* out_;
};

// All streams but the first += added, in place.
template <class T> class AddToStreamsOp : public Op {
public:
    AddToStreamsOp(T* x, const T* added, int streams, int width)
        : x_(x), added_(added), streams_(streams), width_(width) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * streams_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const T* added = added_ + static_cast<int64_t>(row) * width_;
            for (int stream = 1; stream < streams_; stream++) {
                T* x = x_ + (static_cast<int64_t>(row) * streams_ + stream) * width_;
                for (int at = 0; at < width_; at += LANES) {
                    const int left = width_ - at;
                    store(x + at, load(x + at, left) + load(added + at, left), left);
                }
            }
        }
    }

private:
    T* x_;
    const T* added_;
    int streams_, width_;
};

// Each of `parts` parts of a row *= root mean square of `like` / its own, in place.
template <class T> class MatchSizeOp : public Op {
public:
    MatchSizeOp(T* x, const T* like, int64_t like_stride, int parts, int width, float eps)
        : x_(x), like_(like), like_stride_(like_stride), parts_(parts), width_(width), eps_(eps) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * parts_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        const float count = static_cast<float>(width_);
        for (int row = rows.begin; row < rows.end; row++) {
            const float wanted = std::sqrt(sum_of_squares(like_ + row * like_stride_, width_) / count);
            for (int part = 0; part < parts_; part++) {
                T* x = x_ + (static_cast<int64_t>(row) * parts_ + part) * width_;
                const float own = std::sqrt(std::max(sum_of_squares(x, width_) / count, eps_));
                const Floats factor = splat(wanted / own);
                for (int i = 0; i < width_; i += LANES) store(x + i, load(x + i, width_ - i) * factor, width_ - i);
            }
        }
    }

private:
    T* x_;
    const T* like_;
    int64_t like_stride_;
    int parts_, width_;
    float eps_;
};

// out[row] = (sum, sum of squares) of a row of gates.
template <class T> class GateSumsOp : public Op {
public:
    GateSumsOp(const T* gate, int64_t stride, int width, float* out) : gate_(gate), stride_(stride), width_(width), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * width_); }

    void run(const Step& step, Member& member) override {
        constexpr int PIECE = 512;
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const T* gate = gate_ + row * stride_;
            double total = 0, squares = 0;
            for (int begin = 0; begin < width_; begin += PIECE) {
                const int end = std::min(begin + PIECE, width_);
                LaneSums sums;
                sums.add_each(end - begin, [&](Floats& part, int i) { part += load(gate + begin + i, end - begin - i); });
                total += sums.total();
                squares += sum_of_squares(gate + begin, end - begin);
            }
            out_[2 * row] = static_cast<float>(total);
            out_[2 * row + 1] = static_cast<float>(squares);
        }
    }

private:
    const T* gate_;
    int64_t stride_;
    int width_;
    float* out_;
};

// gate = max(0, gate - (mean + factor * deviation)), in place; sums are over `count` numbers. NaN stays.
template <class T> class CutGatesOp : public Op {
public:
    CutGatesOp(T* gate, int64_t stride, int width, const float* sums, int count, float factor)
        : gate_(gate), stride_(stride), width_(width), sums_(sums), count_(count), factor_(factor) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * width_); }

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            const double mean = sums_[2 * row] / static_cast<double>(count_);
            const double variance = sums_[2 * row + 1] / static_cast<double>(count_) - mean * mean;
            const Floats cutoff = splat(static_cast<float>(mean + factor_ * std::sqrt(std::max(variance, 0.0))));
            T* gate = gate_ + row * stride_ + begin;
            for (int i = 0; i < count; i += LANES) {
                const Floats over = load(gate + i, count - i) - cutoff;
                store(gate + i, over < splat(0.f) ? splat(0.f) : over, count - i);
            }
        });
    }

private:
    T* gate_;
    int64_t stride_;
    int width_;
    const float* sums_;
    int count_;
    float factor_;
};

}  // namespace llmbox
