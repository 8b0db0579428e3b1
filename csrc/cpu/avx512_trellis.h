// AVX-512 with VNNI and VBMI, for weights that have a trellis.
#pragma once

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

constexpr std::array<ChunkOrder, kMostTrellisBits> kChunkOrders = {ChunkOrder(1), ChunkOrder(2), ChunkOrder(3),
                                                                   ChunkOrder(4), ChunkOrder(5), ChunkOrder(6),
                                                                   ChunkOrder(7), ChunkOrder(8)};

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
    static I add_products(I sums, H a, H b) { return _mm512_dpwssd_epi32(sums, a, b); }
    static void spread(H a, uint16_t upper, I (&outputs)[2]) {
        const H uppers = _mm512_set1_epi16(static_cast<short>(upper));
        outputs[0] = _mm512_unpacklo_epi16(a, uppers);
        outputs[1] = _mm512_unpackhi_epi16(a, uppers);
    }
    static void natural(F (&values)[1]) {
        const I from = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        values[0] = _mm512_permutexvar_ps(from, values[0]);
    }
};

}  // namespace

}  // namespace hf_kbit::cpu
