// Norms, RoPE, gated activations and softcaps: computed in float32 and rounded once at the end.
#pragma once

#include <algorithm>
#include <cmath>

#include "threads/command_buffer.h"

namespace llmbox {

// out = x / sqrt(mean(x^2) + eps) * weight for `width` numbers. Weights are of x's type or float32.
template <class T, class W> NOINLINE void norm_row(const T* x, const W* weight, T* out, int width, float eps) {
    const Floats scale = splat(1.f / std::sqrt(sum_of_squares(x, width) / static_cast<float>(width) + eps));
    for (int i = 0; i < width; i += LANES)
        store(out + i, load(x + i, width - i) * scale * load(weight + i, width - i), width - i);
}

// out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias for `width` numbers; `bias` may be null.
template <class T, class W>
NOINLINE void layer_norm_row(const T* x, const W* weight, const W* bias, T* out, int width, float eps) {
    LaneSums total, squares;
    total.add_each(width, [&](Floats& part, int i) __attribute__((always_inline)) { part += load(x + i, width - i); });
    const float mean = total.total() / static_cast<float>(width);
    const int whole = width / SUM_LANES * SUM_LANES;
    squares.add_each(whole, [&](Floats& part, int i) __attribute__((always_inline)) {
        const Floats v = load(x + i) - splat(mean);
        part = multiply_add(v, v, part);
    });
    for (int i = whole; i < width; i++) {  // lanes past the end would not be 0 without the mean
        const float v = load(x + i, 1)[0] - mean;
        squares.parts[i % SUM_LANES / LANES][i % LANES] += v * v;
    }
    const Floats scale = splat(1.f / std::sqrt(squares.total() / static_cast<float>(width) + eps)), center = splat(mean);
    for (int i = 0; i < width; i += LANES) {
        const int left = width - i;
        const Floats v = (load(x + i, left) - center) * scale * load(weight + i, left);
        store(out + i, bias ? v + load(bias + i, left) : v, left);
    }
}

// residual += x where there is one, out = layer_norm(residual or x).
template <class T, class W> class LayerNormOp : public Op {
public:
    OpKind kind() const override { return OpKind::NORM; }
    LayerNormOp(const T* x, int64_t x_stride, T* residual, const W* weight, const W* bias, int width, float eps, T* out)
        : x_(x), x_stride_(x_stride), residual_(residual), weight_(weight), bias_(bias), width_(width), eps_(eps), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const T* x = x_ + row * x_stride_;
            if (residual_) {
                T* residual = residual_ + static_cast<int64_t>(row) * width_;
                for (int i = 0; i < width_; i += LANES)
                    store(residual + i, load(residual + i, width_ - i) + load(x + i, width_ - i), width_ - i);
                x = residual;
            }
            layer_norm_row(x, weight_, bias_, out_ + static_cast<int64_t>(row) * width_, width_, eps_);
        }
    }

private:
    const T* x_;
    int64_t x_stride_;
    T* residual_;  // or null
    const W* weight_;
    const W* bias_;  // or null
    int width_;
    float eps_;
    T* out_;
};

// x is [rows, groups, width] with strided rows, weight [groups, width], out [rows, groups * width] contiguous.
template <class T, class W> class NormOp : public Op {
public:
    OpKind kind() const override { return OpKind::NORM; }
    NormOp(const T* x, int64_t x_stride, const W* weight, int groups, int width, float eps, T* out)
        : x_(x), x_stride_(x_stride), weight_(weight), groups_(groups), width_(width), eps_(eps), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * groups_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++)
            for (int group = 0; group < groups_; group++) {
                const int64_t offset = static_cast<int64_t>(group) * width_;
                T* to = out_ + static_cast<int64_t>(row) * groups_ * width_ + offset;
                norm_row(x_ + row * x_stride_ + offset, weight_ + offset, to, width_, eps_);
            }
    }

private:
    const T* x_;
    int64_t x_stride_;
    const W* weight_;
    int groups_, width_;
    float eps_;
    T* out_;
};

