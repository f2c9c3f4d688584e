// Where the time of a step goes, by kinds of operations: counted while somebody asks for it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace llmbox {

// Names are those of `KINDS` in kernels/cpu/profile.py, in this order.
enum class OpKind { OTHER, LINEAR, EXPERTS, ATTENTION, KV_WRITE, NORM, ACTIVATION, RECURRENT, SAMPLING, COUNT };

// Bytes of weights, and multiplications.
struct OpWork {
    double bytes = 0, products = 0;
};

// Sums of one kind, in seconds. Mirrored by `NativeTotals` in kernels/cpu/profile.py.
struct OpTotals {
    double seconds;  // of the whole operation, with its barrier
    double waited;   // at the barrier behind it, mean of the threads
    double floor;    // what reading or multiplying alone would take at the machine's rates, whichever is longer
    double reading;  // part of `floor` in which reading takes longer
};

struct OpProfile {
    bool is_on = false;  // changed between two runs
    double read_rate = 0, product_rate = 0;
    OpTotals totals[static_cast<int>(OpKind::COUNT)] = {};

    static double clock() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    OpTotals& of(OpKind kind) { return totals[static_cast<int>(kind)]; }

    void add(OpKind kind, double seconds, OpWork work) {
        OpTotals& total = of(kind);
        total.seconds += seconds;
        if (!work.bytes || !read_rate || !product_rate) return;
        const double reads = work.bytes / read_rate, products = work.products / product_rate;
        total.floor += std::max(reads, products);
        if (reads > products) total.reading += reads;
    }

    // Called by every thread.
    void add_wait(OpKind kind, double seconds) { std::atomic_ref<double>(of(kind).waited).fetch_add(seconds); }
};

inline OpProfile& op_profile() {
    static OpProfile profile;
    return profile;
}

}  // namespace llmbox
