// How gemm_mma.cu and gemm_mma_int8.cu divide their work.
#pragma once

#include "kernels/fitted.h"
#include "kernels/plan.h"

namespace hf_kbit {

// The kernels are compiled and chosen for all GPUs but Hopper's.
constexpr bool has_mma_path(int arch) { return has_gemm(arch) && arch != 900; }

// A CTA has a tile of 256 rows and 32 or 64 tokens, of 8-bit inputs up to 96, or with `split` > 1 a part of its
// slabs.
struct MmaPlan {
    int token_tile;
    int tiles;
    int split;
};
inline std::string to_string(const MmaPlan& plan) {
    return print_fields({{"token_tile", plan.token_tile}, {"tiles", plan.tiles}, {"split", plan.split}});
}

constexpr int kMmaWarps = 8, kMmaRows = 256, kMmaStages = 4;
// At most in a tile; of 8-bit inputs as many as registers hold in the code for a GPU.
constexpr int kMmaTokens = 64;
constexpr int mma_int8_tokens(int arch) { return arch < 1000 ? 96 : 64; }
// 64 columns, of numbers of so many bytes.
constexpr int mma_stage_bytes(int token_tile, int bytes) { return token_tile * 2 * kBlockSize * bytes; }
constexpr int mma_shared_bytes(int token_tile, int bytes) {
    return kSharedReserved + kPairTableBytes + kMmaStages * mma_stage_bytes(token_tile, bytes);
}
// What the parts of tiles have in memory, float32 or int32.
constexpr int64_t mma_partial_sums(const MmaPlan& plan) {
    return plan.split == 1 ? 0 : int64_t{plan.tiles} * plan.split * kMmaRows * plan.token_tile;
}

// Of 8-bit inputs there is a word more, for what 1 stands for in them.
constexpr int64_t mma_int8_partial_words(const MmaPlan& plan) { return mma_partial_sums(plan) + (plan.split > 1); }

// With batch_invariant a CTA goes through all slabs of its tile.
inline MmaPlan plan_mma(int64_t tokens, int64_t out_features, int64_t in_features, bool batch_invariant,
                        const Gpu& gpu, const fitted::MmaCycles& cycles = fitted::kMma, int most_tokens = kMmaTokens) {
    const int64_t slabs = num_slabs(in_features);
    MmaPlan best{};
    double best_time = 0;
    for (int token_tile = 32; token_tile <= most_tokens; token_tile += 32) {
        const int64_t tiles = ceil_div(out_features, kMmaRows) * ceil_div(tokens, token_tile);
        const int64_t most_split = batch_invariant ? 1 : slabs;
        for (int64_t split = 1; split <= most_split && (split == 1 || tiles * split <= gpu.processors); ++split) {
            const double cta =
                cycles.start + ceil_div(slabs, split) * 4 * (cycles.piece + cycles.piece_token * token_tile);
            const double add = split == 1 ? 0 : cycles.add + cycles.add_token * token_tile;
            const double time = ceil_div(tiles * split, gpu.processors) * cta + add;
            if (best.tiles == 0 || time < best_time) {
                best = {token_tile, static_cast<int>(tiles), static_cast<int>(split)};
                best_time = time;
            }
        }
    }
    return best;
}

// Of 8-bit inputs, whose sums are the same in any order.
inline MmaPlan plan_mma_int8(int64_t tokens, int64_t out_features, int64_t in_features, const Gpu& gpu) {
    return plan_mma(tokens, out_features, in_features, false, gpu, fitted::kMmaInt8, mma_int8_tokens(gpu.arch));
}

}  // namespace hf_kbit
