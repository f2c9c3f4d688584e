// Samples a token for each row of logits, and ranks tokens for log-probabilities.
//
// A row is one thread's work from its maxima on, as it lies in that core's cache then. Rows that are fewer than threads
// have their maxima found by all of them first.
#pragma once

#include "sampling/sample_row.h"
#include "threads/command_buffer.h"

namespace llmbox {

// What operations on rows of logits share: their maxima.
class LogitsOp : public Op {
public:
    OpKind kind() const override { return OpKind::SAMPLING; }
    // Row i of the step is row places[i] of x, or row i where `places` is null.
    LogitsOp(float* x, int64_t x_stride, int width, const int64_t* places)
        : x_(x), x_stride_(x_stride), width_(width), places_(places) {}

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        pool.shared().take<float>(static_cast<size_t>(step.rows) * Logits::blocks(width_));
    }

    bool small(const Step& step) const override { return few(int64_t{step.rows} * width_); }

    void run(const Step& step, Member& member) override {
        const bool apart = step.rows < member.size;
        if (apart) {
            for (int row = 0; row < step.rows; row++) {
                const auto blocks = member.share(Logits::blocks(width_));
                logits(row, member).find_maxima(blocks.begin, blocks.end);
            }
            member.barrier();
        }
        for (int row = take(); row < step.rows; row = take()) {
            const Logits here = logits(row, member);
            if (!apart) here.find_maxima();
            work(row, here);
        }
    }

protected:
    virtual void work(int row, const Logits& logits) = 0;

private:
    Logits logits(int row, Member& member) const {
        float* maxima = member.pool.shared().get<float>() + static_cast<size_t>(row) * Logits::blocks(width_);
        return {x_ + (places_ ? places_[row] : row) * x_stride_, width_, maxima};
    }

    float* x_;
    int64_t x_stride_;
    int width_;
    const int64_t* places_;
};

// drawn[rows] of `how`[rows]. Logits are as they were when it is done.
class DrawOp : public LogitsOp {
public:
    // Largest logits: NaN, inf or -inf mean that the row has no valid id. Mirrored by `Backend.draw`.
    struct Drawn {
        double id;
        double raw_best, best;  // before and after the edits
    };

    DrawOp(float* x, int64_t x_stride, int width, const DrawRow* how, Drawn* drawn)
        : LogitsOp(x, x_stride, width, nullptr), how_(how), drawn_(drawn) {}

protected:
    void work(int row, const Logits& logits) override {
        const DrawRow& how = how_[row];
        Drawn& drawn = drawn_[row];
        drawn = {0, logits.best(), 0};
        const EditedRow edited(logits, how.edits);
        if (how.edits.allowed_count >= 0) return draw_allowed(logits, how, drawn);
        draw(logits, how, logits.width, drawn);
    }

private:
    static void draw(const Logits& logits, const DrawRow& how, int vocabulary, Drawn& drawn) {
        const float best = logits.best();
        drawn.best = best;
        if (std::isfinite(best)) drawn.id = Draw(logits, how, best, vocabulary).id();
    }

    // From a row of the allowed ids alone.
    static void draw_allowed(const Logits& logits, const DrawRow& how, Drawn& drawn) {
        const int count = static_cast<int>(how.edits.allowed_count);
        drawn.best = -__builtin_inff();
        if (count == 0) return;
        std::vector<float> x, maxima(Logits::blocks(count));
        for (int i = 0; i < count; i++) x.push_back(logits.x[how.edits.allowed[i]]);
        const Logits row{x.data(), count, maxima.data()};
        row.find_maxima();
        draw(row, how, logits.width, drawn);
        drawn.id = static_cast<double>(how.edits.allowed[static_cast<int>(drawn.id)]);
    }

    const DrawRow* how_;
    Drawn* drawn_;
};

// Of each row: told[rows], and its `count` best ids in order, leaders[rows, count] and their logits.
class RankOp : public LogitsOp {
public:
    // Mirrored by `Backend.rank`.
    struct Told {
        double best;   // largest logit; where it is not finite, nothing else is told
        double total;  // of weights at temperature 1
        double logit;  // of the chosen id
        double rank;   // 1 for the best
    };

    // Of `chosen`[rows]. At most `width` leaders.
    RankOp(float* x, int64_t x_stride, int width, const int64_t* places, const int64_t* chosen, int count,
           Told* told, int64_t* leaders, float* leader_logits)
        : LogitsOp(x, x_stride, width, places),
          chosen_(chosen),
          count_(count),
          told_(told),
          leaders_(leaders),
          leader_logits_(leader_logits) {}

protected:
    void work(int row, const Logits& logits) override {
        const int chosen = static_cast<int>(chosen_[row]);
        const float best = logits.best();
        told_[row] = {best, 0, logits.x[chosen], 0};
        if (!std::isfinite(best)) return;
        DrawRow plain{};
        plain.temperature = 1;
        told_[row].total = static_cast<double>(Draw(logits, plain, best, logits.width).total());
        told_[row].rank = logits.ahead_of(chosen) + 1;
        if (count_ == 0) return;
        size_t at = static_cast<size_t>(row) * count_;
        for (const RankKey key : logits.ranked(count_, -__builtin_inff())) {
            leaders_[at] = key_id(key);
            leader_logits_[at++] = key_logit(key);
        }
    }

private:
    const int64_t* chosen_;
    int count_;
    Told* told_;
    int64_t* leaders_;
    float* leader_logits_;
};

}  // namespace llmbox
