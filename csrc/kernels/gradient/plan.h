// Whether the gradient of the activations takes gradient_wgmma.cu, and how the kernel divides its work.
#pragma once

#include <algorithm>

#include "kernels/fitted.h"
#include "kernels/hopper/plan.h"

namespace hf_kbit {

// A CTA has a tile of 256 tokens and 128 columns, half a slab of each row tile, or a part of its rows. It goes through
// them in pieces of 64: gradients of outputs, words and scales of four row tiles.
struct GradientPlan {
    int tiles;
    int parts;   // of each tile
    int pieces;  // of each part, an even number; those of the last one may end beyond the rows, times zeros
};
inline std::string to_string(const GradientPlan& plan) {
    return print_fields({{"tiles", plan.tiles}, {"parts", plan.parts}, {"pieces", plan.pieces}});
}

constexpr int kGradientTokens = 256, kGradientColumns = kSlabColumns / 2, kGradientPieceTiles = 4;
constexpr int kGradientStages = 4;  // pieces under way
constexpr int kGradientStageBytes = kGradientTokens * kWgmmaColumns * 2;
// Words of half a slab of a row tile, in whole runs of 512 bytes; then of four row tiles, with scales.
constexpr int gradient_words_bytes(int bits) { return (2 * bits + 3) / 4 * 512; }
constexpr int gradient_weights_bytes(int bits) {
    return kGradientPieceTiles * (gradient_words_bytes(bits) + kScaleBytes / 2);
}
// Groups of eight tokens that a warp hands to another at a time.
constexpr int gradient_exchanged(int bits) { return bits == 5 ? 2 : 4; }
constexpr int gradient_exchange_bytes(int at_once) { return 8 * at_once * 8 * kLanes; }
constexpr int gradient_shared_bytes(int bits) {
    return wgmma_x_address() + kGradientStages * (kGradientStageBytes + gradient_weights_bytes(bits) + 32) +
           gradient_exchange_bytes(gradient_exchanged(bits));
}
// What the parts of tiles have in memory, float32.
constexpr int64_t gradient_partial_sums(const GradientPlan& plan) {
    return plan.parts == 1 ? 0 : int64_t{plan.tiles} * plan.parts * kGradientTokens * kGradientColumns;
}

inline int64_t gradient_tiles(int64_t tokens, int64_t in_features) {
    return ceil_div(tokens, kGradientTokens) * ceil_div(in_features, kGradientColumns);
}

// Else some columns of the weight at a time are decoded for cuBLAS, which costs the same for any number of tokens, and
// twice as much for transformed weights. Beyond 512 tokens the kernel does not divide tiles: it is taken only where at
// most a tenth of its turns are idle.
inline bool gradient_is_fused(int64_t tokens, int64_t out_features, int64_t in_features, int bits, bool transformed,
                              const Gpu& gpu) {
    if (tokens < 1 || gpu.arch != 900 || !can_fuse(out_features, in_features, gpu)) return false;
    if (tokens <= 512) return true;
    const int64_t most = fitted::path::most_gradient_tokens(bits) * (transformed ? 2 : 1);
    const int64_t tiles = gradient_tiles(tokens, in_features);
    return tokens <= std::min<int64_t>(2048, most) &&
           10 * tiles >= 9 * ceil_div(tiles, gpu.processors) * gpu.processors;
}

inline GradientPlan plan_gradient(int64_t tokens, int64_t out_features, int64_t in_features, const Gpu& gpu) {
    using namespace fitted::gradient;
    const int64_t tiles = gradient_tiles(tokens, in_features);
    const int64_t all_pieces = ceil_div(out_features, kGradientPieceTiles * kTileRows);
    GradientPlan best{};
    double best_time = 0;
    for (int64_t split = 1; split == 1 || (tiles * split <= gpu.processors && split <= all_pieces); ++split) {
        const int64_t pieces = ceil_div(all_pieces, 2 * split) * 2, parts = ceil_div(all_pieces, pieces);
        const double add = parts == 1 ? 0 : kAdd + kAddPart * static_cast<double>(tiles * parts);
        const double turns = static_cast<double>(ceil_div(tiles * parts, gpu.processors));
        const double time = turns * (kTile + pieces * kPiece) + add;
        if (best.parts == 0 || time < best_time) {
            best = {static_cast<int>(tiles), static_cast<int>(parts), static_cast<int>(pieces)};
            best_time = time;
        }
    }
    return best;
}

}  // namespace hf_kbit