// residual += x, out = norm(residual). The residual is rounded before it is normed: it is what later layers see.
template <class T, class W> class AddNormOp : public Op {
public:
    OpKind kind() const override { return OpKind::NORM; }
    AddNormOp(const T* x, int64_t x_stride, T* residual, const W* weight, int width, float eps, T* out)
        : x_(x), x_stride_(x_stride), residual_(residual), weight_(weight), width_(width), eps_(eps), out_(out) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const T* x = x_ + row * x_stride_;
            T* residual = residual_ + static_cast<int64_t>(row) * width_;
            for (int i = 0; i < width_; i += LANES)
                store(residual + i, load(residual + i, width_ - i) + load(x + i, width_ - i), width_ - i);
            norm_row(residual, weight_, out_ + static_cast<int64_t>(row) * width_, width_, eps_);
        }
    }

private:
    const T* x_;
    int64_t x_stride_;
    T* residual_;
    const W* weight_;
    int width_;
    float eps_;
    T* out_;
};

// Cosine and sine of an angle below 10^6, rounded in one way on all CPUs: reduced by quarter turns and summed as fdlibm
// does (Sun Microsystems, 1993), in float64 and without a fused operation.
inline void turn(float angle, float* cos, float* sin) {
    constexpr double QUARTERS = 6.36619772367581382433e-01, SHIFT = 6755399441055744.0;  // 2 / pi; 1.5 * 2^52
    constexpr double HIGH = 1.57079632673412561417e+00, LOW = 6.07710050650619224932e-11;  // of pi / 2
    constexpr double SINES[] = {1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
                                -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01};
    constexpr double COSINES[] = {-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
                                  2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02};
    const auto x = static_cast<double>(angle);
    const double count = x * QUARTERS + SHIFT - SHIFT, rest = x - count * HIGH - count * LOW, z = rest * rest;
    double odd = 0, even = 0;
    for (int i = 0; i < 6; i++) odd = odd * z + SINES[i], even = even * z + COSINES[i];
    const auto s = static_cast<float>(rest + rest * z * odd), c = static_cast<float>(1 - (0.5 * z - z * z * even));
    const int quarter = static_cast<int>(static_cast<int64_t>(count) & 3);
    *cos = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
    *sin = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
}

// Rotates one head of `width` numbers in place: halves (a, b) become (a cos - b sin, b cos + a sin).
// cos repeats its first half, sin holds (-sin, sin).
template <class T> NOINLINE void rotate_row(T* x, const float* cos, const float* sin, int width) {
    const int half = width / 2;
    for (int i = 0; i < half; i += LANES) {
        const int left = half - i;
        const Floats a = load(x + i, left), b = load(x + half + i, left);
        const Floats c = load(cos + i, left), s = load(sin + half + i, left);
        store(x + i, multiply_add(a, c, -(b * s)), left);
        store(x + half + i, multiply_add(b, c, a * s), left);
    }
}

// x is [rows, heads, width] with strided rows, in place. `table`: which of the step's angles.
template <class T> class RotaryOp : public Op {
public:
    OpKind kind() const override { return OpKind::KV_WRITE; }
    RotaryOp(T* x, int64_t x_stride, int heads, int width, int table)
        : x_(x), x_stride_(x_stride), heads_(heads), width_(width), table_(table) {}

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const int64_t angles = step.angles(table_, row);
            for (int head = 0; head < heads_; head++)
                rotate_row(x_ + row * x_stride_ + head * width_, step.cos + angles, step.sin + angles, width_);
        }
    }

private:
    T* x_;
    int64_t x_stride_;
    int heads_, width_, table_;
};

// out = x for [rows, heads, width] numbers; strides of rows and heads count elements.
template <class T> class CopyOp : public Op {
public:
    CopyOp(const T* x, int64_t x_stride, int64_t x_head, int heads, int width, T* out, int64_t out_stride, int64_t out_head)
        : x_(x),
          x_stride_(x_stride),
          x_head_(x_head),
          heads_(heads),
          width_(width),
          out_(out),
          out_stride_(out_stride),
          out_head_(out_head) {}

    bool small(const Step& step) const override { return few(int64_t{step.rows} * heads_ * width_); }

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++)
            for (int head = 0; head < heads_; head++)
                std::copy_n(x_ + row * x_stride_ + head * x_head_, width_, out_ + row * out_stride_ + head * out_head_);
    }

