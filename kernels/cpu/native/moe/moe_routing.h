// Routing: the experts of each row, and the places of their copies.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vector/simd.h"

namespace llmbox {

// The `count` largest of `size` numbers, the largest first and of equal ones the lowest.
inline void choose_largest(const float* from, int size, int count, int32_t* chosen) {
    for (int i = 0, found = 0; i < size; i++) {
        int place = found;
        if (found < count) found++;
        else if (from[i] > from[chosen[count - 1]]) place = count - 1;
        else continue;
        for (; place > 0 && from[i] > from[chosen[place - 1]]; place--) chosen[place] = chosen[place - 1];
        chosen[place] = i;
    }
}

// The `count` largest of `experts` logits, the largest first and of equal ones the lowest, with their shares of the softmax
// over all; `normalized`: shares that sum to one. `scratch` has room for `experts`. NaN among the logits makes shares NaN.
inline void choose_experts(
    const float* logits, int experts, int count, bool normalized, float* scratch, int32_t* chosen, float* shares) {
    choose_largest(logits, experts, count, chosen);
    const Floats most = splat(logits[chosen[0]]);
    for (int i = 0; i < experts; i += LANES)
        store(scratch + i, exp_negative(load(logits + i, experts - i) - most), experts - i);
    float total = 0, of_chosen = 0;
    for (int i = 0; i < experts; i++) total += scratch[i];
    for (int k = 0; k < count; k++) of_chosen += shares[k] = scratch[chosen[k]] / total;
    for (int k = 0; normalized && k < count; k++) shares[k] /= of_chosen;
}

// How a row chooses where its scores are no plain softmax: as `Routing` in kernels/op_types.py.
struct Routing {
    int32_t scoring;  // 0: a softmax, 1: sigmoids, 2: sigmoids, and logits choose
    int32_t groups, top_groups, group_best;
    float scale;
    float jitter;             // of SparseMixer, in place of a softmax over all; 0: none
    const float* correction;  // of the scores that choose; may be null
    const float* factors;     // of each expert's share, at last; may be null
    int32_t scales_inputs;    // shares multiply what experts read, not what they give

