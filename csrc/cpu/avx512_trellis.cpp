// AVX-512 with VNNI and VBMI, for weights that have a trellis.
#if defined(HF_KBIT_AVX512_TRELLIS)

#include <array>

#include "cpu/avx512.h"
#include "cpu/trellis.h"

namespace hf_kbit::cpu {

namespace {

// Of a chunk, whose words follow the one before them: which bytes make each quadword hold the windows of four weights,
// the stream's last byte first, and at which bit of it the two bytes of each window begin.
struct ChunkOrder {
    alignas(64) uint8_t from[64] = {}, first_bits[64] = {};

    constexpr explicit ChunkOrder(int bits) {
        for (int four = 0; four < 8; ++four) {
            const int end = 32 + 4 * bits * (four + 1), last = (end - 1) / 8, after = 8 * (last + 1) - end;
            for (int byte = 0; byte < 8; ++byte) {
                const int place = last - byte < 0 ? 0 : last - byte;
                from[8 * four + byte] = static_cast<uint8_t>(place / 4 * 4 + 3 - place % 4);
                first_bits[8 * four + byte] = static_cast<uint8_t>(after + (3 - byte / 2) * bits + byte % 2 * 8);
            }
        }
    }
};

constexpr std::array<ChunkOrder, kMostTrellisBits> kChunkOrders = {
    ChunkOrder(1), ChunkOrder(2), ChunkOrder(3), ChunkOrder(4),
    ChunkOrder(5), ChunkOrder(6), ChunkOrder(7), ChunkOrder(8)};

struct Avx512Trellis : Avx512 {
    using H = __m512i;

    struct Tile {
        const uint32_t* words;
        int bits;
        __mmask16 held;
        I from, first_bits;

        Tile(const uint32_t* words, int bits)
            : words(words),
              bits(bits),
              held(static_cast<__mmask16>((2u << bits) - 1)),
              from(_mm512_load_si512(kChunkOrders[bits - 1].from)),
              first_bits(_mm512_load_si512(kChunkOrders[bits - 1].first_bits)) {}

        H windows(int chunk) const {
            const uint32_t* own = words + bits * chunk - 1;
            I found = _mm512_maskz_loadu_epi32(chunk == 0 ? held & ~1 : held, own);
            if (chunk == 0) found = _mm512_mask_set1_epi32(found, 1, static_cast<int>(words[8 * bits - 1]));
            return _mm512_multishift_epi64_epi8(first_bits, _mm512_permutexvar_epi8(from, found));
        }
    };

    static H mul1_sums(H windows) {
        constexpr uint32_t kFactor = code_factor(Code::mul1);
        const H low = _mm512_set1_epi16(static_cast<short>(kFactor & 0xFFFF)), ones = _mm512_set1_epi8(1);
        const H high = _mm512_set1_epi16(static_cast<short>(kFactor >> 16));
        const H first = _mm512_mullo_epi16(windows, low);
        const H second = _mm512_add_epi16(_mm512_mulhi_epu16(windows, low), _mm512_mullo_epi16(windows, high));
        return _mm512_add_epi16(_mm512_maddubs_epi16(first, ones), _mm512_maddubs_epi16(second, ones));
    }
    static H load_halves(const int16_t* data) { return _mm512_loadu_si512(data); }
    static I words_of(H a, int side) {
        return _mm512_cvtepu16_epi32(side ? _mm512_extracti64x4_epi64(a, 1) : _mm512_castsi512_si256(a));
    }
    static I add_products(I sums, H a, H b) { return _mm512_dpwssd_epi32(sums, a, b); }
    static void as_rows(F (&values)[2]) {
        const I first = _mm512_setr_epi32(0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27);
        const F row = _mm512_permutex2var_ps(values[0], first, values[1]);
        values[1] = _mm512_permutex2var_ps(values[0], add_words(first, splat(4)), values[1]);
        values[0] = row;
    }
};

}  // namespace

const TrellisImplementation avx512_trellis = trellis_implementation_with<Avx512Trellis>();

}  // namespace hf_kbit::cpu

#endif
