// LoRA adapters of experts: y += scale B (A x) for the copies of rows that an expert and an adapter have in common.
//
// Copies of one expert and one adapter that lie next to each other share their weights' way through the caches. A copy's
// numbers are summed as in linear/lora.h, whatever copies are beside it.
#pragma once

#include <vector>

#include "linear/lora.h"
#include "moe/moe_routing.h"

namespace llmbox {

// Tables hold an address for each slot, 0 where an adapter has nothing here. There are the addresses of `LoraWeights` of
// each expert, 0 where it has none, and the most ranks of all.
class ExpertAdapters {
public:
    // Before the threads start.
    void begin(const Step& step, const int64_t* gate_ups, const int64_t* downs, int experts) {
        widest_ = 0;
        for (int run = 0; gate_ups && run < step.adapter_runs; run++) {
            const int slot = step.adapter_slots[run];
            for (const int64_t* weights : {table(gate_ups, slot), table(downs, slot)})
                if (weights) widest_ = std::max(widest_, static_cast<int>(weights[experts]));
        }
        if (!widest_) return;
        slots_.assign(step.rows, -1);
        for (int run = 0; run < step.adapter_runs; run++)
            for (int entry = step.adapter_starts[run]; entry < step.adapter_starts[run + 1]; entry++)
                slots_[step.adapter_rows[entry]] = step.adapter_slots[run];
    }
    explicit operator bool() const { return widest_ > 0; }
    int widest() const { return widest_; }

    // Copies of rows with an adapter, once all have their places. Run by one thread.
    void place(int rows, int per_row, const ExpertRoutes& routes) {
        copies_.clear();
        blocks_.clear();
        order_.resize(routes.room(rows));
        for (int copy = 0; copy < routes.copies(rows); copy++)
            if (routes.place_of(copy) >= 0) order_[routes.place_of(copy)] = copy;
        for (const auto& run : routes.runs())
            for (int place = run.first; place < run.first + run.rows; place++) {
                const int copy = order_[place], slot = slots_[copy / per_row], at = static_cast<int>(copies_.size());
                if (slot < 0) continue;
                const bool goes_on = !blocks_.empty() && blocks_.back().expert == run.expert &&
                                     blocks_.back().slot == slot && at - blocks_.back().first < LORA_ROWS;
                if (!goes_on) blocks_.push_back({run.expert, slot, at, at});
                copies_.push_back({copy, place});
                blocks_.back().end = at + 1;
            }
    }

    // low = scale A x; x_of(copy, place) is where a copy's inputs begin, factor(copy) multiplies them.
    template <class T, class From, class Factor>
    void shrink(const int64_t* tables, From x_of, int inputs, float* low, Member& member, Factor factor) const {
        each_item(tables, member, rank_blocks_of, [&](const LoraWeights& w, int item, const Block& block) {
            for (int entry = block.first; entry < block.end; entry++) {
                float* to = low + static_cast<int64_t>(entry) * widest_;
                const T* x = x_of(copies_[entry].copy, copies_[entry].place);
                lora_shrink(w, item, x, inputs, to);
                const float by = factor(copies_[entry].copy);
                const int end = std::min(static_cast<int>(w.rank), (item + 1) * LORA_RANKS);
                for (int r = item * LORA_RANKS; by != 1.f && r < end; r++) to[r] *= by;
            }
        });
    }
    template <class T, class From>
    void shrink(const int64_t* tables, From x_of, int inputs, float* low, Member& member) const {
        shrink<T>(tables, x_of, inputs, low, member, [](int) { return 1.f; });
    }

    // y[place] += B low, in rows of `stride` numbers.
    template <class T> void expand(const int64_t* tables, const float* low, T* y, int stride, Member& member) const {
        const auto panels = [](const LoraWeights& w) { return panels_of(w); };
        each_item(tables, member, panels, [&](const LoraWeights& w, int item, const Block& block) {
            for (int entry = block.first; entry < block.end; entry++)
                lora_expand<T>(w, item, low + static_cast<int64_t>(entry) * widest_,
                               y + static_cast<size_t>(copies_[entry].place) * stride);
        });
    }

private:
    struct Copy {
        int copy, place;
    };
    struct Block {  // of `copies_`, all of one expert and one adapter
        int expert, slot, first, end;
    };

    static const int64_t* table(const int64_t* tables, int slot) { return reinterpret_cast<const int64_t*>(tables[slot]); }
    static const LoraWeights* of(const int64_t* tables, const Block& block) {
        const int64_t* weights = table(tables, block.slot);
        return weights ? reinterpret_cast<const LoraWeights*>(weights[block.expert]) : nullptr;
    }

    // Calls work(weights, item, block) for this member's share of all blocks.
    template <class Count, class Work> void each_item(const int64_t* tables, Member& member, Count count, Work work) const {
        int total = 0;
        for (const Block& block : blocks_)
            if (const LoraWeights* w = of(tables, block)) total += count(*w);
        const auto mine = member.share(total);
        int passed = 0;
        for (const Block& block : blocks_) {
            if (passed >= mine.end) break;
            const LoraWeights* w = of(tables, block);
            if (!w) continue;
            const int items = count(*w);
            for (int i = std::max(mine.begin - passed, 0); i < std::min(mine.end - passed, items); i++) work(*w, i, block);
            passed += items;
        }
    }

    int widest_ = 0;  // ranks of an adapter of the step; 0: no row has one here
    std::vector<int> slots_;  // of each row; -1: none
    std::vector<int> order_;  // copy at each place
    std::vector<Copy> copies_;
    std::vector<Block> blocks_;
};

}  // namespace llmbox