private:
    const T* x_;
    int64_t x_stride_, x_head_;
    int heads_, width_;
    T* out_;
    int64_t out_stride_, out_head_;
};

// As Python names them (kernels/cpu/weight_packing.py).
enum Activation : int { SILU = 0, GELU_TANH = 1, SWIGLU_OAI = 2, RELU2 = 3, GELU = 4, GELU_NEW = 5, RELU = 6,
                        RELU2_GATED = 7, SWIGLU_LIMITED = 8, GELU_GATED = 9 };

constexpr bool is_gated(Activation a) { return a < RELU2 || a >= RELU2_GATED; }

// Both are x / (1 + e^-z): z = x is SiLU; GELU with its tanh, (1 + tanh(y)) / 2, has z = 2 y. From e^-|z|, so that
// nothing overflows. That of gpt-oss has z = 1.702 x. BitNet's is max(x, 0)^2.
template <Activation A> INLINE Floats activated(Floats x) {
    if constexpr (A == RELU2_GATED) return select(x < splat(0.f), splat(0.f), x * x);
    Floats z = x;
    if constexpr (A == GELU_TANH) z = multiply_add(x * x * x, splat(7.13548163e-2f), x * splat(1.59576912f));
    if constexpr (A == SWIGLU_OAI) z = x * splat(1.702f);
    const Floats e = exp_negative(-abs(z)), one = splat(1.f);
    return x * select(z < splat(0.f), e, one) / (one + e);
}

// erfc(z) for z >= 0, with an error of 1.2e-7 of it: Press et al., "Numerical Recipes in C", 1992, section 6.2.
INLINE Floats erfc_positive(Floats z) {
    const Floats t = splat(1.f) / multiply_add(splat(0.5f), z, splat(1.f));
    Floats sum = splat(0.17087277f);
    for (const float factor : {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                               1.00002368f, -1.26551223f})
        sum = multiply_add(sum, t, splat(factor));
    return t * exp_negative(multiply_add(-z, z, sum));
}

// Activations without a gate: max(x, 0)^2, max(x, 0), and GELU: by its tanh, or x times the normal distribution below x.
template <Activation A> INLINE Floats ungated(Floats x) {
    const Floats zero = splat(0.f);
    if constexpr (A == RELU2) return select(x < zero, zero, x * x);
    if constexpr (A == RELU) return select(x < zero, zero, x);
    if constexpr (A == GELU_NEW) return activated<GELU_TANH>(x);
    const Floats tail = splat(0.5f) * erfc_positive(abs(x) * splat(0.70710678f));
    return x * select(x < zero, tail, splat(1.f) - tail);
}

// `x` where it is at most `most`; NaN stays.
INLINE Floats at_most(Floats x, Floats most) { return select(x > most, most, x); }

// gate = activated(gate) * up for `count` numbers; without a gate: gate = ungated(gate), and no `up`. NaN stays. With
// SWIGLU_OAI and SWIGLU_LIMITED numbers are at most `limit`: both before the activation, or its result.
template <Activation A, class T> INLINE void gate_mul(T* gate, const T* up, int count, float limit) {
    const Floats most = splat(limit);
    for (int i = 0; i < count; i += LANES) {
        Floats g = load(gate + i, count - i);
        if constexpr (!is_gated(A)) {
            store(gate + i, ungated<A>(g), count - i);
            continue;
        }
        Floats u = load(up + i, count - i);
        if constexpr (A == SWIGLU_OAI || A == SWIGLU_LIMITED) u = at_most(select(u < -most, -most, u), most);
        if constexpr (A == SWIGLU_OAI) u = u + splat(1.f), g = at_most(g, most);
        Floats result = g;
        if constexpr (A == GELU_GATED) result = ungated<GELU>(g);
        else result = activated<A>(g);
        if constexpr (A == SWIGLU_LIMITED) result = at_most(result, most);
        store(gate + i, result * u, count - i);
    }
}

