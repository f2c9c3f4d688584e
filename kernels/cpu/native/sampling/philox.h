// Noise of (seed, position) and nothing else, bit by bit as kernels/reference/sampling.py: Philox-4x32-10.
#pragma once

#include <cstdint>

namespace llmbox {

// A multiple of 2^-53 in [0, 1).
inline double uniform(uint64_t seed, uint64_t position) {
    const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
    const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
    uint32_t c0 = low(position), c1 = high(position), c2 = 0, c3 = 0, k0 = low(seed), k1 = high(seed);
    for (int round = 0; round < 10; round++) {
        const uint64_t first = uint64_t{0xD2511F53} * c0, second = uint64_t{0xCD9E8D57} * c2;
        c0 = high(second) ^ c1 ^ k0, c1 = low(second);
        c2 = high(first) ^ c3 ^ k1, c3 = low(first);
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    return static_cast<double>((static_cast<uint64_t>(c1) << 32 | c0) >> 11) * 0x1p-53;
}

}  // namespace llmbox
