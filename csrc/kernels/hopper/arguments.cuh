// What a launch of gemm_wgmma.cu, experts_wgmma.cu, gemm_int8.cu or experts_int8.cu is told, and which of its kernels
// it is.
#pragma once

#include <cuda.h>

#include "kernels/hopper/plan.h"
#include "kernels/hopper/tensor_map.h"
#include "kernels/kernels.h"
#include "kernels/operands.cuh"
#include "kernels/outputs.cuh"

namespace hf_kbit::cuda {

// One of the weights that a launch multiplies tokens by, or all of experts.
struct WgmmaWeight {
    Output output;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
};

// How bulk copies find the x of each. Apart from arguments: as its address is handed out, what lies beside it would be
// read anew after every instruction that writes to memory.
template <int kWeights>
struct WgmmaMaps {
    CUtensorMap of[kWeights];
};

template <int kWeights>
struct WgmmaArguments {
    WgmmaWeight weights[kWeights];
    float* partial;   // as wgmma_partial_sums
    uint32_t* ready;  // [clusters, warps]: whether a warp's sums are there
    int slabs;
    int row_tiles[kWeights];  // of 16 rows
    int token_tiles;
    int clusters, groups_log2, split_log2, x_stages, ring_stages;
    int whole, turns;  // tiles that are not divided, and how many of them each CTA has where others are
    WgmmaDivision division;
    uint32_t signs;            // of scales
    int first_tile[kWeights];  // beyond all tiles where there is no such weight
    // Of experts alone; in place of row tiles times token tiles, whole and turns.
    const int32_t* offsets;
    int experts, row_groups;
};

// Of x in int8.
template <int kWeights>
struct Int8Arguments : WgmmaArguments<kWeights> {
    const __half* inverses[kWeights];     // of each weight's rows
    const float* token_scales[kWeights];  // of each token of its x, and one more
    bool half;                            // whether y is float16, or else bfloat16
};

// T: of operands A and B.
template <typename T, int kWeights>
using ArgumentsOf = std::conditional_t<std::is_same_v<T, int8_t>, Int8Arguments<kWeights>, WgmmaArguments<kWeights>>;

// Which tiles CTAs divide, where the weights have so many.
template <int kWeights>
void divide_tiles(const WgmmaPlan& plan, int64_t tokens, int64_t tiles, WgmmaArguments<kWeights>& arguments) {
    arguments.token_tiles = static_cast<int>(ceil_div(tokens, plan.token_tile));
    arguments.whole = static_cast<int>(tiles - plan.divided);
    arguments.turns = arguments.whole / plan.clusters;
    arguments.division = divide_wgmma(plan, arguments.slabs);
}

// run(std::integral_constant<int, token_tile>)
template <int kTokens = 16, typename Run>
cudaError_t dispatch_token_tile(int token_tile, const Run& run) {
    if (token_tile == kTokens) return run(std::integral_constant<int, kTokens>{});
    if constexpr (kTokens < 256) return dispatch_token_tile<2 * kTokens>(token_tile, run);
    return cudaErrorInvalidConfiguration;
}

// What all products have in common; tokens: rows of x. Counts the tiles of the weights.
template <typename Each, int kWeights>
void begin_arguments(const Each* products, int count, int64_t tokens, int64_t in_features, const WgmmaPlan& plan,
                     WgmmaArguments<kWeights>& arguments, int64_t& tiles) {
    tiles = 0;
    for (int& first_tile : arguments.first_tile) first_tile = INT32_MAX;
    for (int i = 0; i < count; ++i) {
        const Product& product = products[i];
        WgmmaWeight& weight = arguments.weights[i];
        weight.output = {product.bias, product.y, static_cast<int>(tokens), static_cast<int>(product.out_features)};
        weight.words = product.words;
        weight.scales = product.scales;
        weight.codebook = product.codebook;
        arguments.row_tiles[i] = static_cast<int>(ceil_div(product.out_features, kTileRows));
        arguments.first_tile[i] = static_cast<int>(tiles);
        tiles += wgmma_tiles(tokens, product.out_features, plan.token_tile, plan.groups);
    }
    arguments.slabs = static_cast<int>(num_slabs(in_features));
    arguments.clusters = plan.clusters;
    arguments.x_stages = plan.x_stages;
    arguments.ring_stages = plan.ring_stages;
    arguments.split_log2 = log2_ceil(plan.split);
    arguments.groups_log2 = log2_ceil(plan.groups);
}

// The same of x in 16 bits.
template <int kWeights>
cudaError_t begin_arguments(const Product* products, int count, Dtype dtype, int64_t tokens, int64_t in_features,
                            const WgmmaPlan& plan, WgmmaMaps<kWeights>& maps, WgmmaArguments<kWeights>& arguments,
                            int64_t& tiles) {
    begin_arguments(products, count, tokens, in_features, plan, arguments, tiles);
    for (int i = 0; i < count; ++i) {
        const cudaError_t error = map_of_rows(products[i].x, dtype, tokens, in_features, plan.token_tile, maps.of[i]);
        if (error != cudaSuccess) return error;
    }
    arguments.signs = dtype == Dtype::float16 ? signs_of<__half>(products[0].signed_scales)
                                              : signs_of<__nv_bfloat16>(products[0].signed_scales);
    return cudaSuccess;
}

// The same of x in int8.
template <int kWeights>
cudaError_t begin_arguments(const Int8Product* products, int count, Dtype dtype, int64_t tokens, int64_t in_features,
                            const WgmmaPlan& plan, WgmmaMaps<kWeights>& maps, Int8Arguments<kWeights>& arguments,
                            int64_t& tiles) {
    begin_arguments(products, count, tokens, in_features, plan, arguments, tiles);
    const int64_t columns = num_blocks(in_features) * kBlockSize;
    for (int i = 0; i < count; ++i) {
        arguments.inverses[i] = static_cast<const __half*>(products[i].inverses);
        arguments.token_scales[i] = products[i].token_scales;
        const cudaError_t error =
            map_of_rows(products[i].x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, tokens, columns, plan.token_tile, maps.of[i]);
        if (error != cudaSuccess) return error;
    }
    arguments.signs = signs_of<__half>(products[0].signed_scales);
    arguments.half = dtype == Dtype::float16;
    return cudaSuccess;
}

// Of experts, in place of what the host does not know.
template <int kWeights>
void list_experts(const int32_t* offsets, int experts, const WgmmaPlan& plan, WgmmaArguments<kWeights>& arguments) {
    arguments.offsets = offsets;
    arguments.experts = experts;
    const int rows = arguments.weights[0].output.out_features;
    arguments.row_groups = static_cast<int>(ceil_div(rows, wgmma_rows(plan.token_tile, plan.groups)));
}

}  // namespace hf_kbit::cuda
