// A small thread pool: fork, barriers inside, join. The caller takes part as member 0.
//
// Workers are pinned, one to a core; the caller is not, because torch's own threads inherit its mask. Waiting
// spins for some 50 microseconds, which covers the gaps inside a step, and then sleeps in the kernel: an idle
// engine burns nothing. While other processes take the cores, fewer threads run (thread_throttle.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <pthread.h>

#include "threads/thread_throttle.h"
#include "vector/amx.h"
#include "vector/simd.h"

namespace llmbox {

// Memory that grows and is reused; contents are lost when it grows.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { free(memory_); }

    template <class T> T* take(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            free(memory_);
            memory_ = aligned_alloc(64, bytes);
            if (!memory_) abort();
            size_ = bytes;
        }
        return static_cast<T*>(memory_);
    }
    template <class T> T* get() const { return static_cast<T*>(memory_); }

private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

class Pool;

// Weights that a thread reads soon. While it waits for others it brings them into its L2 cache.
struct Upcoming {
    static constexpr size_t MOST = 128 << 10;  // bytes: a small part of that cache

    const uint8_t *at = nullptr, *end = nullptr;

    // Requests some lines. False if none is left.
    bool bring() {
        if (at >= end) return false;
        for (const uint8_t* to = at + 256; at < to; at += 64) prefetch_to_l2(at);
        return true;
    }
    // About as many as can be under way at once.
    void begin() {
        for (int i = 0; i < 8; i++) bring();
    }
};

// One thread's place in a running job.
struct Member {
    Pool& pool;
    int index;
    int size;
    Scratch scratch;
    Scratch spare;  // a second one, for what is called while the first is in use
    Tiles tiles;    // in use during a job alone
    double stolen;  // seconds of the last job in which the thread did not run
    alignas(64) std::atomic<int> calls{0};  // jobs this thread was woken for

    Member(Pool& pool, int index) : pool(pool), index(index), size(1), stolen(0) {}

    struct Span {
        int begin, end;
    };
    // This member's part of `count` equal pieces of work.
    Span share(int count) const {
        return {static_cast<int>(static_cast<int64_t>(count) * index / size),
                static_cast<int>(static_cast<int64_t>(count) * (index + 1) / size)};
    }
    inline void barrier();
    inline void barrier(Upcoming& upcoming);
};

class Pool {
public:
    using Job = void (*)(Member&, void*);

    Pool() { members_.push_back(new Member(*this, 0)); }

    // From the next job on, up to `cores.size() + 1` threads; worker i runs on core cores[i].
    void resize(const std::vector<int>& cores);

    // How many would run the next job.
    int threads();

    // One operation's scratch memory for all members: sized before the threads start, gone with the next one.
    Scratch& shared() { return shared_; }

    // `alone`: without waking the workers.
    void run(Job job, void* argument, bool alone = false);

    void barrier(Upcoming& upcoming);

private:
    void work(Member* member);
    void run_job(Member& member);

    pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER;
    Scratch shared_;
    std::vector<Member*> members_;
    ThreadThrottle throttle_{1};
    int size_ = 1;  // of the running job
    Job job_ = nullptr;
    void* argument_ = nullptr;
    double began_ = 0;
    alignas(64) std::atomic<int> pending_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

inline void Member::barrier(Upcoming& upcoming) { pool.barrier(upcoming); }
inline void Member::barrier() {
    Upcoming nothing;
    pool.barrier(nothing);
}

// The one of this library.
Pool& pool();

}  // namespace llmbox
