// What a trellis's stream says, in registers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/trellis.h"

namespace hf_kbit::cuda {

// The 16 bits that end with bit `end` of a stream; words[0] is the word before it. All but the words is known when
// this is compiled. A shift to the left puts the window at a byte, so one permute takes it out.
template <int count>
__device__ __forceinline__ uint32_t window(const uint32_t (&words)[count], int end) {
    const int half = (end + 15) / 16, from = 16 * half - end, word = half / 2;
    const uint32_t x = half % 2 ? __byte_perm(words[word + 1], words[word], 0x5432) : words[word];
    const int shift = (8 - from % 8) % 8;
    const uint32_t shifted = x << shift;
    return from + shift == 16  ? __byte_perm(shifted, 0, 0x4432)
           : from + shift == 8 ? __byte_perm(shifted, 0, 0x4421)
                               : __byte_perm(shifted, 0, 0x4410);
}

// Weights of two windows.
template <Code code>
__device__ __forceinline__ __half2 two_values(uint32_t first, uint32_t second) {
    const uint32_t a = first * code_factor(code) + code_added(code), b = second * code_factor(code) + code_added(code);
    if constexpr (code == Code::mul1) {
        // As float16, 0x6400 more than a whole number below 1024 is 1024 more than it.
        const uint32_t sums = __byte_perm(__dp4a(a, 0x01010101u, 0x6400u), __dp4a(b, 0x01010101u, 0x6400u), 0x5410);
        const uint32_t scale = 0x1EEE1EEEu, shift = 0xC931C931u;
        return __hfma2(reinterpret_cast<const __half2&>(sums), reinterpret_cast<const __half2&>(scale),
                       reinterpret_cast<const __half2&>(shift));
    } else {
        const uint32_t halves_a = a & kHalvesMask ^ kHalvesFlipped, halves_b = b & kHalvesMask ^ kHalvesFlipped;
        const uint32_t low = __byte_perm(halves_a, halves_b, 0x5410), high = __byte_perm(halves_a, halves_b, 0x7632);
        return __hadd2(reinterpret_cast<const __half2&>(low), reinterpret_cast<const __half2&>(high));
    }
}

// Four weights from `first` on of code mul1 as int8: a quarter of the sums less 509 (many_plan.h, kInt8Zero).
template <int count>
__device__ __forceinline__ uint32_t four_int8(const uint32_t (&words)[count], int first) {
    constexpr int bits = count - 1;
    uint32_t sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t product = window(words, (first + i + 1) * bits) * code_factor(Code::mul1);
        sums[i] = __dp4a(product, 0x40404040u, static_cast<uint32_t>(-509 * 64));
    }
    return __byte_perm(__byte_perm(sums[0], sums[1], 0x0051), __byte_perm(sums[2], sums[3], 0x0051), 0x5410);
}

// Weights `first` and `first` + 1 of words behind the one before them.
template <Code code, int count>
__device__ __forceinline__ __half2 two_weights(const uint32_t (&words)[count], int first) {
    constexpr int bits = count - 1;
    return two_values<code>(window(words, (first + 1) * bits), window(words, (first + 2) * bits));
}

// Of a tile in memory the words of lane 4 g + t, those of four lanes of EXL3's order, behind the word before them: as
// many as fit into one load at a time.
template <int count>
__device__ __forceinline__ void load_words(const uint32_t* from, int lane, uint32_t (&to)[count]) {
    constexpr int bits = count - 1, each = bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
    using Load = std::conditional_t<each == 4, uint4, std::conditional_t<each == 2, uint2, uint32_t>>;
#pragma unroll
    for (int i = 0; i < bits; i += each) {
        const Load loaded = __ldg(reinterpret_cast<const Load*>(from + i));
#pragma unroll
        for (int j = 0; j < each; ++j) to[1 + i + j] = reinterpret_cast<const uint32_t*>(&loaded)[j];
    }
    to[0] = __shfl_sync(0xFFFFFFFF, to[bits], (lane + 28) % 32);
}

}  // namespace hf_kbit::cuda
