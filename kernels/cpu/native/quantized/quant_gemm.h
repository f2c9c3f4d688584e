// Rows quantized to int8 times one panel of quantized weights. Linears and experts share what quant_gemm.cpp and
// gguf_block_gemm.cpp compile once: it takes longer than anything else here.
#pragma once

#include "quantized/quantize_activations.h"

namespace llmbox {

// tile[rows][PANEL] = x * panel, for the rows of x from `row` on.
void multiply_quant_panel(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile,
                          Member& member);

// In `shares` equal parts of the groups, to the first of which `bias` is added, which may be null. Their sums are added
// in pairs, so ranks with half of the parts each come to the same. The tile has room for all.
void multiply_quant_shares(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile, int shares,
                           const float* bias, Member& member);

// tile[rows][PANEL] += x * panel, on GGUF's blocks.
void multiply_blocks(const QuantLinear& linear, int panel, const QuantRows& x, int row, int rows, float* tile, Member& member);

}  // namespace llmbox
