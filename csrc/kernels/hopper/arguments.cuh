// What a launch of gemm_wgmma.cu or experts_wgmma.cu is told, and which of its kernels it is.
#pragma once

#include "kernels/hopper/plan.h"
#include "kernels/kernels.h"
#include "kernels/operands.cuh"
#include "kernels/outputs.cuh"

namespace hf_kbit::cuda {

struct WgmmaArguments {
    Output output;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    float* partial;   // as wgmma_partial_sums
    uint32_t* ready;  // [clusters, warps]: whether a warp's sums are there
    int slabs;
    int row_tiles, token_tiles;  // row_tiles of 16 rows
    int clusters, groups_log2, split_log2, x_stages, ring_stages;
    int whole, turns;  // tiles that are not divided, and how many of them each CTA has where others are
    WgmmaDivision division;
    uint32_t signs;  // of scales
    // Of experts alone; in place of row tiles times token tiles, whole and turns.
    const int32_t* offsets;
    int experts, row_groups;
};

// run(std::integral_constant<int, token_tile>)
template <int kTokens = 16, typename Run>
cudaError_t dispatch_token_tile(int token_tile, const Run& run) {
    if (token_tile == kTokens) return run(std::integral_constant<int, kTokens>{});
    if constexpr (kTokens < 256) return dispatch_token_tile<2 * kTokens>(token_tile, run);
    return cudaErrorInvalidConfiguration;
}

// What products of one weight and of experts have in common; tokens: rows of x.
inline WgmmaArguments wgmma_arguments(const Product& product, Dtype dtype, int64_t tokens, int64_t in_features,
                                      const WgmmaPlan& plan) {
    const TileLayout layout(product.out_features, in_features);
    WgmmaArguments arguments{};
    arguments.output = {product.bias, product.y, static_cast<int>(tokens), static_cast<int>(product.out_features)};
    arguments.words = product.words;
    arguments.scales = product.scales;
    arguments.codebook = product.codebook;
    arguments.slabs = static_cast<int>(layout.slabs);
    arguments.row_tiles = static_cast<int>(layout.row_tiles);
    arguments.clusters = plan.clusters;
    arguments.x_stages = plan.x_stages;
    arguments.ring_stages = plan.ring_stages;
    arguments.split_log2 = log2_ceil(plan.split);
    arguments.groups_log2 = log2_ceil(plan.groups);
    arguments.signs = dtype == Dtype::float16 ? signs_of<__half>(product.signed_scales)
                                              : signs_of<__nv_bfloat16>(product.signed_scales);
    return arguments;
}

}  // namespace hf_kbit::cuda
