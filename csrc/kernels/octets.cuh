// From packed rows to octets, eight neighbouring weights of a row in float32, and to memory: levels in shared memory,
// codes of planes and of tiles, pieces of 16 bytes. Shared by the kernels that decode rows.
#pragma once

#include <cstdint>

#include "kernels/codes.cuh"
#include "kernels/half.cuh"
#include "kernels/kernels.h"
#include "kernels/transform.cuh"

namespace hf_kbit::cuda {

// The levels, one copy for each lane: level c of lane l at word 32 c + l.
template <int kBits>
struct Levels {
    float copies[(1 << kBits) * kWarp];

    __device__ __forceinline__ void load(const float* gmem_codebook, int threads) {  // of the CTA
        for (int i = threadIdx.x; i < (1 << kBits) * kWarp; i += threads) copies[i] = gmem_codebook[i / kWarp];
        __syncthreads();
    }
    static constexpr int kShift = 7;  // a code times 128 is the byte offset of its level
    __device__ __forceinline__ float at(uint32_t code_times_128) const {
        const char* lane = reinterpret_cast<const char*>(copies) + threadIdx.x % kWarp * sizeof(float);
        return *reinterpret_cast<const float*>(lane + code_times_128);
    }
};

// An octet as 16-byte pieces: one of 16-bit values, two of float32.
__device__ __forceinline__ uint4 as_piece(const float* values, const float*) {
    return make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
                      __float_as_uint(values[3]));
}
template <typename T>
__device__ __forceinline__ uint4 as_piece(const float* values, const T*) {
    return make_uint4(pack_two<T>(values[0], values[1]), pack_two<T>(values[2], values[3]),
                      pack_two<T>(values[4], values[5]), pack_two<T>(values[6], values[7]));
}

// Two lanes that differ in kLaneBit, `second` being the one that has it set, hold two pieces each. Afterwards both
// hold a piece of the first lane in pieces[0], each the one of its own number, and of the second lane in pieces[1].
template <int kLaneBit>
__device__ __forceinline__ void exchange_pieces(uint4 (&pieces)[2], bool second) {
    const uint4 sent = second ? pieces[0] : pieces[1];
    uint4 received;
    received.x = __shfl_xor_sync(0xFFFFFFFF, sent.x, kLaneBit);
    received.y = __shfl_xor_sync(0xFFFFFFFF, sent.y, kLaneBit);
    received.z = __shfl_xor_sync(0xFFFFFFFF, sent.z, kLaneBit);
    received.w = __shfl_xor_sync(0xFFFFFFFF, sent.w, kLaneBit);
    if (second) {
        pieces[0] = received;
    } else {
        pieces[1] = received;
    }
}

// The first `valid` values of an octet, one by one: where rows are no whole blocks, and for float64.
template <typename T>
__device__ __forceinline__ void store_ragged(const float (&values)[kOctet], T* gmem_out, int64_t valid) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
        if (i < valid) gmem_out[i] = static_cast<T>(values[i]);
    }
}

// Column scales of an octet.
__device__ __forceinline__ uint2 load_scales(const Transform& transform, int64_t column, int64_t in_features) {
    if (!transform.columns || column >= in_features) return make_uint2(kScalesOfOne, kScalesOfOne);
    return __ldg(reinterpret_cast<const uint2*>(transform.columns + column));
}

// --- from planes ---------------------------------------------------------------------------------

template <int kBits>
__device__ __forceinline__ void load_block(const int32_t* gmem_planes, unsigned block, uint32_t (&planes)[kBits]) {
    const auto* words = reinterpret_cast<const uint32_t*>(gmem_planes) + size_t{block} * kBits;
    if constexpr (kBits == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(words);
        planes[0] = two.x, planes[1] = two.y;
    } else if constexpr (kBits == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(words);
        planes[0] = four.x, planes[1] = four.y, planes[2] = four.z, planes[3] = four.w;
    } else {
#pragma unroll
        for (int p = 0; p < kBits; ++p) planes[p] = words[p];
    }
}

// Octet number t of the block.
template <int kBits>
__device__ __forceinline__ void decode_octet(const uint32_t (&planes)[kBits], int t, float scale,
                                             const Levels<kBits>& levels, float (&values)[kOctet]) {
    constexpr int kShift = Levels<kBits>::kShift;
    const uint32_t octet = octet_of_planes(gather_plane_bytes<kBits>(planes, t));
    [[maybe_unused]] uint32_t top = 0;
    if constexpr (kBits == 5) top = planes[4] >> 8 * t;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
        uint32_t code = shifted(octet, kShift - octet_shift(j)) & 15u << kShift;
        if constexpr (kBits == 5) code |= shifted(top, kShift + 4 - j) & 1u << (kShift + 4);
        values[j] = __fmul_rn(levels.at(code), scale);
    }
}

// --- from tiles ----------------------------------------------------------------------------------

// A warp takes half a slab, two tiles: with a whole one the last CTAs left the GPU half idle for a tenth of the time.
constexpr int kPartTiles = 2, kPartBlocks = 2 * kPartTiles, kParts = kSlabBlocks / kPartBlocks;

// The words of a lane in part `part` of a slab; `gmem_slab` are the lane's loads. At 3 and 5 bits the parts meet
// inside a load.
template <int kBits>
__device__ __forceinline__ void load_part(const uint4* gmem_slab, int part, uint32_t (&words)[kPartTiles][kBits]) {
    constexpr int kWords = kPartTiles * kBits, kLoads = (kWords + 3) / 4;
    uint32_t loaded[4 * kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
        const uint4 four = gmem_slab[(part * kWords / 4 + load) * kWarp];
        loaded[4 * load] = four.x, loaded[4 * load + 1] = four.y;
        loaded[4 * load + 2] = four.z, loaded[4 * load + 3] = four.w;
    }
    const bool inside = part * kWords % 4;  // then the part begins with the third word
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
        words[i / kBits][i % kBits] = kBits % 2 && inside ? loaded[(i + 2) % (4 * kLoads)] : loaded[i];
    }
}

// Decodes row g + 8 half of a block of the part.
template <int kBits>
__device__ __forceinline__ void decode_octet(const uint32_t (&words)[kPartTiles][kBits], uint2 scales, uint32_t sign,
                                             int block, int half, const Levels<kBits>& levels,
                                             float (&values)[kOctet]) {
    // Of a tile its two blocks' scales are four bytes, the rows g and g + 8 alternating.
    const uint32_t bytes = block < 2 ? scales.x : scales.y;
    const float scale = decode_scale(bytes >> (16 * (block % 2) + 8 * half) & 255, sign);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
        const uint32_t code = extract_code<kBits>(words[block / 2], block % 2, half, j, Levels<kBits>::kShift);
        values[j] = __fmul_rn(levels.at(code), scale);
    }
}

}  // namespace hf_kbit::cuda