    bool plain() const { return !scoring && groups == 1 && !correction && jitter == 0; }
};

// Leaves -infinity in `scores` outside the best groups. `scratch` has room for two numbers an expert.
inline void keep_best_groups(float* scores, int experts, const Routing& by, float* scratch) {
    const int size = experts / by.groups;
    auto* kept = reinterpret_cast<int32_t*>(scratch + by.groups);
    for (int g = 0; g < by.groups; g++) {
        const float* group = scores + g * size;
        choose_largest(group, size, by.group_best, kept);
        float total = 0;
        for (int k = 0; k < by.group_best; k++) total += group[kept[k]];
        scratch[g] = total;
    }
    choose_largest(scratch, by.groups, by.top_groups, kept);
    for (int g = 0; g < by.groups; g++) {
        if (std::find(kept, kept + by.top_groups, g) != kept + by.top_groups) continue;
        std::fill_n(scores + g * size, size, -__builtin_inff());
    }
}

// As `choose_experts`, by another rule. `scratch` has room for four numbers an expert.
inline void choose_by_rule(const float* logits, int experts, int count, bool normalized, const Routing& by, float* scratch,
                           int32_t* chosen, float* shares) {
    float *scores = scratch, *chosen_by = scratch + experts;
    float most = logits[0];
    for (int i = 1; i < experts; i++) most = std::max(most, logits[i]);
    for (int i = 0; i < experts; i += LANES) {
        const Floats x = load(logits + i, experts - i), one = splat(1.f);
        const Floats e = exp_negative(by.scoring ? -abs(x) : x - splat(most));
        store(scores + i, by.scoring ? (x < splat(0.f) ? e : one) / (one + e) : e, experts - i);
    }
    float total = 0;
    for (int i = 0; !by.scoring && i < experts; i++) total += scores[i];
    for (int i = 0; i < experts; i++) {
        if (!by.scoring) scores[i] /= total;
        chosen_by[i] = by.scoring == 2 ? logits[i] : scores[i];
        if (by.correction) chosen_by[i] += by.correction[i];
    }
    if (by.groups > 1) keep_best_groups(chosen_by, experts, by, scratch + 2 * experts);
    choose_largest(chosen_by, experts, count, chosen);
    float of_chosen = 1e-20f;
    for (int k = 0; k < count; k++) of_chosen += shares[k] = scores[chosen[k]];
    for (int k = 0; k < count; k++) shares[k] *= normalized ? by.scale / of_chosen : by.scale;
}

// SparseMixer without noise: one expert after the other, with its share of a softmax over those of the rest whose logits are
// within 2 jitter of the best, relative to their size. `scratch` has room for an expert's number.
inline void choose_sparsely(const float* logits, int experts, int count, float jitter, float* scratch, int32_t* chosen,
                            float* shares) {
    choose_largest(logits, experts, count, chosen);
    for (int k = 0; k < count; k++) {
        const float most = logits[chosen[k]];
        for (int i = 0; i < experts; i++) {
            const float factor = std::max(std::abs(logits[i]), most);
            const bool out = (most - logits[i]) / factor > 2 * jitter || std::find(chosen, chosen + k, i) != chosen + k;
            scratch[i] = out ? -__builtin_inff() : logits[i] - most;
        }
        for (int i = 0; i < experts; i += LANES)
            store(scratch + i, exp_negative(load(scratch + i, experts - i)), experts - i);
        float total = 0;
        for (int i = 0; i < experts; i++) total += scratch[i];
        shares[k] = 1 / total;
    }
}

// Experts that are here, where ranks divide them: `places` has the number of each expert here, -1 for one that is not. `holders`
// has a bit for each rank that holds an expert, `loads` counts the rows that each rank computes; both are null where this
// rank computes all rows of what it holds.
struct HeldExperts {
    const int32_t *places, *holders;
    int64_t* loads;
    int rank, ranks;
};

// Of all rows of a step. Copies of rows are sorted by expert, and an expert's begin at a multiple of `align`. Rows choose among
// all `experts`; only copies that are computed here have places.
class ExpertRoutes {
public:
    // Rows of one expert that one rank computes in one go, and the rows that take as long as reading an expert's weights.
    static constexpr int BLOCK_ROWS = 16, READ_ROWS = 8;

    // `held`: number of experts that are here.
    ExpertRoutes(int experts, const HeldExperts& here, int held, int per_row, int align)
        : experts_(experts), here_(here), held_(held), per_row_(per_row), align_(align) {}

    struct Run {
        int expert, first, rows;  // number among those held; of copies
    };

    int copies(int rows) const { return rows * per_row_; }
    // Room that copies of so many rows take at most, with what is between experts.
    int room(int rows) const {
        const int most = rows * std::min(per_row_, held_);
        return round_up(most + (align_ - 1) * std::min(held_, most), align_);
    }

    // Before the threads start.
    void begin(int rows) {
        if (static_cast<size_t>(copies(rows)) <= chosen_.size()) return;
        chosen_.resize(copies(rows));
        shares_.resize(copies(rows));
        places_.resize(copies(rows));
        owners_.resize(copies(rows));
    }

    // `scratch` has room for four numbers an expert.
    void choose(int row, const float* logits, bool normalized, const Routing& by, float* scratch) {
        const size_t at = static_cast<size_t>(row) * per_row_;
        int32_t* chosen = chosen_.data() + at;
        float* shares = shares_.data() + at;
        if (by.jitter > 0) {
            choose_sparsely(logits, experts_, per_row_, by.jitter, scratch, chosen, shares);
        } else if (!by.plain()) {
            choose_by_rule(logits, experts_, per_row_, normalized, by, scratch, chosen, shares);
        } else {
            choose_experts(logits, experts_, per_row_, normalized, scratch, chosen, shares);
            for (int k = 0; by.scale != 1 && k < per_row_; k++) shares[k] *= by.scale;
        }
        for (int k = 0; by.factors && k < per_row_; k++) shares[k] *= by.factors[chosen[k]];
    }

