// Paged attention: one kernel for decoding and prompts, so that a row has one result however it was computed.
//
// A tile is a few tokens of one sequence with all query heads of one kv head. It walks the context in chunks
// of 4 strips (kv_cache.h), counted from the beginning of the sequence, with an online softmax (Milakov and
// Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Chunks lie at fixed places, and hidden slots add exact
// zeros: a row's result does not depend on the rows beside it.
#pragma once

#include <optional>

#include "dtypes.h"
#include "attention/attention_amx_blocked.h"
#include "attention/attention_op.h"

namespace llmbox {

// Over a cache of type E, whatever the type of queries and results.
template <class E> class Attention : public Op {
public:
    OpKind kind() const override { return OpKind::ATTENTION; }
    Attention(const KVCache& cache, int layer, int query_heads, int window, Powers powers)
        : cache_(cache),
          group_(query_heads / cache.heads),
          layer_(layer),
          window_(window),
          powers_(powers),
          words_(ceil_div(cache.head_dim, E::PACK)),
          tile_tokens_(std::max(1, Walked<E>::ROWS / group_)) {}

    // One tile is known ahead, so that its keys are on their way when the one before it ends.
    void run(const Step& step, Member& member) override {
        Cursor cursor{step.sequences - 1, 0};
        for (auto tile = take_tile(step, cursor); tile;) {
            const auto following = take_tile(step, cursor);
            run_tile(step, *tile, following, member);
            tile = following;
        }
    }

protected:
    using Tiled = TileProducts<E>;

    // Of the rows from `row` on and the query heads of one kv head, to the tile's memory and from there.
    virtual void load_queries(int row, int head, Work<E>& work) const = 0;
    virtual void store_result(int row, int head, const Work<E>& work) const = 0;

    // What one more score adds to the sum of a row's weights.
    float sink_share(const Work<E>& work, int r, float sink) const {
        float most = work.most[r];  // AMX keeps it before it is multiplied
        if constexpr (Tiled::OWN_SOFTMAX) most *= powers_.cap == 0 ? powers_.factor : powers_.cap;
        return power_of_two(splat(sink * LOG2_E - most))[0];
    }

    const KVCache& cache_;
    int group_;  // query heads of one kv head

private:
    using W = AttentionWords<E>;
    static constexpr int STRIPS = Chunk<E>::STRIPS, SLOTS = Chunk<E>::SLOTS;

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
        const int position = position_of(step, tile), seen = VisibleRanges{position, 1, window_, 0}.oldest(0);
        const int32_t* table = cache_.tables(step) + static_cast<int64_t>(tile.sequence) * step.table_width;
        const int first = strip_of(step, seen) / STRIPS * STRIPS;  // whole chunks, from the beginning on
        const int newest = std::max(position + tile.tokens - 1, last_of(step, tile));
        return {table, tile.head, first, strip_of(step, newest) + 1};
    }

    // Position that all rows of a tile see, whatever their own; 0 where there is none.
    int last_of(const Step& step, const Tile& tile) const {
        const int span = step.spans ? step.spans[tile.sequence] : 0;
        return span == 1 || (span == 2 && window_) ? step.contexts[tile.sequence] - 1 : 0;
    }

    void run_tile(const Step& step, const Tile& tile, const std::optional<Tile>& following, Member& member) const {
        const int row = step.query_starts[tile.sequence] + tile.first;
        const VisibleRanges visible{position_of(step, tile), group_, window_, last_of(step, tile)};
        Work<E> work(tile.tokens * group_, cache_.padded_dim, member.scratch);
        load_queries(row, tile.head, work);
        const bool tiled = use_tiles(work);
        Walk walk = walk_of(step, tile);
        for (Chunk<E> chunk = find_chunk(step, walk), next; walk.strip < walk.end; chunk = next) {
            walk.strip += STRIPS;
            if (walk.strip < walk.end) next = find_chunk(step, walk);
            else next = following ? find_chunk(step, walk_of(step, *following)) : chunk;
            if (W::SCALED) prefetch_scales(next);
            if (tiled) add_tiled(work, chunk, next, visible, member);
            else add_chunk(work, chunk, next, visible);
        }
        store_result(row, tile.head, work);
    }

    static bool use_tiles(const Work<E>& work) {
        if constexpr (Tiled::POSSIBLE) return Tiled::wanted(work.rows, work.dim);
        return false;
    }

    void add_chunk(const Work<E>& work, const Chunk<E>& chunk, const Chunk<E>& next,
                   VisibleRanges visible) const {
        score(work, chunk);
        update_softmax_rows(work, 0, work.rows, chunk, visible);
        add_values(work, chunk, next);
    }

