// AVX-512 with VNNI, VBMI and GFNI, for products of 8-bit inputs.
#pragma once

#include "cpu/avx512.h"

namespace hf_kbit::cpu {

namespace {

struct Avx512Int8 : Avx512 {
    // VPDPBUSD takes unsigned weights: 128 more than they are.
    using Bytes = __m512i;
    using Sums = __m512i;
    static constexpr int kVectorBytes = 64, kOffset = 128;
    static constexpr int kTileRows = 4, kTileTokens = 4, kRun = 8;
    // Vectors 2 i and 2 i + 1 are of blocks 4 i to 4 i + 3, one in each quarter: weights 0 to 7 and 16 to 23, then
    // the others.
    static int block_of_byte(int v, int byte) { return v / 2 * 4 + byte / 16; }
    static int index_of_byte(int v, int byte) { return byte % 16 / 8 * 16 + v % 2 * 8 + byte % 8; }
    static Bytes load_bytes(const int8_t* source) { return _mm512_load_si512(source); }
    static void store_bytes(int8_t* target, Bytes bytes) { _mm512_store_si512(target, bytes); }
    static Sums no_sums() { return zero_index(); }
    static Sums add_sums(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
    static int32_t total(Sums sums) { return _mm512_reduce_add_epi32(sums); }
    static Sums dot(Sums sums, Bytes weights, Bytes inputs) { return _mm512_dpbusd_epi32(sums, weights, inputs); }

    template <int bits>
    using Int8Levels = TableLevels<Avx512Int8, bits>;

    static I as_words(F a) { return _mm512_castps_si512(a); }
    static I pack(I a, I b) { return _mm512_packus_epi16(a, b); }
    static I interleave(I even, I odd) {
        return _mm512_mask_blend_epi8(0x5555555555555555, _mm512_slli_epi16(odd, 8), even);
    }

    // Where the bytes of four blocks' words go before a transposition of 8 x 8 bits makes codes of them: byte 7 - i of
    // a quadword has bit i of eight codes, of nothing where there is no such bit. `side` counts at 5 bits, where a
    // quadword has eight codes; else it has sixteen, as nibbles.
    template <int bits>
    static constexpr void order_bytes(int side, uint8_t (&from)[64], uint64_t& held) {
        held = 0;
        for (int byte = 0; byte < 64; ++byte) {
            const int block = byte / 16, octet = byte % 16 / 8 * 2, row = 7 - byte % 8;
            const int plane = bits == 5 ? (row < 4 ? row : row == 6 ? 4 : -1) : row % 4 - (4 - bits);
            from[byte] = 0;
            if (plane < 0) continue;
            from[byte] = static_cast<uint8_t>(4 * (block * bits + plane) + octet + (bits == 5 ? side : row / 4));
            held |= uint64_t{1} << byte;
        }
    }

    template <int bits>
    struct Order {
        alignas(64) uint8_t from[64] = {};
        uint64_t held = 0;
        constexpr explicit Order(int side) { order_bytes<bits>(side, from, held); }
    };

    template <int bits>
    static I ordered(const int32_t* words, int side) {
        static constexpr Order<bits> kOrders[2] = {Order<bits>(0), Order<bits>(1)};
        const I from = _mm512_load_si512(kOrders[side].from);
        if constexpr (bits == 5) {
            const I first = _mm512_loadu_si512(words);
            const I last = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + 16)));
            return _mm512_maskz_permutex2var_epi8(kOrders[side].held, first, from, last);
        } else {
            constexpr auto kWords = static_cast<__mmask16>((1u << (4 * bits)) - 1);
            return _mm512_maskz_permutexvar_epi8(kOrders[side].held, from, _mm512_maskz_loadu_epi32(kWords, words));
        }
    }

    static I transposed(I bits) {
        return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(static_cast<long long>(0x8040201008040201)), bits, 0);
    }

    template <int bits, class Sink>
    static inline __attribute__((always_inline)) void decode_int8(const int32_t* words, F multipliers,
                                                                  const Int8Levels<bits>& levels, Sink sink) {
        const F fours = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                                              multipliers);
        const F own[4] = {_mm512_permute_ps(fours, 0x00), _mm512_permute_ps(fours, 0x55),
                          _mm512_permute_ps(fours, 0xAA), _mm512_permute_ps(fours, 0xFF)};
#pragma GCC unroll 4
        for (int four = 0; four < 4; ++four) {
            const int32_t* own_words = words + four * 4 * bits;
            const I low_table = int8_table<Avx512Int8, bits>(levels, 0, own[four]);
            if constexpr (bits == 5) {
                // An index of both tables: the fifth bit, the quarter, the code's low bits.
                const I high_table = int8_table<Avx512Int8, bits>(levels, 1, own[four]);
                const I quarters = _mm512_setr_epi64(0, 0, 0x1010101010101010, 0x1010101010101010, 0x2020202020202020,
                                                     0x2020202020202020, 0x3030303030303030, 0x3030303030303030);
                for (int side = 0; side < 2; ++side) {
                    const I index = bit_or(transposed(ordered<5>(own_words, side)), quarters);
                    sink(2 * four + side, _mm512_permutex2var_epi8(low_table, index, high_table));
                }
            } else {
                const I codes = transposed(ordered<bits>(own_words, 0));
                for (int side = 0; side < 2; ++side) {
                    const I nibbles = bit_and(shift_right(codes, 4 * side), splat(0x0F0F0F0F));
                    sink(2 * four + side, _mm512_shuffle_epi8(low_table, nibbles));
                }
            }
        }
    }
};

}  // namespace

}  // namespace hf_kbit::cpu
