// AMX: eight registers of 16 rows by 64 bytes ("tiles"), and products of them.
//
// C[rows][16] += A[rows][64 bytes] * B[16 words][16 outputs]: a word of B holds neighboring inputs of one output,
// which is how panels (gemm.h) and strips (kv_cache.h) lie in memory anyway. Every number of C is one sum over the
// words in ascending order, whatever the other rows are (Intel SDM, TDPBF16PS and TDPBSUD).
//
// Registers of this project: 0 and 1 are C, 4 and 5 A, 6 and 7 B. The rows of 0 and 4 are one number, those of 1 and
// 5 another.
//
// A tile is loaded fastest where its 16 rows are one piece of 1 KB and the next tile follows: cores look ahead in
// one direction.
//
// A loop writes few registers, and rather loads one again: a core renames what it writes from a small file of tiles
// that its two hardware threads share. While the other thread has tiles of its own (it may belong to another
// virtual machine) a product with its loads takes 28 ns if a loop writes all eight registers, 17 if six, 13 if four; alone
// 6.5 with any (docs/cpu-kernels.md). A register that was cleared or configured and not written takes no place.
#pragma once

#include "vector/simd.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define LLMBOX_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

namespace llmbox {

constexpr int TILE_ROWS = 16;
constexpr int TILE_WORDS = 16;
constexpr int ROW_BYTES = TILE_WORDS * 4;  // of one row of a tile
constexpr size_t TILE_BYTES = static_cast<size_t>(TILE_ROWS) * ROW_BYTES;

// Asks Linux for the right to use them, for all threads of the process. Others (a sandbox) may say no.
inline bool may_use_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// One thread's tile registers. Given back when the work is done: while they are in use the system saves 8 KB of
// them at each switch of threads.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void release() {
        if (upper_) _tile_release();
        upper_ = 0;
    }

    // The rows of the two halves, and how many words of A and B count. Contents are lost if that changes.
    void shape(int upper, int lower, int words = TILE_WORDS) {
        if (upper == upper_ && lower == lower_ && words == words_) return;
        upper_ = upper, lower_ = lower, words_ = words;
        struct {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) {
            const bool a = i == 4 || i == 5, b = i > 5;
            config.bytes[i] = static_cast<uint16_t>(a ? 4 * words : 64);
            config.rows[i] = static_cast<uint8_t>(b ? words : i % 2 ? lower : upper);
        }
        // The intrinsics of GCC 12 name 8 bytes of it, those of tile loads none: without this the rest may stay
        // unwritten.
        asm volatile("" ::"r"(&config) : "memory");
        _tile_loadconfig(&config);
    }

private:
    int upper_ = 0, lower_ = 0, words_ = 0;
};

// The two C. `stride`: numbers from row to row.
INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
}

// For loops that write 0, 1, 4 and 6. After a switch of threads the system puts all registers back, which counts as
// written.
INLINE void give_back_unused() {
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(5);
    _tile_zero(7);
}

template <class T> INLINE void load_sums(const T* first, const T* second, size_t stride) {
    _tile_loadd(0, first, 4 * stride);
    _tile_loadd(1, second, 4 * stride);
}
template <class T> INLINE void store_sums(T* first, T* second, size_t stride) {
    _tile_stored(0, first, 4 * stride);
    _tile_stored(1, second, 4 * stride);
}

// The intrinsics of tile loads name no memory: what is stored before this is there for them.
INLINE void finish_stores() { asm volatile("" ::: "memory"); }

}  // namespace llmbox

#else
#define LLMBOX_TILES 0
namespace llmbox {
constexpr int TILE_WORDS = 1;
inline bool may_use_tiles() { return true; }
struct Tiles {
    void release() {}
};
}  // namespace llmbox
#endif
