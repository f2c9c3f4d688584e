// C interface of the operations of recurrent layers.
#include "dtypes.h"
#include "recurrent/recurrent.h"

using namespace llmbox;

extern "C" {

// `state` [slots, width - 1, channels] of one layer.
Op* llmbox_short_conv_op(int dtype, const void* x, int64_t x_stride, int gated, const float* weight, const float* bias,
                         int width, int channels, float* state, void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new ShortConvOp<T>(static_cast<const T*>(x), x_stride, gated, weight, bias, width, channels, state,
                                  static_cast<T*>(out));
    });
}

// `state` [slots, heads, key_dim, value_dim] of one layer; `skip` may be null.
Op* llmbox_scan_op(int dtype, int delta, const void* rows, int64_t stride, const void* gates, int64_t gates_stride,
                   const float* rate, const float* bias, const float* skip, int heads, int key_heads, int key_dim,
                   int value_dim, float least, float most, float* state, void* out) {
    const ScanHeads shape{heads, key_heads, key_dim, value_dim, least, most};
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        const T *x = static_cast<const T*>(rows), *g = static_cast<const T*>(gates);
        T* to = static_cast<T*>(out);
        if (delta) return new ScanOp<T, true>(x, stride, g, gates_stride, rate, bias, skip, shape, state, to);
        return new ScanOp<T, false>(x, stride, g, gates_stride, rate, bias, skip, shape, state, to);
    });
}

Op* llmbox_gated_norm_op(int dtype, const void* x, int64_t x_stride, const void* gate, int64_t gate_stride,
                         const float* weight, int groups, int width, float eps, int norm_first, void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new GatedNormOp<T>(static_cast<const T*>(x), x_stride, static_cast<const T*>(gate), gate_stride, weight,
                                  groups, width, eps, norm_first, static_cast<T*>(out));
    });
}

Op* llmbox_sigmoid_mul_op(int dtype, void* x, int64_t x_stride, const void* gate, int64_t gate_stride, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new SigmoidMulOp<T>(static_cast<T*>(x), x_stride, static_cast<const T*>(gate), gate_stride, width);
    });
}

}  // extern "C"
