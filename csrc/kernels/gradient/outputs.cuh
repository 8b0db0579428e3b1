// From sums of gradient_wgmma.cu to dx.
//
// Two warps that have half of a block's columns each exchange them, in 16 bits, for half of the tokens, so that four
// lanes have a token's block: they rotate it back, multiply it by the scales of columns and store 16 bytes each. Sums
// of parts of a tile are in memory first, and add_gradient_parts_kernel adds them up, in a fixed order.
#pragma once

#include "kernels/gradient/plan.h"
#include "kernels/kernels.h"
#include "kernels/operands.cuh"
#include "kernels/transform.cuh"

namespace hf_kbit::cuda::gradient {

struct Arguments {
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    Transform transform;
    void* dx;
    float* partial;  // as gradient_partial_sums
    int tokens, in_features, box_tokens;
    int row_tiles, slabs;
    int tiles, token_tiles, parts, pieces;  // pieces of each part
    uint32_t signs;                         // of scales
};

constexpr int kTokens = kGradientTokens, kWarps = 8, kDecoders = kWarps * kWarp;
constexpr int kGroups = kTokens / 8;    // of tokens, as an instruction has them in four sums of a lane
constexpr int kGroupBytes = 8 * kWarp;  // of what two warps exchange

template <typename T>
__device__ __forceinline__ void store_octet(const Arguments& arguments, uint4 octet, uint2 bytes, int t, int token,
                                            int column) {
    if (arguments.transform.any()) octet = octet_to_original<T>(octet, bytes, arguments.transform.rotated, t);
    const int columns = arguments.in_features - column;
    if (token >= arguments.tokens || columns <= 0) return;
    T* to = static_cast<T*>(arguments.dx) + int64_t{token} * arguments.in_features + column;
    if (arguments.in_features % kOctet == 0) {
        store_16(to, octet);
    } else {
        const uint32_t words[4] = {octet.x, octet.y, octet.z, octet.w};
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const auto bits = static_cast<uint16_t>(words[i / 2] >> i % 2 * 16);
            if (i < columns) reinterpret_cast<uint16_t*>(to)[i] = bits;
        }
    }
}

// A warp's sums of some groups of a tile's tokens. It has four neighbouring columns of each eight of a block, the warp
// beside it the others; of each two groups it keeps one.
template <typename T, int kAtOnce, int kSums>
__device__ __forceinline__ void store_groups(const Arguments& arguments, const float (&sums)[kSums], float unit,
                                             int tile, int first_group, int warp, uint32_t exchange) {
    constexpr int kCount = kSums / 4;
    static_assert(kCount % (2 * kAtOnce) == 0);
    const int lane = lane_id(), t = lane % 4;
    const bool second = warp & 1;
    const int column = tile / arguments.token_tiles * kGradientColumns + warp / 2 * kBlockSize + t * kOctet;
    const int first_token = tile % arguments.token_tiles * kTokens + first_group * 8 + lane / 4;
    uint2 bytes = make_uint2(kScalesOfOne, kScalesOfOne);
    if (arguments.transform.columns && column < arguments.in_features) {
        bytes = __ldg(reinterpret_cast<const uint2*>(arguments.transform.columns + column));
    }
    const auto place = [&](int its_warp, int i) {
        return exchange + (its_warp * kAtOnce + i) * kGroupBytes + lane * 8;
    };
    const auto of_group = [&](int group) {
        const float* four = sums + 4 * group;
        return make_uint2(transpose_8x8(pack_two<T>(four[0] * unit, four[1] * unit)),
                          transpose_8x8(pack_two<T>(four[2] * unit, four[3] * unit)));
    };
#pragma unroll
    for (int first = 0; first < kCount; first += 2 * kAtOnce) {
        uint2 kept[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint2 even = of_group(first + 2 * i), odd = of_group(first + 2 * i + 1);
            kept[i] = second ? odd : even;
            store_shared_8(place(warp, i), second ? even : odd);
        }
        named_barrier(2 + warp / 2, 2 * kWarp);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint2 given = load_shared_8(place(warp ^ 1, i));
            const uint2 low = second ? given : kept[i], high = second ? kept[i] : given;
            store_octet<T>(arguments, make_uint4(low.x, low.y, high.x, high.y), bytes, t,
                           first_token + 8 * (first + 2 * i + second), column);
        }
        named_barrier(2 + warp / 2, 2 * kWarp);
    }
}

// A warp's sums of a part of a tile, of which a lane has four of each group.
__device__ __forceinline__ float4* part_of(const Arguments& arguments, int tile, int part, int warp, int lane) {
    return reinterpret_cast<float4*>(arguments.partial) +
           ((tile * arguments.parts + part) * kWarps + warp) * kGroups * kWarp + lane;
}

constexpr int kAddedGroups = 4;

template <typename T>
__global__ void __launch_bounds__(kDecoders) add_gradient_parts_kernel(const __grid_constant__ Arguments arguments) {
    __shared__ __align__(16) char smem[gradient_exchange_bytes(kAddedGroups / 2)];
    const int tile = blockIdx.x / (kGroups / kAddedGroups),
              first_group = blockIdx.x % (kGroups / kAddedGroups) * kAddedGroups;
    const int warp = threadIdx.x / kWarp;
    float sums[4 * kAddedGroups] = {};
#pragma unroll 4
    for (int part = 0; part < arguments.parts; ++part) {
        const float4* from = part_of(arguments, tile, part, warp, threadIdx.x % kWarp) + first_group * kWarp;
#pragma unroll
        for (int i = 0; i < kAddedGroups; ++i) {
            const float4 four = __ldcg(from + i * kWarp);
            sums[4 * i] += four.x, sums[4 * i + 1] += four.y, sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
        }
    }
    store_groups<T, kAddedGroups / 2>(arguments, sums, 1.0f, tile, first_group, warp, shared_address(smem));
}

}  // namespace hf_kbit::cuda::gradient
