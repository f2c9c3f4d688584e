// What threads bring while they wait for each other: prints "right", or what was expected.
#include "threads/command_buffer.h"
#include "threads/pool.cpp"

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

using namespace llmbox;

namespace {

constexpr int THREADS = 3;

void expect(bool holds, const char* what) {
    if (holds) return;
    puts(what);
    exit(0);
}

alignas(64) uint8_t weights[THREADS * Upcoming::MOST];

// Counts how often each thread asks for its weights, and whether it had run by then.
struct Reader : Op {
    bool has_weights;
    mutable int asked[THREADS] = {};
    int ran[THREADS] = {};
    bool asked_late = false;

    explicit Reader(bool has_weights) : has_weights(has_weights) {}
    void run(const Step&, Member& member) override { ran[member.index]++; }
    Upcoming upcoming(const Step&, const Member& member) const override {
        asked[member.index]++;
        if (ran[member.index]) const_cast<Reader*>(this)->asked_late = true;
        const uint8_t* at = weights + member.index * Upcoming::MOST;
        return has_weights ? Upcoming{at, at + Upcoming::MOST} : Upcoming{};
    }
};

void every_thread_asks_the_next_operation_once() {
    std::deque<Reader> readers;
    for (bool has_weights : {true, false, false, true, true, false}) readers.emplace_back(has_weights);
    std::vector<Op*> ops;
    for (Reader& reader : readers) ops.push_back(&reader);
    const Step step{};
    run_commands(pool(), {ops.data(), static_cast<int>(ops.size()), step});
    for (size_t i = 0; i < readers.size(); i++)
        for (int member = 0; member < THREADS; member++) {
            expect(readers[i].ran[member] == 1, "all threads run all operations once");
            expect(readers[i].asked[member] == (i > 0), "each is asked once what it will read, but for the first");
            expect(!readers[i].asked_late, "before it runs");
        }
}

void lines_are_requested_up_to_the_end() {
    Upcoming some{weights, weights + 600}, nothing;
    expect(some.bring() && some.bring() && some.bring() && !some.bring(), "some lines at a time");
    expect(!nothing.bring(), "nothing to bring");
    Upcoming all{weights, weights + Upcoming::MOST};
    all.begin();
    expect(all.at > weights && all.at < all.end && all.bring(), "a beginning of it");
}

// The one that comes last need not wait, so somebody has waited after a few tries.
void who_waits_brings() {
    static Upcoming upcoming[THREADS];
    for (int tries = 0; tries < 100000; tries++) {
        for (Upcoming& each : upcoming) each = {weights, weights + Upcoming::MOST};
        pool().run([](Member& member, void*) { member.barrier(upcoming[member.index]); }, nullptr);
        for (const Upcoming& each : upcoming)
            if (each.at > weights) return;
    }
    expect(false, "a thread that waits brings its weights");
}

}  // namespace

int main() {
    pool().resize({0, 1});
    lines_are_requested_up_to_the_end();
    every_thread_asks_the_next_operation_once();
    who_waits_brings();
    puts("right");
}
