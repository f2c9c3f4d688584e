// How fast all threads together read memory, as the linears read their weights: in order, requested ahead.
#pragma once

#include "threads/command_buffer.h"
#include "vector/simd.h"

namespace llmbox {

class ReadOp : public Op {
public:
    ReadOp(const uint8_t* data, int64_t bytes) : data_(data), pieces_(static_cast<int>(bytes / PIECE)) {}

    void run(const Step&, Member& member) override {
        const auto own = member.share(pieces_);
        Words sum = splat(0u);
        for (int64_t piece = own.begin; piece < own.end; piece++) {
            const uint8_t* from = data_ + piece * PIECE;
            for (int i = 0; i < PIECE; i += 64) {
                prefetch(from + AHEAD + i);
                for (int j = 0; j < 64; j += sizeof(Words)) sum ^= load_as<Words>(from + i + j);
            }
        }
        asm volatile("" ::"m"(sum));  // or the loop would go
    }

private:
    static constexpr int PIECE = 4096, AHEAD = 3072;
    const uint8_t* data_;
    int pieces_;
};

}  // namespace llmbox
