// LoRA adapters as lora.h reads them: one piece of memory for each linear, in the order in which a step reads it.
#pragma once

#include <cmath>

#include "linear/lora.h"

namespace llmbox {

// What an adapter has for linears of one shape: A [linears][rank][inputs] and, for each part of the outputs, B
// [linears][outputs][ranks of the part], whose address is in `panels`.
struct LoraSource {
    int linears, inputs, rank, count;
    const void* a;
    const float* scales;  // [rank]
    const LoraPiece* parts;

    int blocks() const { return ceil_div(rank, LORA_RANKS); }
    int64_t header_bytes() const { return padded(sizeof(LoraWeights) + count * sizeof(LoraPiece) + rank * sizeof(float)); }
    template <class C> int64_t a_bytes() const {
        const int ranks = (blocks() - 1) * LORA_RANKS + ranks_of_block(rank, blocks() - 1);
        return padded(sizeof(C) * ranks * round_up(inputs, LANES));
    }
    template <class C> int64_t b_bytes(const LoraPiece& part) const { return panels_of(part) * lora_panel_bytes<C>(part.rank); }
    // Bytes of one linear.
    template <class C> int64_t bytes() const {
        int64_t bytes = header_bytes() + a_bytes<C>();
        for (int i = 0; i < count; i++) bytes += b_bytes<C>(parts[i]);
        return bytes;
    }

private:
    static int64_t padded(size_t bytes) { return static_cast<int64_t>((bytes + 63) / 64 * 64); }
};

// One number of a step of 1 / `by`.
template <class C, class T> INLINE C lora_code(T x, float by) {
    if constexpr (sizeof(C) == 1) return static_cast<C>(std::lrintf(to_float(x) * by));
    else return x;
}
// Numbers that are all next to nothing are nothing: the inverse of their step would be infinite.
inline float lora_step(float most) { return most > 1e-30f ? most / 127 : 0; }
inline float steps_in_one(float most) { return most > 1e-30f ? 127 / most : 0; }

// `scales`: of the ranks of the block; those of int8 are multiplied into them.
template <class C, class T> void pack_lora_block(const T* a, int ranks, int padded, int inputs, C* to, float* scales) {
    const int width = round_up(inputs, LANES);
    std::fill_n(to, static_cast<int64_t>(padded) * width, C{});
    for (int r = 0; r < ranks; r++) {
        const T* row = a + static_cast<int64_t>(r) * inputs;
        float by = 1;
        if constexpr (sizeof(C) == 1) {
            const float most = range_of(row, inputs).most;
            by = steps_in_one(most);
            scales[r] *= lora_step(most);
        }
        for (int i = 0; i < inputs; i++) to[(i / LANES * padded + r) * LANES + i % LANES] = lora_code<C>(row[i], by);
    }
}

template <class C, class T> void pack_lora_panel(const T* b, int columns, int rank, uint8_t* to) {
    auto* scales = reinterpret_cast<float*>(to);
    C* numbers = reinterpret_cast<C*>(to + panel_scales<C>(rank));
    std::fill_n(to, lora_panel_bytes<C>(rank), uint8_t{0});
    for (int r = 0; r < rank; r++, numbers += LORA_PANEL) {
        float by = 1;
        if constexpr (sizeof(C) == 1) {
            float most = 0;
            for (int i = 0; i < columns; i++) most = std::max(most, std::fabs(to_float(b[i * static_cast<int64_t>(rank) + r])));
            by = steps_in_one(most);
            scales[r] = lora_step(most);
        }
        for (int i = 0; i < columns; i++) numbers[i] = lora_code<C>(b[i * static_cast<int64_t>(rank) + r], by);
    }
}

// Packs all linears to `to`, a multiple of 64, on all threads.
template <class C, class T> void pack_lora(Pool& pool, const LoraSource& from, uint8_t* to) {
    const int64_t each = from.bytes<C>();
    int items = from.blocks();  // of one linear: blocks of A, then panels of B
    for (int linear = 0; linear < from.linears; linear++) {
        uint8_t* at = to + linear * each;
        auto* header = reinterpret_cast<LoraWeights*>(at);
        auto* parts = reinterpret_cast<LoraPiece*>(header + 1);
        auto* scales = reinterpret_cast<float*>(parts + from.count);
        uint8_t* next = at + from.header_bytes();
        *header = {reinterpret_cast<int64_t>(next), reinterpret_cast<int64_t>(scales), from.rank, from.count, sizeof(C) == 1};
        std::copy_n(from.scales, from.rank, scales);
        next += from.a_bytes<C>();
        for (int i = 0; i < from.count; i++) {
            parts[i] = from.parts[i];
            parts[i].panels = reinterpret_cast<int64_t>(next);
            next += from.b_bytes<C>(from.parts[i]);
        }
    }
    for (int i = 0; i < from.count; i++) items += panels_of(from.parts[i]);
    struct Job {
        const LoraSource& from;
        uint8_t* to;
        int64_t each;
        int items;
    } job{from, to, each, items};
    pool.run(
        [](Member& member, void* argument) {
            const auto& [from, to, each, items] = *static_cast<const Job*>(argument);
            const auto mine = member.share(from.linears * items);
            for (int item = mine.begin; item < mine.end; item++) {
                const int64_t linear = item / items;
                const auto& header = *reinterpret_cast<const LoraWeights*>(to + linear * each);
                int number = item % items;
                if (number < from.blocks()) {
                    const int first = number * LORA_RANKS;
                    const T* a = static_cast<const T*>(from.a) + (linear * from.rank + first) * from.inputs;
                    C* block = reinterpret_cast<C*>(header.a) + static_cast<int64_t>(first) * round_up(from.inputs, LANES);
                    pack_lora_block<C, T>(a, std::min(LORA_RANKS, from.rank - first), ranks_of_block(from.rank, number),
                                          from.inputs, block, reinterpret_cast<float*>(header.scales) + first);
                    continue;
                }
                number -= from.blocks();
                int part = 0;
                for (; number >= panels_of(from.parts[part]); part++) number -= panels_of(from.parts[part]);
                const LoraPiece& piece = from.parts[part];
                const int64_t outputs = piece.stop - piece.start, row = static_cast<int64_t>(number) * LORA_PANEL;
                const T* b = reinterpret_cast<const T*>(piece.panels) + (linear * outputs + row) * piece.rank;
                pack_lora_panel<C, T>(b, static_cast<int>(std::min<int64_t>(LORA_PANEL, outputs - row)), static_cast<int>(piece.rank),
                                      reinterpret_cast<uint8_t*>(header.piece(part).panels) + number * lora_panel_bytes<C>(piece.rank));
            }
        },
        &job);
}

}  // namespace llmbox
