// Samples one id of a row, bit by bit as kernels/reference/sampling.py: min-p, then top-k, then top-p over what those leave;
// among what is left by inverting the cumulative weights, in the order of ids where nothing needs a ranking, best first
// otherwise. Equal logits are ordered by lowest id.
#pragma once

#include "sampling/integer_softmax.h"
#include "sampling/logits_processors.h"
#include "sampling/philox.h"

namespace llmbox {

// Sampling parameters of a row. Mirrored by `NativeDrawRow` in kernels/cpu/ffi.py.
struct DrawRow {
    double temperature;  // below 1e-5: greedy
    double top_p, min_p;
    int64_t top_k;  // 0, or the whole row and more, cuts nothing
    uint64_t seed, position;
    Edits edits;
};

class Draw {
public:
    // `best`: the largest logit, finite. `vocabulary`: what top-k counts as the whole row.
    Draw(const Logits& logits, const DrawRow& row, float best, int vocabulary)
        : logits_(logits),
          row_(row),
          vocabulary_(vocabulary),
          best_(best),
          temperature_(static_cast<float>(row.temperature)),
          weights_(best, temperature_, static_cast<int64_t>(row.min_p * static_cast<double>(WEIGHT_ONE))) {}

    int id() const {
        if (row_.temperature < 1e-5) return logits_.find(best_);
        if (row_.top_k > 0 && row_.top_k < vocabulary_) return among_k();
        return row_.top_p < 1 ? from_nucleus() : from_all();
    }

    // Of the weights of all ids.
    int64_t total() const { return sum_of(piece_totals()); }

private:
    static constexpr int PIECE = IntegerSoftmax::AT_ONCE;
    static constexpr int CANDIDATES = 256;
    static constexpr int BINS = 2048;
    static constexpr float WEIGHTLESS = -28.f;  // depth; 2^-40 = e^-27.7

    int64_t point_in(int64_t total) const {
        const double noise = uniform(row_.seed, row_.position);
        return std::min(static_cast<int64_t>(noise * static_cast<double>(total)), total - 1);
    }

    // ---------------------------------------------------------------- in the order of ids

    // Sums of weights, a piece of the row each.
    std::vector<int64_t> piece_totals() const {
        std::vector<int64_t> totals;
        for (int begin = 0; begin < logits_.width; begin += PIECE) {
            int64_t total = 0;
            for (int at = begin; at < std::min(begin + PIECE, logits_.width);) {
                const int end = weighty_end(at, std::min(begin + PIECE, logits_.width));
                total += weights_.total(logits_.x + at, end - at);
                at = end + Logits::BLOCK;
            }
            totals.push_back(total);
        }
        return totals;
    }

    // Where the blocks from `at` on cease to weigh anything.
    int weighty_end(int at, int end) const {
        while (at < end && weighs(at / Logits::BLOCK)) at += Logits::BLOCK;
        return std::min(at, end);
    }
    bool weighs(int block) const { return (logits_.maxima[block] - best_) / temperature_ > WEIGHTLESS; }

    int from_all() const {
        const std::vector<int64_t> totals = piece_totals();
        int64_t point = point_in(sum_of(totals));
        size_t piece = 0;
        while (piece + 1 < totals.size() && totals[piece] <= point) point -= totals[piece++];
        const int begin = static_cast<int>(piece) * PIECE, count = std::min(PIECE, logits_.width - begin);
        int64_t weights[PIECE];
        weights_.all(logits_.x + begin, count, weights);
        return begin + invert(weights, count, point);
    }

    // ---------------------------------------------------------------- best first

    int among_k() const {
        const auto keys = logits_.ranked(static_cast<int>(row_.top_k), best_ + 1.01f * WEIGHTLESS * temperature_);
        const auto weights = weights_of(keys);
        return key_id(keys[pick(weights, limit_of(sum_of(weights)))]);
    }

    int from_nucleus() const {
        const double limit = limit_of(total());
        const auto keys = logits_.ranked(CANDIDATES, -__builtin_inff());
        const auto weights = weights_of(keys);
        const bool covered = static_cast<double>(sum_of(weights)) >= limit;
        return covered ? key_id(keys[pick(weights, limit)]) : from_bins(limit);
    }

    double limit_of(int64_t total) const { return row_.top_p * static_cast<double>(total); }

