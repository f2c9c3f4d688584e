// The paged KV cache, and how keys and values get into it.
//
// For each layer, block and kv head it keeps keys and then values, in `strips` strips of 16 tokens:
//   keys    [strip][words of D][16 tokens]    a word holds PACK neighboring dims of one token
//   values  [strip][16 / PACK][D padded]      a word holds one dim of PACK neighboring tokens
// Both products of attention then are the same loop as in gemm.h, without shuffles. A block whose size is not a
// multiple of 16 wastes the rest of its last strip.
//
// int8: a token's key, and its value, of one head are 127 / max|x| times x, rounded to nearest even. Stored are
// bytes of that plus 128, and behind each strip its 16 float32 scales, max|x| / 127.
#pragma once

#include <algorithm>
#include <cmath>

#include "huge_pages.h"
#include "threads/command_buffer.h"
#include "vector/dot_product.h"

namespace llmbox {

constexpr int STRIP = 16;

struct KVCache {
    int layers, blocks, block_size, heads, head_dim;
    int strips;          // of a block
    int padded_dim;      // whole vectors, with AMX whole tiles of bf16
    size_t codes_bytes;  // of a strip, without its scales
    size_t strip_bytes;
    size_t half_bytes;  // keys of one head in one block; the values are as large
    bool windowed;      // of sliding-window layers, with block tables of their own
    HugeBlock memory;

    // `element_size` 1 is int8 with scales.
    KVCache(int layers, int blocks, int block_size, int heads, int head_dim, int element_size, bool windowed)
        : layers(layers),
          blocks(blocks),
          block_size(block_size),
          heads(heads),
          head_dim(head_dim),
          strips(ceil_div(block_size, STRIP)),
          padded_dim(round_up(head_dim, element_size == 2 ? std::max(STRIP, BF16::STEP * BF16::PACK) : STRIP)),
          codes_bytes(static_cast<size_t>(STRIP) * padded_dim * element_size),
          strip_bytes(codes_bytes + (element_size == 1 ? STRIP * sizeof(float) : 0)),
          half_bytes(strips * strip_bytes),
          windowed(windowed),
          memory(layers * blocks * block_bytes()) {}

    const int32_t* slots(const Step& step) const { return windowed ? step.window_slots : step.slots; }
    const int32_t* tables(const Step& step) const { return windowed ? step.window_tables : step.block_tables; }

