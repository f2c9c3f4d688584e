// Linears with float32 or bf16 weights.
#include "dtypes.h"
#include "linear/gemm_amx.h"

using namespace llmbox;

// Weights of float32, rows of bf16.
extern "C" Op* llmbox_wide_linear_op(
    const Linear* linear, const bf16* x, int64_t x_stride, void* out, int64_t out_stride, int out_dtype) {
    if (out_dtype == FLOAT32) return new WideLinearOp<float>(*linear, x, x_stride, static_cast<float*>(out), out_stride);
    return new WideLinearOp<bf16>(*linear, x, x_stride, static_cast<bf16*>(out), out_stride);
}

extern "C" Op* llmbox_linear_op(
    int dtype, const Linear* linear, const void* x, int64_t x_stride, void* out, int64_t out_stride, int out_dtype) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        auto* rows = static_cast<const typename E::Element*>(x);
        if (out_dtype == FLOAT32)
            return new PlainLinearOf<E, float>(*linear, rows, x_stride, static_cast<float*>(out), out_stride);
        return new PlainLinearOf<E, bf16>(*linear, rows, x_stride, static_cast<bf16*>(out), out_stride);
    });
}

