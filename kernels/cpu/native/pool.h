// A small thread pool: fork, barriers inside, join. The caller takes part as member 0.
//
// Workers are pinned, one to a core; the caller is not, because torch's own threads inherit its mask. Waiting
// spins for some 50 microseconds, which covers the gaps inside a step, and then sleeps in the kernel: an idle
// engine burns nothing. While other processes take the cores, fewer threads run (governor.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <thread>
#include <vector>

#include "governor.h"
#include "simd.h"
#include "tiles.h"

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

// Of the system's and of this thread's clock, in seconds.
inline double read_clock(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

class Pool;

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
    void barrier();
};

class Pool {
public:
    using Job = void (*)(Member&, void*);

    Pool() { members_.push_back(new Member(*this, 0)); }

    // From the next job on, up to `cores.size() + 1` threads; worker i runs on core cores[i].
    void resize(const std::vector<int>& cores) {
        std::lock_guard<std::mutex> lock(busy_);
        const int size = static_cast<int>(cores.size()) + 1;
        governor_ = Governor(size);
        while (static_cast<int>(members_.size()) < size) {
            const int index = static_cast<int>(members_.size());
            members_.push_back(new Member(*this, index));
            std::thread worker(&Pool::work, this, members_.back());
            pin(worker, cores[index - 1]);
            worker.detach();  // it sleeps until the process ends
        }
    }

    // How many would run the next job.
    int threads() {
        std::lock_guard<std::mutex> lock(busy_);
        return governor_.threads();
    }

    // One operation's scratch memory for all members: sized before the threads start, gone with the next one.
    Scratch& shared() { return shared_; }

    // `alone`: without waking the workers.
    void run(Job job, void* argument, bool alone = false) {
        std::lock_guard<std::mutex> lock(busy_);
        size_ = alone ? 1 : governor_.threads();
        members_[0]->size = size_;
        if (size_ == 1) {  // still timed: rests are counted in time at work
            const double began = read_clock(CLOCK_MONOTONIC);
            job(*members_[0], argument);
            members_[0]->tiles.release();
            governor_.report(read_clock(CLOCK_MONOTONIC) - began, 0, 0);
            return;
        }
        job_ = job;
        argument_ = argument;
        began_ = read_clock(CLOCK_MONOTONIC);
        pending_.store(size_ - 1, std::memory_order_relaxed);
        for (int i = 1; i < size_; i++) {
            members_[i]->size = size_;
            members_[i]->calls.fetch_add(1);
            members_[i]->calls.notify_one();
        }
        run_job(*members_[0]);
        for (int spins = 0; pending_.load(std::memory_order_acquire);)
            ++spins < SPINS ? relax() : std::this_thread::yield();
        double stolen = 0, worst = 0;
        for (int i = 0; i < size_; i++) {
            stolen += members_[i]->stolen;
            worst = std::max(worst, members_[i]->stolen);
        }
        governor_.report(read_clock(CLOCK_MONOTONIC) - began_, worst, (stolen - worst) / (size_ - 1));
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
    void work(Member* member) {
        for (int seen = 0;; seen++) {
            for (int spins = 0; member->calls.load(std::memory_order_acquire) == seen;)
                if (++spins < SPINS) relax();
                else member->calls.wait(seen, std::memory_order_acquire);
            run_job(*member);
            pending_.fetch_sub(1, std::memory_order_release);
        }
    }

    void run_job(Member& member) {
        const double before = read_clock(CLOCK_THREAD_CPUTIME_ID);
        job_(member, argument_);
        member.tiles.release();
        const double ran = read_clock(CLOCK_THREAD_CPUTIME_ID) - before;
        member.stolen = std::max(0., read_clock(CLOCK_MONOTONIC) - began_ - ran);
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
    Governor governor_{1};
    int size_ = 1;  // of the running job
    Job job_ = nullptr;
    void* argument_ = nullptr;
    double began_ = 0;
    alignas(64) std::atomic<int> pending_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

inline void Member::barrier() { pool.barrier(); }

}  // namespace llmbox