    size_t block_bytes() const { return 2 * half_bytes * heads; }
    uint8_t* block(int layer, int block) const {
        return memory.data() + (static_cast<size_t>(layer) * blocks + block) * block_bytes();
    }
    uint8_t* head(int layer, int block, int head) const {
        return this->block(layer, block) + 2 * half_bytes * head;
    }
};

// One row of a head as a kind of cache stores it: `numbers`, and with int8 one scale.
template <class E> struct StoredRow {
    using Element = typename E::Element;
    const Element* numbers;

    template <class In> StoredRow(const In* x, int width, Element* scratch) : numbers(scratch) {
        for (int d = 0; d < width; d += LANES) store(scratch + d, load(x + d, width - d));
    }
    void put_scale(uint8_t*) const {}
};

template <> struct StoredRow<INT8> {
    const uint8_t* numbers;
    float scale;

    // NaN or infinity must reach the result, where it is noticed: a scale of NaN carries it there.
    template <class In> StoredRow(const In* x, int width, uint8_t* scratch) : numbers(scratch) {
        const auto [most, finite] = range_of(x, width);
        scale = finite ? most / 127 : NAN;
        const Floats inverse = splat(finite && most > 0 ? 127 / most : 0);
        for (int d = 0; d < width; d += LANES) {
            const Floats v = finite ? load(x + d, width - d) : splat(0.f);
            store_bytes(scratch + d, to_nearest(v * inverse) + 128);
        }
    }
    void put_scale(uint8_t* to) const { store_as(to, scale); }
};

// Writes rows of one head to their slots. One for each thread, as it quantizes into its own memory.
template <class E> class HeadWriter {
public:
    HeadWriter(const KVCache& cache, int layer, int head, Member& member)
        : cache_(cache), layer_(layer), head_(head), scratch_(member.scratch.take<Element>(cache.padded_dim)) {}

    // `slot` counts all slots of the cache.
    template <class In> void key(int slot, const In* x) const { put_key(slot, {x, cache_.head_dim, scratch_}); }
    template <class In> void value(int slot, const In* x) const { put_value(slot, {x, cache_.head_dim, scratch_}); }

private:
    using Element = typename E::Element;

    NOINLINE void put_key(int slot, const StoredRow<E>& row) const {
        const auto [strip, lane] = place(slot);
        const int words = cache_.head_dim / E::PACK;
        for (int w = 0; w < words; w++)
            memcpy(strip + (w * STRIP + lane) * 4, row.numbers + w * E::PACK, 4);
        for (int d = words * E::PACK; d < cache_.head_dim; d++)  // an unfinished word
            reinterpret_cast<Element*>(strip + (words * STRIP + lane) * 4)[d % E::PACK] = row.numbers[d];
        row.put_scale(strip + cache_.codes_bytes + lane * sizeof(float));
    }
    NOINLINE void put_value(int slot, const StoredRow<E>& row) const {
        const auto [keys, lane] = place(slot);
        uint8_t* strip = keys + cache_.half_bytes;
        auto* to = reinterpret_cast<Element*>(strip) + lane / E::PACK * cache_.padded_dim * E::PACK + lane % E::PACK;
        for (int d = 0; d < cache_.head_dim; d++) to[d * E::PACK] = row.numbers[d];
        row.put_scale(strip + cache_.codes_bytes + lane * sizeof(float));
    }

    struct Place {
        uint8_t* keys;  // of the strip
        int lane;
    };

    Place place(int slot) const {
        const int block = slot / cache_.block_size, in_block = slot % cache_.block_size;
        return {cache_.head(layer_, block, head_) + in_block / STRIP * cache_.strip_bytes, in_block % STRIP};
    }

    const KVCache& cache_;
    int layer_, head_;
    Element* scratch_;
};

// Some rows of one head: work for one thread. A strip of rows goes to the same lines of the cache.
struct HeadRows {
    int head, begin, end;

    static int count(int rows, int heads) { return ceil_div(rows, STRIP) * heads; }
    HeadRows(int index, int rows, int heads)
        : head(index % heads), begin(index / heads * STRIP), end(begin + STRIP < rows ? begin + STRIP : rows) {}
};

// k and v are [rows, heads, D] with strided rows.
template <class E, class In> class WriteKVOp : public Op {
public:
    OpKind kind() const override { return OpKind::KV_WRITE; }
    WriteKVOp(const KVCache& cache, int layer, const In* k, int64_t k_stride, const In* v, int64_t v_stride)
        : cache_(cache), layer_(layer), k_(k), k_stride_(k_stride), v_(v), v_stride_(v_stride) {}

    void run(const Step& step, Member& member) override {
        const auto span = member.share(HeadRows::count(step.rows, cache_.heads));
        for (int index = span.begin; index < span.end; index++) {
            const HeadRows rows(index, step.rows, cache_.heads);
            const HeadWriter<E> writer(cache_, layer_, rows.head, member);
            const int offset = rows.head * cache_.head_dim;
            const int32_t* slots = cache_.slots(step);
            for (int row = rows.begin; row < rows.end; row++) {
                writer.key(slots[row], k_ + row * k_stride_ + offset);
                writer.value(slots[row], v_ + row * v_stride_ + offset);
            }
        }
    }

private:
    const KVCache& cache_;
    int layer_;
    const In* k_;
    int64_t k_stride_;
    const In* v_;
    int64_t v_stride_;
};

}  // namespace llmbox
