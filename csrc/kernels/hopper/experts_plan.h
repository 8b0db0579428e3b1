// Whether many rows of experts take experts_wgmma.cu, of 8-bit inputs any number experts_int8.cu, and how these
// kernels divide their work. CTAs, the plan's clusters, take tiles in turns; how many there are, the host does not
// know.
#pragma once

#include "kernels/experts.h"
#include "kernels/hopper/plan.h"

namespace hf_kbit {

// The first row and the tiles of tokens before it of each expert, and of the end of all: 16 bytes at a time.
constexpr int expert_table_bytes(int experts) { return (experts + 2) / 2 * 16; }
// As wgmma_shared_bytes, but what groups exchange lies behind the table, as the next tile is under way meanwhile.
constexpr int experts_shared_bytes(int bits, int token_tile, int groups, int x_stages, int ring_stages, int experts) {
    return wgmma_x_address() + wgmma_stages_bytes(bits, token_tile, groups, x_stages, ring_stages) +
           expert_table_bytes(experts) + wgmma_exchange_bytes(token_tile, groups, 1);
}

// Tiles of 128 tokens are multiplied in as many steps of rows as those that they have take, others whole.
constexpr int kExpertStep = 32;
constexpr int expert_steps(int token_tile) { return token_tile == 128 ? 4 : 1; }

// Whether the kernel multiplies. It counts tiles in 32 bits, whatever the offsets are, a turn beyond the last one too.
inline bool experts_are_fused(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features,
                              const Gpu& gpu) {
    constexpr int64_t kMostTiles = 1 << 30, kLeastTokens = 16, kLeastRows = 4 * kTileRows;
    return rows > 0 && rows <= INT32_MAX && experts > 0 && experts <= kMostExperts && gpu.arch == 900 &&
           can_fuse(out_features, in_features, gpu) &&
           ceil_div(rows, kLeastTokens) * experts <= kMostTiles / ceil_div(out_features, kLeastRows);
}

// Cycles of a tile with so many steps of tokens, as wgmma_tile_cycles, but where each tile has another expert's
// weight.
constexpr double expert_tile_cycles(const fitted::ExpertsCycles& cycles, int64_t slabs, int bits, int token_tile,
                                    int groups, int steps) {
    const bool whole = steps == expert_steps(token_tile);
    const double slab = whole ? cycles.slab[log2_ceil(token_tile / 16)] : cycles.slab_of_steps[steps - 1];
    return ceil_div(slabs, groups) * (slab + (bits == 5 ? cycles.slab_bits5 : 0)) + cycles.tile +
           (groups > 1 ? cycles.group_token * groups * token_tile : 0);
}

// With batch_invariant a CTA goes through all slabs of its tiles. rows and experts: 1 or more.
inline WgmmaPlan plan_experts(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int bits,
                              bool batch_invariant, const Gpu& gpu,
                              const fitted::ExpertsCycles& cycles = fitted::kExperts) {
    const int64_t slabs = num_slabs(in_features);
    WgmmaPlan best{};
    double best_time = 0;
    for (int token_tile = 16; token_tile <= 256; token_tile *= 2) {
        const double token_tiles = expected_token_tiles(rows, experts, token_tile);
        const int most_groups = batch_invariant ? 1 : wgmma_most_groups(token_tile);
        for (int groups = 1; groups <= most_groups && groups <= slabs; groups *= 2) {
            const int64_t row_groups = ceil_div(out_features, wgmma_rows(token_tile, groups));
            const int64_t most_tiles = row_groups * most_token_tiles(rows, experts, token_tile);
            WgmmaPlan plan{token_tile, groups, 1, static_cast<int>(std::min<int64_t>(gpu.processors, most_tiles)),
                           0,          0,      0, 0};
            if (!fit_stages(plan, gpu.shared_limit, [&](int x_stages, int ring_stages) {
                    return experts_shared_bytes(bits, token_tile, groups, x_stages, ring_stages,
                                                static_cast<int>(experts));
                })) {
                continue;
            }
            double of_tiles = 0;  // cycles of all tiles of the same rows: of each step what it adds
            for (int step = 0; step < expert_steps(token_tile); ++step) {
                const auto up_to = [&](int steps) {
                    return steps == 0 ? 0 : expert_tile_cycles(cycles, slabs, bits, token_tile, groups, steps);
                };
                of_tiles += expected_token_tiles(rows, experts, token_tile, step * kExpertStep) *
                            (up_to(step + 1) - up_to(step));
            }
            const double shares = row_groups * token_tiles / plan.clusters;
            const double turns = shares <= 1 ? 1 : shares + 0.5;
            const double time = turns * of_tiles / token_tiles;
            if (best.token_tile == 0 || time < best_time) {
                best = plan;
                best_time = time;
            }
        }
    }
    return best;
}

// Of 8-bit inputs, whose sums are the same in any order.
inline WgmmaPlan plan_experts_int8(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int bits,
                                   const Gpu& gpu) {
    return plan_experts(rows, experts, out_features, in_features, bits, false, gpu, fitted::kExpertsInt8);
}

}  // namespace hf_kbit