    // Which of the ranked: as long as what comes before is below the limit, they are kept.
    size_t pick(const std::vector<int64_t>& weights, double limit) const {
        int64_t before = 0;
        size_t kept = 0;
        while (kept < weights.size() && static_cast<double>(before) < limit) before += weights[kept++];
        return invert(weights.data(), static_cast<int>(kept), point_in(before));
    }

    std::vector<int64_t> weights_of(const std::vector<RankKey>& keys) const {
        std::vector<float> logits;
        for (const RankKey key : keys) logits.push_back(key_logit(key));
        std::vector<int64_t> weights(keys.size());
        weights_.all(logits.data(), static_cast<int>(keys.size()), weights.data());
        return weights;
    }

    // ---------------------------------------------------------------- a nucleus of many, without sorting the row

    // Ids fall into bins by depth. Only two bins need their order known: where the nucleus ends and where the point is.
    int from_bins(double limit) const {
        std::vector<int64_t> totals = bin_totals();
        int64_t before = 0;
        const int edge = find_bin(totals, before, [=](int64_t until) { return static_cast<double>(until) >= limit; });
        int64_t kept = before;
        for (const int64_t weight : weights_of(ranked_bin(edge))) {
            if (static_cast<double>(kept) >= limit) break;
            kept += weight;
        }
        const int64_t point = point_in(kept);
        const int place = find_bin(totals, before, [=](int64_t until) { return until > point; });
        const auto keys = ranked_bin(place);
        const auto weights = weights_of(keys);
        return key_id(keys[invert(weights.data(), static_cast<int>(weights.size()), point - before)]);
    }

    // The first bin by whose end `enough` is reached; `before`: what lies before it.
    template <class Enough> static int find_bin(const std::vector<int64_t>& totals, int64_t& before, Enough enough) {
        int bin = 0;
        before = 0;
        while (bin < BINS - 1 && !enough(before + totals[bin])) before += totals[bin++];
        return bin;
    }

    std::vector<int64_t> bin_totals() const {
        std::vector<int64_t> totals(BINS);
        for (int i = 0; i < logits_.width; i += LANES) {
            // Beyond the end nothing weighs anything.
            const Floats depth = weights_.depth(load_logits(logits_.x + i, logits_.width - i));
            int32_t bins[LANES], high[LANES], low[LANES];
            store_as(bins, bins_of(depth));
            IntegerSoftmax::store(high, low, weights_.halves(depth));
            UNROLL for (int lane = 0; lane < LANES; lane++)
                totals[bins[lane]] += IntegerSoftmax::join(high[lane], low[lane]);
        }
        return totals;
    }

    // Each id of a bin is likelier than any of the next, equal logits share one.
    static Ints bins_of(Floats depth) {
        const Floats bins = depth * splat((BINS - 1) / WEIGHTLESS);
        return __builtin_convertvector(bins < BINS - 1.f ? bins : splat(BINS - 1.f), Ints);
    }

    std::vector<RankKey> ranked_bin(int bin) const {
        std::vector<RankKey> keys;
        for (int block = 0; block < logits_.blocks(); block++) {
            if (bins_of(weights_.depth(splat(logits_.maxima[block])))[0] > bin) continue;
            for (int i = logits_.begin(block); i < logits_.end(block); i += LANES) {
                const int count = std::min(LANES, logits_.width - i);
                int32_t bins[LANES];
                store_as(bins, bins_of(weights_.depth(load_logits(logits_.x + i, count))));
                for (int lane = 0; lane < count; lane++)
                    if (bins[lane] == bin) keys.push_back(rank_key(logits_.x[i + lane], i + lane));
            }
        }
        if (!std::is_sorted(keys.begin(), keys.end())) std::sort(keys.begin(), keys.end());
        return keys;
    }

    // ----------------------------------------------------------------

    // Where the cumulative weight first exceeds the point.
    static int invert(const int64_t* weights, int count, int64_t point) {
        int i = 0;
        while (i < count - 1 && weights[i] <= point) point -= weights[i++];
        return i;
    }

    static int64_t sum_of(const std::vector<int64_t>& numbers) {
        int64_t sum = 0;
        for (const int64_t number : numbers) sum += number;
        return sum;
    }

    const Logits& logits_;
    const DrawRow& row_;
    int vocabulary_;
    float best_, temperature_;
    IntegerSoftmax weights_;
};

}  // namespace llmbox
