// Codes between their three forms in registers: bit-planes, octets (eight codes as nibbles) and the words of tiles;
// and the scales. Shared by the kernels that quantize, dequantize and repack.
#pragma once

#include <cstdint>

#include "common/format.h"

namespace hf_kbit::cuda {

constexpr int kWarp = kLanes;

// The float32 value of an E4M4 byte, subnormals included: the byte is the top of a float's bits, 116 powers of two
// low.
__device__ __forceinline__ float decode_e4m4(uint32_t byte) { return __uint_as_float(byte << 19) * 0x1p116f; }

// The same with a sign in the eighth bit, if `sign` is kSignBit; 0 for scales without signs.
__device__ __forceinline__ float decode_scale(uint32_t byte, uint32_t sign) {
    return decode_e4m4(byte & ~sign) * (byte & sign ? -1.0f : 1.0f);
}

// The nearest E4M4 byte of value >= 0: ties to even, saturating at 31.
__device__ __forceinline__ uint32_t encode_e4m4(float value) {
    if (value < 0x1p-10f) return __float2uint_rn(value * 0x1p14f);  // the grid of the subnormals
    const uint32_t bits = __float_as_uint(value);
    return min(((bits + 0x3FFFF + (bits >> 19 & 1)) >> 19) - (116 << 4), 255u);
}

// A bit's place in a word is a five-bit number; swaps two bits of all those numbers, u above v. Compositions of this
// transpose small matrices of bits. (The delta swap of Knuth, TAOCP 4A, 7.1.3.)
template <int u, int v>
__device__ __forceinline__ uint32_t swap_place_bits(uint32_t word) {
    constexpr int distance = (1 << u) - (1 << v);
    constexpr uint32_t mask = [] {
        uint32_t places = 0;
        for (int i = 0; i < 32; ++i) places |= (!(i >> u & 1) && (i >> v & 1)) ? 1u << i : 0;
        return places;
    }();
    const uint32_t t = ((word >> distance) ^ word) & mask;
    return word ^ t ^ (t << distance);
}

// Eight codes of a row, columns 8 t .. 8 t + 7 of a block, number j = 4 i + 2 h + n, as an octet: the low four bits of
// code j are nibble n of byte 2 h + i. A fifth bit stays in its plane.
__device__ __forceinline__ constexpr int octet_shift(int j) { return 16 * (j >> 1 & 1) + 8 * (j >> 2) + 4 * (j & 1); }

// From a word whose byte p holds plane p of the eight codes. Place bits: [p1 p0 i h n] -> [h i n p1 p0].
__device__ __forceinline__ uint32_t octet_of_planes(uint32_t plane_bytes) {
    return swap_place_bits<3, 2>(swap_place_bits<3, 0>(swap_place_bits<4, 1>(plane_bytes)));
}
__device__ __forceinline__ uint32_t planes_of_octet(uint32_t octet) {
    return swap_place_bits<4, 1>(swap_place_bits<3, 0>(swap_place_bits<3, 2>(octet)));
}

// Byte t of each of up to four plane words, as one word.
template <int kBits>
__device__ __forceinline__ uint32_t gather_plane_bytes(const uint32_t (&planes)[kBits], int t) {
    static_assert(kBits <= 5, "octets hold nibbles, beside a fifth bit");
    const uint32_t two = 0x40 + 0x11 * t;  // byte t of the first and of the second operand
    const uint32_t low = __byte_perm(planes[0], planes[1], two);
    if constexpr (kBits == 2) {
        return low & 0xFFFF;
    } else {
        const uint32_t high = __byte_perm(planes[2], kBits == 3 ? 0 : planes[kBits > 3 ? 3 : 2], two);
        return __byte_perm(low, high, 0x5410);
    }
}

// At 4 and 5 bits: pair 8 b + 4 i + 2 h + r of a lane of a tile: block b of the tile, row g + 8 r, codes (i, h, 0) and
// (i, h, 1). Words hold 32 / (2 * bits) pairs from their low end; at 5 bits the top two bits of all words are the last
// pair.
template <int kBits>
struct TileWord {
    static constexpr int kPairBits = 2 * kBits;
    static constexpr int kPairs = 32 / kPairBits;
    static constexpr bool spread(int pair) { return pair >= kPairs * kBits; }
    static constexpr int word(int pair) { return pair / kPairs; }
    static constexpr int shift(int pair) { return pair % kPairs * kPairBits; }
};

constexpr int pair_index(int block, int row_half, int j) {
    return 8 * block + 4 * (j >> 2) + 2 * (j >> 1 & 1) + row_half;
}

// value * 2^by, by of either sign.
__device__ __forceinline__ constexpr uint32_t shifted(uint32_t value, int by) {
    return by >= 0 ? value << by : value >> -by;
}

// At 3 bits: the pairs of instruction 2 * block + i of a tile, in bits 2 to 7 of bytes 2 h + r. The lowest two bits of
// bytes are undefined: those of words hold the pairs of the fourth instruction.
__device__ __forceinline__ uint32_t three_bit_pairs(const uint32_t (&words)[3], int instruction) {
    if (instruction < 3) return words[instruction];
    const uint32_t upper = (words[0] << 6 & 0xC0C0C0C0) | (words[1] << 4 & 0x3F3F3F3F);
    uint32_t pairs = (upper & 0xF0F0F0F0) | (words[2] << 2 & 0x0F0F0F0F);
    asm("" : "+r"(pairs));  // or the compiler gathers each code's bits from the three words by itself, which is slower
    return pairs;
}

// At 5 bits, on their way, the four pairs of an octet lie two in each register, pair (h, i) in half h of pairs[i].
__device__ __forceinline__ void pairs_of_octet(uint32_t octet, uint32_t top, uint32_t (&pairs)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t bytes = octet >> 8 * i;  // bytes 0 and 2 count
        const uint32_t tops = top >> 4 * i, spread = (tops & 0x3) | (tops << 14 & 0x00030000);
        pairs[i] = (bytes & 0x000F000F) | (bytes << 1 & 0x01E001E0) | (spread * 0x110 & 0x02100210);
    }
}
__device__ __forceinline__ void octet_of_pairs(const uint32_t (&pairs)[2], uint32_t& octet, uint32_t& top) {
    octet = 0, top = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        octet |= ((pairs[i] & 0x000F000F) | (pairs[i] >> 1 & 0x00F000F0)) << 8 * i;
        const uint32_t both = (pairs[i] >> 4 & 0x00010001) | (pairs[i] >> 8 & 0x00020002);
        top |= ((both | both >> 14) & 15) << 4 * i;
    }
}