    // Places of the copies once all rows are routed. Run by one thread. Adds the rows of each expert, held or not, to `load`,
    // which may be null.
    void place(int rows, int64_t* load) {
        const int count = copies(rows);
        next_.assign(experts_, 0);
        runs_.clear();
        for (int copy = 0; copy < count; copy++) next_[chosen_[copy]]++;
        for (int expert = 0; load && expert < experts_; expert++) load[expert] += next_[expert];
        if (here_.holders) {
            divide(count);
            next_.assign(experts_, 0);
            for (int copy = 0; copy < count; copy++) next_[chosen_[copy]] += owners_[copy] == here_.rank;
        }
        for (int expert = 0, first = 0; expert < experts_; expert++) {
            const int mine = next_[expert], number = here_.places[expert];
            if (number < 0) continue;
            next_[expert] = first;
            if (mine) runs_.push_back({number, first, mine});
            first += round_up(mine, align_);
        }
        for (int copy = 0; copy < count; copy++) {
            const int expert = chosen_[copy];
            const bool is_mine = here_.places[expert] >= 0 && (!here_.holders || owners_[copy] == here_.rank);
            places_[copy] = is_mine ? next_[expert]++ : -1;
        }
    }

    // Copy `k` of row `row` is row * per_row + k. -1: it is not computed here.
    int place_of(int copy) const { return places_[copy]; }
    int owner_of(int copy) const { return owners_[copy]; }  // the rank that computes it, where there are `holders`
    float share_of(int copy) const { return shares_[copy]; }
    const std::vector<Run>& runs() const { return runs_; }

private:
    static int only_rank(int32_t holders) { return (holders & (holders - 1)) ? -1 : __builtin_ctz(holders); }

    // The rank of each copy: all ranks find the same. Rows of an expert that several hold are dealt out in blocks, each to
    // the one with least to do so far. `next_` has the rows of each expert.
    void divide(int count) {
        cost_.assign(here_.ranks, 0);
        owned_.assign(experts_, -1);
        seen_.assign(experts_, 0);
        for (int expert = 0; expert < experts_; expert++) {
            if (!next_[expert]) continue;
            owned_[expert] = only_rank(here_.holders[expert]);
            if (owned_[expert] >= 0) cost_[owned_[expert]] += READ_ROWS + next_[expert];
        }
        for (int copy = 0; copy < count; copy++) {
            const int expert = chosen_[copy];
            const int32_t holders = here_.holders[expert];
            if (only_rank(holders) < 0 && seen_[expert]++ % BLOCK_ROWS == 0) {
                owned_[expert] = idlest(holders);
                cost_[owned_[expert]] += READ_ROWS + std::min(BLOCK_ROWS, next_[expert] - seen_[expert] + 1);
            }
            owners_[copy] = owned_[expert];
            if (here_.loads) here_.loads[owned_[expert]]++;
        }
    }

    int idlest(int32_t holders) const {
        int found = -1;
        for (int rank = 0; rank < here_.ranks; rank++)
            if ((holders >> rank & 1) && (found < 0 || cost_[rank] < cost_[found])) found = rank;
        return found;
    }

    const int experts_;
    const HeldExperts here_;
    const int held_, per_row_, align_;
    std::vector<int32_t> chosen_, places_, owners_, next_;
    std::vector<int32_t> cost_, owned_, seen_;  // of ranks; of experts: rank of the block under way, rows dealt out
    std::vector<float> shares_;
    std::vector<Run> runs_;  // of experts that have rows
};

}  // namespace llmbox
