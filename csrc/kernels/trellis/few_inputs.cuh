// The inputs of few_tokens.cu: tokens turned, and rounded to two columns of int8 each.
#pragma once

#include "kernels/ptx.cuh"
#include "kernels/trellis/few_plan.h"
#include "kernels/trellis/turn.cuh"

namespace hf_kbit::cuda {

// An octet of a token, turned. Lanes side by side have octets side by side, whole blocks of them.
template <typename T>
__device__ __forceinline__ void turn_octet(const T* x, const __half* suh, int first, int in_features, bool swiglu,
                                           int block, float (&values)[kOctet]) {
    eight_scaled(x, suh, first, in_features, swiglu, values);
    turn_own(values);
    for (int distance = 1; distance < block / kOctet; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) values[i] = turned_with_lane(values[i], distance);
    }
}

// Of 16 bytes, of which this lane has half and its neighbour the other one, bytes 2 i, 2 i + 1, 2 i + 8 and 2 i + 9
// for two i.
__device__ __forceinline__ uint64_t by_pairs(uint64_t own) {
    const bool odd = threadIdx.x % 2;
    const auto low = static_cast<uint32_t>(own), high = static_cast<uint32_t>(own >> 32);
    const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? low : high, 1);
    const uint32_t first = odd ? other : low, second = odd ? high : other;
    return __byte_perm(first, second, 0x5410) | static_cast<uint64_t>(__byte_perm(first, second, 0x7632)) << 32;
}

// CTAs of a cluster, or threads of the only one.
__device__ __forceinline__ void meet() {
    if constexpr (kArch >= 900) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
}
// To the same place of a CTA of the cluster.
template <typename Number>
__device__ __forceinline__ void store_for(int rank, Number* to, Number number) {
    if constexpr (kArch >= 900) {
        const uint32_t there = cluster_address(shared_address(to), rank);
        asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(there), "r"(number) : "memory");
    } else {
        *to = number;
    }
}

struct FewTrellisScales {
    const __half* of_parts[kTrellisParts];
};

// Clusters of so many CTAs, one for each token of each part, or for each weight of a row. columns: int8 [parts, 2 * M,
// padded_in], of each token the upper ones, then the lower ones. tokens [parts, M]. Of experts: which weight each has,
// or one beyond the last.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    turn_kernel(const T* gmem_x, const __grid_constant__ FewTrellisScales scales, int cluster, int count,
                const __grid_constant__ TrellisExperts experts, int in_features, int padded_in, int block,
                const __grid_constant__ FewTrellisRoom room, int num_counts) {
    if constexpr (kArch < 800) return;
    constexpr int kWarps = kThreads / 32;
    __shared__ uint32_t largest_of[32];  // of all warps of a cluster
    __shared__ int sum_of[32];
    let_next_kernel_start();  // which waits for this one before it reads anything but weights
    meet();                   // whose shared memory is there now
    wait_for_kernel_before();
    for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_counts; i += gridDim.x * kThreads) room.counts[i] = 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int rank = static_cast<int>(blockIdx.x) % cluster, number_of_token = static_cast<int>(blockIdx.x) / cluster;
    const int warps = cluster * kWarps, own_warp = rank * kWarps + warp;
    int part = 0, row = number_of_token % count, weight = 0;
    bool has_weight = true;
    if (experts.offsets) {
        const int item = number_of_token / experts.weights, owner = owner_of(experts, item);
        row = picked(experts, item);
        has_weight = owner < experts.count;
        weight = has_weight ? owner * experts.weights + number_of_token % experts.weights : 0;
        if (rank == 0 && threadIdx.x == 0) {
            room.weights[number_of_token] = has_weight ? weight : experts.count * experts.weights;
        }
    } else {
        part = number_of_token / count;
    }
    const bool swiglu = experts.swiglu;
    const T* x = gmem_x + int64_t{row} * (in_features * (swiglu ? 2 : 1));
    const __half* suh = scales.of_parts[part] + int64_t{weight} * padded_in;
    const int octets = padded_in / kOctet, each = cluster * kThreads, turns = (octets + each - 1) / each;
    const int first_octet = rank * kThreads + static_cast<int>(threadIdx.x);
    uint32_t largest_bits = 0;  // as integers magnitudes have the same order, and NaN is the largest
    float values[kOctet];
    for (int turn = 0; turn < turns; ++turn) {
        turn_octet(x, suh, (turn * each + first_octet) * kOctet, in_features, swiglu, block, values);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) largest_bits = max(largest_bits, __float_as_uint(values[i]) & 0x7FFFFFFF);
    }
    largest_bits = largest_of_warp(largest_bits);
    if (lane < cluster) store_for(lane, largest_of + own_warp, largest_bits);
    meet();
    largest_bits = largest_of_warp(lane < warps ? largest_of[lane] : 0);
    const float largest = __uint_as_float(largest_bits);
    const bool usual = has_weight && largest_bits >= __float_as_uint(0x1p-100f) && largest_bits < 0x7F800000;
    const float inverse = usual ? __fdiv_rn(kMostTrellisInput, largest) : 0.0f;
    int sum = 0, octet = octets;
    uint64_t upper, lower;
    const auto store_columns = [&] {
        if (octet >= octets) return;
        int8_t* to = room.columns + int64_t{2 * number_of_token} * padded_in + octet * kOctet;
        *reinterpret_cast<uint64_t*>(to) = upper;
        *reinterpret_cast<uint64_t*>(to + padded_in) = lower;
    };
    for (int turn = 0; turn < turns; ++turn) {
        store_columns();  // of the turn before: the last ones only when all have met, who would wait for them
        octet = turn * each + first_octet;
        if (turns > 1) turn_octet(x, suh, octet * kOctet, in_features, swiglu, block, values);
        upper = lower = 0;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            const int number = usual ? __float2int_rn(__fmul_rn(values[i], inverse)) : 0, high = (number + 64) >> 7;
            upper |= static_cast<uint64_t>(high & 0xFF) << 8 * i;
            lower |= static_cast<uint64_t>((number - 128 * high) & 0xFF) << 8 * i;
            sum += number;
        }
        // Of a tile's inputs 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 lie together; two lanes have a tile.
        upper = by_pairs(upper), lower = by_pairs(lower);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) store_for(0, sum_of + own_warp, sum);
    meet();
    store_columns();
    if (rank == 0 && warp == 0) {
        int64_t all = lane < warps ? sum_of[lane] : 0;
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) all += __shfl_xor_sync(kAllLanes, all, distance);
        const float scale = has_weight ? __fmul_rn(largest, 1.0f / kMostTrellisInput) : 0.0f;
        if (lane == 0) room.tokens[number_of_token] = {scale, all};
    }
}

}  // namespace hf_kbit::cuda
