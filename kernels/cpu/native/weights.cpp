// Weights: rounded and packed, or packed before.
#include "dtypes.h"
#include "gemm.h"
#include "quant_pack.h"

using namespace llmbox;

namespace {

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
    if (bias) {
        linear->bias.assign(linear->panels() * PANEL, 0.f);
        std::copy_n(bias, linear->outputs, linear->bias.begin());
    }
    return linear;
}

}  // namespace

extern "C" {

// Packs weight[outputs, inputs] and bias (float32 or null); null when memory is short.
Linear* llmbox_linear_new(int dtype, int inputs, int outputs, const void* weight, const float* bias) try {
    return with_type(dtype, [&]<class E>(E) {
        auto* linear = new Linear(inputs, outputs, words_of<E>(inputs));
        auto* rows = static_cast<const typename E::Element*>(weight);
        return fill(linear, bias, [=](int panel) { pack_panel<E>(*linear, panel, rows); });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// Quantised: `bits` 8 or 4, a scale for each `group` (32 or 128) inputs.
QuantLinear* llmbox_quant_new(
    int dtype, int inputs, int outputs, int bits, int group, const void* weight, const float* bias) try {
    return with_type(dtype, [&]<class E>(E) {
        auto* linear = new QuantLinear(inputs, outputs, bits, group);
        auto* rows = static_cast<const typename E::Element*>(weight);
        return fill(linear, bias, [=](int panel) {
            pack_quant_panel(*linear, panel, [=](int row, int g, int8_t* codes) {
                return round_row_group(rows + static_cast<size_t>(row) * inputs, inputs, g, group, bits, codes);
            });
        });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// As `llmbox_quant_new`, from codes[outputs, inputs] and scales[outputs, groups] (float16) made before.
QuantLinear* llmbox_quant_from(int inputs, int outputs, int bits, int group, const int8_t* codes,
                               const uint16_t* scales, const float* bias) try {
    auto* linear = new QuantLinear(inputs, outputs, bits, group);
    return fill(linear, bias, [=](int panel) {
        pack_quant_panel(*linear, panel, [=](int row, int g, int8_t* to) {
            const int8_t* from = codes + static_cast<size_t>(row) * inputs + g * group;
            std::copy_n(from, std::min(group, inputs - g * group), to);
            return scales[static_cast<size_t>(row) * linear->groups + g];
        });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

// The codes and scales that `llmbox_quant_new` would pack.
void llmbox_quantize(
    int dtype, int inputs, int outputs, int bits, int group, const void* weight, int8_t* codes, uint16_t* scales) {
    with_type(dtype, [&]<class E>(E) {
        struct Job {
            int inputs, outputs, bits, group;
            const typename E::Element* weight;
            int8_t* codes;
            uint16_t* scales;
        } job{inputs, outputs, bits, group, static_cast<const typename E::Element*>(weight), codes, scales};
        pool().run(
            [](Member& member, void* argument) {
                const auto& job = *static_cast<Job*>(argument);
                const auto rows = member.share(job.outputs);
                const int groups = ceil_div(job.inputs, job.group);
                int8_t rounded[MAX_GROUP];
                for (int row = rows.begin; row < rows.end; row++)
                    for (int g = 0; g < groups; g++) {
                        const size_t at = static_cast<size_t>(row) * job.inputs;
                        job.scales[static_cast<size_t>(row) * groups + g] =
                            round_row_group(job.weight + at, job.inputs, g, job.group, job.bits, rounded);
                        const int begin = g * job.group;
                        std::copy_n(rounded, std::min(job.group, job.inputs - begin), job.codes + at + begin);
                    }
            },
            &job);
    });
}

// Linears on panels that were packed before and lie elsewhere, for as long as the linear.
Linear* llmbox_linear_at(int dtype, int inputs, int outputs, uint8_t* packed, const float* bias) {
    return with_type(dtype, [&]<class E>(E) {
        return fill(new Linear(inputs, outputs, words_of<E>(inputs), packed), bias, [](int) {});
    });
}
QuantLinear* llmbox_quant_at(int inputs, int outputs, int bits, int group, uint8_t* packed, const float* bias) {
    return fill(new QuantLinear(inputs, outputs, bits, group, packed), bias, [](int) {});
}

const uint8_t* llmbox_packed(const LinearShape* linear) { return linear->packed(); }
int64_t llmbox_packed_bytes(const LinearShape* linear) { return static_cast<int64_t>(linear->packed_bytes()); }

void llmbox_linear_free(LinearShape* linear) { delete linear; }

}  // extern "C"
