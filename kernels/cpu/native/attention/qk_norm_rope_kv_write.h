// QK-norm, RoPE and KV write in one pass over the rows of the qkv linear.
#pragma once

#include "elementwise.h"
#include "attention/kv_cache.h"

namespace llmbox {

// x is [rows, H + 2 G heads, D] with strided rows: queries, keys, values. Queries and keys are normed (where
// `norm` is given, [H + G, D]) and RoPE-rotated in place, keys and values written to the cache. In between numbers are
// rounded as if these were operations of their own. `table`: which of the step's angles.
template <class E, class T, class W> class HeadsOp : public Op {
public:
    OpKind kind() const override { return OpKind::KV_WRITE; }
    HeadsOp(const KVCache& cache, int layer, T* x, int64_t x_stride, int heads, const W* norm, float eps, int table)
        : cache_(cache), layer_(layer), x_(x), x_stride_(x_stride), heads_(heads), norm_(norm), eps_(eps), table_(table) {}

    void run(const Step& step, Member& member) override {
        const auto span = member.share(HeadRows::count(step.rows, heads_));
        for (int index = span.begin; index < span.end; index++) run_rows(step, {index, step.rows, heads_}, member);
    }

private:
    void run_rows(const Step& step, const HeadRows& rows, Member& member) const {
        const int width = cache_.head_dim, first_key = heads_ - 2 * cache_.heads, first_value = heads_ - cache_.heads;
        const bool is_value = rows.head >= first_value, is_key = rows.head >= first_key && !is_value;
        const int kv_head = rows.head - (is_value ? first_value : first_key);
        const int32_t* slots = cache_.slots(step);
        const HeadWriter<E> writer(cache_, layer_, kv_head, member);
        for (int row = rows.begin; row < rows.end; row++) {
            T* x = x_ + row * x_stride_ + rows.head * width;
            if (is_value) {
                writer.value(slots[row], x);
                continue;
            }
            const int64_t angles = step.angles(table_, row);
            if (norm_) norm_row(x, norm_ + rows.head * width, x, width, eps_);
            rotate_row(x, step.cos + angles, step.sin + angles, width);
            if (is_key) writer.key(slots[row], x);
        }
    }

    const KVCache& cache_;
    int layer_;
    T* x_;
    int64_t x_stride_;
    int heads_;
    const W* norm_;
    float eps_;
    int table_;
};

}  // namespace llmbox
