// Every operation on odd shapes, with buffers that end where their data ends: run under ASan and UBSan. With the
// argument `digests`, what each left is hashed and printed, so that two machines or instruction sets can be compared.
#include "checked_amx.h"
#include "emulated_amx.h"
#include "emulated_vectors.h"
#include "library.cpp"
#include "attention/attention_bf16.cpp"
#include "attention/attention_f32.cpp"
#include "attention/attention_int8.cpp"
#include "moe/moe.cpp"
#include "linear/linear.cpp"
#include "threads/pool.cpp"
#include "quantized/gguf_block_gemm.cpp"
#include "quantized/quant_gemm.cpp"
#include "quantized/quant_linear.cpp"
#include "recurrent/recurrent.cpp"
#include "sampling/sample.cpp"
#include "linear/weight_packing.cpp"

#include <cstdio>
#include <random>

namespace {

std::mt19937 randomness(1);

// Normal to the eye, and the same with every C library.
float normal() {
    float sum = -6;
    for (int i = 0; i < 12; i++) sum += static_cast<float>(randomness() >> 8) * 0x1p-24f;
    return sum;
}

bool prints_digests = false;

void print_digest(const char* what, const void* data, size_t bytes) {
    if (!prints_digests) return;
    uint64_t digest = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
    printf("%s %016lx\n", what, static_cast<unsigned long>(digest));
}

// `count` random numbers of a dtype; the bytes are on the heap, exactly.
struct Buffer {
    Buffer(int dtype, size_t count) : dtype(dtype), count(count), bytes(count * (dtype == BFLOAT16 ? 2 : 4)) {
        for (size_t i = 0; i < count; i++) set(i, normal());
    }
    void set(size_t i, float x) {
        if (dtype == BFLOAT16) reinterpret_cast<bf16*>(bytes.data())[i] = to_bf16(x);
        else reinterpret_cast<float*>(bytes.data())[i] = x;
    }
    float get(size_t i) const {
        if (dtype == BFLOAT16) return to_float(reinterpret_cast<const bf16*>(bytes.data())[i]);
        return reinterpret_cast<const float*>(bytes.data())[i];
    }
    void poison() {
        for (size_t i = 0; i < count; i++) set(i, NAN);
    }
    void* data() { return bytes.data(); }
    int dtype;
    size_t count;
    std::vector<uint8_t> bytes;
};

void run(Op* op, const Step& step) {
    llmbox_run(&op, 1, &step);
    llmbox_op_free(op);
}

void must_be_finite(const Buffer& buffer, const char* what) {
    for (size_t i = 0; i < buffer.count; i++)
        if (!std::isfinite(buffer.get(i))) {
            printf("%s: element %zu of %zu is not finite\n", what, i, buffer.count);
            exit(1);
        }
    print_digest(what, buffer.bytes.data(), buffer.bytes.size());
}

// Rows of x and of the result lie apart, and the last one ends where the buffer does.
template <class Make> void check_strided(int dtype, int rows, int inputs, int outputs, Make make) {
    const int x_stride = inputs + 3, out_stride = outputs + 5;
    Buffer x(dtype, size_t(rows - 1) * x_stride + inputs), out(FLOAT32, size_t(rows - 1) * out_stride + outputs);
    for (size_t i = 0; i < x.count; i++)
        if (int(i % x_stride) >= inputs) x.set(i, NAN);
    out.poison();
    Step step{};
    step.rows = rows;
    run(make(x.data(), x_stride, out.data(), out_stride), step);
    for (size_t i = 0; i < out.count; i++)
        if (std::isfinite(out.get(i)) != (int(i % out_stride) < outputs)) {
            printf("strided linear: element %zu\n", i);
            exit(1);
        }
}

void check_linear(int dtype, int rows, int inputs, int outputs) {
    Buffer weight(dtype, size_t(inputs) * outputs), x(dtype, size_t(rows) * inputs);
    Buffer bias(FLOAT32, outputs), out(dtype, size_t(rows) * outputs), wide(FLOAT32, size_t(rows) * outputs);
    out.poison(), wide.poison();
    auto* biases = static_cast<const float*>(bias.data());
    Linear* linear = llmbox_linear_new(dtype, inputs, outputs, weight.data(), biases);
    Step step{};
    step.rows = rows;
    run(llmbox_linear_op(dtype, linear, x.data(), inputs, out.data(), outputs, dtype), step);
    run(llmbox_linear_op(dtype, linear, x.data(), inputs, wide.data(), outputs, FLOAT32), step);
    must_be_finite(out, "linear of floats"), must_be_finite(wide, "logits of floats");
    check_strided(dtype, rows, inputs, outputs, [&](void* from, int x_stride, void* to, int out_stride) {
        return llmbox_linear_op(dtype, linear, from, x_stride, to, out_stride, FLOAT32);
    });
    // On a copy of its panels, which is all that a file on disk holds.
    const auto* panels = llmbox_packed(linear);
    std::vector<uint8_t> copy(panels, panels + llmbox_packed_bytes(linear));
    Linear* taken_up = llmbox_linear_at(dtype, inputs, outputs, copy.data(), biases);
    Buffer again(FLOAT32, size_t(rows) * outputs);
    run(llmbox_linear_op(dtype, taken_up, x.data(), inputs, again.data(), outputs, FLOAT32), step);
    if (again.bytes != wide.bytes) exit(1);
    llmbox_linear_free(taken_up);
    std::vector<int64_t> ids(rows, outputs - 1);
    step.ids = ids.data();
    Buffer taken(dtype, size_t(rows) * inputs);
    for (float scale : {1.f, 2.5f}) {
        taken.poison();
        run(llmbox_embedding_op(dtype, linear, scale, taken.data(), inputs), step);
        must_be_finite(taken, "embedding");
    }
    ids.assign(rows, int64_t{1} << 40);  // beyond the table: NaN, not a crash
    run(llmbox_embedding_op(dtype, linear, 2.5f, taken.data(), inputs), step);
    if (!std::isnan(taken.get(0))) exit(1);
    llmbox_linear_free(linear);
    if (dtype == FLOAT32) return;
    Linear* wide_linear = llmbox_linear_new(WIDE_BFLOAT16, inputs, outputs, weight.data(), biases);
    for (Buffer* to : {&out, &wide}) {
        to->poison();
        const LinearShape* one = wide_linear;
        run(llmbox_linear_by_head_op(dtype, WIDE_BFLOAT16, 1, &one, x.data(), inputs, 0, to->data(), outputs, 0, to->dtype), step);
        must_be_finite(*to, "wide linear");
    }
    llmbox_linear_free(wide_linear);
}

// Linears of three heads, whose parts of a row lie side by side; `form`: see `llmbox_linear_by_head_op`.
void check_heads(int dtype, int form, int rows, int inputs, int outputs) {
    constexpr int HEADS = 3;
    Buffer weight(dtype, size_t(inputs) * outputs), x(dtype, size_t(rows) * HEADS * inputs);
    Buffer out(dtype, size_t(rows) * HEADS * outputs);
    out.poison();
    std::vector<LinearShape*> linears;
    for (int head = 0; head < HEADS; head++)
        if (form == INT8_SCALED) linears.push_back(llmbox_quant_new(dtype, inputs, outputs, 8, 32, 0, weight.data(), nullptr));
        else linears.push_back(llmbox_linear_new(form, inputs, outputs, weight.data(), nullptr));
    Step step{};
    step.rows = rows;
    run(llmbox_linear_by_head_op(dtype, form, HEADS, linears.data(), x.data(), HEADS * inputs, inputs, out.data(),
                                 HEADS * outputs, outputs, dtype),
        step);
    must_be_finite(out, form == dtype ? "heads of floats" : "wide heads");
    for (LinearShape* linear : linears) llmbox_linear_free(linear);
}

void check_quant(int dtype, const QuantFormat& format, int rows, int inputs, int outputs) {
    const auto [bits, group, grid_of_4] = format;
    const int grid = static_cast<int>(grid_of_4);
    const bool has_offsets = grid_of_4 == Grid4::STEPS;
    Buffer weight(dtype, size_t(inputs) * outputs), x(dtype, size_t(rows) * inputs);
    Buffer out(dtype, size_t(rows) * outputs), taken(dtype, size_t(rows) * inputs), bias(FLOAT32, outputs);
    out.poison(), taken.poison();
    auto* biases = static_cast<const float*>(bias.data());
    QuantLinear* linear = llmbox_quant_new(dtype, inputs, outputs, bits, group, grid, weight.data(), biases);
    std::vector<int64_t> ids(rows, outputs - 1);
    Step step{};
    step.rows = rows;
    step.ids = ids.data();
    run(llmbox_quant_op(dtype, linear, x.data(), inputs, out.data(), outputs, dtype), step);
    run(llmbox_quant_embedding_op(dtype, linear, 2.5f, taken.data(), inputs), step);
    must_be_finite(out, "quantized linear"), must_be_finite(taken, "quantized embedding");
    check_strided(dtype, rows, inputs, outputs, [&](void* from, int x_stride, void* to, int out_stride) {
        return llmbox_quant_op(dtype, linear, from, x_stride, to, out_stride, FLOAT32);
    });
    // Rounded apart and packed from that, and on a copy of its panels.
    const auto* panels = llmbox_packed(linear);
    std::vector<uint8_t> copy(panels, panels + llmbox_packed_bytes(linear));
    std::vector<int8_t> codes(size_t(inputs) * outputs);
    std::vector<uint16_t> scales(size_t(outputs) * ceil_div(inputs, group));
    std::vector<uint8_t> steps_of(scales.size() * STEPS);
    uint8_t* steps = has_offsets ? steps_of.data() : nullptr;
    llmbox_quantize(dtype, inputs, outputs, bits, group, weight.data(), codes.data(), scales.data(), steps);
    print_digest("codes", codes.data(), codes.size()), print_digest("scales", scales.data(), 2 * scales.size());
    Buffer again(dtype, size_t(rows) * outputs);
    for (QuantLinear* same :
         {llmbox_quant_from(inputs, outputs, bits, group, grid, codes.data(), scales.data(), steps, nullptr, biases),
          llmbox_quant_at(inputs, outputs, bits, group, grid, false, copy.data(), biases)}) {
        again.poison();
        run(llmbox_quant_op(dtype, same, x.data(), inputs, again.data(), outputs, dtype), step);
        if (again.bytes != out.bytes) exit(1);
        llmbox_linear_free(same);
    }
    // In parts as ranks have them.
    const int groups = ceil_div(inputs, group);
    for (int shares : {1, 2, 4}) {
        if (groups % shares) continue;
        again.poison();
        run(llmbox_shared_quant_op(dtype, linear, x.data(), inputs, again.data(), outputs, dtype, shares), step);
        if (shares == 1 && again.bytes != out.bytes) exit(1);
        must_be_finite(again, "quantized linear in shares");
    }
    llmbox_linear_free(linear);
}

// Groups as published: a zero for each, or floats of four bits.
void check_stored(int dtype, Grid4 grid, int rows, int inputs, int outputs) {
    const int groups = ceil_div(inputs, 32);
    std::vector<int8_t> codes(size_t(inputs) * outputs);
    std::vector<uint16_t> scales(size_t(outputs) * groups, to_scale(0.01f));
    std::vector<uint8_t> zeros(scales.size());
    for (size_t i = 0; i < zeros.size(); i++) zeros[i] = randomness() % 16;
    for (size_t i = 0; i < codes.size(); i++) {
        const int n = randomness() % 16, zero = zeros[i / inputs * groups + i % inputs / 32];
        codes[i] = static_cast<int8_t>(grid == Grid4::E2M1 ? E2M1_VALUES[n] : grid == Grid4::ZEROS ? n - zero : n - 8);
    }
    Buffer x(dtype, size_t(rows) * inputs), out(dtype, size_t(rows) * outputs);
    out.poison();
    const auto* none = static_cast<const uint8_t*>(nullptr);
    QuantLinear* linear =
        llmbox_quant_from(inputs, outputs, 4, 32, static_cast<int>(grid), codes.data(), scales.data(),
                          grid == Grid4::ZEROS ? zeros.data() : none, nullptr, nullptr);
    Step step{};
    step.rows = rows;
    run(llmbox_quant_op(dtype, linear, x.data(), inputs, out.data(), outputs, dtype), step);
    must_be_finite(out, "linear of stored groups");
    llmbox_linear_free(linear);
}

// Blocks of GGUF files: any bytes are numbers and factors.
void check_blocks(int dtype, int bits, Grid4 grid, int rows, int inputs, int outputs) {
    const BlockLayout layout({bits, BLOCK_GROUP, grid});
    const size_t units = static_cast<size_t>(outputs) * (inputs / layout.unit());
    std::vector<uint8_t> numbers(size_t(inputs) * outputs), parts(units * layout.parts, 33);
    for (size_t i = 0; i < numbers.size(); i++) numbers[i] = i % (1 << bits);
    std::vector<uint16_t> scales(units, to_scale(0.01f));
    const uint8_t* least_parts = layout.has_minimums && !layout.are_paired ? parts.data() : nullptr;
    Buffer x(dtype, size_t(rows) * inputs), out(dtype, size_t(rows) * outputs), again(dtype, size_t(rows) * outputs);
    Buffer taken(dtype, size_t(rows) * inputs);
    out.poison(), again.poison(), taken.poison();
    QuantLinear* linear = llmbox_quant_blocks(inputs, outputs, bits, static_cast<int>(grid), numbers.data(), scales.data(),
                                              layout.has_minimums ? scales.data() : nullptr,
                                              layout.parts ? parts.data() : nullptr, least_parts, nullptr);
    std::vector<int64_t> ids(rows, outputs - 1);
    Step step{};
    step.rows = rows;
    step.ids = ids.data();
    run(llmbox_quant_op(dtype, linear, x.data(), inputs, out.data(), outputs, dtype), step);
    run(llmbox_quant_embedding_op(dtype, linear, 1, taken.data(), inputs), step);
    must_be_finite(out, "linear of blocks"), must_be_finite(taken, "embedding of blocks");
    const auto* panels = llmbox_packed(linear);
    std::vector<uint8_t> copy(panels, panels + llmbox_packed_bytes(linear));
    QuantLinear* same =
        llmbox_quant_at(inputs, outputs, bits, BLOCK_GROUP, static_cast<int>(grid), false, copy.data(), nullptr);
    run(llmbox_quant_op(dtype, same, x.data(), inputs, again.data(), outputs, dtype), step);
    if (again.bytes != out.bytes) exit(1);
    llmbox_linear_free(same);
    llmbox_linear_free(linear);
}

// Few rows and many, NaN among the logits of the first: the others must be finite, and each row that of itself alone.
void check_experts(int dtype, const QuantFormat* format, int rows, int hidden, int inner, int count, int per_row) {
    std::vector<LinearShape*> gate_ups, downs;
    const auto linear = [&](int inputs, int outputs) -> LinearShape* {
        Buffer weight(dtype, size_t(inputs) * outputs);
        if (!format) return llmbox_linear_new(dtype, inputs, outputs, weight.data(), nullptr);
        return llmbox_quant_new(dtype, inputs, outputs, format->bits, format->group, static_cast<int>(format->grid),
                                weight.data(), nullptr);
    };
    for (int expert = 0; expert < count; expert++) {
        gate_ups.push_back(linear(hidden, 2 * inner));
        downs.push_back(linear(inner, hidden));
    }
    const int x_stride = hidden + 3;
    Buffer x(dtype, size_t(rows - 1) * x_stride + hidden), logits(FLOAT32, size_t(rows) * count);
    Buffer out(dtype, size_t(rows) * hidden), alone(dtype, hidden);
    logits.set(0, rows > 1 ? NAN : 0), out.poison(), alone.poison();
    const Routing routing{0, 1, 1, 1, 1.f, 0, nullptr};
    Step step{};
    const auto run_rows = [&](int first, int many, Buffer& to) {
        step.rows = many;
        const auto* from = x.bytes.data() + size_t(first) * x_stride * x.bytes.size() / x.count;
        const auto* routed = static_cast<const float*>(logits.data()) + first * count;
        std::vector<int64_t> load(count);
        // Of some experts first, as a rank has them: its results are overwritten. Then both ranks hold the last expert, and
        // its rows are divided.
        std::vector<int32_t> places(count), holders(count, 1), owners(many * per_row);
        std::vector<float> shares(many * per_row);
        std::vector<int64_t> loads(2);
        Buffer results(dtype, size_t(many) * per_row * hidden);
        holders[count - 1] = 3, results.poison();
        for (const int held : {(count + 1) / 2, count}) {
            for (int expert = 0; expert < count; expert++) places[expert] = std::max(-1, expert - (count - held));
            const HeldExperts whole{places.data(), nullptr, nullptr, 0, 1};
            const HeldExperts divided{places.data(), holders.data(), loads.data(), held == count ? 0 : 1, 2};
            const auto experts = [&](const HeldExperts& here, Buffer& out_of, int width, float* weights, int32_t* ranks) {
                run(llmbox_experts_op(dtype, format != nullptr, count, &here, held, load.data(), gate_ups.data(),
                                      downs.data(), from, x_stride, routed, count, per_row, 1, &routing, 0, 7.f, nullptr, 0,
                                      nullptr, 0, out_of.data(), width, nullptr, nullptr, weights, ranks),
                    step);
            };
            experts(divided, results, per_row * hidden, shares.data(), owners.data());
            run(llmbox_combine_op(dtype, results.data(), shares.data(), per_row, hidden, nullptr, 0, nullptr, 0, to.data(),
                                  hidden),
                step);
            experts(whole, to, hidden, nullptr, nullptr);
        }
    };
    run_rows(0, rows, out);
    run_rows(rows - 1, 1, alone);
    must_be_finite(alone, format ? "experts of integers" : "experts of floats");
    for (size_t i = 0; i < out.count; i++)
        if (std::isfinite(out.get(i)) == (rows > 1 && i < size_t(hidden))) exit(1);
    if (!std::equal(alone.bytes.rbegin(), alone.bytes.rend(), out.bytes.rbegin())) exit(1);
    for (auto* linear : gate_ups) llmbox_linear_free(linear);
    for (auto* linear : downs) llmbox_linear_free(linear);
}

void check_rows(int dtype, int rows, int heads, int width) {
    const size_t size = size_t(rows) * heads * width;
    Buffer x(dtype, size), out(dtype, size), residual(dtype, size);
    Buffer cos(FLOAT32, 2 * rows * width), sin(FLOAT32, 2 * rows * width);
    Step step{};
    step.rows = rows;
    step.cos = static_cast<const float*>(cos.data());
    step.sin = static_cast<const float*>(sin.data());
    const int row = heads * width;
    for (int of : {dtype, int(FLOAT32)}) {
        Buffer weight(of, heads * width);
        out.poison();
        run(llmbox_norm_op(dtype, of, x.data(), row, weight.data(), heads, width, 1e-6f, out.data()), step);
        must_be_finite(out, "norm");
        out.poison();
        run(llmbox_add_norm_op(dtype, of, x.data(), row, residual.data(), weight.data(), row, 1e-6f, out.data()), step);
        must_be_finite(out, "add norm");
    }
    for (int table : {0, 1}) run(llmbox_rotary_op(dtype, x.data(), row, heads, width, table), step);
    if (row % 2 == 0)
        for (int activation : {SILU, GELU_TANH, RELU2_GATED, SWIGLU_LIMITED, GELU_GATED})
            run(llmbox_gate_mul_op(dtype, activation, 7.f, x.data(), row, row / 2), step);
    for (int activation : {RELU2, GELU, GELU_NEW, RELU}) run(llmbox_gate_mul_op(dtype, activation, 7.f, x.data(), row, row), step);
    run(llmbox_xielu_op(dtype, x.data(), row, row, 0.8f, 0.9f, 0.5f, -1e-6f), step);
    must_be_finite(x, "rotary and gates");
}

// Two sequences, a fresh one and one that goes on; states are saved on the way. New slots are NaN.
void check_recurrent(int dtype, int heads, int group, int keys, int values) {
    const int rows = 9, key_heads = heads / group, width = 2 * key_heads * keys + heads * values;
    const int32_t starts[] = {0, 2, rows}, contexts[] = {2, 20}, slots[] = {2, 0}, save_starts[] = {0, 1, 3};
    const int32_t save_rows[] = {0, 4, rows - 1}, save_slots[] = {1, 3, 4};
    Step step{};
    step.rows = rows, step.sequences = 2, step.query_starts = starts, step.contexts = contexts;
    step.state_slots = slots, step.save_starts = save_starts, step.save_rows = save_rows, step.save_slots = save_slots;
    const size_t size = size_t(heads) * keys * values;
    {
        const int own = heads * values, gate_width = own + 2 * keys;
        Buffer x(dtype, size_t(rows) * own), gates(dtype, size_t(rows) * gate_width), out(dtype, size_t(rows) * own);
        Buffer rate(FLOAT32, size), bias(FLOAT32, own), state(FLOAT32, 5 * size);
        for (size_t i = 0; i < size; i++) rate.set(i, -0.5f);
        for (size_t i = size; i < state.count; i++) state.set(i, NAN);
        out.poison();
        run(llmbox_scan_op(dtype, S6, x.data(), own, gates.data(), gate_width, static_cast<float*>(rate.data()),
                           static_cast<float*>(bias.data()), static_cast<float*>(bias.data()), heads, 1, keys, values, 0.f, INFINITY,
                           1.f, static_cast<float*>(state.data()), out.data()),
            step);
        must_be_finite(out, "selective scan"), must_be_finite(state, "state of a selective scan");
    }
    for (int rule : {SSM, DELTA, KDA}) {
        if (rule == KDA && group > 1) continue;
        const int decays = rule == KDA ? heads * keys : heads, gate_width = rule == SSM ? heads : heads + decays;
        Buffer x(dtype, size_t(rows) * width), gates(dtype, size_t(rows) * gate_width), out(dtype, size_t(rows) * heads * values);
        Buffer rate(FLOAT32, heads), bias(FLOAT32, decays), state(FLOAT32, 5 * size);
        for (int i = 0; i < heads; i++) rate.set(i, -0.5f);
        for (size_t i = size; i < state.count; i++) state.set(i, NAN);
        out.poison();
        const auto* skip = rule == SSM ? static_cast<const float*>(bias.data()) : nullptr;
        run(llmbox_scan_op(dtype, rule, x.data(), width, gates.data(), gate_width, static_cast<float*>(rate.data()),
                           static_cast<float*>(bias.data()), skip, heads, key_heads, keys, values, 0.f, INFINITY, 2.f,
                           static_cast<float*>(state.data()), out.data()),
            step);
        must_be_finite(out, "scan"), must_be_finite(state, "state of a scan");
    }
    for (int gated : {0, 1}) {
        Buffer x(dtype, size_t(rows) * values * (1 + 2 * gated)), weight(FLOAT32, 4 * values), bias(FLOAT32, values);
        Buffer state(FLOAT32, size_t(5) * 3 * values), out(dtype, size_t(rows) * values);
        for (size_t i = 3 * values; i < state.count; i++) state.set(i, NAN);
        out.poison();
        run(llmbox_short_conv_op(dtype, x.data(), values * (1 + 2 * gated), gated, static_cast<float*>(weight.data()),
                                 gated ? nullptr : static_cast<float*>(bias.data()), 4, values, static_cast<float*>(state.data()), out.data()),
            step);
        must_be_finite(out, "convolution"), must_be_finite(state, "state of a convolution");
    }
    Buffer x(dtype, size_t(rows) * heads * values), gate(dtype, x.count), weight(FLOAT32, heads * values), out(dtype, x.count);
    const int row = heads * values;
    for (int first : {0, 1})
        run(llmbox_gated_norm_op(dtype, x.data(), row, gate.data(), row, static_cast<float*>(weight.data()), heads, values, 1e-6f, first, out.data()), step);
    for (int function : {0, 1, 2}) run(llmbox_gate_rows_op(dtype, function, x.data(), row, gate.data(), row, row), step);
    must_be_finite(out, "gated norm"), must_be_finite(x, "sigmoid");
    out.poison();
    for (const void* added : {static_cast<const void*>(nullptr), static_cast<const void*>(gate.data())})
        run(llmbox_mul_add_op(dtype, x.data(), row, static_cast<float*>(weight.data()), added, row, out.data()), step);
    must_be_finite(out, "mul add");
}

void check_streams(int dtype, int rows, int streams, int width) {
    Step step{};
    step.rows = rows;
    Buffer x(dtype, size_t(rows) * streams * width), row(dtype, size_t(rows) * width), out(dtype, x.count);
    Buffer routed(FLOAT32, size_t(rows) * streams), coefs(FLOAT32, streams * streams * streams), sums(FLOAT32, 2 * rows);
    auto *by = static_cast<float*>(coefs.data()), *from = static_cast<float*>(routed.data());
    out.poison();
    run(llmbox_predict_streams_op(dtype, x.data(), from, by, streams, width, out.data()), step);
    must_be_finite(out, "predicted streams");
    run(llmbox_correct_streams_op(dtype, x.data(), row.data(), from, by, streams, streams - 1, width, out.data()), step);
    run(llmbox_add_to_streams_op(dtype, out.data(), row.data(), streams, width), step);
    run(llmbox_match_size_op(dtype, out.data(), row.data(), width, streams, width, 1e-5f), step);
    must_be_finite(out, "corrected streams");
    run(llmbox_gate_sums_op(dtype, row.data(), width, width, static_cast<float*>(sums.data())), step);
    run(llmbox_cut_gates_op(dtype, row.data(), width, width, static_cast<float*>(sums.data()), width, 1.5f), step);
    must_be_finite(row, "cut gates"), must_be_finite(sums, "sums of gates");
}

// Numbers between rows stay as they are.
void check_softcap(int rows, int width) {
    const int stride = width + 3;
    Buffer x(FLOAT32, size_t(rows - 1) * stride + width);
    for (size_t i = 0; i < x.count; i++) x.set(i, int(i % stride) < width ? x.get(i) * 1e3f : NAN);
    Step step{};
    step.rows = rows;
    run(llmbox_softcap_op(static_cast<float*>(x.data()), stride, width, 30), step);
    for (size_t i = 0; i < x.count; i++)
        if ((std::fabs(x.get(i)) <= 30) != (int(i % stride) < width)) exit(1);
}

void check_best(int rows, int width) {
    Buffer x(FLOAT32, size_t(rows) * width), best(FLOAT32, rows);
    std::vector<int64_t> ids(rows, -1);
    Step step{};
    step.rows = rows;
    run(llmbox_best_op(static_cast<const float*>(x.data()), width, width, static_cast<float*>(best.data()), ids.data()),
        step);
    for (int row = 0; row < rows; row++)
        if (ids[row] < 0 || x.get(row * width + ids[row]) != best.get(row)) exit(1);
}

// Every way of drawing, and ranks; logits must be as before.
void check_draw(int rows, int width, float deviation) {
    Buffer x(FLOAT32, size_t(rows) * width);
    for (size_t i = 0; i < x.count; i++) x.set(i, x.get(i) * deviation);
    const std::vector<uint8_t> before = x.bytes;
    const std::vector<int64_t> ids{0, width - 1}, bias_ids{width / 2}, none;
    const std::vector<float> counts{0, 3}, biases{1e38f};
    const Edits plain{.allowed_count = -1};
    Edits all{bias_ids.data(), biases.data(), 1, ids.data(), counts.data(), 2, 1.5, 0.5, -0.5, ids.data(), 2, nullptr, -1};
    Edits few = all, nothing = all;
    few.allowed = bias_ids.data(), few.allowed_count = 1;
    nothing.allowed_count = 0;
    Step step{};
    step.rows = rows;
    for (const Edits& edits : {plain, all, few, nothing})
        for (double temperature : {0., 0.7, 2.})
            for (double top_p : {1e-300, 0.5, 0.999, 1.})
                for (int64_t top_k : {0, 1, 20, 700, width + 1}) {
                    std::vector<DrawRow> how(rows);
                    for (auto& row : how) row = {temperature, top_p, 1e-7, top_k, uint64_t(&row - how.data()), 7, edits};
                    std::vector<DrawOp::Drawn> drawn(rows, DrawOp::Drawn{-1, NAN, NAN});
                    auto* logits = static_cast<float*>(x.data());
                    run(llmbox_draw_op(logits, width, width, how.data(), drawn.data()), step);
                    for (const auto& one : drawn)
                        if (!(one.id >= 0 && one.id < width && std::isfinite(one.raw_best)) || x.bytes != before) exit(1);
                    for (const auto& one : drawn) print_digest("draw", &one.id, sizeof one.id);
                }
    for (int count : {0, 1, width}) {
        std::vector<int64_t> places(rows), chosen(rows, width - 1), leaders(size_t(rows) * count, -1);
        for (int row = 0; row < rows; row++) places[row] = rows - 1 - row;
        std::vector<float> leader_logits(leaders.size());
        std::vector<RankOp::Told> told(rows);
        run(llmbox_rank_op(static_cast<float*>(x.data()), width, width, places.data(), chosen.data(), count, told.data(),
                           leaders.data(), leader_logits.data()),
            step);
        for (const auto& one : told)
            if (!(one.rank >= 1 && one.rank <= width && one.total >= double(WEIGHT_ONE))) exit(1);
        for (const int64_t leader : leaders)
            if (leader < 0 || leader >= width) exit(1);
    }
    x.set(0, NAN);
    std::vector<DrawRow> how(rows, DrawRow{1, 0.9, 0, 0, 0, 0, plain});
    std::vector<DrawOp::Drawn> drawn(rows);
    run(llmbox_draw_op(static_cast<float*>(x.data()), width, width, how.data(), drawn.data()), step);
    if (!std::isnan(drawn[0].raw_best)) exit(1);
}

// Sequences of (past, new) tokens; the past is written first.
void check_attention(int dtype, int kv_dtype, int block_size, int query_heads, int heads, int width, int window) {
    const std::vector<std::pair<int, int>> sequences = {{0, 1}, {70, 1}, {5, 40}, {130, 3}};
    const int table_width = ceil_div(133, block_size);
    KVCache* cache = llmbox_cache_new(kv_dtype, 2, table_width * 4, block_size, heads, width, 0);
    std::vector<int32_t> tables(table_width * 4);
    for (size_t i = 0; i < tables.size(); i++) tables[i] = tables.size() - 1 - i;
    for (bool past : {true, false}) {
        std::vector<int32_t> starts{0}, contexts, slots;
        for (int n = 0; n < 4; n++) {
            const auto [before, fresh] = sequences[n];
            const int begin = past ? 0 : before, end = past ? before : before + fresh;
            for (int p = begin; p < end; p++)
                slots.push_back(tables[n * table_width + p / block_size] * block_size + p % block_size);
            starts.push_back(slots.size());
            contexts.push_back(end);
        }
        const int rows = slots.size();
        Buffer k(dtype, size_t(rows) * heads * width), v(dtype, size_t(rows) * heads * width);
        Buffer q(dtype, size_t(rows) * query_heads * width), out(dtype, size_t(rows) * query_heads * width);
        Step step{};
        step.rows = rows, step.sequences = 4, step.block_size = block_size, step.table_width = table_width;
        step.query_starts = starts.data(), step.contexts = contexts.data();
        step.block_tables = tables.data(), step.slots = slots.data();
        const int kv_row = heads * width;
        run(llmbox_write_kv_op(dtype, kv_dtype, cache, 1, k.data(), kv_row, v.data(), kv_row), step);
        if (past) continue;
        const int all = query_heads + 2 * heads;
        Buffer cos(FLOAT32, 2 * rows * width), sin(FLOAT32, 2 * rows * width);
        step.cos = static_cast<const float*>(cos.data()), step.sin = static_cast<const float*>(sin.data());
        for (int of : {dtype, int(FLOAT32)}) {
            Buffer x(dtype, size_t(rows) * all * width), norm(of, size_t(all - heads) * width);
            run(llmbox_heads_op(dtype, of, kv_dtype, cache, 1, x.data(), all * width, all, norm.data(), 1e-6f, 1), step);
            must_be_finite(x, "heads");
        }
        Buffer sinks(FLOAT32, query_heads);
        for (float softcap : {0.f, 3.f}) {
            const auto* sunk = softcap > 0 ? nullptr : static_cast<const float*>(sinks.data());
            out.poison();
            run(llmbox_attention_op(dtype, kv_dtype, cache, 1, q.data(), query_heads * width, query_heads, window, 0.1f,
                                    softcap, sunk, out.data()),
                step);
            must_be_finite(out, kv_dtype == INT8_SCALED ? "attention over int8" : "attention over floats");
        }
    }
    llmbox_cache_copy(cache, 0, 1);
    const int blocks[] = {0, 1};
    llmbox_cache_clear(cache, blocks, 2);
    const int stop = 0;
    llmbox_cache_populate(cache, 0, 1, &stop);
    llmbox_cache_free(cache);
}

}  // namespace

