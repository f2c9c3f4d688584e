// What a tile of rows carries from chunk to chunk, and the softmax between its two products.
#pragma once

#include <algorithm>
#include <limits>

#include "attention/attention_product.h"

namespace llmbox {

constexpr float LOG2_E = 1.44269504f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// The working memory of one tile: rows of queries, and what their chunks left so far.
template <class E> struct Work {
    static constexpr int SLOTS = Chunk<E>::SLOTS;
    static constexpr int ROWS = 16;  // room for whole tiles of them (amx.h)

    int rows, dim;
    PackedRows<E> q, p;
    float* scores;    // [rows][SLOTS]
    float* out;       // [rows][dim]
    float* total;     // [rows][SUM_LANES], to be summed
    float *most, *scale;  // [rows]
    int32_t* sums;    // of one product, two for each of 16 rows
    uint8_t* values;  // of a chunk, gathered: [SLOTS / PACK][dim] words

    // `dim` is padded.
    Work(int rows, int dim, Scratch& scratch) : rows(rows), dim(dim) {
        constexpr int PARTS = AttentionWords<E>::PARTS, packed = sizeof(Packed) / sizeof(float);
        const int q_part = dim / E::PACK, p_part = SLOTS / E::PACK, room = round_up(rows, ROWS);
        const size_t words = dim + SLOTS + PARTS * (q_part + p_part) + SUM_LANES + 2 + 2 * packed;
        const size_t own = PARTS > 1 ? PARTS * ROWS * std::max(dim, SLOTS) : 0;
        float* memory = scratch.take<float>(room * words + own + SLOTS / E::PACK * dim);
        const auto take = [&](size_t width) {
            float* taken = memory;
            memory += room * width;
            return taken;
        };
        const auto take_packed = [&](int part) {
            auto* row_words = reinterpret_cast<uint32_t*>(take(PARTS * part));
            return PackedRows<E>{row_words, part, reinterpret_cast<Packed*>(take(packed))};
        };
        out = take(dim);
        scores = take(SLOTS);
        q = take_packed(q_part);
        p = take_packed(p_part);
        total = take(SUM_LANES);
        most = take(1);
        scale = take(1);
        sums = reinterpret_cast<int32_t*>(memory);
        values = reinterpret_cast<uint8_t*>(memory + own);
        std::fill_n(out, static_cast<size_t>(rows) * dim, 0.f);
        std::fill_n(total, static_cast<size_t>(rows) * SUM_LANES, 0.f);
        std::fill_n(most, rows, NOTHING);
    }
};

// Which slots of a chunk a row sees: positions oldest .. newest.
struct VisibleRange {
    int oldest, newest;
};

// The rows of a tile: `group` of each token, from the token at `position` on. A window of 0 has no end; one of -c begins with
// the chunk of c positions that the row is in. Rows of a picture all see the position `last`, 0 for others.
struct VisibleRanges {
    int position, group, window, last;

    int own(int row) const { return position + row / group; }
    int newest(int row) const { return std::max(own(row), last); }
    int oldest(int row) const {
        if (window < 0) return own(row) / -window * -window;
        return window ? std::max(0, own(row) - window + 1) : 0;
    }
    VisibleRange of(int row) const { return {oldest(row), newest(row)}; }
    // What all of them see.
    VisibleRange common(int row, int end) const { return {oldest(end - 1), newest(row)}; }
};

template <class E> bool all_seen(const Chunk<E>& chunk, VisibleRange range) {
    bool all = chunk.positions[0] >= range.oldest && chunk.positions[Chunk<E>::STRIPS - 1] + STRIP <= range.newest + 1;
    for (int count : chunk.counts) all &= count == STRIP;
    return all;
}

// Up to the last that a row sees, in whole pairs.
template <class E> int strips_seen(const Chunk<E>& chunk, int newest) {
    int strips = 0;
    for (int s = 0; s < Chunk<E>::STRIPS; s++)
        if (chunk.counts[s] > 0 && chunk.positions[s] <= newest) strips = s + 1;
    return round_up(strips, 2);
}

// Lanes from .. to - 1; the others count as never seen.
INLINE Floats only(Floats scores, int from, int to) {
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const Ints least = from - Ints{}, end = to - Ints{};
    return select((lane >= least) & (lane < end), scores, splat(NOTHING));
}

// From a product s of query and key to a power of two: s * factor, or cap * tanh(s * factor) where there is a cap.
struct Powers {
    float factor, cap;

    // A `softcap` of 0 is none.
    static Powers of(float scale, float softcap) {
        if (softcap == 0) return {scale * LOG2_E, 0};
        return {scale / softcap, softcap * LOG2_E};
    }
};

// Scores of one row become weights e^(score - most), packed. What was summed before is to be scaled to the new
// `most`: work.scale. With `MASKED` not all slots are seen.
template <class E, bool MASKED, bool CAPPED>
INLINE void update_softmax(const Work<E>& work, int r, const Chunk<E>& chunk, size_t scales_at, Powers powers,
                           VisibleRange range) {
    using W = AttentionWords<E>;
    constexpr int VECTORS = Chunk<E>::SLOTS / LANES;
    const auto scales = [&](const uint8_t* strip, int lane) {  // of the tokens of a strip, from `lane` on
        return load_as<Floats>(strip + scales_at + lane * sizeof(float));
    };
    Floats scores[VECTORS], most = splat(NOTHING);
    UNROLL for (int v = 0; v < VECTORS; v++) {
        const int s = v * LANES / STRIP, lane = v * LANES % STRIP;
        scores[v] = load(work.scores + r * Chunk<E>::SLOTS + v * LANES) * splat(work.q.packed[r].factor * powers.factor);
        if (W::SCALED) scores[v] = scores[v] * scales(chunk.keys[s], lane);
        if (CAPPED) scores[v] = splat(powers.cap) * tanh(scores[v]);
        if (MASKED) {
            const int base = chunk.positions[s] + lane;
            scores[v] = only(scores[v], range.oldest - base, std::min(range.newest + 1 - base, chunk.counts[s] - lane));
        }
        most = max(most, scores[v]);
    }
    const float before = work.most[r], now = std::max(before, max(most));
    const Floats zero = splat(now == NOTHING ? 0.f : now);  // nothing seen yet: all weights 0
    LaneSums total;
    alignas(64) float weights[Chunk<E>::SLOTS];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        Floats weight = power_of_two(scores[v] - zero);
        total.parts[v % SUM_VECTORS] += weight;
        if (W::SCALED) weight = weight * scales(chunk.values[v * LANES / STRIP], v * LANES % STRIP);
        llmbox::store(weights + v * LANES, weight);
    }
    work.p.pack(r, weights, Chunk<E>::SLOTS);
    work.scale[r] = 1.f;
    if (now != before) {
        work.scale[r] = before == NOTHING ? 0.f : power_of_two(splat(before - now))[0];
        work.most[r] = now;
    }
    UNROLL for (int v = 0; v < SUM_VECTORS; v++) {
        float* sums = work.total + r * SUM_LANES + v * LANES;
        llmbox::store(sums, multiply_add(load(sums), splat(work.scale[r]), total.parts[v]));
    }
}

}  // namespace llmbox
