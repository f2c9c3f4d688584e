// CRC-32 and Adler-32 of one pass, the same numbers as zlib's: files of KV blocks have both.
//
// zlib's read 2.5 GB a second together on one core, which costs more than writing a block to the page cache. These
// take the instructions that fold a CRC, and keep Adler's sums in lanes that compilers make vectors of. With AVX2 and
// AVX-512 both take the vectors of the level, 32 or 64 bytes; a CRC only where the CPU folds so many at once.
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

// x^n modulo the polynomial, for carry-less products of reflected numbers: 33 bits, x^0 the highest.
constexpr int64_t power_of_x(size_t n) {
    uint32_t power = 0x80000000;
    for (; n > 0; n--) power = power & 1 ? power >> 1 ^ POLYNOMIAL : power >> 1;
    return int64_t{power} << 1;
}

// Multipliers of the low and the high half of 16 bytes, which move them BYTES ahead.
template <size_t BYTES>
inline __m128i ahead() {
    constexpr int64_t low = power_of_x(8 * BYTES + 32), high = power_of_x(8 * BYTES - 32);
    return _mm_set_epi64x(high, low);
}

bool has_fast_crc() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

#define FOLDING __attribute__((target("pclmul,sse4.1")))

FOLDING inline __m128i fold(__m128i sum, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(sum, by, 0x00), high = _mm_clmulepi64_si128(sum, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

#if defined(__AVX2__)

bool has_wide() { return __builtin_cpu_supports("vpclmulqdq"); }

#define WIDE __attribute__((target("vpclmulqdq,pclmul,sse4.1")))

#if defined(__AVX512BW__)

using Vector = __m512i;

inline Vector load(const uint8_t* data) { return _mm512_loadu_si512(data); }
inline Vector repeat(__m128i value) { return _mm512_broadcast_i32x4(value); }
inline Vector extend(__m128i value) { return _mm512_zextsi128_si512(value); }
inline Vector add_bytes(Vector bytes) { return _mm512_sad_epu8(bytes, Vector{}); }
inline Vector multiply_add_bytes(Vector bytes, Vector weights) {
    return _mm512_madd_epi16(_mm512_maddubs_epi16(bytes, weights), _mm512_set1_epi16(1));
}
WIDE inline Vector fold_wide(Vector sum, Vector by, Vector next) {
    const Vector low = _mm512_clmulepi64_epi128(sum, by, 0x00), high = _mm512_clmulepi64_epi128(sum, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // of all three: exclusive or
}

#else

using Vector = __m256i;

inline Vector load(const uint8_t* data) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(data)); }
inline Vector repeat(__m128i value) { return _mm256_broadcastsi128_si256(value); }
inline Vector extend(__m128i value) { return _mm256_zextsi128_si256(value); }
inline Vector add_bytes(Vector bytes) { return _mm256_sad_epu8(bytes, Vector{}); }
inline Vector multiply_add_bytes(Vector bytes, Vector weights) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, weights), _mm256_set1_epi16(1));
}
WIDE inline Vector fold_wide(Vector sum, Vector by, Vector next) {
    return _mm256_clmulepi64_epi128(sum, by, 0x00) ^ _mm256_clmulepi64_epi128(sum, by, 0x11) ^ next;
}

#endif

constexpr size_t WIDTH = sizeof(Vector);

// Folds whole multiples of four vectors, one at least, into the 64 bytes of `state`. Returns where it stopped.
WIDE size_t crc_folded_wide(uint32_t crc, const uint8_t* data, size_t size, __m128i* state) {
    const Vector by_four = repeat(ahead<4 * WIDTH>()), by_64 = repeat(ahead<64>());
    Vector a = load(data) ^ extend(_mm_cvtsi32_si128(static_cast<int>(crc))), b = load(data + WIDTH);
    Vector c = load(data + 2 * WIDTH), d = load(data + 3 * WIDTH);
    size_t at = 4 * WIDTH;
    for (; at + 4 * WIDTH <= size; at += 4 * WIDTH) {
        a = fold_wide(a, by_four, load(data + at));
        b = fold_wide(b, by_four, load(data + at + WIDTH));
        c = fold_wide(c, by_four, load(data + at + 2 * WIDTH));
        d = fold_wide(d, by_four, load(data + at + 3 * WIDTH));
    }
    if constexpr (WIDTH == 64) {
        d = fold_wide(fold_wide(fold_wide(a, by_64, b), by_64, c), by_64, d);
    } else {
        c = fold_wide(a, by_64, c), d = fold_wide(b, by_64, d);
        memcpy(state, &c, WIDTH);
    }
    memcpy(reinterpret_cast<uint8_t*>(state) + 64 - WIDTH, &d, WIDTH);
    return at;
}

#endif

// Folds 64 bytes at a time, as in Intel's "Fast CRC Computation Using PCLMULQDQ". `size`: 64 or more, in 16s.
FOLDING uint32_t crc_folded(uint32_t crc, const uint8_t* data, size_t size) {
    const auto load = [&](size_t at) FOLDING {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + at));
    };
    const __m128i by_64 = ahead<64>(), by_16 = ahead<16>(), by_8 = ahead<4>();
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);  // x^64 by the polynomial, and that
    const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i a = _mm_xor_si128(load(0), _mm_cvtsi32_si128(static_cast<int>(crc)));
    __m128i b = load(16), c = load(32), d = load(48);
    size_t at = 64;
#if defined(__AVX2__)
    if (size >= 4 * WIDTH && has_wide()) {
        __m128i state[4];
        at = crc_folded_wide(crc, data, size, state);
        a = state[0], b = state[1], c = state[2], d = state[3];
    }
#endif
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

#if defined(__AVX2__)

using Words = int32_t __attribute__((vector_size(WIDTH)));

// Adds whole vectors, PIECE bytes at most, to both sums. Returns where it stopped.
size_t adler_rows(uint64_t& sum, uint64_t& sums, const uint8_t* data, size_t size) {
    uint8_t weight[WIDTH];  // 64 at most: two products of bytes stay below 2^15
    for (size_t i = 0; i < WIDTH; i++) weight[i] = static_cast<uint8_t>(WIDTH - i);
    const Vector weights = load(weight);
    Vector lanes{}, before{};  // `before`: sums of each lane in front of each row
    Words weighted{};
    size_t at = 0;
    for (; at + WIDTH <= size; at += WIDTH) {
        const Vector row = load(data + at);
        before += lanes;
        lanes += add_bytes(row);
        weighted += reinterpret_cast<Words>(multiply_add_bytes(row, weights));
    }
    sums += sum * at;
    for (size_t i = 0; i < WIDTH / 4; i++) sums += static_cast<uint64_t>(weighted[i]);
    for (size_t i = 0; i < WIDTH / 8; i++) {
        sums += WIDTH * static_cast<uint64_t>(before[i]);
        sum += static_cast<uint64_t>(lanes[i]);
    }
    return at;
}

#else

size_t adler_rows(uint64_t& sum, uint64_t& sums, const uint8_t* data, size_t size) {
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
    return rows * LANES;
}

#endif

uint32_t adler_fast(uint32_t adler, const uint8_t* data, size_t size) {
    uint64_t sum = adler & 0xffff, sums = adler >> 16;
    for (size_t i = adler_rows(sum, sums, data, size); i < size; i++) sums += sum += data[i];
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