// Bytes 2 h + i of the octets of rows g and g + 8, as bytes 2 h + r of a word for each i. Its own inverse.
__device__ __forceinline__ void swap_rows_and_instructions(const uint32_t (&from)[2], uint32_t (&to)[2]) {
    to[0] = __byte_perm(from[0], from[1], 0x6240);
    to[1] = __byte_perm(from[0], from[1], 0x7351);
}

// Puts the codes of an octet of rows g and of one of g + 8 (and of plane 4 a byte) into the words of a tile, which are
// 0 before the first of its blocks.
template <int kBits>
__device__ __forceinline__ void insert_octets(const uint32_t (&octets)[2], const uint32_t (&tops)[2], int block,
                                              uint32_t (&words)[kBits]) {
    static_assert(kBits > 2, "two_bit_word");
    if constexpr (kBits == 5) {
        using Word = TileWord<kBits>;
        constexpr uint32_t kPair = (1u << 2 * kBits) - 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pairs[2];
            pairs_of_octet(octets[half], tops[half], pairs);
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const int pair = pair_index(block, half, j), from = 16 * (j >> 1 & 1), to = Word::shift(pair);
                const uint32_t source = pairs[j >> 2];
                if (Word::spread(pair)) {
#pragma unroll
                    for (int word = 0; word < kBits; ++word)
                        words[word] |= shifted(source, 30 - from - 2 * word) & 3u << 30;
                } else {
                    words[Word::word(pair)] |= shifted(source, to - from) & kPair << to;
                }
            }
        }
    } else {
        uint32_t bytes[2];
        swap_rows_and_instructions(octets, bytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int instruction = 2 * block + i;
            if constexpr (kBits == 4) {
                words[instruction] = bytes[i];
            } else {
                // Nibbles n go to bits 2 and 5 of their bytes: all move by one place, the lower ones by one more.
                const uint32_t doubled = bytes[i] << 1, pairs = doubled + (doubled & 0x0E0E0E0E);
                if (instruction < 3) {
                    words[instruction] |= pairs;
                } else {
#pragma unroll
                    for (int word = 0; word < 3; ++word) words[word] |= pairs >> (6 - 2 * word) & 0x03030303;
                }
            }
        }
    }
}

