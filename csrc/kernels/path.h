// Which kernel multiplies tokens by a weight in tiles, and how many tokens by several weights at once.
#pragma once

#include "kernels/few_tokens/plan.h"
#include "kernels/fitted.h"
#include "kernels/hopper/plan.h"
#include "kernels/mma/plan.h"

namespace hf_kbit {

// For tiles and float16 or bfloat16; everything else is dequantized.
enum class GemmPath { decode, wgmma, mma, dequantize };

// Up to kGemmTokens tokens: few_tokens/gemm.cu, but for large weights on Hopper. More: wgmma or mma, until decoding
// first and cuBLAS are faster. A transformed weight of few rows is turned back while it is decoded, for less than it
// costs to transform many tokens.
//
// With batch_invariant any number of tokens takes the kernel that is made for many: there a token's sums are added up
// in the same order, whatever tokens are beside it.
inline GemmPath gemm_path(int64_t tokens, int64_t out_features, int64_t in_features, int bits, bool transformed,
                          bool batch_invariant, const Gpu& gpu) {
    using namespace fitted::path;
    if (tokens < 1 || !can_fuse(out_features, in_features, gpu)) return GemmPath::dequantize;
    const bool large = out_features * in_features >= kLargeWeight;
    const GemmPath many = has_mma_path(gpu.arch) ? GemmPath::mma : GemmPath::wgmma;
    if (batch_invariant) return many;
    if (tokens <= kGemmTokens) {
        const bool few = many == GemmPath::mma || !large || tokens < fewest_wgmma(bits, transformed);
        return few ? GemmPath::decode : many;
    }
    const int64_t most = many == GemmPath::mma                         ? kMostTokensMma
                         : transformed && out_features <= kFewFeatures ? kFewFeaturesMostTokens
                         : large                                       ? kMostTokensLarge
                                                                       : kMostTokens;
    return tokens <= most ? many : GemmPath::dequantize;
}

// Where 8-bit inputs are asked for, 16-bit ones are taken up to so many tokens, or rows of each expert in the mean, as
// they are as fast (docs/lab, "8-bit inputs on Hopper").
constexpr int kMost16BitTokens = 64, kMost16BitRows = 32;

// Whether a weight of 8-bit inputs shares a launch with others of one input. With more tokens the tiles of a large one
// keep a GPU busy by themselves, and x becomes int8 for the next while they are multiplied.
inline bool int8_is_joined(int64_t tokens, int64_t out_features, int64_t in_features) {
    constexpr int64_t kMostTokens = 128;
    return tokens <= kMostTokens || out_features * in_features < fitted::path::kLargeWeight;
}

// Whether rows of experts, each one of the tokens, are copies of tokens that were made int8 before, or made one by
// one: where that moves fewer bytes of each column. A row that is made is read in 16 bits, with swiglu twice as many.
inline bool int8_rows_are_copied(int64_t rows, int64_t tokens, bool swiglu) {
    const int64_t made = swiglu ? 5 : 3, copied = 2;
    return made * tokens + copied * rows < made * rows;
}

// Whether a kernel multiplies 8-bit inputs by a weight in tiles: that of wgmma or of mma. They count tiles in 32 bits,
// those of all weights of a launch and a turn beyond the last one.
inline bool int8_is_fused(int64_t tokens, int64_t out_features, int64_t in_features, const Gpu& gpu) {
    constexpr int64_t kMostTiles = (1 << 30) / kGemmParts, kLeastTokens = 16, kLeastRows = 4 * kTileRows;
    return tokens > 0 && tokens <= INT32_MAX - 1 && can_fuse(out_features, in_features, gpu) &&
           ceil_div(tokens, kLeastTokens) <= kMostTiles / ceil_div(out_features, kLeastRows);
}

// The most tokens whose products with several weights become one op where models are compiled. More gain little by one
// launch, and all results take memory from the first product on.
constexpr int kJoinedTokens = 512;

}  // namespace hf_kbit
