// Paged attention: one kernel for decoding and prompts, so that a row has one result however it was computed.
//
// A tile is a few tokens of one sequence with all query heads of one kv head. It walks the context in chunks
// of 4 strips (kv_cache.h), counted from the beginning of the sequence, with an online softmax (Milakov and
// Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Chunks lie at fixed places, and hidden slots add exact
// zeros: a row's result does not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "attention_product.h"

namespace llmbox {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

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
          words_(ceil_div(cache.head_dim, E::PACK)),
          tile_tokens_(std::max(1, TILE_ROWS / group_)) {}

    // One tile is known ahead, so that its keys are on their way when the one before it ends.
    void run(const Step& step, Member& member) override {
        Cursor cursor{step.sequences - 1, 0};
        for (auto tile = take_tile(step, cursor); tile;) {
            const auto following = take_tile(step, cursor);
            run_tile(step, *tile, following, member.scratch);
            tile = following;
        }
    }

private:
    using W = AttentionWords<E>;
    static constexpr int TILE_ROWS = 48;

    // Some tokens of one sequence, and a kv head with the query heads that read it.
    struct Tile {
        int sequence, first, tokens, head;
    };

    // Where a tile's context lies, and which strips of it are to be read.
    struct Walk {
        const int32_t* table;
        int head, strip, end;
    };

    // While items are taken one after the other: the sequence of the last one, and the items of those behind it.
    struct Cursor {
        int sequence, before;
    };

    // A tile's working memory.
    struct Work {
        int rows;
        PackedRows<E> q, p;
        float* scores;  // [rows][CHUNK]
        float* out;     // [rows][padded dim]
        float *most, *total, *scale;  // [rows]
    };

    int query_rows(const Step& step, int n) const { return step.query_starts[n + 1] - step.query_starts[n]; }
    int tiles_of(const Step& step, int n) const { return ceil_div(query_rows(step, n), tile_tokens_); }
    int items_of(const Step& step, int n) const { return tiles_of(step, n) * cache_.heads; }

    // Taken from the last sequence to the first and from the last tile to the first: the engine puts prompts last,
    // and their late tiles take longest, so the short work fills the gaps.
    std::optional<Tile> take_tile(const Step& step, Cursor& cursor) {
        const int item = take();
        auto& [n, before] = cursor;
        while (n >= 0 && item - before >= items_of(step, n)) before += items_of(step, n--);
        if (n < 0) return std::nullopt;
        const int first = (tiles_of(step, n) - 1 - (item - before) / cache_.heads) * tile_tokens_;
        return Tile{n, first, std::min(tile_tokens_, query_rows(step, n) - first), (item - before) % cache_.heads};
    }

    // Position of a tile's first token.
    int position_of(const Step& step, const Tile& tile) const {
        return step.contexts[tile.sequence] - query_rows(step, tile.sequence) + tile.first;
    }

    Walk walk_of(const Step& step, const Tile& tile) const {
        const int position = position_of(step, tile), seen = window_ ? std::max(0, position - window_ + 1) : 0;
        const int32_t* table = step.block_tables + static_cast<int64_t>(tile.sequence) * step.table_width;
        const int first = strip_of(step, seen) / CHUNK_STRIPS * CHUNK_STRIPS;  // whole chunks, from the beginning on
        return {table, tile.head, first, strip_of(step, position + tile.tokens - 1) + 1};
    }

    Work make_work(int rows, Scratch& scratch) const {
        const int padded = cache_.padded_dim, q_part = padded / E::PACK, p_part = CHUNK / E::PACK;
        const size_t words = padded + CHUNK + W::PARTS * (q_part + p_part) + 3 + 2 * sizeof(Packed) / sizeof(float);
        float* memory = scratch.take<float>(rows * words);
        const auto take = [&](int width) {
            float* taken = memory;
            memory += static_cast<size_t>(rows) * width;
            return taken;
        };
        const auto take_packed = [&](int part) {
            auto* row_words = reinterpret_cast<uint32_t*>(take(W::PARTS * part));
            return PackedRows<E>{row_words, part, reinterpret_cast<Packed*>(take(sizeof(Packed) / sizeof(float)))};
        };
        Work work;
        work.rows = rows;
        work.out = take(padded);
        work.scores = take(CHUNK);
        work.q = take_packed(q_part);
        work.p = take_packed(p_part);
        work.most = take(1);
        work.total = take(1);
        work.scale = take(1);
        return work;
    }

    void run_tile(const Step& step, const Tile& tile, const std::optional<Tile>& following, Scratch& scratch) const {
        const int row = step.query_starts[tile.sequence] + tile.first, position = position_of(step, tile);
        Work work = make_work(tile.tokens * group_, scratch);
        load_queries(row, tile.head, work);
        std::fill_n(work.out, static_cast<size_t>(work.rows) * cache_.padded_dim, 0.f);
        std::fill_n(work.most, work.rows, NOTHING);
        std::fill_n(work.total, work.rows, 0.f);

        Walk walk = walk_of(step, tile);
        for (Chunk chunk = find_chunk(step, walk), next; walk.strip < walk.end; chunk = next) {
            walk.strip += CHUNK_STRIPS;
            if (walk.strip < walk.end) next = find_chunk(step, walk);
            else next = following ? find_chunk(step, walk_of(step, *following)) : chunk;
            if (W::SCALED) prefetch_scales(next);
            score(work, chunk);
            for (int r = 0; r < work.rows; r++) soften(work, r, chunk, position + r / group_);
            add_values(work, chunk, next);
        }
        store_result(row, tile.head, work);
    }

