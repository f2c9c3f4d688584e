// Linears with int8 or int4 weights.
#include "dtypes.h"
#include "quantized/quant_linear.h"

using namespace llmbox;

// In `shares` parts of the inputs, see QuantLinearOp.
extern "C" Op* llmbox_shared_quant_op(int dtype, const QuantLinear* linear, const void* x, int64_t x_stride, void* out,
                                      int64_t out_stride, int out_dtype, int shares) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using In = typename E::Element;
        auto* rows = static_cast<const In*>(x);
        if (out_dtype == FLOAT32)
            return new QuantLinearOp<In, float>(*linear, rows, x_stride, static_cast<float*>(out), out_stride, shares);
        return new QuantLinearOp<In, bf16>(*linear, rows, x_stride, static_cast<bf16*>(out), out_stride, shares);
    });
}

extern "C" Op* llmbox_quant_op(int dtype, const QuantLinear* linear, const void* x, int64_t x_stride, void* out,
                               int64_t out_stride, int out_dtype) {
    return llmbox_shared_quant_op(dtype, linear, x, x_stride, out, out_stride, out_dtype, 1);
}
