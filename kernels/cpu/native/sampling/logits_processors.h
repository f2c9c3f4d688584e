// Logits processors: changes to a row before sampling, as engine/sampling/logits_processors.py: bias, then penalties, then
// banned ids. The row is changed in place and restored afterwards.
#pragma once

#include "sampling/logits.h"

namespace llmbox {

// Mirrored by `NativeDrawRow` in kernels/cpu/ffi.py. Ids lie in the row; those of one list differ, but for `forbidden`.
struct Edits {
    const int64_t* bias_ids;
    const float* biases;
    int64_t bias_count;
    const int64_t* counted_ids;
    const float* counts;  // in the output
    int64_t counted_count;
    double repetition, frequency, presence;  // used as float32
    const int64_t* forbidden;
    int64_t forbidden_count;
    const int64_t* allowed;  // ascending
    int64_t allowed_count;   // -1: all ids
};

class EditedRow {
public:
    EditedRow(const Logits& logits, const Edits& edits) : logits_(logits) {
        const auto repetition = static_cast<float>(edits.repetition), frequency = static_cast<float>(edits.frequency);
        const auto presence = static_cast<float>(edits.presence);
        for (int64_t i = 0; i < edits.bias_count; i++) {
            const float old = logits.x[edits.bias_ids[i]];
            set(edits.bias_ids[i], bounded(old + edits.biases[i], old));
        }
        for (int64_t i = 0; i < edits.counted_count; i++) {
            const float old = logits.x[edits.counted_ids[i]], count = edits.counts[i];
            float fresh = old > 0 ? old / repetition : old * repetition;
            fresh -= frequency * count;
            fresh -= count > 0 ? presence : 0.f;
            set(edits.counted_ids[i], bounded(fresh, old));
        }
        for (int64_t i = 0; i < edits.forbidden_count; i++) set(edits.forbidden[i], -__builtin_inff());
        for (const Change& change : changes_) {
            const int block = static_cast<int>(change.id / Logits::BLOCK);
            logits.find_maxima(block, block + 1);
        }
    }
    EditedRow(const EditedRow&) = delete;
    EditedRow& operator=(const EditedRow&) = delete;
    ~EditedRow() {
        for (auto change = changes_.rbegin(); change != changes_.rend(); ++change)
            logits_.x[change->id] = change->logit;
    }

private:
    struct Change {
        int64_t id;
        float logit;  // before
    };

    void set(int64_t id, float logit) {
        changes_.push_back({id, logits_.x[id]});
        logits_.x[id] = logit;
    }

    // A finite logit stays finite: an overflow must neither forbid a token nor look like a broken model.
    static float bounded(float fresh, float old) {
        if (!std::isfinite(old)) return old;
        const float largest = __FLT_MAX__;
        return fresh < -largest ? -largest : fresh > largest ? largest : fresh;
    }

    const Logits& logits_;
    std::vector<Change> changes_;
};

}  // namespace llmbox
