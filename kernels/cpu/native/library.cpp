// The C interface: everything that kernels/cpu/ffi.py calls. Handles are pointers to C++ objects.
//
// Constructors of operations return a new Op: run it once, or many times on a commands. The caller keeps whatever
// the pointers point to alive as long as the Op.
//
// What takes long to compile has a file of its own in the folders, so that compilers share the work.
#include "dtypes.h"
#include "elementwise.h"
#include "altup.h"
#include "attention/attention_op.h"
#include "attention/qk_norm_rope_kv_write.h"
#include "linear/embedding.h"
#include "linear/lora_packing.h"
#include "sampling/argmax.h"
#include "threads/read_probe.h"

using namespace llmbox;

extern "C" {

// Whether the system lets this process use the instructions of this level.
int llmbox_usable() { return may_use_tiles() && has_byte_products(); }

// `cores[i]` is where worker i + 1 lives; `workers` = threads - 1.
void llmbox_threads(int workers, const int* cores) { pool().resize({cores, cores + workers}); }

// How many of them run at the moment: fewer while other processes take their cores.
int llmbox_threads_running() { return pool().threads(); }

// ---------------------------------------------------------------- KV cache

KVCache* llmbox_cache_new(int dtype, int layers, int blocks, int block_size, int heads, int head_dim, int windowed) try {
    const int element_size = with_kv_type(dtype, []<class E>(E) -> int { return sizeof(typename E::Element); });
    return new KVCache(layers, blocks, block_size, heads, head_dim, element_size, windowed);
} catch (const std::bad_alloc&) {
    return nullptr;
}
void llmbox_cache_free(KVCache* cache) { delete cache; }
void llmbox_cache_copy(const KVCache* cache, int from, int to) {
    for (int layer = 0; layer < cache->layers; layer++)
        memcpy(cache->block(layer, to), cache->block(layer, from), cache->block_bytes());
}
// The whole memory, [layers, blocks, bytes of a block].
uint8_t* llmbox_cache_data(const KVCache* cache) { return cache->memory.data(); }
int64_t llmbox_cache_block_bytes(const KVCache* cache) { return cache->block_bytes(); }
// All threads share it: memory that is touched for the first time is slow, some milliseconds a block.
void llmbox_cache_clear(const KVCache* cache, const int* blocks, int count) {
    struct Clearing {
        const KVCache& cache;
        const int* blocks;
        int count;
    } clearing{*cache, blocks, count};
    pool().run(
        [](Member& member, void* argument) {
            const auto& [cache, blocks, count] = *static_cast<const Clearing*>(argument);
            const auto own = member.share(cache.layers * count);
            for (int i = own.begin; i < own.end; i++)
                memset(cache.block(i % cache.layers, blocks[i / cache.layers]), 0, cache.block_bytes());
        },
        &clearing);
}
// Gives blocks their pages without changing their content, a layer at a time, until `stop` is set. 0: the system cannot.
int llmbox_cache_populate(const KVCache* cache, int first, int count, const int* stop) {
    for (int layer = 0; layer < cache->layers && !__atomic_load_n(stop, __ATOMIC_RELAXED); layer++)
        if (!populate(cache->block(layer, first), count * cache->block_bytes())) return 0;
    return 1;
}
// Copies `count` runs of `size` bytes that are `from_step` and `to_step` bytes apart.
void llmbox_copy_runs(const uint8_t* from, int64_t from_step, uint8_t* to, int64_t to_step, int64_t size, int count) {
    for (int run = 0; run < count; run++) memcpy(to + run * to_step, from + run * from_step, size);
}

// ---------------------------------------------------------------- operations; strides count elements

Op* llmbox_embedding_op(int dtype, const Linear* table, float scale, void* out, int64_t out_stride) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        return new EmbeddingOp<E>(*table, scale, static_cast<typename E::Element*>(out), out_stride);
    });
}

Op* llmbox_quant_embedding_op(int dtype, const QuantLinear* table, float scale, void* out, int64_t out_stride) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using Out = typename E::Element;
        return new QuantEmbeddingOp<Out>(*table, scale, static_cast<Out*>(out), out_stride);
    });
}

