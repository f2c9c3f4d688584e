// Weights: quantized and packed, or packed before.
#include "dtypes.h"
#include "linear/wide_gemm.h"

using namespace llmbox;

namespace {

template <class Shape> Shape* keep_bias(Shape* linear, const float* bias) {
    if (bias) {
        linear->bias.assign(linear->panels() * PANEL, 0.f);
        std::copy_n(bias, linear->outputs, linear->bias.begin());
    }
    return linear;
}

// Runs `make_panel(panel)` for all panels of a linear, on all threads, and keeps the bias.
template <class Shape, class MakePanel> Shape* fill(Shape* linear, const float* bias, MakePanel make_panel) {
    struct Job {
        Shape* linear;
        MakePanel& make_panel;
    } job{linear, make_panel};
    pool().run(
        [](Member& member, void* argument) {
            auto& job = *static_cast<Job*>(argument);
            const auto panels = member.share(job.linear->panels());
            for (int panel = panels.begin; panel < panels.end; panel++) job.make_panel(panel);
        },
        &job);
    return keep_bias(linear, bias);
}

// Calls `make` with the type that unquantized weights are packed for.
template <class Make> Linear* with_packed_type(int dtype, Make make) {
    return dtype == WIDE_BFLOAT16 ? make(WideBF16{}) : with_type(dtype, make);
}

}  // namespace