    NOINLINE void load_queries(int row, int head, Work& work) const {
        for (int r = 0; r < work.rows; r++) {
            const In* from = q_ + (row + r / group_) * q_stride_ + (head * group_ + r % group_) * cache_.head_dim;
            work.q.pack(r, from, cache_.head_dim);
        }
    }

    // Which strip of its sequence holds a position.
    int strip_of(const Step& step, int position) const {
        return position / step.block_size * cache_.strips + position % step.block_size / STRIP;
    }

    Chunk find_chunk(const Step& step, const Walk& walk) const {
        Chunk chunk;
        for (int i = 0; i < CHUNK_STRIPS; i++) {
            // Past the end: memory that is surely there, no slot of it seen.
            const bool real = walk.strip + i < walk.end;
            const int strip = real ? walk.strip + i : walk.strip;
            const int block = strip / cache_.strips, part = strip % cache_.strips;
            chunk.keys[i] = cache_.head(layer_, walk.table[block], walk.head) + part * cache_.strip_bytes;
            chunk.values[i] = chunk.keys[i] + cache_.half_bytes;
            chunk.positions[i] = block * step.block_size + part * STRIP;
            chunk.counts[i] = real ? std::min(STRIP, step.block_size - part * STRIP) : 0;
        }
        return chunk;
    }

    // The first rows of a tile prefetch what comes next, the others find it done.
    NOINLINE void score(const Work& work, const Chunk& chunk) const {
        in_tiles<W::ROWS>(work.rows, [&](auto rows, int row) {
            multiply_keys<E, rows>(work.q.from(row), words_, chunk, row == 0, work.scores + row * CHUNK);
        });
    }

    // Scores of one row become weights e^(score - most), and what was summed before is scaled to the new `most`.
    NOINLINE void soften(Work& work, int r, const Chunk& chunk, int position) const {
        const int oldest = window_ ? std::max(0, position - window_ + 1) : 0;
        const Floats factor = splat(work.q.packed[r].factor * scale_);
        Floats scores[CHUNK / LANES], most = splat(NOTHING);
        UNROLL for (int v = 0; v < CHUNK / LANES; v++) {
            const int s = v * LANES / STRIP, lane = v * LANES % STRIP, base = chunk.positions[s] + lane;
            const int from = oldest - base, to = std::min(position - base + 1, chunk.counts[s] - lane);
            scores[v] = load(work.scores + r * CHUNK + v * LANES) * factor;
            if (W::SCALED) scores[v] = scores[v] * scales(chunk.keys[s], lane);
            if (from > 0 || to < LANES) scores[v] = only(scores[v], from, to);
            most = max(most, scores[v]);
        }
        const float before = work.most[r], now = std::max(before, max(most));
        work.most[r] = now;
        alignas(64) float weights[CHUNK] = {};
        work.scale[r] = 1.f;
        if (now != NOTHING) {  // something is seen
            Floats total = splat(0.f);
            UNROLL for (int v = 0; v < CHUNK / LANES; v++) {
                Floats weight = exp_negative(scores[v] - splat(now));
                total += weight;
                if (W::SCALED) weight = weight * scales(chunk.values[v * LANES / STRIP], v * LANES % STRIP);
                llmbox::store(weights + v * LANES, weight);
            }
            work.scale[r] = exp_negative(splat(before - now))[0];
            work.total[r] = work.total[r] * work.scale[r] + sum(total);
        }
        work.p.pack(r, weights, CHUNK);
    }

    // Of the tokens of a strip, from `lane` on.
    Floats scales(const uint8_t* strip, int lane) const {
        return load_as<Floats>(strip + cache_.codes_bytes + lane * sizeof(float));
    }

    void prefetch_scales(const Chunk& chunk) const {
        for (int s = 0; s < CHUNK_STRIPS; s++) {
            prefetch(chunk.keys[s] + cache_.codes_bytes);
            prefetch(chunk.values[s] + cache_.codes_bytes);
        }
    }

    // Lanes from .. to - 1; the others count as never seen.
    static Floats only(Floats scores, int from, int to) {
        float kept[LANES];
        llmbox::store(kept, scores);
        for (int i = 0; i < LANES; i++) kept[i] = i >= from && i < to ? kept[i] : NOTHING;
        return load(kept);
    }

    void add_values(const Work& work, const Chunk& chunk, const Chunk& next) const {
        const int dim = cache_.padded_dim;
        in_tiles<W::ROWS>(work.rows, [&](auto rows, int row) {
            multiply_all_values<E, rows>(work.p.from(row), chunk, row ? nullptr : &next, dim, work.scale + row,
                                         work.out + row * dim);
        });
    }

    NOINLINE void store_result(int row, int head, const Work& work) const {
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
