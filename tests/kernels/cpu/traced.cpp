// Whether the sums behind an output are one tree, however its row was computed: alone, among up to 256 rows, by any number of
// threads, its prompt cut anywhere. Prints a digest of the trees of each case, to be compared between numbers of lanes.
//
//     traced [ROWS [PART PARTS]]    up to so many rows: all below, or with 0 the numbers at which tiles and blocks change;
//                                   of all below only those of part PART of PARTS, with the same digests
#include "traced.h"

#include "attention/attention.h"
#include "elementwise.h"
#include "quantized/gguf_block_gemm.cpp"
#include "quantized/quant_gemm.cpp"
#include "quantized/quant_linear.h"
#include "recurrent/recurrent.h"
#include "threads/pool.cpp"

using namespace llmbox;

namespace {

using Hashes = std::vector<uint64_t>;
constexpr int MOST_ROWS = 256, KINDS_OF_ROWS = 7, MOST_THREADS = 3;

std::mt19937 randomness(1);

PlainFloat random_number() { return static_cast<PlainFloat>(static_cast<int>(randomness() % 65536) - 32768) / 4096; }

std::vector<TracedFloat> random_numbers(size_t count) {
    std::vector<TracedFloat> made(count);
    for (TracedFloat& x : made) x = random_number();
    return made;
}

void set_threads(int count) { pool().resize(std::vector<int>(count - 1, -1)); }

void run(Op& op, const Step& step) {
    Op* ops[] = {&op};
    run_commands(pool(), {ops, 1, step});
}

struct Trees {
    Hashes outputs;
    uint64_t rounded;  // what was rounded to integers on the way
};

Trees collect(const std::vector<TracedFloat>& out) {
    Trees trees{{}, trace.rounded.exchange(0)};
    for (TracedFloat x : out) trees.outputs.push_back(x.hash());
    trace.count = 0;
    return trees;
}

void print_digest(const std::string& name, const Hashes& hashes) {
    uint64_t digest = 0;
    for (uint64_t hash : hashes) digest = mix(digest ^ hash);
    printf("%s: %016lx\n", name.c_str(), static_cast<unsigned long>(digest));
    fflush(stdout);
}

[[noreturn]] void fail(const std::string& name, int row, int rows) {
    printf("%s: the sums of row %d differ when it is one of %d\n", name.c_str(), row, rows);
    exit(1);
}

// `compute(rows of x, count)` returns the outputs of so many rows, each of `width` numbers of KINDS_OF_ROWS different ones.
template <class Compute> void check_rows(const std::string& name, const std::vector<int>& counts, int width, Compute compute) {
    const std::vector<TracedFloat> kinds = random_numbers(static_cast<size_t>(KINDS_OF_ROWS) * width);
    std::vector<TracedFloat> x;
    for (int row = 0; row < MOST_ROWS; row++) {
        const auto from = kinds.begin() + row % KINDS_OF_ROWS * width;
        x.insert(x.end(), from, from + width);
    }
    set_threads(1);
    std::vector<Trees> alone;
    Hashes all;
    for (int kind = 0; kind < KINDS_OF_ROWS; kind++) {
        alone.push_back(collect(compute(x.data() + static_cast<size_t>(kind) * width, 1)));
        all.insert(all.end(), alone[kind].outputs.begin(), alone[kind].outputs.end());
    }
    print_digest(name, all);
    for (int rows : counts) {
        set_threads(1 + rows % MOST_THREADS);
        const Trees found = collect(compute(x.data(), rows));
        const size_t outputs = found.outputs.size() / rows;
        uint64_t rounded = 0;
        for (int row = 0; row < rows; row++) {
            const Trees& wanted = alone[row % KINDS_OF_ROWS];
            rounded += wanted.rounded;
            const auto own = found.outputs.begin() + row * outputs;
            if (!std::equal(wanted.outputs.begin(), wanted.outputs.end(), own)) fail(name, row, rows);
        }
        if (rounded != found.rounded) fail(name, -1, rows);
    }
}

void check_linear(const QuantFormat& format, int inputs, int outputs, int shares, const std::vector<int>& counts) {
    QuantLinear linear(inputs, outputs, format);
    for (int panel = 0; panel < linear.panels(); panel++)
        pack_quant_panel(linear, panel, [&](int, int, int8_t* numbers, uint8_t* steps) {
            for (int k = 0; k < linear.group; k++) {
                const int n = static_cast<int>(randomness() % (format.bits == 8 ? 255 : 16));
                if (linear.has_zeros()) steps[0] = 7;
                numbers[k] = static_cast<int8_t>(format.bits == 8     ? n - 127
                                                 : linear.is_e2m1()   ? E2M1_VALUES[n]
                                                 : linear.has_zeros() ? n - 7
                                                                      : Step4(PLAIN_STEP).number(n));
            }
            if (linear.is_e2m1()) return uint16_t(0x3c00 + randomness() % 512);  // bf16
            return to_scale(PlainFloat(1 + randomness() % 999) / 65536);
        });
    linear.bias = random_numbers(linear.panels() * PANEL);
    const std::string name = "linear of int" + std::to_string(format.bits) + " by " + std::to_string(format.group) + ", grid " +
                             std::to_string(static_cast<int>(format.grid)) + ", in " + std::to_string(shares);
    check_rows(name, counts, inputs, [&](const TracedFloat* x, int rows) {
        std::vector<TracedFloat> out(static_cast<size_t>(rows) * outputs);
        QuantLinearOp<TracedFloat, TracedFloat> op(linear, x, inputs, out.data(), outputs, shares);
        Step step{};
        step.rows = rows;
        run(op, step);
        return out;
    });
}

void check_float_linear(int inputs, int outputs, const std::vector<int>& counts) {
    Linear linear(inputs, outputs, words_of<F32>(inputs));
    const std::vector<TracedFloat> weight = random_numbers(static_cast<size_t>(inputs) * outputs);
    for (int panel = 0; panel < linear.panels(); panel++) pack_panel<F32>(linear, panel, weight.data());
    check_rows("linear of floats", counts, inputs, [&](const TracedFloat* x, int rows) {
        std::vector<TracedFloat> out(static_cast<size_t>(rows) * outputs);
        PlainLinearOp<F32, TracedFloat> op(linear, x, inputs, out.data(), outputs);
        Step step{};
        step.rows = rows;
        run(op, step);
        return out;
    });
}

void check_norms(int width, const std::vector<int>& counts) {
    const std::vector<TracedFloat> weight = random_numbers(width), bias = random_numbers(width);
    Step step{};
    const auto of = [&](const char* name, auto make) {
        check_rows(name + (" of " + std::to_string(width)), counts, width, [&](const TracedFloat* x, int rows) {
            std::vector<TracedFloat> out(static_cast<size_t>(rows) * width), residual(x, x + out.size());
            step.rows = rows;
            auto op = make(x, residual.data(), out.data());
            run(op, step);
            return out;
        });
    };
    using T = TracedFloat;
    of("norm", [&](const T* x, T*, T* out) { return NormOp<T, T>(x, width, weight.data(), 1, width, 1e-6, out); });
    of("add and norm", [&](const T* x, T* to, T* out) { return AddNormOp<T, T>(x, width, to, weight.data(), width, 1e-6, out); });
    of("layer norm", [&](const T* x, T* to, T* out) {
        return LayerNormOp<T, T>(x, width, to, weight.data(), bias.data(), width, 1e-6, out);
    });
}

// In place, so that results are read where x was.
void check_elementwise(int width, const std::vector<int>& counts) {
    Step step{};
    const auto of = [&](const char* name, int columns, auto make) {
        check_rows(name + (" of " + std::to_string(width)), counts, columns, [&](const TracedFloat* x, int rows) {
            std::vector<TracedFloat> to(x, x + static_cast<size_t>(rows) * columns);
            step.rows = rows;
            auto op = make(to.data());
            run(op, step);
            return to;
        });
    };
    using T = TracedFloat;
    of("SiLU", 2 * width, [&](T* x) { return GateMulOp<SILU, T>(x, 2 * width, width, 7.f); });
    of("GELU", 2 * width, [&](T* x) { return GateMulOp<GELU_TANH, T>(x, 2 * width, width, 7.f); });
    of("GELU without gates", width, [&](T* x) { return GateMulOp<GELU, T>(x, width, width, 7.f); });
    of("softcap", width, [&](T* x) { return SoftcapOp(x, width, width, 30); });
}

// Prompts side by side, each step with at most a piece of each.
struct Prompts {
    std::vector<int> lengths;

