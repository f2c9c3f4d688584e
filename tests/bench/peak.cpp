// What one core can do of the instructions that the CPU kernels spend their time in, in its own CPU time.
//     g++ -O2 -mavx512f peak.cpp -o peak && ./peak
#include <algorithm>
#include <cstdio>
#include <ctime>

static double cpu_seconds() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

// 16 of them that do not wait for one another.
#define ONE(name, n) name " %%zmm30, %%zmm31, %%zmm" #n "\n"
#define FOUR(name, a, b, c, d) ONE(name, a) ONE(name, b) ONE(name, c) ONE(name, d)
#define SIXTEEN(name) \
    FOUR(name, 0, 1, 2, 3) FOUR(name, 4, 5, 6, 7) FOUR(name, 8, 9, 10, 11) FOUR(name, 12, 13, 14, 15)
#define USED \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
        "xmm13", "xmm14", "xmm15"

template <class Run> void measure(const char* name, int operations, Run run) {
    constexpr int TIMES = 100000;
    double best = 1e9;
    for (int pass = 0; pass < 60; pass++) {
        const double began = cpu_seconds();
        for (int i = 0; i < TIMES; i++) run();
        best = std::min(best, cpu_seconds() - began);
    }
    printf("%-12s %6.0f G/s\n", name, 16.0 * TIMES * operations / best / 1e9);
}

int main() {
    measure("vfmadd231ps", 32, [] { asm volatile(SIXTEEN("vfmadd231ps")::: USED); });
    measure("vdpbf16ps", 64, [] { asm volatile(SIXTEEN("vdpbf16ps")::: USED); });
    measure("vpdpbusd", 128, [] { asm volatile(SIXTEEN("vpdpbusd")::: USED); });
}
