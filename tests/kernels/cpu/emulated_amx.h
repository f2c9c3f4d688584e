// AMX in plain C++, so that its kernels run on a CPU with the other instructions of that level: what tiles hold and what
// their products are (Intel SDM). To be included before the kernels.
#pragma once

#if defined(__AMX_TILE__) && defined(LLMBOX_EMULATED_TILES)

#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

struct EmulatedTiles {
    struct Config {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config;
    uint8_t data[8][16][64];

    void load(int tile, const void* base, size_t stride) {
        zero(tile);
        for (int row = 0; row < config.rows[tile]; row++)
            memcpy(data[tile][row], static_cast<const char*>(base) + row * stride, config.bytes[tile]);
    }
    void store(int tile, void* base, size_t stride) const {
        for (int row = 0; row < config.rows[tile]; row++)
            memcpy(static_cast<char*>(base) + row * stride, data[tile][row], config.bytes[tile]);
    }
    void zero(int tile) { memset(data[tile], 0, sizeof data[tile]); }

    // c[m][n] = dot(c[m][n], row m of a, column n of b), where dot goes through `words` words.
    template <class T, class Dot> void multiply(int c, int a, int b, Dot dot) {
        for (int m = 0; m < config.rows[c]; m++)
            for (int n = 0; n < config.bytes[c] / 4; n++) {
                T sum;
                memcpy(&sum, data[c][m] + 4 * n, 4);
                sum = dot(sum, config.bytes[a] / 4, [&](int k) { return data[a][m] + 4 * k; },
                          [&](int k) { return data[b][k] + 4 * n; });
                memcpy(data[c][m] + 4 * n, &sum, 4);
            }
    }
    template <class Of> void multiply_bytes(int c, int a, int b) {
        multiply<int32_t>(c, a, b, [](int32_t sum, int words, auto row, auto column) {
            for (int k = 0; k < words; k++)
                for (int i = 0; i < 4; i++)
                    sum += static_cast<int8_t>(row(k)[i]) * static_cast<Of>(column(k)[i]);
            return sum;
        });
    }
    // Even and odd inputs apart, denormals as zero.
    void multiply_bf16(int c, int a, int b) {
        const auto flushed = [](float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; };
        multiply<float>(c, a, b, [&](float sum, int words, auto row, auto column) {
            const auto number = [&](const uint8_t* from) {
                const uint32_t bits = static_cast<uint32_t>(from[0] | from[1] << 8) << 16;
                float x;
                memcpy(&x, &bits, 4);
                return flushed(x);
            };
            float sums[2] = {};
            for (int k = 0; k < words; k++)
                for (int i = 0; i < 2; i++)
                    sums[i] = flushed(std::fma(number(row(k) + 2 * i), number(column(k) + 2 * i), sums[i]));
            return flushed(sum + flushed(sums[0] + sums[1]));
        });
    }
};
inline thread_local EmulatedTiles emulated_tiles;

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(config_of) memcpy(&emulated_tiles.config, config_of, sizeof emulated_tiles.config)
#define _tile_release() emulated_tiles = {}
#define _tile_loadd(tile, base, stride) emulated_tiles.load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_tiles.store(tile, base, stride)
#define _tile_zero(tile) emulated_tiles.zero(tile)
#define _tile_dpbssd(c, a, b) emulated_tiles.multiply_bytes<int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) emulated_tiles.multiply_bytes<uint8_t>(c, a, b)
#define _tile_dpbf16ps(c, a, b) emulated_tiles.multiply_bf16(c, a, b)
#define syscall(...) 0L  // the system is not asked for tiles

#endif