// Pieces of rows of `width` numbers, assigned so that threads share a single long row too.
template <class Each> void in_pieces(int rows, int width, Member& member, Each each) {
    constexpr int PIECE = 1024;
    const int pieces = ceil_div(width, PIECE);
    const auto span = member.share(rows * pieces);
    for (int piece = span.begin; piece < span.end; piece++) {
        const int begin = piece % pieces * PIECE;
        each(piece / pieces, begin, width - begin < PIECE ? width - begin : PIECE);
    }
}

// x is [rows, gate | up], without a gate [rows, gate]: out = activated(gate) * up, written over the gates.
template <Activation A, class T> class GateMulOp : public Op {
public:
    OpKind kind() const override { return OpKind::ACTIVATION; }
    GateMulOp(T* x, int64_t x_stride, int width, float limit) : x_(x), x_stride_(x_stride), width_(width), limit_(limit) {}

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            T* gate = x_ + row * x_stride_ + begin;
            gate_mul<A>(gate, gate + width_, count, limit_);
        });
    }

private:
    T* x_;
    int64_t x_stride_;
    int width_;
    float limit_;
};

// e^m - 1 - m for m <= 0: near zero by its series, where the difference would lose all digits.
INLINE Floats expm1_minus(Floats m) {
    Floats sum = splat(1.f / 40320);
    for (const float factor : {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 1.f / 2}) sum = multiply_add(sum, m, splat(factor));
    return select(m < splat(-0.5f), exp_negative(m) - splat(1.f) - m, sum * m * m);
}

// xIELU (kernels/activation.py), in place. NaN stays.
template <class T> class XieluOp : public Op {
public:
    OpKind kind() const override { return OpKind::ACTIVATION; }
    XieluOp(T* x, int64_t x_stride, int width, float alpha_p, float alpha_n, float beta, float eps)
        : x_(x), x_stride_(x_stride), width_(width), alpha_p_(alpha_p), alpha_n_(alpha_n), beta_(beta), eps_(eps) {}

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            T* piece = x_ + row * x_stride_ + begin;
            const Floats most = splat(eps_);
            for (int i = 0; i < count; i += LANES) {
                const Floats x = load(piece + i, count - i), m = select(x > most, most, x);
                const Floats negative = splat(alpha_n_) * (expm1_minus(m) + (m - x));
                const Floats curved = select(x > splat(0.f), splat(alpha_p_) * x * x, negative);
                store(piece + i, multiply_add(splat(beta_), x, curved), count - i);
            }
        });
    }

private:
    T* x_;
    int64_t x_stride_;
    int width_;
    float alpha_p_, alpha_n_, beta_, eps_;
};

// x = x * factor, in place.
template <class T> class ScaleOp : public Op {
public:
    ScaleOp(T* x, int64_t x_stride, int width, float factor) : x_(x), x_stride_(x_stride), width_(width), factor_(factor) {}

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            T* x = x_ + row * x_stride_ + begin;
            for (int i = 0; i < count; i += LANES) store(x + i, load(x + i, count - i) * splat(factor_), count - i);
        });
    }

private:
    T* x_;
    int64_t x_stride_;
    int width_;
    float factor_;
};

// x = cap * tanh(x / cap), in place.
class SoftcapOp : public Op {
public:
    SoftcapOp(float* x, int64_t x_stride, int width, float cap)
        : x_(x), x_stride_(x_stride), width_(width), cap_(cap) {}

    void run(const Step& step, Member& member) override {
        in_pieces(step.rows, width_, member, [&](int row, int begin, int count) {
            float* x = x_ + row * x_stride_ + begin;
            for (int i = 0; i < count; i += LANES)
                store(x + i, splat(cap_) * tanh(load(x + i, count - i) / splat(cap_)), count - i);
        });
    }

private:
    float* x_;
    int64_t x_stride_;
    int width_;
    float cap_;
};

}  // namespace llmbox
