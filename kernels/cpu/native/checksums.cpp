// CRC-32 and Adler-32 of one pass, the same numbers as zlib's: files of KV blocks have both.
//
// zlib's read 2.5 GB a second together on one core, which costs more than writing a block to the page cache. These
// take the instructions that fold a CRC, and keep Adler's sums in lanes that compilers make vectors of. Where a CPU
// folds and multiplies 64 bytes at once, those do.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace llmbox {
namespace {

constexpr uint32_t POLYNOMIAL = 0xedb88320;

constexpr std::array<uint32_t, 256> crc_table() {
    std::array<uint32_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        table[byte] = crc;
    }
    return table;
}

[[maybe_unused]] uint32_t crc_bytes(uint32_t crc, const uint8_t* data, size_t size) {
    static constexpr std::array<uint32_t, 256> table = crc_table();
    for (size_t i = 0; i < size; i++) crc = crc >> 8 ^ table[(crc ^ data[i]) & 0xff];
    return crc;
}

#if defined(__x86_64__)

bool has_fast_crc() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

#define FOLDING __attribute__((target("pclmul,sse4.1")))

FOLDING inline __m128i fold(__m128i sum, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00), high = _mm_clmulepi64_si128(sum, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

bool has_wide() {
    return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vnni");
}

#define WIDE __attribute__((target("avx512f,avx512bw,avx512vnni,vpclmulqdq,pclmul,sse4.1")))

WIDE inline __m512i fold_wide(__m512i sum, __m512i by, __m512i next) {
    const __m512i low = _mm512_clmulepi64_epi128(sum, by, 0x00), high = _mm512_clmulepi64_epi128(sum, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // of all three: exclusive or
}

// Folds whole multiples of 256 bytes, one at least, into the 64 bytes of `state`. Returns where it stopped.
WIDE size_t crc_folded_wide(uint32_t crc, const uint8_t* data, size_t size, __m128i* state) {
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i by_64 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    const __m512i before = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc)));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(data), before), b = _mm512_loadu_si512(data + 64);
    __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    size_t at = 256;
    for (; at + 256 <= size; at += 256) {
        a = fold_wide(a, by_256, _mm512_loadu_si512(data + at));
        b = fold_wide(b, by_256, _mm512_loadu_si512(data + at + 64));
        c = fold_wide(c, by_256, _mm512_loadu_si512(data + at + 128));
        d = fold_wide(d, by_256, _mm512_loadu_si512(data + at + 192));
    }
    a = fold_wide(fold_wide(fold_wide(a, by_64, b), by_64, c), by_64, d);
    _mm512_storeu_si512(state, a);
    return at;
}

// Folds 64 bytes at a time, as in Intel's "Fast CRC Computation Using PCLMULQDQ". `size`: 64 or more, in 16s.
FOLDING uint32_t crc_folded(uint32_t crc, const uint8_t* data, size_t size) {
    const auto load = [&](size_t at) FOLDING {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + at));
    };
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = load(16), c = load(32), d = load(48);
    size_t at = 64;
    if (size >= 256 && has_wide()) {
        __m128i state[4];
        at = crc_folded_wide(crc, data, size, state);
        a = state[0], b = state[1], c = state[2], d = state[3];
    }
    for (; at + 64 <= size; at += 64) {
        a = fold(a, by_64, load(at));
        b = fold(b, by_64, load(at + 16));
        c = fold(c, by_64, load(at + 32));
        d = fold(d, by_64, load(at + 48));
    }
    a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
    for (; at < size; at += 16) a = fold(a, by_16, load(at));
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_8, 0x00));
    __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), barrett, 0x10);
    quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), barrett, 0x00);
    return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}

uint32_t crc_fast(uint32_t crc, const uint8_t* data, size_t size) {
    const size_t folded = size < 64 ? 0 : size / 16 * 16;
    if (folded) crc = crc_folded(crc, data, folded);
    return crc_bytes(crc, data + folded, size - folded);
}

