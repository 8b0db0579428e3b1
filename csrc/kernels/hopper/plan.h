// How gemm_wgmma.cu divides its work.
//
// A CTA has a tile of 16, 32, 64, 128 or 256 tokens and `groups` of warps; a group has a tile of rows, 16 for each of
// its warps. The groups of a CTA and the CTAs of a cluster of `split` have the same rows and divide the slabs along K.
// Without either, CTAs take whole tiles in turns, and where the last turn would leave some of them idle, all of them
// divide the slabs of its tiles evenly, each those that follow the ones of the CTA before it. Who has the last slab of
// a tile adds up the sums of its parts, which the others leave in memory. After Osama et al., Stream-K, 2023.
//
// One launch may multiply the same tokens by several weights of one width. Their tiles follow each other, whole ones
// of each, and are divided as if they were those of one weight.
#pragma once

#include <algorithm>
#include <numeric>

#include "kernels/fitted.h"
#include "kernels/plan.h"

namespace hf_kbit {

struct WgmmaPlan {
    int token_tile;
    int groups;       // 1, 2 or 4
    int split;        // 1 or 2
    int clusters;     // share the tiles of rows and tokens
    int divided;      // of these the last ones, whose slabs they divide; the others are a multiple of `clusters`
    int x_stages;     // of each group
    int ring_stages;  // slabs under way for each warp
    int shared_bytes;
};
inline std::string to_string(const WgmmaPlan& plan) {
    return print_fields({{"token_tile", plan.token_tile},
                         {"groups", plan.groups},
                         {"split", plan.split},
                         {"clusters", plan.clusters},
                         {"divided", plan.divided},
                         {"x_stages", plan.x_stages},
                         {"ring_stages", plan.ring_stages},
                         {"shared_bytes", plan.shared_bytes}});
}

// The sums of 256 tokens leave registers for 8 warps only; fewer tokens need more warps to hide what decoding waits
// for.
constexpr int wgmma_warps(int token_tile) { return token_tile == 256 ? 8 : 16; }
constexpr int wgmma_rows(int token_tile, int groups) { return wgmma_warps(token_tile) * kTileRows / groups; }
constexpr int wgmma_most_groups(int token_tile) { return token_tile == 256 ? 1 : 4; }

// Whether x has its columns in the order in which tiles hold codes (Transformed::ordered). Where x is made for the
// weight anyway that costs nothing. Otherwise it takes a kernel, or else warps exchange codes, which costs as much for
// every row of the weight: with tiles of 256 tokens less than that kernel, but for 5 bits. The order is also that in
// which products are added up.
constexpr bool wgmma_ordered(int bits, int token_tile, bool transformed, bool batch_invariant) {
    return transformed || batch_invariant || bits == 5 || token_tile < 256;
}

inline int64_t wgmma_tiles(int64_t tokens, int64_t out_features, int token_tile, int groups) {
    return ceil_div(out_features, wgmma_rows(token_tile, groups)) * ceil_div(tokens, token_tile);
}
inline int64_t wgmma_tiles(int64_t tokens, const int64_t* out_features, int parts, int token_tile, int groups) {
    return std::accumulate(out_features, out_features + parts, int64_t{0}, [&](int64_t sum, int64_t rows) {
        return sum + wgmma_tiles(tokens, rows, token_tile, groups);
    });
}

// A stage of x has one box or two, of 128 bytes of each token: 64 columns, of int8 128.
constexpr int kWgmmaColumns = 64, kWgmmaBoxBytes = 2 * kWgmmaColumns;
constexpr int wgmma_stage_boxes(int token_tile) { return token_tile > 32 ? 1 : 2; }
constexpr int wgmma_stage_bytes(int token_tile) { return wgmma_stage_boxes(token_tile) * token_tile * kWgmmaBoxBytes; }

// Of the groups that share rows, those that add up the sums of an equal part of the tokens each.
constexpr int wgmma_owners(int parties, int token_tile) { return std::min(parties, token_tile / 8); }
// What they are sent, float32 or int32.
constexpr int wgmma_exchange_bytes(int token_tile, int groups, int split) {
    const int parties = groups * split;
    return groups * (parties - 1) * (token_tile / wgmma_owners(parties, token_tile)) * wgmma_rows(token_tile, groups) *
           4;
}

constexpr int wgmma_x_address() { return kSharedReserved + kPairTableBytes; }

// Of the slabs of the divided tiles, numbered through all of them, a CTA has as many as any other, which follow each
// other; the first ones have one more.
struct WgmmaDivision {
    int of_cta, more;

