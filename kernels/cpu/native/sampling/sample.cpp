// Drawing tokens from logits, and ranking them.
#include "sampling/sample.h"

using namespace llmbox;

// Draws an id for each of x [rows, width] float32, which a request's edits may change meanwhile.
extern "C" Op* llmbox_draw_op(float* x, int64_t x_stride, int width, const DrawRow* how, DrawOp::Drawn* drawn) {
    return new DrawOp(x, x_stride, width, how, drawn);
}

// Log-probability statistics of `chosen`[rows] in the rows `places`[rows], and the `count` likeliest ids there.
extern "C" Op* llmbox_rank_op(float* x, int64_t x_stride, int width, const int64_t* places, const int64_t* chosen,
                              int count, RankOp::Told* told, int64_t* leaders, float* leader_logits) {
    return new RankOp(x, x_stride, width, places, chosen, count, told, leaders, leader_logits);
}