    // `each(step, rows of each prompt that are done)`, with the step's rows, starts and contexts.
    template <class Each> void walk(const std::vector<int>& pieces, Each each) const {
        const int count = static_cast<int>(lengths.size());
        std::vector<int> done(count);
        for (bool is_left = true; is_left;) {
            is_left = false;
            std::vector<int32_t> starts{0}, contexts;
            const std::vector<int> before = done;
            for (int n = 0; n < count; n++) {
                done[n] = std::min(done[n] + pieces[n], lengths[n]);
                starts.push_back(starts.back() + done[n] - before[n]), contexts.push_back(done[n]);
                is_left |= done[n] < lengths[n];
            }
            Step step{};
            step.rows = starts.back(), step.sequences = count;
            step.query_starts = starts.data(), step.contexts = contexts.data();
            each(step, before);
        }
    }

    // `compute(numbers of prompts, their pieces)` returns the outputs of each of these, row after row.
    template <class Compute> void check(const std::string& name, const std::vector<int>& cuts, Compute compute) const {
        const int count = static_cast<int>(lengths.size());
        Trees wanted{{}, 0};
        std::vector<int> all;
        set_threads(1);
        for (int n = 0; n < count; n++) {
            const Trees alone = collect(joined(compute({n}, {lengths[n]})));
            wanted.outputs.insert(wanted.outputs.end(), alone.outputs.begin(), alone.outputs.end());
            wanted.rounded += alone.rounded;
            all.push_back(n);
        }
        print_digest(name, wanted.outputs);
        for (int cut : cuts) {
            if (cut > lengths[0]) break;
            set_threads(1 + cut % MOST_THREADS);
            std::vector<int> pieces;
            for (int n = 0; n < count; n++) pieces.push_back(1 + (cut - 1 + 5 * n) % lengths[0]);
            const Trees found = collect(joined(compute(all, pieces)));
            if (found.outputs != wanted.outputs || found.rounded != wanted.rounded) {
                printf("%s: sums differ when prompts are cut into pieces of %d\n", name.c_str(), cut);
                exit(1);
            }
        }
    }

