// The most likely id of each row of logits.
#pragma once

#include <cmath>

#include "threads/command_buffer.h"

namespace llmbox {

// best[rows], ids[rows]: each row's largest number and where it stands first. NaN anywhere in a row makes it NaN.
class ArgmaxOp : public Op {
public:
    OpKind kind() const override { return OpKind::SAMPLING; }
    ArgmaxOp(const float* x, int64_t x_stride, int width, float* best, int64_t* ids)
        : x_(x), x_stride_(x_stride), width_(width), pieces_(ceil_div(width, PIECE)), best_(best), ids_(ids) {}

    void prepare(const Step& step, Pool& pool) override {
        Op::prepare(step, pool);
        pool.shared().take<float>(static_cast<size_t>(step.rows) * pieces_);
    }

    // Pieces of rows, so that a single row is shared too; then each row's pieces, in order.
    void run(const Step& step, Member& member) override {
        float* largest = member.pool.shared().get<float>();
        const auto pieces = member.share(step.rows * pieces_);
        for (int i = pieces.begin; i < pieces.end; i++) largest[i] = find(piece(i / pieces_, i % pieces_));
        member.barrier();
        const auto rows = member.share(step.rows);
        for (int row = rows.begin; row < rows.end; row++) {
            const float* of_row = largest + static_cast<size_t>(row) * pieces_;
            int best = 0;
            for (int i = 1; i < pieces_ && !std::isnan(of_row[best]); i++)
                if (of_row[i] > of_row[best] || std::isnan(of_row[i])) best = i;
            best_[row] = of_row[best];
            ids_[row] = best * PIECE + place(piece(row, best), of_row[best]);
        }
    }

private:
    static constexpr int PIECE = 8192;

    struct Piece {
        const float* x;
        int count;
    };

    Piece piece(int row, int index) const {
        const int first = index * PIECE;
        return {x_ + row * x_stride_ + first, width_ - first < PIECE ? width_ - first : PIECE};
    }

    static float find(const Piece& piece) {
        Floats most = splat(-__builtin_inff()), odd = splat(0.f);
        for (int i = 0; i + LANES <= piece.count; i += LANES) {
            const Floats v = load(piece.x + i);
            most = max(v, most);
            odd += v - v;  // NaN from NaN and from infinity, else 0
        }
        float best = max(most);
        bool strange = sum(odd) != 0.f;
        for (int i = piece.count / LANES * LANES; i < piece.count; i++) {
            best = piece.x[i] > best ? piece.x[i] : best;
            strange = strange || std::isnan(piece.x[i]);
        }
        for (int i = 0; strange && i < piece.count; i++)
            if (std::isnan(piece.x[i])) return piece.x[i];
        return best;
    }

    // Where `best` stands first.
    static int place(const Piece& piece, float best) {
        int i = 0;
        while (i < piece.count - 1 && piece.x[i] != best && !(std::isnan(piece.x[i]) && std::isnan(best))) i++;
        return i;
    }

    const float* x_;
    int64_t x_stride_;
    int width_, pieces_;
    float* best_;
    int64_t* ids_;
};

}  // namespace llmbox