extern "C" {

// Packs weight[outputs, inputs] and bias (float32 or null); null when memory is short.
Linear* llmbox_linear_new(int dtype, int inputs, int outputs, const void* weight, const float* bias) try {
    return with_packed_type(dtype, [&]<class E>(E) {
        auto* linear = new Linear(inputs, outputs, words_of<E>(inputs));
        auto* rows = static_cast<const typename E::Element*>(weight);
        return fill(linear, bias, [=](int panel) { pack_panel<E>(*linear, panel, rows); });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// Quantized: `bits` 8 or 4, a scale for each `group` (32 or 128) inputs, `grid` as in QuantFormat.
QuantLinear* llmbox_quant_new(
    int dtype, int inputs, int outputs, int bits, int group, int grid, const void* weight, const float* bias) try {
    return with_type(dtype, [&]<class E>(E) {
        auto* linear = new QuantLinear(inputs, outputs, {bits, group, static_cast<Grid4>(grid)});
        auto* rows = static_cast<const typename E::Element*>(weight);
        return fill(linear, bias, [=](int panel) {
            pack_quant_panel(*linear, panel, [=](int row, int g, int8_t* numbers, uint8_t* to) {
                return round_row_group(rows + static_cast<size_t>(row) * inputs, inputs, g, *linear, numbers, to);
            });
        });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// Already quantized: numbers[outputs, inputs], scales[outputs, groups] (float16), by `grid` steps[outputs, groups * 8]
// or zeros[outputs, groups], and order[inputs] or null.
QuantLinear* llmbox_quant_from(int inputs, int outputs, int bits, int group, int grid, const int8_t* numbers,
                               const uint16_t* scales, const uint8_t* offsets, const int32_t* order, const float* bias) try {
    auto* linear = new QuantLinear(inputs, outputs, {bits, group, static_cast<Grid4>(grid)}, order != nullptr);
    if (order) std::copy_n(order, inputs, linear->order());
    const int each = linear->has_steps() ? STEPS : linear->has_zeros() ? 1 : 0;
    return fill(linear, bias, [=](int panel) {
        pack_quant_panel(*linear, panel, [=](int row, int g, int8_t* to, uint8_t* steps_to) {
            const int8_t* from = numbers + static_cast<size_t>(row) * inputs + g * group;
            const size_t cell = static_cast<size_t>(row) * linear->groups + g;
            std::copy_n(from, std::min(group, inputs - g * group), to);
            std::copy_n(offsets + cell * each, each, steps_to);
            return scales[cell];
        });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// Blocks of a GGUF file, taken apart as BlockRows says; `grid` from Grid4::CENTERED on.
QuantLinear* llmbox_quant_blocks(int inputs, int outputs, int bits, int grid, const uint8_t* numbers, const uint16_t* scales,
                                 const uint16_t* minimums, const uint8_t* scale_parts, const uint8_t* minimum_parts,
                                 const float* bias) try {
    auto* linear = new QuantLinear(inputs, outputs, {bits, BLOCK_GROUP, static_cast<Grid4>(grid)});
    const BlockRows rows{numbers, scales, minimums, scale_parts, minimum_parts};
    return fill(linear, bias, [=](int panel) {
        const BlockLayout layout = linear->blocks();
        const int columns = std::min(PANEL, outputs - panel * PANEL);
        for (int unit = 0; unit < linear->units; unit++)
            for (int column = 0; column < columns; column++) {
                const size_t row = static_cast<size_t>(panel) * PANEL + column;
                pack_block(layout, rows, row * linear->units + unit, linear->unit_at(panel, unit), column);
            }
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// What `llmbox_quant_new` would pack, as `llmbox_quant_from` takes it.
void llmbox_quantize(int dtype, int inputs, int outputs, int bits, int group, const void* weight, int8_t* numbers,
                     uint16_t* scales, uint8_t* steps) {
    with_type(dtype, [&]<class E>(E) {
        struct Job {
            int inputs, outputs;
            QuantFormat format;
            const typename E::Element* weight;
            int8_t* numbers;
            uint16_t* scales;
            uint8_t* steps;
        } job{inputs, outputs, {bits, group, steps ? Grid4::STEPS : Grid4::PLAIN},
              static_cast<const typename E::Element*>(weight), numbers, scales, steps};
        pool().run(
            [](Member& member, void* argument) {
                const auto& job = *static_cast<Job*>(argument);
                const auto rows = member.share(job.outputs);
                const int group = job.format.group, groups = ceil_div(job.inputs, group);
                int8_t numbers[MAX_GROUP];
                uint8_t steps[STEPS];
                for (int row = rows.begin; row < rows.end; row++)
                    for (int g = 0; g < groups; g++) {
                        const size_t at = static_cast<size_t>(row) * job.inputs, cell = static_cast<size_t>(row) * groups + g;
                        job.scales[cell] = round_row_group(job.weight + at, job.inputs, g, job.format, numbers, steps);
                        const int begin = g * group;
                        std::copy_n(numbers, std::min(group, job.inputs - begin), job.numbers + at + begin);
                        if (job.steps) std::copy_n(steps, STEPS, job.steps + cell * STEPS);
                    }
            },
            &job);
    });
}

// Linears on panels that were packed before and lie elsewhere, for as long as the linear.
Linear* llmbox_linear_at(int dtype, int inputs, int outputs, uint8_t* packed, const float* bias) {
    return with_packed_type(dtype, [&]<class E>(E) {
        return keep_bias(new Linear(inputs, outputs, words_of<E>(inputs), packed), bias);
    });
}
QuantLinear* llmbox_quant_at(
    int inputs, int outputs, int bits, int group, int grid, int is_ordered, uint8_t* packed, const float* bias) {
    const QuantFormat format{bits, group, static_cast<Grid4>(grid)};
    return keep_bias(new QuantLinear(inputs, outputs, format, is_ordered != 0, packed), bias);
}

const uint8_t* llmbox_packed(const LinearShape* linear) { return linear->packed(); }
int64_t llmbox_packed_bytes(const LinearShape* linear) { return static_cast<int64_t>(linear->packed_bytes()); }
// The bias, which may be written between two steps, and its numbers.
float* llmbox_bias(LinearShape* linear, int64_t* count) {
    *count = static_cast<int64_t>(linear->bias.size());
    return linear->bias.data();
}

void llmbox_linear_free(LinearShape* linear) { delete linear; }

}  // extern "C"
