// Paged attention: one kernel for decoding and prompts, so that a row has one result however it was computed.
//
// The cache keeps, for each layer, block and kv head, keys and then values of `strips` strips of 16 tokens:
//   keys    [strip][words of D][16 tokens]    a word holds PACK neighbouring dims of one token
//   values  [strip][16 / PACK][D padded]      a word holds one dim of PACK neighbouring tokens
// Both products then are the same loop as in gemm.h, without shuffles. A block whose size is not a multiple of
// 16 wastes the rest of its last strip.
//
// A tile is a few tokens of one sequence with all query heads of one kv head. It walks the context in chunks
// of 4 strips, counted from the beginning of the sequence, with an online softmax (Milakov and Gimelshein, 2018;
// Dao et al., "FlashAttention", 2022). Chunks lie at fixed places, and hidden slots add exact zeros: a row's
// result does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <limits>

#include "memory.h"
#include "tape.h"

namespace llmbox {

constexpr int STRIP = 16;
constexpr int CHUNK_STRIPS = 4;
constexpr int CHUNK = STRIP * CHUNK_STRIPS;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct KVCache {
    int layers, blocks, block_size, heads, head_dim;
    int element_size, pack;
    int strips;         // of a block
    int padded_dim;     // whole vectors
    size_t half_bytes;  // keys of one head in one block; the values are as large
    HugeBlock memory;

    KVCache(int layers, int blocks, int block_size, int heads, int head_dim, int element_size)
        : layers(layers),
          blocks(blocks),
          block_size(block_size),
          heads(heads),
          head_dim(head_dim),
          element_size(element_size),
          pack(4 / element_size),
          strips(ceil_div(block_size, STRIP)),
          padded_dim(round_up(head_dim, STRIP)),
          half_bytes(static_cast<size_t>(strips) * STRIP * padded_dim * element_size),
          memory(layers * blocks * block_bytes()) {}

    size_t block_bytes() const { return 2 * half_bytes * heads; }
    uint8_t* block(int layer, int block) const {
        return memory.data() + (static_cast<size_t>(layer) * blocks + block) * block_bytes();
    }
    uint8_t* head(int layer, int block, int head) const {
        return this->block(layer, block) + 2 * half_bytes * head;
    }
    size_t strip_bytes() const { return half_bytes / strips; }
};

// k and v are [rows, heads, D] with strided rows.
template <class E, class In> class WriteKVOp : public Op {
public:
    WriteKVOp(const KVCache& cache, int layer, const In* k, int64_t k_stride, const In* v, int64_t v_stride)
        : cache_(cache), layer_(layer), k_(k), k_stride_(k_stride), v_(v), v_stride_(v_stride) {}

    void run(const Step& step, Member& member) override {
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const int block = step.slots[row] / step.block_size, slot = step.slots[row] % step.block_size;
            for (int head = 0; head < cache_.heads; head++) {
                const int offset = head * cache_.head_dim;
                auto* to = reinterpret_cast<Element*>(
                    cache_.head(layer_, block, head) + slot / STRIP * cache_.strip_bytes());
                write_key(k_ + row * k_stride_ + offset, to, slot % STRIP);
                to = reinterpret_cast<Element*>(reinterpret_cast<uint8_t*>(to) + cache_.half_bytes);
                write_value(v_ + row * v_stride_ + offset, to, slot % STRIP);
            }
        }
    }

private:
    using Element = typename E::Element;

    void write_key(const In* from, Element* strip, int lane) const {
        for (int d = 0; d < cache_.head_dim; d++)
            strip[(d / E::PACK * STRIP + lane) * E::PACK + d % E::PACK] = from_float<Element>(to_float(from[d]));
    }
    void write_value(const In* from, Element* strip, int lane) const {
        Element* to = strip + lane / E::PACK * cache_.padded_dim * E::PACK + lane % E::PACK;
        for (int d = 0; d < cache_.head_dim; d++) to[d * E::PACK] = from_float<Element>(to_float(from[d]));
    }

    const KVCache& cache_;
    int layer_;
    const In* k_;
    int64_t k_stride_;
    const In* v_;
    int64_t v_stride_;
};

// The strips of one chunk: where they lie, the position of their first token, how many slots are real.
struct Chunk {
    const uint8_t* keys[CHUNK_STRIPS];
    const uint8_t* values[CHUNK_STRIPS];
    int positions[CHUNK_STRIPS];
    int counts[CHUNK_STRIPS];
};