    void add_tiled(const Work<E>& work, const Chunk<E>& chunk, const Chunk<E>& next, VisibleRanges visible,
                   Member& member) const {
        if constexpr (Tiled::OWN_SOFTMAX) {
            Tiled::add_chunk(work, chunk, next, visible, powers_, member.tiles);
        } else if constexpr (Tiled::POSSIBLE) {
            // From the last rows on: they see all that others see, and bring it.
            for (int row = (work.rows - 1) / Tiled::BAND * Tiled::BAND; row >= 0; row -= Tiled::BAND) {
                const int rows = std::min(Tiled::BAND, work.rows - row);
                const Band band{row, rows, strips_seen(chunk, visible.newest(row + rows - 1)), row + rows == work.rows};
                if (band.strips == 0) break;
                Tiled::score(work, band, chunk, member.tiles);
                update_softmax_rows(work, row, row + rows, chunk, visible);
                Tiled::add(work, band, chunk, band.first ? &next : nullptr, member.tiles);
            }
        }
    }

    void update_softmax_rows(const Work<E>& work, int row, int end, const Chunk<E>& chunk,
                             VisibleRanges visible) const {
        if (powers_.cap == 0) update_softmax_rows_of<false>(work, row, end, chunk, visible);
        else update_softmax_rows_of<true>(work, row, end, chunk, visible);
    }

    template <bool CAPPED>
    NOINLINE void update_softmax_rows_of(const Work<E>& work, int row, int end, const Chunk<E>& chunk,
                                         VisibleRanges visible) const {
        const VisibleRange common = visible.common(row, end);
        if (all_seen(chunk, common)) {
            for (; row < end; row++) update_softmax<E, false, CAPPED>(work, row, chunk, cache_.codes_bytes, powers_, common);
        } else {
            for (; row < end; row++)
                update_softmax<E, true, CAPPED>(work, row, chunk, cache_.codes_bytes, powers_, visible.of(row));
        }
    }

    // Which strip of its sequence holds a position.
    int strip_of(const Step& step, int position) const {
        return position / step.block_size * cache_.strips + position % step.block_size / STRIP;
    }

    Chunk<E> find_chunk(const Step& step, const Walk& walk) const {
        Chunk<E> chunk;
        for (int i = 0; i < STRIPS; i++) {
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
    NOINLINE void score(const Work<E>& work, const Chunk<E>& chunk) const {
        in_tiles<W::ROWS>(work.rows, [&](auto rows, int row) {
            multiply_keys<E, rows>(work.q.from(row), words_, chunk, row == 0, work.scores + row * SLOTS);
        });
    }

    void prefetch_scales(const Chunk<E>& chunk) const {
        for (int s = 0; s < STRIPS; s++) {
            prefetch(chunk.keys[s] + cache_.codes_bytes);
            prefetch(chunk.values[s] + cache_.codes_bytes);
        }
    }

    void add_values(const Work<E>& work, const Chunk<E>& chunk, const Chunk<E>& next) const {
        const int dim = cache_.padded_dim;
        in_tiles<W::ROWS>(work.rows, [&](auto rows, int row) {
            multiply_all_values<E, rows>(work.p.from(row), chunk, row ? nullptr : &next, dim, work.scale + row,
                                         work.out + row * dim);
        });
    }

    int layer_, window_;
    Powers powers_;
    int words_, tile_tokens_;
};

// q and out are [rows, heads of queries, D]; rows of q are strided, those of out contiguous.
template <class E, class In> class AttentionOp final : public Attention<E> {
public:
    AttentionOp(const KVCache& cache, int layer, const In* q, int64_t q_stride, int query_heads, int window,
                Powers powers, const float* sinks, In* out)
        : Attention<E>(cache, layer, query_heads, window, powers),
          q_(q),
          q_stride_(q_stride),
          sinks_(sinks),
          out_(out) {}

private:
    using Attention<E>::cache_;
    using Attention<E>::group_;

    void load_queries(int row, int head, Work<E>& work) const override {
        for (int r = 0; r < work.rows; r++) {
            const In* from = q_ + (row + r / group_) * q_stride_ + (head * group_ + r % group_) * cache_.head_dim;
            work.q.pack(r, from, cache_.head_dim);
        }
    }

    void store_result(int row, int head, const Work<E>& work) const override {
        const int dim = cache_.head_dim, heads = cache_.heads * group_;
        for (int r = 0; r < work.rows; r++) {
            In* to = out_ + (static_cast<int64_t>(row + r / group_) * heads + head * group_ + r % group_) * dim;
            const float* from = work.out + r * cache_.padded_dim;
            float total = load_as<LaneSums>(work.total + r * SUM_LANES).total();
            if (sinks_) total += this->sink_share(work, r, sinks_[head * group_ + r % group_]);
            const Floats inverse = splat(1.f / total);
            for (int d = 0; d < dim; d += LANES) llmbox::store(to + d, load(from + d) * inverse, dim - d);
        }
    }

    const In* q_;
    int64_t q_stride_;
    const float* sinks_;  // of query heads, or null
    In* out_;
};

template <class E> Op* make_attention(int dtype, const AttentionCall& call) {
    return with_type(dtype, [&]<class I>(I) -> Op* {
        using In = typename I::Element;
        return new AttentionOp<E, In>(call.cache, call.layer, static_cast<const In*>(call.q), call.q_stride,
                                      call.heads, call.window, Powers::of(call.scale, call.softcap), call.sinks,
                                      static_cast<In*>(call.out));
    });
}

}  // namespace llmbox
