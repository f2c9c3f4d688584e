// How Python names element types, and from there to the types themselves.
#pragma once

#include "vector/dot_product.h"

namespace llmbox {

// INT8_SCALED: KV caches, and weights that become float32; WIDE_BFLOAT16: weights that do.
enum Dtype : int { FLOAT32 = 0, BFLOAT16 = 1, INT8_SCALED = 2, WIDE_BFLOAT16 = 3 };

// Calls `make` with the word type of a dtype.
template <class Make> auto with_type(int dtype, Make make) { return dtype == BFLOAT16 ? make(BF16{}) : make(F32{}); }

// Calls `make` with numbers of the types of rows and of the weights that norm them, which are the same or float32.
template <class Make> auto with_norm_types(int dtype, int weight_dtype, Make make) {
    if (dtype == FLOAT32) return make(float{}, float{});
    return weight_dtype == FLOAT32 ? make(bf16{}, float{}) : make(bf16{}, bf16{});
}

template <class Make> auto with_kv_type(int dtype, Make make) {
    return dtype == INT8_SCALED ? make(INT8{}) : with_type(dtype, make);
}

}  // namespace llmbox
