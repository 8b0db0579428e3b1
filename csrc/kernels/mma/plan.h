// How gemm_mma.cu divides its work.
#pragma once

#include "kernels/fitted.h"
#include "kernels/plan.h"

namespace hf_kbit {

// The kernel is compiled and chosen for all GPUs but Hopper's.
constexpr bool has_mma_path(int arch) { return has_gemm(arch) && arch != 900; }

// A CTA has a tile of 256 rows and 32 or 64 tokens, or with `split` > 1 a part of its slabs.
struct MmaPlan {
    int token_tile;
    int tiles;
    int split;
};
inline std::string to_string(const MmaPlan& plan) {
    return print_fields({{"token_tile", plan.token_tile}, {"tiles", plan.tiles}, {"split", plan.split}});
}

constexpr int kMmaWarps = 8, kMmaRows = 256, kMmaStages = 4;
constexpr int mma_stage_bytes(int token_tile) { return token_tile * 2 * kBlockSize * 2; }  // 64 columns
constexpr int mma_shared_bytes(int token_tile) {
    return kSharedReserved + kPairTableBytes + kMmaStages * mma_stage_bytes(token_tile);
}
// What the parts of tiles have in memory, float32.
constexpr int64_t mma_partial_sums(const MmaPlan& plan) {
    return plan.split == 1 ? 0 : int64_t{plan.tiles} * plan.split * kMmaRows * plan.token_tile;
}

// With batch_invariant a CTA goes through all slabs of its tile.
inline MmaPlan plan_mma(int64_t tokens, int64_t out_features, int64_t in_features, bool batch_invariant,
                        const Gpu& gpu) {
    using namespace fitted::mma;
    const int64_t slabs = num_slabs(in_features);
    MmaPlan best{};
    double best_time = 0;
    for (const int token_tile : {32, 64}) {
        const int64_t tiles = ceil_div(out_features, kMmaRows) * ceil_div(tokens, token_tile);
        const int64_t most_split = batch_invariant ? 1 : slabs;
        for (int64_t split = 1; split <= most_split && (split == 1 || tiles * split <= gpu.processors); ++split) {
            const double cta = kStart + ceil_div(slabs, split) * 4 * (kPiece + kPieceToken * token_tile);
            const double add = split == 1 ? 0 : kAdd + kAddToken * token_tile;
            const double time = ceil_div(tiles * split, gpu.processors) * cta + add;
            if (best.tiles == 0 || time < best_time) {
                best = {token_tile, static_cast<int>(tiles), static_cast<int>(split)};
                best_time = time;
            }
        }
    }
    return best;
}

}  // namespace hf_kbit
