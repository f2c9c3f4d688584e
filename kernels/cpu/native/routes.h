// Which experts rows go through, and where their copies lie for them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace llmbox {

// The `count` largest of `experts` logits, the largest first and of equal ones the lowest, with their shares of the softmax
// over all; `normalised`: shares that sum to one. `scratch` has room for `experts`. NaN among the logits makes shares NaN.
inline void choose_experts(
    const float* logits, int experts, int count, bool normalised, float* scratch, int32_t* chosen, float* shares) {
    for (int i = 0, found = 0; i < experts; i++) {
        int place = found;
        if (found < count) found++;
        else if (logits[i] > logits[chosen[count - 1]]) place = count - 1;
        else continue;
        for (; place > 0 && logits[i] > logits[chosen[place - 1]]; place--) chosen[place] = chosen[place - 1];
        chosen[place] = i;
    }
    const Floats most = splat(logits[chosen[0]]);
    for (int i = 0; i < experts; i += LANES)
        store(scratch + i, exp_negative(load(logits + i, experts - i) - most), experts - i);
    float total = 0, of_chosen = 0;
    for (int i = 0; i < experts; i++) total += scratch[i];
    for (int k = 0; k < count; k++) of_chosen += shares[k] = scratch[chosen[k]] / total;
    for (int k = 0; normalised && k < count; k++) shares[k] /= of_chosen;
}

// Of all rows of a step. Copies of rows are sorted by expert, and an expert's begin at a multiple of `align`.
class Routes {
public:
    Routes(int experts, int per_row, int align) : experts_(experts), per_row_(per_row), align_(align) {}

    struct Run {
        int expert, first, rows;  // of copies
    };

    int copies(int rows) const { return rows * per_row_; }
    // Room that copies of so many rows take at most, with what is between experts.
    int room(int rows) const {
        return round_up(copies(rows) + (align_ - 1) * std::min(experts_, copies(rows)), align_);
    }

    // Before the threads start.
    void begin(int rows) {
        if (static_cast<size_t>(copies(rows)) <= chosen_.size()) return;
        chosen_.resize(copies(rows));
        shares_.resize(copies(rows));
        places_.resize(copies(rows));
    }

    void choose(int row, const float* logits, bool normalised, float* scratch) {
        const size_t at = static_cast<size_t>(row) * per_row_;
        choose_experts(logits, experts_, per_row_, normalised, scratch, chosen_.data() + at, shares_.data() + at);
    }

    // All rows have chosen: who lies where. By one thread.
    void place(int rows) {
        next_.assign(experts_, 0);
        runs_.clear();
        for (int copy = 0; copy < copies(rows); copy++) next_[chosen_[copy]]++;
        for (int expert = 0, first = 0; expert < experts_; expert++) {
            const int count = next_[expert];
            next_[expert] = first;
            if (count) runs_.push_back({expert, first, count});
            first += round_up(count, align_);
        }
        for (int copy = 0; copy < copies(rows); copy++) places_[copy] = next_[chosen_[copy]]++;
    }

    // Copy `k` of row `row` is row * per_row + k.
    int place_of(int copy) const { return places_[copy]; }
    float share_of(int copy) const { return shares_[copy]; }
    const std::vector<Run>& runs() const { return runs_; }

private:
    const int experts_, per_row_, align_;
    std::vector<int32_t> chosen_, places_, next_;
    std::vector<float> shares_;
    std::vector<Run> runs_;  // of experts that have rows
};

}  // namespace llmbox
