// The threads of pool.h: made once, woken for each job.
#include "threads/pool.h"

#include <ctime>
#include <thread>

#include <sched.h>

namespace llmbox {

namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr int SPINS = 4000;

// Yielding lets a member whose core was taken away by another process come back.
inline void relax_or_yield(int& spins) {
    if (++spins < SPINS) relax();
    else sched_yield();
}

// Of the system's and of this thread's clock, in seconds.
double read_clock(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

class Lock {
public:
    explicit Lock(pthread_mutex_t& mutex) : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
    ~Lock() { pthread_mutex_unlock(&mutex_); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

private:
    pthread_mutex_t& mutex_;
};

void pin([[maybe_unused]] std::thread& worker, [[maybe_unused]] int core) {
#if defined(__linux__)
    if (core < 0 || core >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);  // a hint: failing changes nothing
#endif
}

}  // namespace

// Never destroyed: its sleeping workers outlive static destructors.
Pool& pool() {
    static Pool& pool = *new Pool;
    return pool;
}

void Pool::resize(const std::vector<int>& cores) {
    const Lock lock(busy_);
    const int size = static_cast<int>(cores.size()) + 1;
    throttle_ = ThreadThrottle(size);
    while (static_cast<int>(members_.size()) < size) {
        const int index = static_cast<int>(members_.size());
        members_.push_back(new Member(*this, index));
        std::thread worker(&Pool::work, this, members_.back());
        pin(worker, cores[index - 1]);
        worker.detach();  // it sleeps until the process ends
    }
}

int Pool::threads() {
    const Lock lock(busy_);
    return throttle_.threads();
}

void Pool::run(Job job, void* argument, bool alone) {
    const Lock lock(busy_);
    size_ = alone ? 1 : throttle_.threads();
    members_[0]->size = size_;
    if (size_ == 1) {  // still timed: rests are counted in time at work
        const double began = read_clock(CLOCK_MONOTONIC);
        job(*members_[0], argument);
        members_[0]->tiles.release();
        throttle_.report(read_clock(CLOCK_MONOTONIC) - began, 0, 0);
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
    for (int spins = 0; pending_.load(std::memory_order_acquire);) relax_or_yield(spins);
    double stolen = 0, worst = 0;
    for (int i = 0; i < size_; i++) {
        stolen += members_[i]->stolen;
        worst = std::max(worst, members_[i]->stolen);
    }
    throttle_.report(read_clock(CLOCK_MONOTONIC) - began_, worst, (stolen - worst) / (size_ - 1));
}

void Pool::barrier(Upcoming& upcoming) {
    if (size_ == 1) return;
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;)
        if (!upcoming.bring()) relax_or_yield(spins);
}

void Pool::work(Member* member) {
    for (int seen = 0;; seen++) {
        for (int spins = 0; member->calls.load(std::memory_order_acquire) == seen;)
            if (++spins < SPINS) relax();
            else member->calls.wait(seen, std::memory_order_acquire);
        run_job(*member);
        pending_.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::run_job(Member& member) {
    const double before = read_clock(CLOCK_THREAD_CPUTIME_ID);
    job_(member, argument_);
    member.tiles.release();
    const double ran = read_clock(CLOCK_THREAD_CPUTIME_ID) - before;
    member.stolen = std::max(0., read_clock(CLOCK_MONOTONIC) - began_ - ran);
}

}  // namespace llmbox
