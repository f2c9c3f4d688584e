// Assignment of an operation's work: one run of neighboring items for each thread.
//
// Items that lie side by side in memory are best read by one thread: what it brings ahead is what it needs next. A
// thread that is done takes single items from the end of the longest run that is left, so one that loses its core for
// a while does less.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace llmbox {

class WorkPartition {
public:
    // Before the threads start.
    void deal(int items, int threads) {
        if (threads > static_cast<int>(runs_.size())) runs_ = std::vector<Run>(threads);
        threads_ = threads;
        for (int i = 0; i < threads; i++) runs_[i].left.store(pack(part(items, i), part(items, i + 1)), RELAXED);
    }

    // The next item of its run, before it takes any.
    int first(int member) const { return member < threads_ ? begin(runs_[member].left.load(RELAXED)) : 0; }

    // The next item of thread `member`, -1 if none is left.
    int take(int member) {
        if (member < threads_) {
            auto& own = runs_[member].left;
            for (uint64_t left = own.load(RELAXED); begin(left) < end(left);)
                if (own.compare_exchange_weak(left, pack(begin(left) + 1, end(left)), RELAXED)) return begin(left);
        }
        for (int run = find_longest(); length(run) > 0; run = find_longest()) {
            uint64_t left = runs_[run].left.load(RELAXED);
            if (begin(left) < end(left) &&
                runs_[run].left.compare_exchange_weak(left, pack(begin(left), end(left) - 1), RELAXED))
                return end(left) - 1;
        }
        return -1;
    }

private:
    // begin .. end - 1 in one word, so that both ends move together.
    struct alignas(64) Run {
        std::atomic<uint64_t> left{0};
    };
    static constexpr auto RELAXED = std::memory_order_relaxed;  // items are handed out; barriers hand over data
    static uint64_t pack(int begin, int end) { return static_cast<uint64_t>(begin) << 32 | static_cast<uint32_t>(end); }
    static int begin(uint64_t left) { return static_cast<int>(left >> 32); }
    static int end(uint64_t left) { return static_cast<int>(left & 0xffffffff); }

    int part(int items, int i) const { return static_cast<int>(static_cast<int64_t>(items) * i / threads_); }
    int length(int run) const {
        const uint64_t left = runs_[run].left.load(RELAXED);
        return end(left) - begin(left);
    }
    int find_longest() const {
        int longest = 0;
        for (int i = 1; i < threads_; i++)
            if (length(i) > length(longest)) longest = i;
        return longest;
    }

    std::vector<Run> runs_;
    int threads_ = 0;
};

}  // namespace llmbox
