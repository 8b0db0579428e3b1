// Which rows of which expert a CTA of gemm.cu multiplies. How many rows each expert has is known on the GPU alone:
// each CTA finds its own part from where each expert's rows begin.
#pragma once

#include "kernels/few_tokens/arguments.cuh"
#include "kernels/few_tokens/experts_plan.h"
#include "kernels/operands.cuh"

namespace hf_kbit::cuda::few_tokens {

// Which rows of an expert a CTA multiplies: none, or so many. Rows from `beyond` on are no expert's.
struct Share {
    int expert, first, rows, cluster, clusters, x_row, beyond;
};

// Whatever offsets and rows say, rows are there.
__device__ __forceinline__ int first_row(const Arguments& arguments, int expert) {
    return min(max(arguments.offsets[expert], 0), arguments.y_rows);
}
__device__ __forceinline__ int row_of_x(const Arguments& arguments, int row) {
    row = min(row, arguments.y_rows - 1);
    return min(max(arguments.rows ? arguments.rows[row] : row, 0), arguments.last_row);
}

// Where each part is a row: the row is known at once, and the number of its expert is that of experts which end
// before.
__device__ __forceinline__ Share share_of_row(const Arguments& arguments, int of_all, int lane) {
    const int clusters = arguments.least_clusters, row = of_all / clusters;
    const int x_row = row_of_x(arguments, row), beyond = first_row(arguments, arguments.experts);
    int expert = 0;
    for (int i = lane; i < arguments.experts; i += kWarp) expert += arguments.offsets[i + 1] <= row;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) expert += __shfl_xor_sync(0xFFFFFFFF, expert, distance);
    return {expert, row,   expert < arguments.experts && row < arguments.y_rows, of_all - row * clusters, clusters,
            x_row,  beyond};
}

// By all lanes of a warp, each for some experts that follow each other.
__device__ __forceinline__ Share share_of_experts(const Arguments& arguments, int of_all, int lane) {
    if (arguments.part_rows_log2 == 0) return share_of_row(arguments, of_all, lane);
    const int of_lane = (arguments.experts + kWarp - 1) / kWarp, log2 = arguments.part_rows_log2;
    const int begin = min(lane * of_lane, arguments.experts), end = min(begin + of_lane, arguments.experts);
    const auto row = [&](int expert) { return first_row(arguments, expert); };
    const auto parts = [&](int expert) { return (max(row(expert + 1) - row(expert), 0) + (1 << log2) - 1) >> log2; };
    int own = 0;
#pragma unroll 4
    for (int i = begin; i < end; ++i) own += parts(i);
    const int up_to = sum_up_to_lane(own, lane);
    const int all = __shfl_sync(0xFFFFFFFF, up_to, kWarp - 1);
    const int clusters = expert_clusters(all, arguments.row_tiles, arguments.slabs, arguments.processors,
                                         arguments.least_clusters, arguments.waves);
    const int index = of_all / clusters;
    int left = index - (up_to - own);
    const bool found = left >= 0 && left < own;
    Share share{begin, 0, 0, of_all - index * clusters, clusters, 0, row(arguments.experts)};
    if (found) {
        while (left >= parts(share.expert)) left -= parts(share.expert++);
        share.first = row(share.expert) + (left << log2);
        share.rows = min(1 << log2, row(share.expert + 1) - share.first);
    }
    const unsigned finder = __ballot_sync(0xFFFFFFFF, found);
    const int from = finder ? __ffs(finder) - 1 : 0;
    share.expert = __shfl_sync(0xFFFFFFFF, share.expert, from);
    share.first = __shfl_sync(0xFFFFFFFF, share.first, from);
    share.rows = __shfl_sync(0xFFFFFFFF, share.rows, from);
    share.x_row = row_of_x(arguments, share.first);
    return share;
}

// Where the inputs and results of these rows are.
template <int kBits, typename T>
__device__ __forceinline__ Part part_of(const Arguments& arguments, const Share& share) {
    Part part = arguments.parts[0];
    const int64_t out_features = part.out_features, columns = arguments.in_features * (arguments.swiglu ? 2 : 1);
    const int64_t slab = int64_t{share.expert} * arguments.row_tiles * arguments.slabs;
    part.x = static_cast<const T*>(part.x) + share.x_row * columns;
    part.y = static_cast<T*>(part.y) + share.first * out_features;
    if (part.bias) part.bias = static_cast<const T*>(part.bias) + share.expert * out_features;
    part.words += slab * (word_bytes(kBits) / 4);
    part.scales += slab * kScaleBytes;
    part.cluster_tiles = arguments.row_tiles / share.clusters;
    part.more_tiles = arguments.row_tiles - part.cluster_tiles * share.clusters;
    return part;
}

// Zeros for rows of y from one on, by all CTAs.
template <typename T>
__device__ __forceinline__ void clear_rows(const Arguments& arguments, int first) {
    const int64_t out_features = arguments.parts[0].out_features, end = arguments.y_rows * out_features;
    T* y = static_cast<T*>(arguments.parts[0].y);
    for (int64_t i = first * out_features + blockIdx.x * blockDim.x + threadIdx.x; i < end;
         i += gridDim.x * blockDim.x) {
        y[i] = static_cast<T>(0.0f);
    }
}

}  // namespace hf_kbit::cuda::few_tokens