    static std::vector<TracedFloat> joined(const std::vector<std::vector<TracedFloat>>& each) {
        std::vector<TracedFloat> all;
        for (const auto& one : each) all.insert(all.end(), one.begin(), one.end());
        return all;
    }
    Prompts only(const std::vector<int>& chosen) const {
        Prompts some;
        for (int n : chosen) some.lengths.push_back(lengths[n]);
        return some;
    }
    // Random numbers, `width` for each token.
    std::vector<std::vector<TracedFloat>> numbers(int width) const {
        std::vector<std::vector<TracedFloat>> made;
        for (int length : lengths) made.push_back(random_numbers(static_cast<size_t>(length) * width));
        return made;
    }
};

void append(std::vector<TracedFloat>& to, const std::vector<TracedFloat>& from, int row, int rows, int width) {
    const auto begin = from.begin() + static_cast<size_t>(row) * width;
    to.insert(to.end(), begin, begin + static_cast<size_t>(rows) * width);
}

struct AttentionCase {
    int block_size, window;
    PlainFloat softcap;
};

void check_attention(const Prompts& prompts, const AttentionCase& how, const std::vector<int>& cuts) {
    constexpr int HEADS = 2, QUERY_HEADS = 4, WIDTH = 34, Q = QUERY_HEADS * WIDTH, KV = HEADS * WIDTH;
    const auto q_of = prompts.numbers(Q), k_of = prompts.numbers(KV), v_of = prompts.numbers(KV);
    const std::string name = "attention, blocks of " + std::to_string(how.block_size) + ", window " + std::to_string(how.window) +
                             ", cap " + std::to_string(static_cast<int>(how.softcap));
    prompts.check(name, cuts, [&](const std::vector<int>& chosen, const std::vector<int>& pieces) {
        const int count = static_cast<int>(chosen.size()), table_width = ceil_div(prompts.lengths[0], how.block_size);
        KVCache cache(1, table_width * count, how.block_size, HEADS, WIDTH, 1, how.window > 0);
        std::vector<int32_t> tables(count * table_width);
        for (int n = 0; n < count; n++)
            for (int b = 0; b < table_width; b++) tables[n * table_width + b] = b * count + n;  // scattered
        std::vector<std::vector<TracedFloat>> outs(count);
        prompts.only(chosen).walk(pieces, [&](Step& step, const std::vector<int>& before) {
            std::vector<TracedFloat> q, k, v;
            std::vector<int32_t> slots;
            for (int n = 0; n < count; n++) {
                const int rows = step.contexts[n] - before[n];
                append(q, q_of[chosen[n]], before[n], rows, Q);
                append(k, k_of[chosen[n]], before[n], rows, KV), append(v, v_of[chosen[n]], before[n], rows, KV);
                for (int row = before[n]; row < step.contexts[n]; row++)
                    slots.push_back(tables[n * table_width + row / how.block_size] * how.block_size + row % how.block_size);
            }
            step.block_size = how.block_size, step.table_width = table_width;
            step.block_tables = step.window_tables = tables.data(), step.slots = step.window_slots = slots.data();
            std::vector<TracedFloat> out(static_cast<size_t>(step.rows) * Q);
            WriteKVOp<INT8, TracedFloat> write(cache, 0, k.data(), KV, v.data(), KV);
            run(write, step);
            AttentionOp<INT8, TracedFloat> op(cache, 0, q.data(), Q, QUERY_HEADS, how.window, Powers::of(0.125, how.softcap),
                                              nullptr, out.data());
            run(op, step);
            for (int n = 0; n < count; n++) append(outs[n], out, step.query_starts[n], step.contexts[n] - before[n], Q);
        });
        return outs;
    });
}

// `make(rows, states, outputs)` returns an operation on rows of `width` numbers, with `state` numbers for each prompt.
template <class Make>
void check_recurrent(const std::string& name, const Prompts& prompts, const std::vector<int>& cuts, int width, int state,
                     int outputs, Make make) {
    const auto x_of = prompts.numbers(width);
    prompts.check(name, cuts, [&](const std::vector<int>& chosen, const std::vector<int>& pieces) {
        const int count = static_cast<int>(chosen.size());
        std::vector<TracedFloat> states(static_cast<size_t>(count) * state, TracedFloat(0));
        std::vector<std::vector<TracedFloat>> outs(count);
        std::vector<int32_t> slots, none(count + 1);
        for (int n = 0; n < count; n++) slots.push_back(count - 1 - n);
        prompts.only(chosen).walk(pieces, [&](Step& step, const std::vector<int>& before) {
            std::vector<TracedFloat> x, out(static_cast<size_t>(step.rows) * outputs);
            for (int n = 0; n < count; n++) append(x, x_of[chosen[n]], before[n], step.contexts[n] - before[n], width);
            step.state_slots = slots.data(), step.save_starts = none.data();
            auto op = make(x.data(), states.data(), out.data());
            run(op, step);
            for (int n = 0; n < count; n++) append(outs[n], out, step.query_starts[n], step.contexts[n] - before[n], outputs);
        });
        return outs;
    });
}

void check_recurrent(const Prompts& prompts, const std::vector<int>& cuts) {
    using T = TracedFloat;
    constexpr int CHANNELS = 70, TAPS = 4, HEADS = 4, KEY_HEADS = 2, KEY = 6, VALUE = 20, STATE = HEADS * KEY * VALUE;
    const std::vector<T> weight = random_numbers(TAPS * CHANNELS), bias = random_numbers(CHANNELS), rate(HEADS * KEY, T(-0.25)),
                         skip = random_numbers(HEADS);
    check_recurrent("short convolution", prompts, cuts, CHANNELS, (TAPS - 1) * CHANNELS, CHANNELS, [&](T* x, T* state, T* out) {
        return ShortConvOp<T>(x, CHANNELS, false, weight.data(), bias.data(), TAPS, CHANNELS, state, out);
    });
    const auto scan = [&]<ScanRule RULE>(std::integral_constant<ScanRule, RULE>, const char* name) {
        const int key_heads = RULE == KDA ? HEADS : KEY_HEADS;
        const ScanHeads shape{HEADS, key_heads, KEY, VALUE, 0.01, 8, 1};
        const int numbers = 2 * key_heads * KEY + HEADS * VALUE, gates = RULE == KDA ? HEADS + HEADS * KEY : 2 * HEADS;
        check_recurrent(name, prompts, cuts, numbers + gates, STATE, HEADS * VALUE, [&](T* x, T* state, T* out) {
            return ScanOp<T, RULE>(x, numbers + gates, x + numbers, numbers + gates, rate.data(), bias.data(),
                                   RULE == SSM ? skip.data() : nullptr, shape, state, out);
        });
    };
    scan(std::integral_constant<ScanRule, DELTA>{}, "delta rule");
    scan(std::integral_constant<ScanRule, SSM>{}, "state space");
    scan(std::integral_constant<ScanRule, KDA>{}, "delta rule by keys");
}

// The instrument itself: it must tell orders apart, and see as one what has the same bits.
void check_trees() {
    const std::vector<TracedFloat> x = random_numbers(40);
    const auto in_order = [&](int count) {
        TracedFloat sum = 0;
        for (int i = 0; i < count; i++) sum += x[i];
        return sum;
    };
    const auto by_lanes = [&] {
        LaneSums sums;
        sums.add_each(40, [&](Floats& part, int i) { part += load(x.data() + i, 40 - i); });
        return sums.total();
    };
    const bool is_right = ((x[0] + x[1]) + x[2]).hash() != (x[0] + (x[1] + x[2])).hash() &&
                          (x[0] + x[1]).hash() == (x[1] + x[0]).hash() && (x[0] + 0).hash() == x[0].hash() &&
                          (x[0] * x[1] + x[2]).hash() != fused(x[0], x[1], x[2]).hash() &&
                          in_order(40).hash() != by_lanes().hash() && by_lanes().hash() == by_lanes().hash();
    if (!is_right) puts("trees are not told apart"), exit(1);
    trace.count = 0;
}

}  // namespace

