// Linears with float32 or bf16 weights, and those whose weights become float32.
#include "dtypes.h"
#include "linear/gemm_amx.h"
#include "linear/linear_by_head.h"

using namespace llmbox;

extern "C" Op* llmbox_linear_op(
    int dtype, const Linear* linear, const void* x, int64_t x_stride, void* out, int64_t out_stride, int out_dtype) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        auto* rows = static_cast<const typename E::Element*>(x);
        if (out_dtype == FLOAT32)
            return new PlainLinearOf<E, float>(*linear, rows, x_stride, static_cast<float*>(out), out_stride);
        return new PlainLinearOf<E, bf16>(*linear, rows, x_stride, static_cast<bf16*>(out), out_stride);
    });
}

// `count` linears, one for each head. `form`: what their weights become float32 from, WIDE_BFLOAT16 or INT8_SCALED, or the
// dtype of x, which stay as they are.
extern "C" Op* llmbox_linear_by_head_op(int dtype, int form, int count, const LinearShape* const* linears, const void* x,
                                        int64_t x_stride, int64_t x_head, void* out, int64_t out_stride, int64_t out_head,
                                        int out_dtype) {
    const auto make = [&]<class Copies, class Out>() -> Op* {
        using Shape = typename Copies::Shape;
        using In = typename Copies::In;
        std::vector<const Shape*> shapes;
        for (int head = 0; head < count; head++) shapes.push_back(static_cast<const Shape*>(linears[head]));
        return new LinearByHeadOp<Copies, Out>(std::move(shapes), ByHead<const In>{static_cast<const In*>(x), x_stride, x_head},
                                               ByHead<Out>{static_cast<Out*>(out), out_stride, out_head});
    };
    if (form == WIDE_BFLOAT16 && out_dtype == FLOAT32) return make.template operator()<WideCopies<WideBF16, bf16>, float>();
    if (form == WIDE_BFLOAT16) return make.template operator()<WideCopies<WideBF16, bf16>, bf16>();
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        if (form == INT8_SCALED) return make.template operator()<WideCopies<WideInt8, T>, T>();
        return make.template operator()<typename PlainCopies<E>::Rows, T>();
    });
}
