// What a launch of gemm.cu is told.
#pragma once

#include <cstdint>

#include "kernels/few_tokens/plan.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda::few_tokens {

constexpr bool kSm90 = kArch >= 900;

// One of the weights that a launch multiplies x by, where its product goes, and which CTAs see to it: the clusters
// that follow those of the parts before.
struct Part {
    const void* bias;
    void* y;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    const void* x;  // its own in instances for weights with a Transform: made before, unless each CTA does so
    const uint8_t* columns;
    int rotated;
    int out_features;
    int cluster_tiles, more_tiles;  // row tiles of a cluster; this many clusters have one more
};

// In this order, so that a CTA of the first part reads few lines of constant memory.
struct Arguments {
    const void* x;
    int tokens, in_features, slabs;
    int k_warps_log2, split_log2, tokens_log2;
    int pitch, warp_floats;         // of sums
    int first_cluster[kGemmParts];  // of each part; beyond all clusters where there is none
    int transforms;                 // each CTA by itself
    uint32_t signs;                 // of scales, in float16
    Part parts[kGemmParts];
    // Of experts: the first part is that of row 0 and expert 0, of the first row of x or the first picked one.
    const int32_t* rows;
    const int32_t* offsets;
    int experts, y_rows, last_row;
    int part_rows_log2, row_tiles, processors, least_clusters, waves;  // of plan_few_experts
    int swiglu;
};

}  // namespace hf_kbit::cuda::few_tokens