    constexpr int begin(int cta) const { return of_cta * cta + (cta < more ? cta : more); }
    // Which CTA has a slab.
    constexpr int cta_with(int slab) const {
        const int with_more = (of_cta + 1) * more;
        return slab < with_more ? slab / (of_cta + 1) : more + (slab - with_more) / of_cta;
    }
};
inline WgmmaDivision divide_wgmma(const WgmmaPlan& plan, int slabs) {
    return {slabs * plan.divided / plan.clusters, slabs * plan.divided % plan.clusters};
}

// A CTA leaves at most one part of a tile: its sums, float32 or int32, and for each of its warps whether they are
// there.
constexpr int64_t wgmma_partial_sums(const WgmmaPlan& plan) {
    return plan.divided == 0 ? 0 : int64_t{plan.clusters} * wgmma_rows(plan.token_tile, 1) * plan.token_tile;
}
constexpr int64_t wgmma_partial_flags(const WgmmaPlan& plan) {
    return plan.divided == 0 ? 0 : int64_t{plan.clusters} * wgmma_warps(plan.token_tile);
}

// From wgmma_x_address on: x, words and scales, a pair of barriers for each stage of both.
constexpr int wgmma_stages_bytes(int bits, int token_tile, int groups, int x_stages, int ring_stages) {
    return groups * x_stages * (wgmma_stage_bytes(token_tile) + 16) +
           wgmma_warps(token_tile) * ring_stages * (slab_bytes(bits) + 16);
}
// In the end sums of others lie there.
constexpr int wgmma_shared_bytes(int bits, int token_tile, int groups, int split, int x_stages, int ring_stages) {
    return wgmma_x_address() + std::max(wgmma_stages_bytes(bits, token_tile, groups, x_stages, ring_stages),
                                        wgmma_exchange_bytes(token_tile, groups, split));
}

// As many stages of x and of weights as shared memory has room for; whether that is enough.
template <typename Bytes>
bool fit_stages(WgmmaPlan& plan, int shared_limit, const Bytes& bytes) {
    constexpr int kMostStages = 8;
    plan.ring_stages = bytes(4, 2) <= shared_limit ? 2 : 1;
    plan.x_stages = kMostStages;
    while (plan.x_stages > 1 && bytes(plan.x_stages, plan.ring_stages) > shared_limit) --plan.x_stages;
    plan.shared_bytes = bytes(plan.x_stages, plan.ring_stages);
    return plan.x_stages >= 2;
}

// Cycles of a slab of a CTA, whose warps decode 64 columns at a time and share the tensor cores and shared memory.
constexpr double wgmma_slab_cycles(const fitted::WgmmaCycles& cycles, int bits, int token_tile) {
    return 4 * wgmma_warps(token_tile) *
           (cycles.piece + (bits == 5 ? cycles.piece_bits5 : 0) + cycles.piece_token * token_tile);
}
// Of a tile, whose groups compete for x.
constexpr double wgmma_tile_cycles(const fitted::WgmmaCycles& cycles, int64_t slabs, int bits, int token_tile,
                                   int groups, int split) {
    return ceil_div(slabs, groups * split) * wgmma_slab_cycles(cycles, bits, token_tile) + cycles.tile +
           (groups > 1 ? cycles.group_token * groups * token_tile : 0);
}

// out_features: of each of the weights of a launch. With batch_invariant a CTA goes through all slabs of its tiles. On
// a GPU of compute capability 9.0.
inline WgmmaPlan plan_wgmma(int64_t tokens, const int64_t* out_features, int parts, int64_t in_features, int bits,
                            bool batch_invariant, const Gpu& gpu, const fitted::WgmmaCycles& cycles = fitted::kWgmma) {
    const int64_t slabs = num_slabs(in_features);
    WgmmaPlan best{};
    double best_time = 0;
    const auto consider = [&](int token_tile, int groups, int split, bool divides) {
        const int64_t tiles = wgmma_tiles(tokens, out_features, parts, token_tile, groups);
        const int64_t clusters = divides ? std::min<int64_t>(gpu.processors, tiles * slabs)
                                         : std::min<int64_t>(gpu.processors / split, tiles);
        if (clusters < 1 || (groups * split > 1 && clusters < tiles)) return;  // parties have one tile
        const int64_t divided = divides ? tiles % clusters : 0;
        WgmmaPlan plan{token_tile, groups, split, static_cast<int>(clusters), static_cast<int>(divided), 0, 0, 0};
        if (!fit_stages(plan, gpu.shared_limit, [&](int x_stages, int ring_stages) {
                return wgmma_shared_bytes(bits, token_tile, groups, split, x_stages, ring_stages);
            })) {
            return;
        }
        const double tile =
            wgmma_tile_cycles(cycles, slabs, bits, token_tile, groups, split) + (split > 1 ? cycles.cluster : 0);
        double time = cycles.start + ceil_div(tiles - divided, clusters) * tile;
        if (divided > 0) {
            time += ceil_div(divided * slabs, clusters) * wgmma_slab_cycles(cycles, bits, token_tile) +
                    cycles.divided + cycles.divided_token * token_tile +
                    ceil_div(clusters, divided) * (cycles.part + cycles.part_token * token_tile);
        }
        if (best.token_tile == 0 || time < best_time) {
            best = plan;
            best_time = time;
        }
    };
    for (int token_tile = 16; token_tile <= 256; token_tile *= 2) {
        const int most_groups = batch_invariant ? 1 : wgmma_most_groups(token_tile);
        const int most_split = batch_invariant ? 1 : 2;
        for (int groups = 1; groups <= most_groups; groups *= 2) {
            for (int split = 1; split <= most_split && groups * split <= slabs; ++split) {
                consider(token_tile, groups, split, false);
            }
        }
        if (!batch_invariant) consider(token_tile, 1, 1, true);
    }
    return best;
}

// Of 8-bit inputs, whose sums are the same in any order.
inline WgmmaPlan plan_int8(int64_t tokens, const int64_t* out_features, int parts, int64_t in_features, int bits,
                           const Gpu& gpu) {
    return plan_wgmma(tokens, out_features, parts, in_features, bits, false, gpu, fitted::kInt8);
}
}  // namespace hf_kbit
