// A step as a list of operations: recorded once, run in one call.
//
// Operations hold pointers into buffers that stay where they are; what changes from step to step is in `Step`.
#pragma once

#include <atomic>
#include <cstdint>

#include "threads/op_profile.h"
#include "threads/pool.h"

namespace llmbox {

// Inputs of a step (`BatchLayout` and RoPE tables) as pointers. Mirrored by `Step` in kernels/cpu/ffi.py.
struct Step {
    int32_t rows;
    int32_t sequences;
    int32_t block_size;
    int32_t table_width;
    int32_t angle_width;           // of a row of cos and sin; narrower heads read its first numbers
    const int64_t* ids;            // [rows]
    const float* cos;              // [tables, rows, angle_width]
    const float* sin;              // [tables, rows, angle_width]
    const int32_t* query_starts;   // [sequences + 1]
    const int32_t* contexts;       // [sequences]
    const int32_t* block_tables;   // [sequences, table_width]
    const int32_t* slots;          // [rows]
    const int32_t* window_tables;  // as these two, of caches of sliding-window layers
    const int32_t* window_slots;
    const int32_t* state_slots;    // [sequences]; these four only for models with recurrent layers
    const int32_t* save_starts;    // [sequences + 1]
    const int32_t* save_rows;      // [save_starts[sequences]]
    const int32_t* save_slots;     // as many
    const int32_t* adapter_rows;   // [adapter_starts[adapter_runs]], rows by adapter; these three only with LoRA
    const int32_t* adapter_starts; // [adapter_runs + 1]
    const int32_t* adapter_slots;  // [adapter_runs]
    int32_t adapter_runs;
    const int32_t* spans;          // [sequences]; only with pictures whose rows see each other: see `BatchLayout`

    // Where a row's cos and sin begin.
    int64_t angles(int table, int row) const { return (static_cast<int64_t>(table) * rows + row) * angle_width; }
};

// All threads call `run`; the list puts a barrier behind it. No operation may let the value of a row depend on
// `step.rows`, on the thread, or on where its work was cut.
class Op {
public:
    virtual ~Op() = default;
    virtual void run(const Step& step, Member& member) = 0;
    // Too little work to wake other threads for.
    virtual bool small(const Step&) const { return false; }
    virtual OpKind kind() const { return OpKind::OTHER; }
    // Weights that a step must read and products that it must compute, where these bound its time.
    virtual OpWork work(const Step&) const { return {}; }
    // Which of the weights this thread reads first, once prepared: a hint.
    virtual Upcoming upcoming(const Step&, const Member&) const { return {}; }
    // Before the threads start.
    virtual void prepare(const Step&, Pool&) { next_.store(0, std::memory_order_relaxed); }

protected:
    static bool few(int64_t numbers) { return numbers <= 1 << 14; }

    // Work for the first free thread: threads that lose their core for a while take less.
    int take(int count = 1) { return next_.fetch_add(count, std::memory_order_relaxed); }

private:
    std::atomic<int> next_{0};
};

struct CommandList {
    Op* const* ops;
    int count;
    const Step& step;
};

// The barriers behind operations. A thread that waits there brings the weights it will read next, because memory is what a
// step of few rows waits for.
class Barriers {
public:
    Barriers(const CommandList& commands, Member& member) : commands_(commands), member_(member) {}

    // Behind operation `number`; numbers ascend.
    void wait(int number) {
        for (; next_ <= number || (next_ < commands_.count && !upcoming_.at); next_++) upcoming_ = of(next_ + 1);
        member_.barrier(upcoming_);
    }

private:
    Upcoming of(int number) const {
        return number < commands_.count ? commands_.ops[number]->upcoming(commands_.step, member_) : Upcoming{};
    }

    const CommandList& commands_;
    Member& member_;
    int next_ = 0;       // the operation whose
    Upcoming upcoming_;  // weights these are
};

// `run_commands` with a clock beside every operation; `waited` leaves out barriers inside an operation.
inline void run_profiled(Pool& pool, const CommandList& commands, bool alone) {
    pool.run(
        [](Member& member, void* argument) {
            const CommandList& commands = *static_cast<const CommandList*>(argument);
            OpProfile& profile = op_profile();
            Barriers barriers(commands, member);
            double began = OpProfile::clock();
            for (int i = 0; i < commands.count; i++) {
                commands.ops[i]->run(commands.step, member);
                const double done = OpProfile::clock();
                barriers.wait(i);
                const double ended = OpProfile::clock();
                const OpKind kind = commands.ops[i]->kind();
                profile.add_wait(kind, (ended - done) / member.size);
                if (member.index == 0) profile.add(kind, ended - began, commands.ops[i]->work(commands.step));
                began = ended;
            }
        },
        const_cast<CommandList*>(&commands), alone);
}

inline void run_commands(Pool& pool, const CommandList& commands) {
    for (int i = 0; i < commands.count; i++) commands.ops[i]->prepare(commands.step, pool);
    const bool alone = commands.count == 1 && commands.ops[0]->small(commands.step);
    if (op_profile().is_on) return run_profiled(pool, commands, alone);
    pool.run(
        [](Member& member, void* argument) {
            const CommandList& commands = *static_cast<const CommandList*>(argument);
            Barriers barriers(commands, member);
            for (int i = 0; i < commands.count; i++) {
                commands.ops[i]->run(commands.step, member);
                barriers.wait(i);
            }
        },
        const_cast<CommandList*>(&commands), alone);
}

}  // namespace llmbox
