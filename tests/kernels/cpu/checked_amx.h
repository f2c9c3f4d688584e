// Tile loads and stores that AddressSanitizer sees. They are inline assembly: without this it checks nothing of them.
#pragma once

#if defined(__AMX_TILE__) && defined(__SANITIZE_ADDRESS__)

#include <cstddef>
#include <cstdint>
#include <immintrin.h>

extern "C" void __asan_loadN(void*, size_t);
extern "C" void __asan_storeN(void*, size_t);

// All rows that register `tile` has at the moment.
inline void check_tile(int tile, const void* base, size_t stride, void (*check)(void*, size_t)) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    asm volatile("sttilecfg %0" : "=m"(config));
    if (!config.rows[tile]) __builtin_trap();  // no shape: the instruction would be a fault
    for (size_t row = 0; row < config.rows[tile]; row++)
        check(const_cast<char*>(static_cast<const char*>(base)) + row * stride, config.bytes[tile]);
}

#undef _tile_loadd
#undef _tile_stored
#define _tile_loadd(tile, base, stride)                 \
    do {                                                \
        check_tile(tile, base, stride, __asan_loadN);   \
        _tile_loadd_internal(tile, base, stride);       \
    } while (0)
#define _tile_stored(tile, base, stride)                \
    do {                                                \
        check_tile(tile, base, stride, __asan_storeN);  \
        _tile_stored_internal(tile, base, stride);      \
    } while (0)

#endif
