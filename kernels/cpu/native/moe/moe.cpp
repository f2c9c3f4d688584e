// Mixtures of experts.
#include "dtypes.h"
#include "moe/moe.h"

using namespace llmbox;

namespace {

template <class Copies, class T>
Op* make_experts(int count, const LinearShape* const* gate_ups, const LinearShape* const* downs, const ExpertsCall<T>& call) {
    using Shape = typename Copies::Shape;
    ExpertLinears<Shape> linears;
    for (int expert = 0; expert < count; expert++) {
        linears.gate_ups.push_back(static_cast<const Shape*>(gate_ups[expert]));
        linears.downs.push_back(static_cast<const Shape*>(downs[expert]));
    }
    return new ExpertsOp<Copies>(std::move(linears), call);
}

}  // namespace

// `count` of all `experts` are `here`, each with two linears, all of one kind: `quant` says whether they are quantized.
// `shared` and its gate may be null, `load`, both tables of adapters, and `shares` with `owners`: see `ExpertsCall`.
extern "C" Op* llmbox_experts_op(int dtype, int quant, int experts, const HeldExperts* here, int count, int64_t* load,
                                 const LinearShape* const* gate_ups, const LinearShape* const* downs, const void* x,
                                 int64_t x_stride, const float* logits, int64_t logits_stride, int per_row, int normalized,
                                 const Routing* routing,
                                 int activation, float limit, const void* shared, int64_t shared_stride, const float* shared_gate,
                                 int64_t shared_gate_stride, void* out, int64_t out_stride,
                                 const int64_t* gate_up_adapters, const int64_t* down_adapters, float* shares,
                                 int32_t* owners) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        const ExpertsCall<T> call{static_cast<const T*>(x), x_stride, logits, logits_stride, experts, *here, load, per_row,
                                  normalized != 0, *routing, activation, limit, static_cast<const T*>(shared), shared_stride,
                                  shared_gate, shared_gate_stride, static_cast<T*>(out), out_stride, gate_up_adapters,
                                  down_adapters, shares, owners};
        if (quant) return make_experts<RoundedCopies<T>>(count, gate_ups, downs, call);
        return make_experts<typename PlainCopies<E>::Rows>(count, gate_ups, downs, call);
    });
}

// Adds up what `llmbox_experts_op` left apart.
extern "C" Op* llmbox_combine_op(int dtype, const void* results, const float* shares, int per_row, int width,
                                 const void* shared, int64_t shared_stride, const float* shared_gate,
                                 int64_t shared_gate_stride, void* out, int64_t out_stride) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new CombineOp<T>(static_cast<const T*>(results), shares, per_row, width, static_cast<const T*>(shared),
                                shared_stride, shared_gate, shared_gate_stride, static_cast<T*>(out), out_stride);
    });
}