#elif defined(__ARM_FEATURE_CRC32)

bool has_fast_crc() { return true; }

uint32_t crc_fast(uint32_t crc, const uint8_t* data, size_t size) {
    size_t at = 0;
    for (; at + 8 <= size; at += 8) {
        uint64_t word;
        memcpy(&word, data + at, 8);
        crc = __crc32d(crc, word);
    }
    return crc_bytes(crc, data + at, size - at);
}

#else

bool has_fast_crc() { return false; }
uint32_t crc_fast(uint32_t crc, const uint8_t* data, size_t size) { return crc_bytes(crc, data, size); }

#endif

constexpr uint32_t ADLER_MODULUS = 65521;
constexpr size_t LANES = 32, ROWS = 512;  // of lanes, whose sums of sums stay below 2^32
constexpr size_t PIECE = LANES * ROWS;    // stays in the first cache between the two sums

#if defined(__x86_64__)

// Adds whole multiples of 64 bytes, PIECE at most, to both sums. Returns where it stopped.
WIDE size_t adler_wide(uint64_t& sum, uint64_t& sums, const uint8_t* data, size_t size) {
    alignas(64) int8_t weight[64];
    for (int i = 0; i < 64; i++) weight[i] = static_cast<int8_t>(64 - i);
    const __m512i weights = _mm512_load_si512(weight), zero = _mm512_setzero_si512();
    __m512i bytes = zero, before = zero, weighted = zero;  // `before`: sums in front of each 64 bytes
    size_t at = 0;
    for (; at + 64 <= size; at += 64) {
        const __m512i row = _mm512_loadu_si512(data + at);
        before = _mm512_add_epi64(before, bytes);
        bytes = _mm512_add_epi64(bytes, _mm512_sad_epu8(row, zero));
        weighted = _mm512_dpbusd_epi32(weighted, row, weights);
    }
    sums += sum * at + 64 * static_cast<uint64_t>(_mm512_reduce_add_epi64(before)) +
            static_cast<uint64_t>(_mm512_reduce_add_epi32(weighted));
    sum += static_cast<uint64_t>(_mm512_reduce_add_epi64(bytes));
    return at;
}

#endif

uint32_t adler_fast(uint32_t adler, const uint8_t* data, size_t size) {
    uint64_t sum = adler & 0xffff, sums = adler >> 16;
#if defined(__x86_64__)
    if (has_wide()) {
        const size_t done = adler_wide(sum, sums, data, size);
        data += done, size -= done;
    }
#endif
    const size_t rows = size / LANES;
    uint32_t lane[LANES] = {}, before[LANES] = {};  // `before`: sums of each lane in front of each row
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < LANES; i++) {
            before[i] += lane[i];
            lane[i] += data[row * LANES + i];
        }
    sums += sum * (rows * LANES);
    for (size_t i = 0; i < LANES; i++) {
        sums += uint64_t{LANES} * before[i] + (LANES - i) * uint64_t{lane[i]};
        sum += lane[i];
    }
    for (size_t i = rows * LANES; i < size; i++) sums += sum += data[i];
    return static_cast<uint32_t>(sums % ADLER_MODULUS << 16 | sum % ADLER_MODULUS);
}

}  // namespace
}  // namespace llmbox

extern "C" {

// Continue both checksums, each as zlib returns and takes it. 0: nothing is done, zlib is as fast on this CPU.
int llmbox_checksums(const uint8_t* data, int64_t size, uint32_t* crc, uint32_t* adler) {
    using namespace llmbox;
    if (!has_fast_crc()) return 0;
    uint32_t state = ~*crc, sums = *adler;
    for (size_t at = 0, whole = static_cast<size_t>(size); at < whole; at += PIECE) {
        const size_t piece = std::min(PIECE, whole - at);
        state = crc_fast(state, data + at, piece);
        sums = adler_fast(sums, data + at, piece);
    }
    *crc = ~state;
    *adler = sums;
    return 1;
}
}
