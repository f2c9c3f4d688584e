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

// `state` [slots, heads, key_dim, value_dim] of one layer; `skip` may be null, but for S6.
Op* llmbox_scan_op(int dtype, int rule, const void* rows, int64_t stride, const void* gates, int64_t gates_stride,
                   const float* rate, const float* bias, const float* skip, int heads, int key_heads, int key_dim,
                   int value_dim, float least, float most, float beta, float* state, void* out) {
    const ScanHeads shape{heads, key_heads, key_dim, value_dim, least, most, beta};
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        const T *x = static_cast<const T*>(rows), *g = static_cast<const T*>(gates);
        T* to = static_cast<T*>(out);
        if (rule == DELTA) return new ScanOp<T, DELTA>(x, stride, g, gates_stride, rate, bias, skip, shape, state, to);
        if (rule == KDA) return new ScanOp<T, KDA>(x, stride, g, gates_stride, rate, bias, skip, shape, state, to);
        if (rule == S6) return new ScanOp<T, S6>(x, stride, g, gates_stride, rate, bias, skip, shape, state, to);
        return new ScanOp<T, SSM>(x, stride, g, gates_stride, rate, bias, skip, shape, state, to);
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

Op* llmbox_gate_rows_op(int dtype, int function, void* x, int64_t x_stride, const void* gate, int64_t gate_stride, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        const T* by = static_cast<const T*>(gate);
        T* rows = static_cast<T*>(x);
        switch (Gate(function)) {
            case Gate::SILU: return new GateRowsOp<T, Gate::SILU>(rows, x_stride, by, gate_stride, width);
            case Gate::SOFTPLUS: return new GateRowsOp<T, Gate::SOFTPLUS>(rows, x_stride, by, gate_stride, width);
            default: return new GateRowsOp<T, Gate::SIGMOID>(rows, x_stride, by, gate_stride, width);
        }
    });
}

// `added` may be null.
Op* llmbox_mul_add_op(int dtype, const void* x, int64_t x_stride, const float* by, const void* added, int width, void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new MulAddOp<T>(static_cast<const T*>(x), x_stride, by, static_cast<const T*>(added), width,
                               static_cast<T*>(out));
    });
}

}  // extern "C"