int main(int count, char**) {
    prints_digests = count > 1;
    if (!llmbox_usable()) return puts("the system keeps these instructions from us"), 1;
    const int cores[] = {0, 1};
    llmbox_threads(2, cores);
    for (int dtype : {FLOAT32, BFLOAT16}) {
        for (auto [rows, inputs, outputs] : {std::tuple{1, 1, 1}, {2, 33, 65}, {33, 130, 7}, {7, 64, 200}, {200, 9, 70}})
            check_linear(dtype, rows, inputs, outputs);
        for (auto [rows, inputs, outputs] : {std::tuple{1, 1, 1}, {6, 33, 65}, {9, 130, 7}, {300, 64, 200}}) {
            for (int form : {dtype, int{INT8_SCALED}}) check_heads(dtype, form, rows, inputs, outputs);
            if (dtype == BFLOAT16) check_heads(dtype, WIDE_BFLOAT16, rows, inputs, outputs);
        }
        for (const QuantFormat format : {QuantFormat{8, 32}, {8, 128}, {4, 128}, {4, 128, Grid4::STEPS}}) {
            check_quant(dtype, format, 1, 1, 1);
            check_quant(dtype, format, 5, 33, 65);
            check_quant(dtype, format, 9, 300, 70);
            check_quant(dtype, format, 17, 300, 70);
            check_quant(dtype, format, 33, 256, 7);
            check_quant(dtype, format, 207, 130, 66);
            check_quant(dtype, format, 9, 4 * format.group, 66);
        }
        for (const Grid4 grid : {Grid4::PLAIN, Grid4::ZEROS, Grid4::E2M1})
            for (const int rows : {1, 2, 3, 4, 11}) check_stored(dtype, grid, rows, 130, 70);
        for (const auto& [bits, grid] : {std::pair{5, Grid4::CENTERED}, {4, Grid4::TABLE}, {4, Grid4::MINIMUMS}, {5, Grid4::MINIMUMS}})
            check_blocks(dtype, bits, grid, 3, 288, 66), check_blocks(dtype, bits, grid, 1, 32, 1);
        for (const auto& [bits, grid] : {std::pair{4, Grid4::K_MINIMUMS}, {5, Grid4::K_MINIMUMS}, {2, Grid4::K_PAIRS},
                                         {3, Grid4::K_SIGNED}, {6, Grid4::K_SIGNED}, {4, Grid4::K_TABLE}})
            check_blocks(dtype, bits, grid, 2, 256, 3), check_blocks(dtype, bits, grid, 17, 512, 66);
        for (const QuantFormat& format : {QuantFormat{8, 32}, {8, 128}, {4, 128, Grid4::STEPS}}) {
            check_experts(dtype, &format, 1, 33, 7, 3, 2);
            check_experts(dtype, &format, 40, 130, 70, 4, 2);
        }
        check_experts(dtype, nullptr, 1, 1, 1, 1, 1);
        check_experts(dtype, nullptr, 5, 33, 7, 20, 3);
        check_experts(dtype, nullptr, 70, 130, 66, 2, 1);
        check_experts(dtype, nullptr, 400, 9, 35, 3, 3);
        for (auto [rows, heads, width] : {std::tuple{1, 1, 2}, {5, 3, 10}, {33, 2, 66}}) check_rows(dtype, rows, heads, width);
        check_recurrent(dtype, 1, 1, 1, 1);
        check_recurrent(dtype, 4, 2, 7, 20);
        check_recurrent(dtype, 2, 1, 33, 130);
        for (int width : {1, 77, 600}) check_streams(dtype, 3, 4, width);
        for (int kv_dtype : {FLOAT32, BFLOAT16, INT8_SCALED}) {
            check_attention(dtype, kv_dtype, 16, 4, 2, 32, 0);
            check_attention(dtype, kv_dtype, 16, 2, 1, 64, 20);
            check_attention(dtype, kv_dtype, 4, 5, 1, 10, 0);
            check_attention(dtype, kv_dtype, 64, 3, 3, 34, 7);
            check_attention(dtype, kv_dtype, 32, 6, 1, 66, 0);    // 240 rows of a prompt: several bands, the last one odd
            check_attention(dtype, kv_dtype, 16, 3, 1, 128, 33);  // whole tiles of int8
        }
    }
    for (auto [rows, width] : {std::tuple{1, 1}, {3, 8200}, {2, 100}}) check_best(rows, width), check_softcap(rows, width);
    for (auto [rows, width] : {std::tuple{1, 1}, {5, 100}, {2, 8200}})
        for (float deviation : {0.f, 0.3f, 8.f}) check_draw(rows, width, deviation);
    puts("clean");
}
