// A row of logits in blocks of 64. Their maxima show where large logits are: ranking reads only those blocks.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vector/simd.h"

namespace llmbox {

// Ascending keys are descending logits, equal ones (0 and -0 too) by ascending id.
using RankKey = uint64_t;

inline RankKey rank_key(float logit, int id) {
    const uint32_t bits = as_bits(logit + 0.f);  // -0 becomes 0
    const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<RankKey>(~ascending) << 32 | static_cast<uint32_t>(id);
}
inline int key_id(RankKey key) { return static_cast<int>(key & 0xffffffffu); }
inline float key_logit(RankKey key) {
    const uint32_t ascending = ~static_cast<uint32_t>(key >> 32);
    return as_float(ascending & 0x80000000u ? ascending & 0x7fffffffu : ~ascending);
}

// Beyond the end lies minus infinity.
INLINE Floats load_logits(const float* from, int count) {
    if (count >= LANES) return load(from);
    float padded[LANES];
    std::fill_n(padded, LANES, -__builtin_inff());
    std::copy_n(from, std::max(count, 0), padded);
    return load(padded);
}

struct Logits {
    static constexpr int BLOCK = 64;

    float* x;
    int width;
    float* maxima;  // of blocks; NaN where one is

    static int blocks(int width) { return ceil_div(width, BLOCK); }
    int blocks() const { return blocks(width); }
    int begin(int block) const { return block * BLOCK; }
    int end(int block) const { return std::min(width, (block + 1) * BLOCK); }

    // Of blocks from..to - 1.
    void find_maxima(int from, int to) const {
        for (int block = from; block < to; block++)
            maxima[block] = largest(x + begin(block), end(block) - begin(block));
    }
    void find_maxima() const { find_maxima(0, blocks()); }

    // NaN if one is anywhere.
    float best() const { return largest(maxima, blocks()); }

    // The first id of this logit, which is the best.
    int find(float logit) const {
        int block = 0;
        while (block < blocks() - 1 && maxima[block] != logit) block++;
        int id = begin(block);
        while (id < end(block) - 1 && x[id] != logit) id++;
        return id;
    }

    // The `count` best ids in order, or fewer: of those below `floor` none. For rows without NaN.
    std::vector<RankKey> ranked(int count, float floor) const {
        const float least = std::max(floor, bound(count));
        std::vector<RankKey> keys;
        for (int block = 0; block < blocks(); block++) {
            if (maxima[block] < least) continue;
            for (int id = begin(block); id < end(block); id++)
                if (x[id] >= least) keys.push_back(rank_key(x[id], id));
        }
        if (keys.size() > static_cast<size_t>(count)) {
            std::nth_element(keys.begin(), keys.begin() + count, keys.end());
            keys.resize(count);
        }
        std::sort(keys.begin(), keys.end());
        return keys;
    }

    // How many ids rank before this one.
    int ahead_of(int id) const {
        int count = 0;
        for (int block = 0; block < blocks(); block++) {
            if (maxima[block] < x[id]) continue;
            for (int i = begin(block); i < end(block); i++) count += x[i] > x[id] || (x[i] == x[id] && i < id);
        }
        return count;
    }

private:
    static constexpr int AHEAD = 1024;  // logits; beyond the row lies the next one, or nothing that is read

    static float largest(const float* numbers, int count) {
        Floats most = splat(-__builtin_inff()), odd = splat(0.f);
        int i = 0;
        for (; i + LANES <= count; i += LANES) {
            prefetch(numbers + i + AHEAD);
            const Floats v = load(numbers + i);
            most = max(v, most);
            odd += v - v;  // NaN from NaN and from infinity, else 0
        }
        float found = max(most);
        bool strange = sum(odd) != 0.f;
        for (; i < count; i++) {
            found = numbers[i] > found ? numbers[i] : found;
            strange = strange || std::isnan(numbers[i]);
        }
        for (i = 0; strange && i < count; i++)
            if (std::isnan(numbers[i])) return numbers[i];
        return found;
    }

    // At least `count` logits are not below it: as many maxima of groups of blocks are not. With twice as many groups
    // few more are above it.
    float bound(int count) const {
        const int groups = round_up(2 * count, LANES);
        if (count < 1 || groups > blocks()) return lowest_bound(count);
        std::vector<float> largest(maxima, maxima + groups);
        for (int block = groups; block < blocks(); block += groups)
            for (int i = 0; i < std::min(groups, blocks() - block); i += LANES) {
                const Floats before = load(&largest[i]), more = load_logits(maxima + block + i, blocks() - block - i);
                store(&largest[i], max(more, before));
            }
        return nth(largest, count);
    }
    float lowest_bound(int count) const {
        if (count < 1 || count > blocks()) return -__builtin_inff();
        return nth({maxima, maxima + blocks()}, count);
    }
    static float nth(std::vector<float> numbers, int count) {
        std::nth_element(numbers.begin(), numbers.begin() + count - 1, numbers.end(), std::greater<>());
        return numbers[count - 1];
    }
};

}  // namespace llmbox
