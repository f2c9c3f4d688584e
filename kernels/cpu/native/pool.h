// A small thread pool: fork, barriers inside, join. The caller takes part as member 0.
//
// Workers are pinned, one to a core; the caller is not, because torch's own threads inherit its mask. Waiting
// spins for some 50 microseconds, which covers the gaps inside a step, and then sleeps in the kernel: an idle
// engine burns nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace llmbox {

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int SPINS = 4000;

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

// One thread's place in a running job.
struct Member {
    Pool& pool;
    int index;
    int size;
    Scratch scratch;
    Scratch spare;  // a second one, for what is called while the first is in use

    struct Span {
        int begin, end;
    };
    // This member's part of `count` equal pieces of work.
    Span share(int count) const {
        return {static_cast<int>(static_cast<int64_t>(count) * index / size),
                static_cast<int>(static_cast<int64_t>(count) * (index + 1) / size)};
    }
    void barrier();
};

class Pool {
public:
    using Job = void (*)(Member&, void*);

    Pool() { members_.push_back(new Member{*this, 0, 1, {}, {}}); }

    // From the next job on, `cores.size() + 1` threads; worker i runs on core cores[i].
    void resize(const std::vector<int>& cores) {
        std::lock_guard<std::mutex> lock(busy_);
        size_ = static_cast<int>(cores.size()) + 1;
        while (static_cast<int>(members_.size()) < size_) {
            int index = static_cast<int>(members_.size());
            members_.push_back(new Member{*this, index, size_, {}, {}});
            std::thread worker(&Pool::work, this, members_.back(), generation_.load());
            pin(worker, cores[index - 1]);
            worker.detach();  // it sleeps until the process ends
        }
    }

    int size() const { return size_; }

    // One operation's scratch memory for all members: sized before the threads start, gone with the next one.
    Scratch& shared() { return shared_; }

    void run(Job job, void* argument) {
        std::lock_guard<std::mutex> lock(busy_);
        for (int i = 0; i < size_; i++) members_[i]->size = size_;
        if (size_ > 1) {
            job_ = job;
            argument_ = argument;
            active_ = size_;
            // All workers count themselves out, also those that a smaller size leaves without work.
            pending_.store(static_cast<int>(members_.size()) - 1, std::memory_order_relaxed);
            generation_.fetch_add(1);
            generation_.notify_all();
        }
        job(*members_[0], argument);
        if (size_ > 1) {
            for (int spins = 0; pending_.load(std::memory_order_acquire);)
                ++spins < SPINS ? relax() : std::this_thread::yield();
        }
    }

    void barrier() {
        if (size_ == 1) return;
        uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        // Yielding lets a member whose core was taken away by another process come back.
        for (int spins = 0; round_.load(std::memory_order_acquire) == round;)
            ++spins < SPINS ? relax() : std::this_thread::yield();
    }

private:
    void work(Member* member, int seen) {
        for (;;) {
            for (int spins = 0; generation_.load(std::memory_order_acquire) == seen;)
                if (++spins < SPINS) relax();
                else generation_.wait(seen, std::memory_order_acquire);
            seen++;
            if (member->index < active_) job_(*member, argument_);
            pending_.fetch_sub(1, std::memory_order_release);
        }
    }

    static void pin([[maybe_unused]] std::thread& worker, [[maybe_unused]] int core) {
#if defined(__linux__)
        if (core < 0 || core >= CPU_SETSIZE) return;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core, &set);
        pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);  // a hint: failing changes nothing
#endif
    }

    std::mutex busy_;
    Scratch shared_;
    std::vector<Member*> members_;
    int size_ = 1;
    int active_ = 1;
    Job job_ = nullptr;
    void* argument_ = nullptr;
    alignas(64) std::atomic<int> generation_{0};
    alignas(64) std::atomic<int> pending_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

inline void Member::barrier() { pool.barrier(); }

}  // namespace llmbox
