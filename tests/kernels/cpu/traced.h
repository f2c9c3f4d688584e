// Numbers that know how they were computed, for kernels that are compiled with `-DLLMBOX_TRACED=lanes`: instead of float
// they add, multiply and select `TracedFloat`, and what comes out names its whole tree of operations.
//
// A number is 32 bits, so that kernels lay out their memory as ever. Inputs and constants are their own bits; a result has the
// bits of a NaN, whose payload is its place in a table of values and hashes. A hash is of the operation and of the hashes
// of its operands: two numbers have one hash if they come from the same inputs by the same operations in the same order.
// a + b is b + a. What changes no bits is left out: adding zero, multiplying by one. Integers are exact in any order, and so
// they are plain; where floats are rounded to integers, `rounded` adds up the hashes of what was rounded.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <immintrin.h>
#include <initializer_list>
#include <limits>
#include <map>
#include <new>
#include <optional>
#include <pthread.h>
#include <random>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <type_traits>
#include <unistd.h>
#include <vector>

#undef __SSE2__  // products of words in plain C++, whatever the number of lanes

// Optimized, as a run spends most of its time here; the rest is not, for compiling it would take longer than that run.
#pragma GCC push_options
#pragma GCC optimize("O2")

namespace llmbox {

using PlainFloat = float;
[[gnu::always_inline]] inline uint32_t bits_of(PlainFloat x) { return __builtin_bit_cast(uint32_t, x); }
[[gnu::always_inline]] inline PlainFloat float_of(uint32_t bits) { return __builtin_bit_cast(PlainFloat, bits); }
[[gnu::always_inline]] inline uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
[[gnu::always_inline]] inline uint64_t most(uint64_t a, uint64_t b) { return a < b ? b : a; }
enum Operation : uint64_t {
    INPUT, ADD, SUBTRACT, MULTIPLY, DIVIDE, MULTIPLY_ADD, ROOT, ABSOLUTE, POWER, EXPONENTIAL, TANH, ROUNDED
};

[[gnu::always_inline]] inline uint64_t mix(uint64_t x) {  // SplitMix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}
[[gnu::always_inline]] inline uint64_t hash_of(Operation operation, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    return mix(mix(mix(mix(operation) ^ a) ^ b) ^ c);
}

struct TraceTable {
    static constexpr uint32_t INFINITE = 0x7f800000u, NOT_A_NUMBER = 0x7fc00000u, PAYLOAD = 0x7fffffu, SIZE = 1u << 24;
    struct Result {
        uint64_t hash;
        PlainFloat value;
    };
    Result* const results = new Result[SIZE]();
    std::atomic<uint32_t> count{0};
    std::atomic<uint64_t> rounded{0};

    [[gnu::always_inline]] static bool is_place(uint32_t bits) {
        return (bits & INFINITE) == INFINITE && (bits & PAYLOAD) && bits != NOT_A_NUMBER;
    }
    [[gnu::always_inline]] static uint32_t place_of(uint32_t bits) { return (bits >> 31) << 23 | (bits & PAYLOAD); }

    [[gnu::always_inline]] uint32_t put(uint64_t hash, PlainFloat value) {
        uint32_t place = count.fetch_add(1, std::memory_order_relaxed);
        while ((place & PAYLOAD) == 0 || place == (NOT_A_NUMBER & PAYLOAD)) place = count.fetch_add(1, std::memory_order_relaxed);
        if (place >= SIZE) puts("the table of results is full"), exit(1);
        results[place] = {hash, value};
        return (place >> 23) << 31 | INFINITE | (place & PAYLOAD);
    }
};
inline TraceTable trace;
inline thread_local bool is_untraced = false;  // while a function of a number is computed, which counts as one operation

struct TracedFloat {
    uint32_t bits;

    TracedFloat() = default;
    template <class Number>
        requires std::is_arithmetic_v<Number> || std::is_same_v<Number, _Float16>
    constexpr TracedFloat(Number x) : bits(__builtin_bit_cast(uint32_t, static_cast<PlainFloat>(x))) {}

    [[gnu::always_inline]] bool is_result() const { return TraceTable::is_place(bits); }
    [[gnu::always_inline]] PlainFloat value() const {
        return is_result() ? trace.results[TraceTable::place_of(bits)].value : float_of(bits);
    }
    [[gnu::always_inline]] uint64_t hash() const {
        return is_result() ? trace.results[TraceTable::place_of(bits)].hash : hash_of(INPUT, bits);
    }
    [[gnu::always_inline]] bool is(PlainFloat x) const { return !is_result() && float_of(bits) == x; }
    explicit operator double() const { return value(); }
    explicit operator _Float16() const { return static_cast<_Float16>(value()); }
    explicit operator int() const { return static_cast<int>(value()); }
    explicit operator int64_t() const { return static_cast<int64_t>(value()); }

    [[gnu::always_inline]] static TracedFloat plain(PlainFloat value) {
        TracedFloat x;
        x.bits = value == value ? bits_of(value) : TraceTable::NOT_A_NUMBER;
        return x;
    }
    static TracedFloat result(uint64_t hash, PlainFloat value) {
        if (is_untraced) return plain(value);
        TracedFloat x;
        x.bits = trace.put(hash, value);
        return x;
    }

    friend TracedFloat operator+(TracedFloat a, TracedFloat b) {
        if (a.is(0)) return b;
        if (b.is(0)) return a;
        return result(hash_of(ADD, least(a.hash(), b.hash()), most(a.hash(), b.hash())), a.value() + b.value());
    }
    friend TracedFloat operator-(TracedFloat a, TracedFloat b) {
        if (b.is(0)) return a;
        return result(hash_of(SUBTRACT, a.hash(), b.hash()), a.value() - b.value());
    }
    friend TracedFloat operator*(TracedFloat a, TracedFloat b) {
        if (a.is(0) || b.is(0)) return 0;
        if (a.is(1)) return b;
        if (b.is(1)) return a;
        return result(hash_of(MULTIPLY, least(a.hash(), b.hash()), most(a.hash(), b.hash())), a.value() * b.value());
    }
    friend TracedFloat operator/(TracedFloat a, TracedFloat b) {
        if (a.is(0)) return 0;
        return result(hash_of(DIVIDE, a.hash(), b.hash()), a.value() / b.value());
    }
    friend TracedFloat fused(TracedFloat a, TracedFloat b, TracedFloat c) {
        if (a.is(0) || b.is(0)) return c;
        if (a.is(1)) return b + c;
        if (b.is(1)) return a + c;
        if (c.is(0)) return a * b;
        const uint64_t hash = hash_of(MULTIPLY_ADD, least(a.hash(), b.hash()), most(a.hash(), b.hash()), c.hash());
        return result(hash, std::fma(a.value(), b.value(), c.value()));
    }
    TracedFloat operator-() const { return TracedFloat(0) - *this; }
    TracedFloat& operator+=(TracedFloat b) { return *this = *this + b; }
    TracedFloat& operator-=(TracedFloat b) { return *this = *this - b; }
    TracedFloat& operator*=(TracedFloat b) { return *this = *this * b; }
    TracedFloat& operator/=(TracedFloat b) { return *this = *this / b; }
    friend bool operator==(TracedFloat a, TracedFloat b) { return a.value() == b.value(); }
    friend bool operator<(TracedFloat a, TracedFloat b) { return a.value() < b.value(); }
    friend bool operator>(TracedFloat a, TracedFloat b) { return a.value() > b.value(); }
    friend bool operator<=(TracedFloat a, TracedFloat b) { return a.value() <= b.value(); }
    friend bool operator>=(TracedFloat a, TracedFloat b) { return a.value() >= b.value(); }
};
static_assert(sizeof(TracedFloat) == 4 && std::is_trivially_copyable_v<TracedFloat>);

#pragma GCC pop_options

struct TracedFloats {
    static constexpr int COUNT = LLMBOX_TRACED;
    typedef int32_t Integers __attribute__((vector_size(COUNT * 4)));
    typedef uint32_t Bits __attribute__((vector_size(COUNT * 4)));
    TracedFloat lanes[COUNT];

    TracedFloats() = default;
    TracedFloats(TracedFloat x) { std::fill_n(lanes, COUNT, x); }
    explicit TracedFloats(Integers bits) : TracedFloats((Bits)bits) {}
    explicit TracedFloats(Bits bits) {
        for (int i = 0; i < COUNT; i++) lanes[i] = TracedFloat::plain(std::bit_cast<PlainFloat>(uint32_t{bits[i]}));
    }
    explicit operator Bits() const {
        Bits bits;
        for (int i = 0; i < COUNT; i++) bits[i] = std::bit_cast<uint32_t>(lanes[i].value());
        return bits;
    }
    explicit operator Integers() const { return (Integers) static_cast<Bits>(*this); }
    TracedFloat& operator[](int i) { return lanes[i]; }
    TracedFloat operator[](int i) const { return lanes[i]; }

    template <class Of> __attribute__((noinline)) static TracedFloats each(Of of) {
        TracedFloats v;
        for (int i = 0; i < COUNT; i++) v.lanes[i] = of(i);
        return v;
    }
    template <class Of> __attribute__((noinline)) static Integers mask(Of of) {
        Integers v;
        for (int i = 0; i < COUNT; i++) v[i] = of(i) ? -1 : 0;
        return v;
    }
    using V = const TracedFloats&;
    friend TracedFloats operator+(V a, V b) { return each([&](int i) { return a[i] + b[i]; }); }
    friend TracedFloats operator-(V a, V b) { return each([&](int i) { return a[i] - b[i]; }); }
    friend TracedFloats operator*(V a, V b) { return each([&](int i) { return a[i] * b[i]; }); }
    friend TracedFloats operator/(V a, V b) { return each([&](int i) { return a[i] / b[i]; }); }
    TracedFloats operator-() const { return each([&](int i) { return -lanes[i]; }); }
    TracedFloats& operator+=(V b) { return *this = *this + b; }
    TracedFloats& operator-=(V b) { return *this = *this - b; }
    TracedFloats& operator*=(V b) { return *this = *this * b; }
    friend Integers operator<(V a, V b) { return mask([&](int i) { return a[i] < b[i]; }); }
    friend Integers operator>(V a, V b) { return mask([&](int i) { return a[i] > b[i]; }); }
    friend Integers operator==(V a, V b) { return mask([&](int i) { return a[i] == b[i]; }); }
};

inline TracedFloats select(TracedFloats::Integers mask, const TracedFloats& yes, const TracedFloats& no) {
    return TracedFloats::each([&](int i) { return mask[i] ? yes[i] : no[i]; });
}
inline TracedFloats multiply_add(const TracedFloats& a, const TracedFloats& b, const TracedFloats& c) {
    return TracedFloats::each([&](int i) { return fused(a[i], b[i], c[i]); });
}
inline TracedFloats splat(PlainFloat x) { return TracedFloat(x); }
#define LLMBOX_FUSED 1

template <class To, class From> To converted(From from) {
    if constexpr (std::is_same_v<To, TracedFloats>) {
        return TracedFloats::each([&](int i) { return TracedFloat(from[i]); });
    } else if constexpr (std::is_same_v<From, TracedFloats>) {
        To to;
        for (int i = 0; i < TracedFloats::COUNT; i++) to[i] = static_cast<int>(from[i]);
        return to;
    } else {
        return __builtin_convertvector(from, To);
    }
}

// `of` x, whose values are computed by the kernels' code, as one operation.
template <class Of> TracedFloats as_one(Operation operation, const TracedFloats& x, Of of) {
    is_untraced = true;
    const TracedFloats values = of(TracedFloats::each([&](int i) { return TracedFloat::plain(x[i].value()); }));
    is_untraced = false;
    return TracedFloats::each([&](int i) {
        return values[i].is(0) ? TracedFloat(0) : TracedFloat::result(hash_of(operation, x[i].hash()), values[i].value());
    });
}

}  // namespace llmbox

namespace std {
inline llmbox::TracedFloat sqrt(llmbox::TracedFloat x) {
    return llmbox::TracedFloat::result(llmbox::hash_of(llmbox::ROOT, x.hash()), std::sqrt(x.value()));
}
inline llmbox::TracedFloat fabs(llmbox::TracedFloat x) {
    return llmbox::TracedFloat::result(llmbox::hash_of(llmbox::ABSOLUTE, x.hash()), std::fabs(x.value()));
}
template <> class numeric_limits<llmbox::TracedFloat> : public numeric_limits<float> {};
}  // namespace std

// From here on the kernels' headers may follow.
#define float TracedFloat
#define __builtin_convertvector(from, To) converted<To>(from)
#define power_of_two values_of_power_of_two
#define exp_negative values_of_exp_negative
#define tanh values_of_tanh
#define abs values_of_abs
#define to_nearest values_of_to_nearest
#include "vector/simd.h"
#undef power_of_two
#undef exp_negative
#undef tanh
#undef abs
#undef to_nearest

namespace llmbox {

inline Floats power_of_two(const Floats& x) { return as_one(POWER, x, values_of_power_of_two); }
inline Floats exp_negative(const Floats& x) { return as_one(EXPONENTIAL, x, values_of_exp_negative); }
inline Floats tanh(const Floats& x) { return as_one(TANH, x, values_of_tanh); }
inline Floats abs(const Floats& x) {
    const Floats sizes = as_one(ABSOLUTE, x, values_of_abs);
    return Floats::each([&](int i) { return x[i].is_result() ? sizes[i] : TracedFloat::plain(sizes[i].value()); });
}
inline Ints to_nearest(const Floats& x) {
    for (int i = 0; i < LANES; i++)
        if (x[i].is_result()) trace.rounded.fetch_add(hash_of(ROUNDED, x[i].hash()), std::memory_order_relaxed);
    is_untraced = true;
    const Ints rounded = values_of_to_nearest(Floats::each([&](int i) { return TracedFloat::plain(x[i].value()); }));
    is_untraced = false;
    return rounded;
}

}  // namespace llmbox
