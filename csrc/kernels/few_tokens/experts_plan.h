// How gemm.cu divides the work of few rows of experts: a part has up to `rows` rows of one expert, and all clusters
// divide its row tiles. Where a part has several rows, a kernel before transforms them. On GPUs without
// hopper/experts_wgmma.cu any number of rows is few.
#pragma once

#include <cmath>

#include "kernels/experts.h"
#include "kernels/few_tokens/plan.h"

namespace hf_kbit {

struct FewExpertsPlan {
    GemmPlan gemm;       // of a part; warps 0: rows are too many
    int rows;            // 1 or 8
    int least_clusters;  // of a part, whose CTAs have room for the sums of no more row tiles; of one row, those it has
    int waves;           // of the GPU's processors at most, for which parts are divided
    int clusters;        // of all parts, as many as there may be
};
inline std::string to_string(const FewExpertsPlan& plan) {
    return to_string(plan.gemm) + " " +
           print_fields({{"rows", plan.rows},
                         {"least_clusters", plan.least_clusters},
                         {"waves", plan.waves},
                         {"all_clusters", plan.clusters}});
}

// The clusters of each part with which all parts take least time, in up to so many waves: how many parts there are is
// known on the GPU alone.
constexpr int expert_clusters(int parts, int row_tiles, int slabs, int processors, int least, int waves) {
    int best = least;
    float best_time = 0;
    for (int wave = 1; wave <= waves && parts > 0; ++wave) {
        const int clusters = std::min(processors * wave / parts, row_tiles);
        if (clusters < least) continue;
        const int tiles = (row_tiles + clusters - 1) / clusters;
        const float time = static_cast<float>(wave) * static_cast<float>(fitted::few_tokens::kStart + tiles * slabs);
        if (best_time == 0 || time < best_time) best = clusters, best_time = time;
    }
    return best;
}

inline FewExpertsPlan plan_few_experts(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features,
                                       int bits, bool batch_invariant, const Gpu& gpu) {
    using namespace fitted::few_tokens;
    constexpr int kPartRows = 8, kMostWaves = 8;
    FewExpertsPlan plan{};
    if (rows < 1 || batch_invariant || experts > kMostExperts || !can_fuse(out_features, in_features, gpu)) {
        return plan;
    }
    const int64_t row_tiles[kGemmParts] = {ceil_div(out_features, kTileRows)}, slabs = num_slabs(in_features);
    const auto tiles = static_cast<int>(row_tiles[0]);
    const auto clusters_of = [&](int parts, int ctas, int least) {
        return expert_clusters(parts, tiles, static_cast<int>(slabs), ctas, least, kMostWaves);
    };
    // In slabs, as if all parts had as many processors.
    const auto time_of = [&](int parts) {
        const int clusters = clusters_of(parts, gpu.processors, 1);
        return static_cast<double>(ceil_div(int64_t{parts} * clusters, gpu.processors)) *
               static_cast<double>(kStart + ceil_div(tiles, clusters) * slabs);
    };
    const auto joined = static_cast<int>(std::ceil(expected_token_tiles(rows, experts, kPartRows)));
    const bool alone = rows <= experts && time_of(static_cast<int>(rows)) <= time_of(joined) + kTransformExperts;
    if (!alone && gpu.arch == 900 && rows >= fitted::path::kFewRows * experts) return plan;
    plan.rows = alone ? 1 : kPartRows;
    const int parts = alone ? static_cast<int>(rows) : joined;
    Gpu share = gpu;  // of a part
    share.processors = clusters_of(parts, gpu.processors, 1);
    plan.gemm = plan_gemm(plan.rows, row_tiles, 1, in_features, bits, true, share, alone);
    GemmPlan& gemm = plan.gemm;
    if (gemm.warps == 0) return plan;
    // Room for the sums of more row tiles, should there be more parts.
    const int64_t transformed = alone ? ceil_div(slabs, gemm.split) * kSlabActivations : 0;
    const auto bytes = [&](int of_tiles) {
        return gemm_shared_bytes(bits, gemm.warps, gemm.k_warps, plan.rows, of_tiles) + transformed;
    };
    for (int more = 1 << 20; more > 0; more /= 2) {
        if (gemm.tiles + more <= tiles && bytes(gemm.tiles + more) <= gpu.shared_limit) gemm.tiles += more;
    }
    gemm.shared_bytes = static_cast<int>(bytes(gemm.tiles));
    const int processors = gpu.processors / gemm.split;
    plan.least_clusters = static_cast<int>(ceil_div(tiles, gemm.tiles));
    const int clusters = clusters_of(parts, processors, plan.least_clusters);
    if (alone) plan.least_clusters = clusters;
    plan.waves = static_cast<int>(ceil_div(int64_t{parts} * clusters, processors)) + (alone ? 0 : 1);
    const int64_t most = alone ? rows : most_token_tiles(rows, experts, kPartRows);
    plan.clusters = static_cast<int>(std::max<int64_t>(processors * plan.waves, most * plan.least_clusters));
    return plan;
}

}  // namespace hf_kbit
