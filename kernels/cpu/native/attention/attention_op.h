// Makes operations of attention. Only files that instantiate `make_attention` include attention.h, too.
#pragma once

#include "attention/kv_cache.h"

namespace llmbox {

// As in library.cpp: q and out of the model's dtype.
struct AttentionCall {
    const KVCache& cache;
    int layer;
    const void* q;
    int64_t q_stride;
    int heads, window;
    float scale, softcap;
    const float* sinks;
    void* out;
};

// Over a cache of type E.
template <class E> Op* make_attention(int dtype, const AttentionCall& call);

}  // namespace llmbox
