// The C interface: everything that kernels/cpu/native.py calls. Handles are pointers to C++ objects.
//
// Constructors of operations return a new Op: run it once, or many times on a tape. The caller keeps whatever
// the pointers point to alive as long as the Op.
#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "pool.h"
#include "quant.h"
#include "tape.h"

using namespace llmbox;

namespace {

// Never destroyed: its sleeping workers outlive static destructors.
Pool& pool() {
    static Pool& pool = *new Pool;
    return pool;
}

// How Python names element types.
enum Dtype : int { FLOAT32 = 0, BFLOAT16 = 1 };

// Calls `make` with the word type of a dtype.
template <class Make> auto with_type(int dtype, Make make) { return dtype == BFLOAT16 ? make(BF16{}) : make(F32{}); }

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

// `cores[i]` is where worker i + 1 lives; `workers` = threads - 1.
void llmbox_threads(int workers, const int* cores) { pool().resize({cores, cores + workers}); }

// ---------------------------------------------------------------- weights

// Packs weight[outputs, inputs] and bias (float32 or null); null when memory is short.
Linear* llmbox_linear_new(int dtype, int inputs, int outputs, const void* weight, const float* bias) try {
    return with_type(dtype, [&]<class E>(E) {
        auto* linear = new Linear(inputs, outputs, E::PACK);
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
        return fill(linear, bias, [=](int panel) { quantize_panel(*linear, panel, rows); });
    });
} catch (const std::bad_alloc&) {
    return nullptr;
}

void llmbox_linear_free(LinearShape* linear) { delete linear; }

// ---------------------------------------------------------------- KV cache

KVCache* llmbox_cache_new(int dtype, int layers, int blocks, int block_size, int heads, int head_dim) try {
    return new KVCache(layers, blocks, block_size, heads, head_dim, dtype == BFLOAT16 ? 2 : 4);
} catch (const std::bad_alloc&) {
    return nullptr;
}
void llmbox_cache_free(KVCache* cache) { delete cache; }
void llmbox_cache_copy(const KVCache* cache, int from, int to) {
    for (int layer = 0; layer < cache->layers; layer++)
        memcpy(cache->block(layer, to), cache->block(layer, from), cache->block_bytes());
}
void llmbox_cache_clear(const KVCache* cache, int block) {
    for (int layer = 0; layer < cache->layers; layer++) memset(cache->block(layer, block), 0, cache->block_bytes());
}

// ---------------------------------------------------------------- operations; strides count elements

Op* llmbox_linear_op(
    int dtype, const Linear* linear, const void* x, int64_t x_stride, void* out, int64_t out_stride, int out_dtype) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        auto* rows = static_cast<const typename E::Element*>(x);
        if (out_dtype == FLOAT32)
            return new PlainLinearOp<E, float>(*linear, rows, x_stride, static_cast<float*>(out), out_stride);
        return new PlainLinearOp<E, bf16>(*linear, rows, x_stride, static_cast<bf16*>(out), out_stride);
    });
}

Op* llmbox_embedding_op(int dtype, const Linear* table, void* out, int64_t out_stride) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        return new EmbeddingOp<E>(*table, static_cast<typename E::Element*>(out), out_stride);
    });
}

Op* llmbox_quant_op(int dtype, const QuantLinear* linear, const void* x, int64_t x_stride, void* out,
                    int64_t out_stride, int out_dtype) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using In = typename E::Element;
        auto* rows = static_cast<const In*>(x);
        if (out_dtype == FLOAT32)
            return new QuantLinearOp<In, float>(*linear, rows, x_stride, static_cast<float*>(out), out_stride);
        return new QuantLinearOp<In, bf16>(*linear, rows, x_stride, static_cast<bf16*>(out), out_stride);
    });
}

Op* llmbox_quant_embedding_op(int dtype, const QuantLinear* table, void* out, int64_t out_stride) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using Out = typename E::Element;
        return new QuantEmbeddingOp<Out>(*table, static_cast<Out*>(out), out_stride);
    });
}

Op* llmbox_norm_op(
    int dtype, const void* x, int64_t x_stride, const void* weight, int groups, int width, float eps, void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new NormOp<T>(static_cast<const T*>(x), x_stride, static_cast<const T*>(weight), groups, width, eps,
                             static_cast<T*>(out));
    });
}

Op* llmbox_add_norm_op(
    int dtype, const void* x, int64_t x_stride, void* residual, const void* weight, int width, float eps, void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new AddNormOp<T>(static_cast<const T*>(x), x_stride, static_cast<T*>(residual),
                                static_cast<const T*>(weight), width, eps, static_cast<T*>(out));
    });
}

Op* llmbox_rotary_op(int dtype, void* x, int64_t x_stride, int heads, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new RotaryOp<T>(static_cast<T*>(x), x_stride, heads, width);
    });
}

Op* llmbox_silu_mul_op(int dtype, void* x, int64_t x_stride, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new SiluMulOp<T>(static_cast<T*>(x), x_stride, width);
    });
}

Op* llmbox_write_kv_op(int dtype, int kv_dtype, const KVCache* cache, int layer, const void* k, int64_t k_stride,
                       const void* v, int64_t v_stride) {
    return with_type(kv_dtype, [&]<class E>(E) {
        return with_type(dtype, [&]<class I>(I) -> Op* {
            using In = typename I::Element;
            return new WriteKVOp<E, In>(*cache, layer, static_cast<const In*>(k), k_stride,
                                        static_cast<const In*>(v), v_stride);
        });
    });
}

Op* llmbox_attention_op(int dtype, int kv_dtype, const KVCache* cache, int layer, const void* q, int64_t q_stride,
                        int heads, int window, float scale, void* out) {
    return with_type(kv_dtype, [&]<class E>(E) {
        return with_type(dtype, [&]<class I>(I) -> Op* {
            using In = typename I::Element;
            return new AttentionOp<E, In>(*cache, layer, static_cast<const In*>(q), q_stride, heads, window, scale,
                                          static_cast<In*>(out));
        });
    });
}

void llmbox_op_free(Op* op) { delete op; }

// Runs operations one after the other on all threads.
void llmbox_run(Op* const* ops, int count, const Step* step) { run_tape(pool(), {ops, count, *step}); }

}  // extern "C"
