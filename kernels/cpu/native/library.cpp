// The C interface: everything that kernels/cpu/native.py calls. Handles are pointers to C++ objects.
//
// Constructors of operations return a new Op: run it once, or many times on a tape. The caller keeps whatever
// the pointers point to alive as long as the Op.
#include "attention.h"
#include "best.h"
#include "elementwise.h"
#include "embedding.h"
#include "gemm_tiles.h"
#include "heads.h"
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
enum Dtype : int { FLOAT32 = 0, BFLOAT16 = 1, INT8_SCALED = 2 };  // the last for KV caches alone

// Calls `make` with the word type of a dtype.
template <class Make> auto with_type(int dtype, Make make) { return dtype == BFLOAT16 ? make(BF16{}) : make(F32{}); }

template <class Make> auto with_kv_type(int dtype, Make make) {
    return dtype == INT8_SCALED ? make(INT8{}) : with_type(dtype, make);
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
    if (bias) {
        linear->bias.assign(linear->panels() * PANEL, 0.f);
        std::copy_n(bias, linear->outputs, linear->bias.begin());
    }
    return linear;
}

}  // namespace

extern "C" {

// Whether the system lets this process use the instructions of this level.
int llmbox_usable() { return may_use_tiles(); }

// `cores[i]` is where worker i + 1 lives; `workers` = threads - 1.
void llmbox_threads(int workers, const int* cores) { pool().resize({cores, cores + workers}); }

// How many of them run at the moment: fewer while other processes take their cores.
int llmbox_threads_running() { return pool().threads(); }

// ---------------------------------------------------------------- weights

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

// ---------------------------------------------------------------- KV cache

KVCache* llmbox_cache_new(int dtype, int layers, int blocks, int block_size, int heads, int head_dim) try {
    const int element_size = with_kv_type(dtype, []<class E>(E) -> int { return sizeof(typename E::Element); });
    return new KVCache(layers, blocks, block_size, heads, head_dim, element_size);
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
            return new PlainLinearOf<E, float>(*linear, rows, x_stride, static_cast<float*>(out), out_stride);
        return new PlainLinearOf<E, bf16>(*linear, rows, x_stride, static_cast<bf16*>(out), out_stride);
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
    return with_kv_type(kv_dtype, [&]<class E>(E) {
        return with_type(dtype, [&]<class I>(I) -> Op* {
            using In = typename I::Element;
            return new WriteKVOp<E, In>(*cache, layer, static_cast<const In*>(k), k_stride,
                                        static_cast<const In*>(v), v_stride);
        });
    });
}

// `norm` [heads that are rotated, D] or null.
Op* llmbox_heads_op(int dtype, int kv_dtype, const KVCache* cache, int layer, void* x, int64_t x_stride, int heads,
                    const void* norm, float eps) {
    return with_kv_type(kv_dtype, [&]<class E>(E) {
        return with_type(dtype, [&]<class I>(I) -> Op* {
            using T = typename I::Element;
            return new HeadsOp<E, T>(*cache, layer, static_cast<T*>(x), x_stride, heads, static_cast<const T*>(norm),
                                     eps);
        });
    });
}

Op* llmbox_attention_op(int dtype, int kv_dtype, const KVCache* cache, int layer, const void* q, int64_t q_stride,
                        int heads, int window, float scale, void* out) {
    return with_kv_type(kv_dtype, [&]<class E>(E) {
        return with_type(dtype, [&]<class I>(I) -> Op* {
            using In = typename I::Element;
            return new AttentionOp<E, In>(*cache, layer, static_cast<const In*>(q), q_stride, heads, window, scale,
                                          static_cast<In*>(out));
        });
    });
}

// x [rows, width] float32.
Op* llmbox_best_op(const float* x, int64_t x_stride, int width, float* best, int64_t* ids) {
    return new BestOp(x, x_stride, width, best, ids);
}

void llmbox_op_free(Op* op) { delete op; }

// Runs operations one after the other on all threads.
void llmbox_run(Op* const* ops, int count, const Step* step) { run_tape(pool(), {ops, count, *step}); }

}  // extern "C"