// Bytes of what llmbox_lora_pack writes for each linear.
int64_t llmbox_lora_bytes(int dtype, int is_int8, const LoraSource* source) {
    return with_type(dtype, [&]<class E>(E) {
        return is_int8 ? source->bytes<int8_t>() : source->bytes<typename E::Element>();
    });
}
// Packs the linears one after another to `to`, a multiple of 64. The source may go then.
void llmbox_lora_pack(int dtype, int is_int8, const LoraSource* source, uint8_t* to) {
    with_type(dtype, [&]<class E>(E) {
        using T = typename E::Element;
        if (is_int8) pack_lora<int8_t, T>(pool(), *source, to);
        else pack_lora<T, T>(pool(), *source, to);
    });
}
// Memory for adapters, in huge pages where it is large; null when memory is short.
HugeBlock* llmbox_lora_memory(int64_t bytes) try {
    return new HugeBlock(bytes);
} catch (const std::bad_alloc&) {
    return nullptr;
}
uint8_t* llmbox_lora_memory_data(const HugeBlock* block) { return block->data(); }
void llmbox_lora_memory_free(HugeBlock* block) { delete block; }

// `weights`: addresses of `LoraWeights` by slot; y is of x's type or float32.
Op* llmbox_lora_op(int dtype, int out_dtype, const int64_t* weights, const void* x, int64_t x_stride, int inputs, void* y,
                   int64_t y_stride) {
    return with_norm_types(dtype, out_dtype, [&]<class T, class Out>(T, Out) -> Op* {
        return new LoraOp<T, Out>(weights, static_cast<const T*>(x), x_stride, inputs, static_cast<Out*>(y), y_stride);
    });
}

// `tables`: addresses of embeddings by slot.
Op* llmbox_lora_embedding_op(int dtype, const int64_t* tables, float scale, void* x, int64_t x_stride, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new LoraEmbeddingOp<T>(tables, scale, static_cast<T*>(x), x_stride, width);
    });
}

Op* llmbox_norm_op(int dtype, int weight_dtype, const void* x, int64_t x_stride, const void* weight, int groups, int width,
                   float eps, void* out) {
    return with_norm_types(dtype, weight_dtype, [&]<class T, class W>(T, W) -> Op* {
        return new NormOp<T, W>(static_cast<const T*>(x), x_stride, static_cast<const W*>(weight), groups, width, eps,
                                static_cast<T*>(out));
    });
}

// `residual` and `bias` may be null.
Op* llmbox_layer_norm_op(int dtype, int weight_dtype, const void* x, int64_t x_stride, void* residual, const void* weight,
                         const void* bias, int width, float eps, void* out) {
    return with_norm_types(dtype, weight_dtype, [&]<class T, class W>(T, W) -> Op* {
        return new LayerNormOp<T, W>(static_cast<const T*>(x), x_stride, static_cast<T*>(residual),
                                     static_cast<const W*>(weight), static_cast<const W*>(bias), width, eps,
                                     static_cast<T*>(out));
    });
}

Op* llmbox_add_norm_op(int dtype, int weight_dtype, const void* x, int64_t x_stride, void* residual, const void* weight,
                       int width, float eps, void* out) {
    return with_norm_types(dtype, weight_dtype, [&]<class T, class W>(T, W) -> Op* {
        return new AddNormOp<T, W>(static_cast<const T*>(x), x_stride, static_cast<T*>(residual),
                                   static_cast<const W*>(weight), width, eps, static_cast<T*>(out));
    });
}

// `table`: which of the step's cos and sin.
Op* llmbox_rotary_op(int dtype, void* x, int64_t x_stride, int heads, int width, int table) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new RotaryOp<T>(static_cast<T*>(x), x_stride, heads, width, table);
    });
}

Op* llmbox_gate_mul_op(int dtype, int activation, float limit, void* x, int64_t x_stride, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        const auto make = [&]<Activation A>() -> Op* { return new GateMulOp<A, T>(static_cast<T*>(x), x_stride, width, limit); };
        switch (activation) {
            case GELU_TANH: return make.template operator()<GELU_TANH>();
            case SWIGLU_OAI: return make.template operator()<SWIGLU_OAI>();
            case RELU2: return make.template operator()<RELU2>();
            case GELU: return make.template operator()<GELU>();
            case GELU_NEW: return make.template operator()<GELU_NEW>();
            case RELU: return make.template operator()<RELU>();
            case RELU2_GATED: return make.template operator()<RELU2_GATED>();
            case GELU_GATED: return make.template operator()<GELU_GATED>();
            case SWIGLU_LIMITED: return make.template operator()<SWIGLU_LIMITED>();
            default: return make.template operator()<SILU>();
        }
    });
}

Op* llmbox_xielu_op(int dtype, void* x, int64_t x_stride, int width, float alpha_p, float alpha_n, float beta, float eps) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new XieluOp<T>(static_cast<T*>(x), x_stride, width, alpha_p, alpha_n, beta, eps);
    });
}

Op* llmbox_copy_op(int dtype, const void* x, int64_t x_stride, int64_t x_head, int heads, int width, void* out,
                   int64_t out_stride, int64_t out_head) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new CopyOp<T>(static_cast<const T*>(x), x_stride, x_head, heads, width, static_cast<T*>(out), out_stride,
                             out_head);
    });
}

