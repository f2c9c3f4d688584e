/* Read bandwidth of N threads over one large buffer, GB/s on stdout: membw THREADS MIB SECONDS.
   Reads with plain vector loads that the compiler cannot drop; the best of the passes that fit in the time. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t lanes __attribute__((vector_size(64)));
struct part { const lanes *from; size_t count; uint64_t sum; };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void *read_part(void *argument) {
    struct part *p = argument;
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 4 <= p->count; i += 4) {
        __builtin_prefetch(p->from + i + 48);
        __builtin_prefetch(p->from + i + 50);
        a += p->from[i], b += p->from[i + 1], c += p->from[i + 2], d += p->from[i + 3];
    }
    lanes sum = a + b + c + d;
    p->sum = sum[0] + sum[7];
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: membw THREADS MIB SECONDS\n"), 2;
    int threads = atoi(argv[1]);
    size_t bytes = (size_t)atol(argv[2]) << 20, count = bytes / sizeof(lanes) / (size_t)threads;
    double limit = atof(argv[3]);
    lanes *buffer = aligned_alloc(2 << 20, bytes);
    struct part *parts = calloc((size_t)threads, sizeof *parts);
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    if (!buffer || !parts || !ids) return fprintf(stderr, "no memory\n"), 1;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    memset(buffer, 1, bytes);
    double best = 0, begun = now();
    do {
        double start = now();
        for (int i = 0; i < threads; i++) {
            parts[i] = (struct part){.from = buffer + (size_t)i * count, .count = count};
            pthread_create(&ids[i], NULL, read_part, &parts[i]);
        }
        uint64_t check = 0;
        for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL), check += parts[i].sum;
        double rate = (double)bytes / (now() - start) / 1e9;
        if (check && rate > best) best = rate;
    } while (now() - begun < limit);
    printf("%.1f\n", best);
    return 0;
}