// The way back. At 3 bits the highest bit of nibbles is undefined.
template <int kBits>
__device__ __forceinline__ void extract_octets(const uint32_t (&words)[kBits], int block, uint32_t (&octets)[2],
                                               uint32_t (&tops)[2]) {
    static_assert(kBits > 2, "two_bit_planes");
    if constexpr (kBits == 5) {
        using Word = TileWord<kBits>;
        constexpr uint32_t kPair = (1u << 2 * kBits) - 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pairs[2] = {0, 0};
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const int pair = pair_index(block, half, j), to = 16 * (j >> 1 & 1), from = Word::shift(pair);
                uint32_t& target = pairs[j >> 2];
                if (Word::spread(pair)) {
#pragma unroll
                    for (int word = 0; word < kBits; ++word) target |= words[word] >> 30 << (to + 2 * word);
                } else {
                    target |= shifted(words[Word::word(pair)], to - from) & kPair << to;
                }
            }
            octet_of_pairs(pairs, octets[half], tops[half]);
        }
    } else {
        uint32_t bytes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kBits == 4) {
                bytes[i] = words[2 * block + i];
            } else {
                const uint32_t pairs = three_bit_pairs(words, 2 * block + i);
                bytes[i] = (pairs >> 2 & 0x07070707) | (pairs >> 1 & 0xF8F8F8F8);
            }
        }
        swap_rows_and_instructions(bytes, octets);
    }
}

// The word of a block of a tile at 2 bits, from the planes of rows g and g + 8. Place bits: [p row i h n] -> [i h n
// row p].
__device__ __forceinline__ uint32_t two_bit_word(const uint32_t (&low)[2], const uint32_t (&high)[2], int t) {
    const uint32_t two = 0x40 + 0x11 * t;
    const uint32_t bytes = __byte_perm(__byte_perm(low[0], high[0], two), __byte_perm(low[1], high[1], two), 0x5410);
    return swap_place_bits<2, 0>(swap_place_bits<3, 1>(swap_place_bits<4, 2>(bytes)));
}
// The way back: byte p of row g and of row g + 8, for each p.
__device__ __forceinline__ uint32_t two_bit_planes(uint32_t word) {
    return swap_place_bits<4, 2>(swap_place_bits<3, 1>(swap_place_bits<2, 0>(word)));
}

// The code of column j of an octet in the words of a tile, times 2^by, by >= 0.
template <int kBits>
__device__ __forceinline__ uint32_t extract_code(const uint32_t (&words)[kBits], int block, int row_half, int j,
                                                 int by) {
    constexpr uint32_t kMask = (1 << kBits) - 1;
    const int n = j & 1;
    if constexpr (kBits == 2) {
        return shifted(words[block], by - (8 * (j >> 1) + 4 * n + 2 * row_half)) & kMask << by;
    } else if constexpr (kBits == 3) {
        const int shift = 16 * (j >> 1 & 1) + 8 * row_half + 2 + 3 * n;
        return shifted(three_bit_pairs(words, 2 * block + (j >> 2)), by - shift) & kMask << by;
    } else {
        using Word = TileWord<kBits>;
        const int pair = pair_index(block, row_half, j);
        if (Word::spread(pair)) {
            uint32_t value = 0;
#pragma unroll
            for (int word = 0; word < kBits; ++word) value |= words[word] >> 30 << 2 * word;
            return (value >> n * kBits & kMask) << by;
        }
        return shifted(words[Word::word(pair)], by - Word::shift(pair) - n * kBits) & kMask << by;
    }
}

}  // namespace hf_kbit::cuda