Op* llmbox_scale_op(int dtype, void* x, int64_t x_stride, int width, float factor) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new ScaleOp<T>(static_cast<T*>(x), x_stride, width, factor);
    });
}

Op* llmbox_softcap_op(float* x, int64_t x_stride, int width, float cap) {
    return new SoftcapOp(x, x_stride, width, cap);
}

// ---------------------------------------------------------------- streams of Gemma 3n; rows are contiguous

Op* llmbox_predict_streams_op(int dtype, const void* x, const float* routed, const float* coefs, int streams, int width,
                              void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new PredictStreamsOp<T>(static_cast<const T*>(x), routed, coefs, streams, width, static_cast<T*>(out));
    });
}

Op* llmbox_correct_streams_op(int dtype, const void* predicted, const void* x, const float* routed, const float* coefs,
                              int streams, int active, int width, void* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new CorrectStreamsOp<T>(static_cast<const T*>(predicted), static_cast<const T*>(x), routed, coefs, streams,
                                       active, width, static_cast<T*>(out));
    });
}

Op* llmbox_add_to_streams_op(int dtype, void* x, const void* added, int streams, int width) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new AddToStreamsOp<T>(static_cast<T*>(x), static_cast<const T*>(added), streams, width);
    });
}

Op* llmbox_match_size_op(int dtype, void* x, const void* like, int64_t like_stride, int parts, int width, float eps) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new MatchSizeOp<T>(static_cast<T*>(x), static_cast<const T*>(like), like_stride, parts, width, eps);
    });
}

Op* llmbox_gate_sums_op(int dtype, const void* gate, int64_t stride, int width, float* out) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new GateSumsOp<T>(static_cast<const T*>(gate), stride, width, out);
    });
}

Op* llmbox_cut_gates_op(int dtype, void* gate, int64_t stride, int width, const float* sums, int count, float factor) {
    return with_type(dtype, [&]<class E>(E) -> Op* {
        using T = typename E::Element;
        return new CutGatesOp<T>(static_cast<T*>(gate), stride, width, sums, count, factor);
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

// `norm` [heads that are rotated, D] or null; `table`: which of the step's cos and sin.
Op* llmbox_heads_op(int dtype, int norm_dtype, int kv_dtype, const KVCache* cache, int layer, void* x, int64_t x_stride,
                    int heads, const void* norm, float eps, int table) {
    return with_kv_type(kv_dtype, [&]<class E>(E) {
        return with_norm_types(dtype, norm_dtype, [&]<class T, class W>(T, W) -> Op* {
            return new HeadsOp<E, T, W>(*cache, layer, static_cast<T*>(x), x_stride, heads,
                                        static_cast<const W*>(norm), eps, table);
        });
    });
}

// A `softcap` of 0 is none; `sinks` [heads] may be null. `window`: as in attention_work.h.
Op* llmbox_attention_op(int dtype, int kv_dtype, const KVCache* cache, int layer, const void* q, int64_t q_stride,
                        int heads, int window, float scale, float softcap, const float* sinks, void* out) {
    const AttentionCall call{*cache, layer, q, q_stride, heads, window, scale, softcap, sinks, out};
    return with_kv_type(kv_dtype, [&]<class E>(E) { return make_attention<E>(dtype, call); });
}

// Of `count` angles; outside of a step.
void llmbox_turn(const float* angles, int64_t count, float* cos, float* sin) {
    for (int64_t i = 0; i < count; i++) turn(angles[i], cos + i, sin + i);
}

// x [rows, width] float32.
Op* llmbox_best_op(const float* x, int64_t x_stride, int width, float* best, int64_t* ids) {
    return new ArgmaxOp(x, x_stride, width, best, ids);
}

// Starts (1) or ends (0) counting time by kinds of operations. The rates, bytes and products a second of all threads,
// may be 0 where they are not known. Returns the sums, which the next start clears.
OpTotals* llmbox_profile(int is_on, double read_rate, double product_rate) {
    OpProfile& profile = op_profile();
    if (is_on) profile = OpProfile{true, read_rate, product_rate, {}};
    else profile.is_on = false;
    return profile.totals;
}

// Reads packed weights once with all threads, and does nothing else: how fast memory is read.
Op* llmbox_read_op(const uint8_t* data, int64_t bytes) { return new ReadOp(data, bytes); }

void llmbox_op_free(Op* op) { delete op; }

// Runs operations one after the other on all threads.
void llmbox_run(Op* const* ops, int count, const Step* step) { run_commands(pool(), {ops, count, *step}); }

}  // extern "C"