int main(int count, char** words) {
    const int most = count > 1 ? atoi(words[1]) : MOST_ROWS;
    const int part = count > 3 ? atoi(words[2]) : 0, parts = count > 3 ? atoi(words[3]) : 1;
    std::vector<int> counts, cuts;
    for (int rows = 1; rows <= std::min(most, MOST_ROWS); rows++)
        if (rows % parts == part) counts.push_back(rows);
    for (int cut = 1; cut <= std::min(most, 150); cut++)
        if (cut % parts == part) cuts.push_back(cut);
    const std::vector<int> few{1, 2, 5, 7, 13, 33, 193, 256};
    if (most == 0) counts = few, cuts = {1, 3, 16, 49, 150};
    check_trees();
    for (const QuantFormat& format : {QuantFormat{8, 32}, {8, 128}, {4, 128}, {4, 128, Grid4::STEPS}, {4, 32, Grid4::ZEROS},
                                      {4, 32, Grid4::E2M1}}) {
        check_linear(format, format.bits == 8 ? 300 : 2 * format.group + 44, 70, 1, counts);
        for (int shares : {2, 4}) check_linear(format, 4 * format.group, 70, shares, format.group == 128 ? counts : few);
    }
    check_float_linear(130, 70, few);
    for (int width : {1, 100, 1030}) check_norms(width, width < 1000 ? counts : few);
    check_elementwise(1030, {1, 2, 33});
    const Prompts prompts{{150, 77, 9}};
    for (const AttentionCase& how : {AttentionCase{16, 0, 0}, {32, 70, 0}, {4, 0, 3}}) check_attention(prompts, how, cuts);
    check_recurrent({{40, 23, 5}}, cuts);
    puts("one tree each");
}