// scores[ROWS][CHUNK] = q * keys; q is [ROWS][words].
template <class E, int ROWS>
INLINE void multiply_keys(const uint32_t* q, int words, const Chunk& chunk, const Chunk& next, float* scores) {
    constexpr int VECTORS = STRIP / LANES;               // of one strip
    constexpr int TOGETHER = LANES == 16 ? CHUNK_STRIPS : 1;  // strips in registers at once
    for (int first = 0; first < CHUNK_STRIPS; first += TOGETHER) {
        Floats sums[ROWS][TOGETHER][VECTORS] = {};
        for (int w = 0; w < words; w++) {
            typename E::Columns keys[TOGETHER][VECTORS];
            UNROLL for (int s = 0; s < TOGETHER; s++) {
                const size_t at = static_cast<size_t>(w) * STRIP * 4;
                UNROLL for (int v = 0; v < VECTORS; v++)
                    keys[s][v] = E::columns(chunk.keys[first + s] + at + v * LANES * 4);
                prefetch_to_l2(next.keys[first + s] + at);  // blocks are scattered: the hardware cannot guess
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                typename E::Row row = E::row(q[r * words + w]);
                UNROLL for (int s = 0; s < TOGETHER; s++)
                    UNROLL for (int v = 0; v < VECTORS; v++) E::dot(sums[r][s][v], keys[s][v], row);
            }
        }
        UNROLL for (int r = 0; r < ROWS; r++)
            UNROLL for (int s = 0; s < TOGETHER; s++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    store(scores + r * CHUNK + (first + s) * STRIP + v * LANES, sums[r][s][v]);
    }
}

// out[ROWS][VECTORS of D] = out * scale + p * values; p is [ROWS][CHUNK / PACK words].
template <class E, int ROWS, int VECTORS>
INLINE void multiply_values(
    const uint32_t* p, const Chunk& chunk, const Chunk& next, int column, int dim, const float* scale, float* out) {
    constexpr int WORDS = STRIP / E::PACK;
    Floats sums[ROWS][VECTORS];
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sums[r][v] = load(out + r * dim + column + v * LANES) * splat(scale[r]);
    for (int s = 0; s < CHUNK_STRIPS; s++)
        for (int w = 0; w < WORDS; w++) {
            const size_t at = (static_cast<size_t>(w) * dim + column) * 4;
            typename E::Columns values[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++) {
                values[v] = E::columns(chunk.values[s] + at + v * LANES * 4);
                prefetch_to_l2(next.values[s] + at + v * LANES * 4);
            }
            UNROLL for (int r = 0; r < ROWS; r++) {
                typename E::Row row = E::row(p[r * (CHUNK / E::PACK) + s * WORDS + w]);
                UNROLL for (int v = 0; v < VECTORS; v++) E::dot(sums[r][v], values[v], row);
            }
        }
    UNROLL for (int r = 0; r < ROWS; r++)
        UNROLL for (int v = 0; v < VECTORS; v++) store(out + r * dim + column + v * LANES, sums[r][v]);
}

template <class E, int ROWS>
void multiply_all_values(
    const uint32_t* p, const Chunk& chunk, const Chunk& next, int dim, const float* scale, float* out) {
    constexpr int VECTORS = LANES == 16 ? 4 : 2;
    int column = 0;
    for (; column + VECTORS * LANES <= dim; column += VECTORS * LANES)
        multiply_values<E, ROWS, VECTORS>(p, chunk, next, column, dim, scale, out);
    for (; column < dim; column += LANES)
        multiply_values<E, ROWS, 1>(p, chunk, next, column, dim, scale, out);
}

// q and out are [rows, heads of queries, D]; rows of q are strided, those of out contiguous.
template <class E, class In> class AttentionOp : public Op {
public:
    AttentionOp(const KVCache& cache, int layer, const In* q, int64_t q_stride, int query_heads, int window,
                float scale, In* out)
        : cache_(cache),
          layer_(layer),
          q_(q),
          q_stride_(q_stride),
          group_(query_heads / cache.heads),
          window_(window),
          scale_(scale),
          out_(out),
          words_(cache.head_dim / E::PACK),
          tile_tokens_(std::max(1, TILE_ROWS / group_)) {}

    // Items are (tile, kv head). They are taken from the last sequence to the first and from the last tile to the
    // first: the engine puts prompts last, and their late tiles take longest, so the short work fills the gaps.
    void run(const Step& step, Member& member) override {
        int sequence = step.sequences - 1, before = 0;  // items of the sequences behind `sequence`
        for (int item = take(); sequence >= 0; item = take()) {
            while (sequence >= 0 && item - before >= items_of(step, sequence)) {
                before += items_of(step, sequence);
                sequence--;
            }
            if (sequence < 0) break;
            const int tile = tiles_of(step, sequence) - 1 - (item - before) / cache_.heads;
            run_tile(step, sequence, tile, (item - before) % cache_.heads, member.scratch);
        }
    }

private:
    static constexpr int TILE_ROWS = 48;
    static constexpr int ROWS_AT_ONCE = 6;

    // A tile's working memory.
    struct Work {
        int rows;
        uint32_t* q;    // [rows][words]
        float* scores;  // [rows][CHUNK]
        uint32_t* p;    // [rows][CHUNK / PACK]
        float* out;     // [rows][padded dim]
        float *most, *total, *scale;  // [rows]
    };

    int query_rows(const Step& step, int n) const { return step.query_starts[n + 1] - step.query_starts[n]; }
    int tiles_of(const Step& step, int n) const { return ceil_div(query_rows(step, n), tile_tokens_); }
    int items_of(const Step& step, int n) const { return tiles_of(step, n) * cache_.heads; }

    Work make_work(int rows, Scratch& scratch) const {
        const size_t padded = cache_.padded_dim;
        float* memory = scratch.take<float>(rows * (padded + CHUNK + CHUNK + padded + 3) + 64);
        Work work;
        work.rows = rows;
        work.out = memory;
        work.scores = work.out + rows * padded;
        work.p = reinterpret_cast<uint32_t*>(work.scores + rows * CHUNK);
        work.q = work.p + rows * CHUNK;
        work.most = reinterpret_cast<float*>(work.q + rows * padded);
        work.total = work.most + rows;
        work.scale = work.total + rows;
        return work;
    }

    void run_tile(const Step& step, int n, int tile, int head, Scratch& scratch) const {
        const int first = tile * tile_tokens_;
        const int tokens = std::min(tile_tokens_, query_rows(step, n) - first);
        const int row = step.query_starts[n] + first;
        // Position of the tile's first row.
        const int position = step.contexts[n] - query_rows(step, n) + first;
        Work work = make_work(tokens * group_, scratch);
        load_queries(row, head, work);
        std::fill_n(work.out, static_cast<size_t>(work.rows) * cache_.padded_dim, 0.f);
        std::fill_n(work.most, work.rows, NOTHING);
        std::fill_n(work.total, work.rows, 0.f);

        const int32_t* table = step.block_tables + static_cast<int64_t>(n) * step.table_width;
        const int last = position + tokens - 1, seen = window_ ? std::max(0, position - window_ + 1) : 0;
        const int first_chunk = strip_of(step, seen) / CHUNK_STRIPS, end = strip_of(step, last) + 1;
        Chunk chunk = find_chunk(step, table, head, first_chunk * CHUNK_STRIPS, end);
        for (int strip = first_chunk * CHUNK_STRIPS; strip < end; strip += CHUNK_STRIPS) {
            const Chunk next =
                strip + CHUNK_STRIPS < end ? find_chunk(step, table, head, strip + CHUNK_STRIPS, end) : chunk;
            score(work, chunk, next);
            for (int r = 0; r < work.rows; r++) soften(work, r, chunk, position + r / group_);
            add_values(work, chunk, next);
            chunk = next;
        }
        store_result(row, head, work);
    }

    void load_queries(int row, int head, Work& work) const {
        for (int r = 0; r < work.rows; r++) {
            const In* from = q_ + (row + r / group_) * q_stride_ + (head * group_ + r % group_) * cache_.head_dim;
            auto* to = reinterpret_cast<typename E::Element*>(work.q + r * words_);
            for (int d = 0; d < cache_.head_dim; d++) to[d] = from_float<typename E::Element>(to_float(from[d]));
        }
    }

    // Which strip of its sequence holds a position.
    int strip_of(const Step& step, int position) const {
        return position / step.block_size * cache_.strips + position % step.block_size / STRIP;
    }

    Chunk find_chunk(const Step& step, const int32_t* table, int head, int strip, int end) const {
        Chunk chunk;
        for (int i = 0; i < CHUNK_STRIPS; i++) {
            // Past the end: memory that is surely there, no slot of it seen.
            const int s = strip + i < end ? strip + i : strip;
            const int block = s / cache_.strips, part = s % cache_.strips;
            chunk.keys[i] = cache_.head(layer_, table[block], head) + part * cache_.strip_bytes();
            chunk.values[i] = chunk.keys[i] + cache_.half_bytes;
            chunk.positions[i] = block * step.block_size + part * STRIP;
            chunk.counts[i] = strip + i < end ? std::min(STRIP, step.block_size - part * STRIP) : 0;
        }
        return chunk;
    }

    template <int ROWS> static void score_rows(const Work& work, int row, int words, const Chunk& chunk, const Chunk& next) {
        multiply_keys<E, ROWS>(work.q + row * words, words, chunk, next, work.scores + row * CHUNK);
    }

    void score(const Work& work, const Chunk& chunk, const Chunk& next) const {
        for (int row = 0; row < work.rows; row += ROWS_AT_ONCE) switch (work.rows - row) {
                case 1: score_rows<1>(work, row, words_, chunk, next); break;
                case 2: score_rows<2>(work, row, words_, chunk, next); break;
                case 3: score_rows<3>(work, row, words_, chunk, next); break;
                case 4: score_rows<4>(work, row, words_, chunk, next); break;
                case 5: score_rows<5>(work, row, words_, chunk, next); break;
                default: score_rows<6>(work, row, words_, chunk, next);
            }
    }

    // Scores of one row become weights e^(score - most), and what was summed before is scaled to the new `most`.
    void soften(Work& work, int r, const Chunk& chunk, int position) const {
        const int oldest = window_ ? std::max(0, position - window_ + 1) : 0;
        Floats scores[CHUNK / LANES], most = splat(NOTHING);
        UNROLL for (int v = 0; v < CHUNK / LANES; v++) {
            const int s = v * LANES / STRIP, lane = v * LANES % STRIP, base = chunk.positions[s] + lane;
            const int from = oldest - base, to = std::min(position - base + 1, chunk.counts[s] - lane);
            scores[v] = load(work.scores + r * CHUNK + v * LANES) * splat(scale_);
            if (from > 0 || to < LANES) scores[v] = only(scores[v], from, to);
            most = max(most, scores[v]);
        }
        const float before = work.most[r], now = std::max(before, max(most));
        work.most[r] = now;
        auto* p = reinterpret_cast<typename E::Element*>(work.p + r * (CHUNK / E::PACK));
        if (now == NOTHING) {  // nothing seen yet
            std::fill_n(p, CHUNK, from_float<typename E::Element>(0.f));
            work.scale[r] = 1.f;
            return;
        }
        Floats total = splat(0.f);
        UNROLL for (int v = 0; v < CHUNK / LANES; v++) {
            const Floats weights = exp_negative(scores[v] - splat(now));
            total += weights;
            llmbox::store(p + v * LANES, weights);
        }
        work.scale[r] = exp_negative(splat(before - now))[0];
        work.total[r] = work.total[r] * work.scale[r] + sum(total);
    }

    // Lanes from .. to - 1; the others count as never seen.
    static Floats only(Floats scores, int from, int to) {
        float kept[LANES];
        llmbox::store(kept, scores);
        for (int i = 0; i < LANES; i++) kept[i] = i >= from && i < to ? kept[i] : NOTHING;
        return load(kept);
    }

    template <int ROWS> void add_rows(const Work& work, int row, const Chunk& chunk, const Chunk& next) const {
        multiply_all_values<E, ROWS>(work.p + row * (CHUNK / E::PACK), chunk, next, cache_.padded_dim,
                                     work.scale + row, work.out + row * cache_.padded_dim);
    }

    void add_values(const Work& work, const Chunk& chunk, const Chunk& next) const {
        for (int row = 0; row < work.rows; row += ROWS_AT_ONCE) switch (work.rows - row) {
                case 1: add_rows<1>(work, row, chunk, next); break;
                case 2: add_rows<2>(work, row, chunk, next); break;
                case 3: add_rows<3>(work, row, chunk, next); break;
                case 4: add_rows<4>(work, row, chunk, next); break;
                case 5: add_rows<5>(work, row, chunk, next); break;
                default: add_rows<6>(work, row, chunk, next);
            }
    }

    void store_result(int row, int head, const Work& work) const {
        const int dim = cache_.head_dim, heads = cache_.heads * group_;
        for (int r = 0; r < work.rows; r++) {
            In* to = out_ + (static_cast<int64_t>(row + r / group_) * heads + head * group_ + r % group_) * dim;
            const float* from = work.out + r * cache_.padded_dim;
            const Floats inverse = splat(1.f / work.total[r]);
            for (int d = 0; d < dim; d += LANES) llmbox::store(to + d, load(from + d) * inverse, dim - d);
        }
    }

    const KVCache& cache_;
    int layer_;
    const In* q_;
    int64_t q_stride_;
    int group_, window_;
    float scale_;
    In* out_;
    int words_, tile_tokens_;
};

}  // namespace llmbox
