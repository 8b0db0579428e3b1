// How gemm.cu divides the work of up to 16 tokens.
//
// The unit of work is a slab (16 rows x 256 columns). A CTA owns consecutive row tiles; with `split` > 1 the CTAs of a
// cluster share their row tiles and divide the slabs along K. Of a CTA's warps `k_warps` divide the slabs and the
// others the row tiles. A warp goes through its slabs along K in the outer loop, so that its activations stay in
// registers, and through its row tiles in the inner one; its sums wait in shared memory until all warps are done.
//
// One launch may multiply the same activations by several weights, its parts. A CTA has row tiles of one of them.
//
// Where weights have column scales or a rotation and there is one token, each CTA transforms the activations of its
// slabs by itself, into shared memory, while its first slabs are under way. More tokens, or very many columns, are too
// much work to do once for every CTA, and a kernel before it transforms them all.
#pragma once

#include <algorithm>
#include <numeric>

#include "kernels/fitted.h"
#include "kernels/plan.h"

namespace hf_kbit {

constexpr int kGemmTokens = 16;  // at most
constexpr int kGemmParts = 4;

struct GemmPlan {
    int warps;                 // of a CTA
    int k_warps;               // a power of two; the other factor of `warps` divides the row tiles
    int split;                 // CTAs of a cluster
    int tiles;                 // the most row tiles of a cluster
    int clusters[kGemmParts];  // of each part, whose row tiles are divided evenly among them
    int shared_bytes;          // of a CTA
    bool transforms;           // by itself
};
inline std::string to_string(const GemmPlan& plan) {
    const int (&of)[kGemmParts] = plan.clusters;
    return print_fields({{"warps", plan.warps},
                         {"k_warps", plan.k_warps},
                         {"split", plan.split},
                         {"tiles", plan.tiles},
                         {"clusters0", of[0]},
                         {"clusters1", of[1]},
                         {"clusters2", of[2]},
                         {"clusters3", of[3]},
                         {"shared_bytes", plan.shared_bytes},
                         {"transforms", plan.transforms}});
}

// Shared memory, from kSharedReserved on: table, ring and barriers, the unit of the sums, sums; then what a CTA
// transforms.
// A byte of codes selects 256 bytes of the table, a pair of 5-bit codes 128: an entry for each lane. Where shared
// memory is small, two lanes have one entry at 5 bits.
constexpr int table_bytes(int bits, int warps) { return bits == 5 && warps == 16 ? 128 << 10 : 64 << 10; }
// Slabs under way for each warp. More do not help: their requests only queue up, before those for activations. Beyond
// eight tokens sums need the memory.
constexpr int ring_stages(int bits, int warps, int tokens) {
    return std::max(1, (warps == 16 && tokens <= 8 ? 5 : 4) - bits);
}
constexpr int ring_bytes(int bits, int warps, int tokens) {
    return warps * ring_stages(bits, warps, tokens) * (slab_bytes(bits) + 8);
}
constexpr int kUnitBytes = 16;
// The floats of a warp's sums: a row for each token (above eight: sixteen rows) of all its row tiles. The padding
// spreads rows and warps over the banks.
constexpr int sums_pitch(int row_tiles) { return row_tiles * kTileRows + 4; }
constexpr int sums_floats(int tokens, int row_tiles) {
    return ((tokens > 8 ? 16 : tokens) * sums_pitch(row_tiles) + 31) / 32 * 32 + 8;
}

constexpr int ring_address(int bits, int warps) { return kSharedReserved + table_bytes(bits, warps); }
constexpr int unit_address(int bits, int warps, int tokens) {
    return ring_address(bits, warps) + ring_bytes(bits, warps, tokens);
}
constexpr int gemm_shared_bytes(int bits, int warps, int k_warps, int tokens, int row_tiles) {
    return unit_address(bits, warps, tokens) + kUnitBytes + k_warps * sums_floats(tokens, row_tiles) * 4;
}

// What a CTA transforms: 16-bit activations of one token, whole slabs, at most so many octets for each thread.
constexpr int kSlabActivations = kSlabColumns * 2;
constexpr int kTransformOctets = 4;

// Warps of a CTA on a GPU of compute capability `arch` (900 for 9.0): 16 on Hopper, which has the shared memory for
// them. Kernels are compiled for the one or the other.
constexpr int gemm_warps(int arch) { return arch / 100 == 9 ? 16 : 8; }
constexpr bool has_clusters(int arch) { return arch >= 900; }
constexpr int kGemmMostSplit = 2;

// The fewest row tiles that the largest share can have where so many clusters divide those of all parts.
inline int64_t most_tiles(const int64_t* row_tiles, int parts, int64_t clusters) {
    const auto needed = [&](int64_t tiles) {
        int64_t sum = 0;
        for (int i = 0; i < parts; ++i) sum += ceil_div(row_tiles[i], tiles);
        return sum;
    };
    int64_t tiles = ceil_div(std::accumulate(row_tiles, row_tiles + parts, int64_t{0}), clusters);
    while (needed(tiles) > clusters) ++tiles;
    return tiles;
}

// Gives every part the clusters that it needs, those left to the parts with the largest shares.
inline void share_clusters(const int64_t* row_tiles, int parts, int64_t clusters, GemmPlan& plan) {
    for (int i = 0; i < parts; ++i) {
        plan.clusters[i] = static_cast<int>(ceil_div(row_tiles[i], plan.tiles));
        clusters -= plan.clusters[i];
    }
    for (; clusters > 0; --clusters) {
        int largest = 0;
        for (int i = 1; i < parts; ++i) {
            if (row_tiles[i] * plan.clusters[largest] > row_tiles[largest] * plan.clusters[i]) largest = i;
        }
        ++plan.clusters[largest];
    }
}

// For 1 to 16 tokens; row_tiles: of each of 1 to kGemmParts parts; transformed: whether activations need to be. With
// `alone` no other kernel may transform them. warps == 0 where shared memory is too small. Takes 0.02 to 0.2 us, as
// long as to look up an earlier plan, so none is kept.
inline GemmPlan plan_gemm(int tokens, const int64_t* row_tiles, int parts, int64_t in_features, int bits,
                          bool transformed, const Gpu& gpu, bool alone = false) {
    using namespace fitted::few_tokens;
    const bool hopper = gpu.arch / 100 == 9;
    const double cluster_token = hopper ? kClusterToken : 0, megabyte = hopper ? kMegabyte : 0;
    const int64_t slabs = num_slabs(in_features),
                  all_tiles = std::accumulate(row_tiles, row_tiles + parts, int64_t{0});
    const int warps = gemm_warps(gpu.arch);
    const int most_split = has_clusters(gpu.arch) && slabs > 1 && gpu.processors > 1 ? kGemmMostSplit : 1;
    GemmPlan best{};
    double best_time = 0;
    int64_t best_clusters = 0;
    const auto consider = [&](int split, int k_warps, bool transforms) {
        const int64_t cta_slabs = ceil_div(slabs, split);
        const int64_t own_bytes = transforms ? cta_slabs * kSlabActivations : 0;
        if (transforms && cta_slabs > kTransformOctets * warps) return;
        if (gemm_shared_bytes(bits, warps, k_warps, tokens, 1) + own_bytes > gpu.shared_limit) return;
        // As many CTAs as there are processors, or several times as many where shared memory is too small for the sums
        // of all row tiles.
        for (int64_t waves = 1; waves <= all_tiles; ++waves) {
            const int64_t clusters = std::clamp<int64_t>(gpu.processors / split * waves, parts, all_tiles);
            const auto tiles = static_cast<int>(most_tiles(row_tiles, parts, clusters));
            const int64_t shared = gemm_shared_bytes(bits, warps, k_warps, tokens, tiles) + own_bytes;
            if (shared > gpu.shared_limit) continue;
            const int row_warps = warps / k_warps;
            const int64_t warp_slabs = ceil_div(cta_slabs, k_warps) * ceil_div(tiles, row_warps);
            const double activations = transforms ? kTransform * ceil_div(cta_slabs, warps) * warps : 0;
            // Warps of one row tile read activations once; further ones find half of them in L1.
            const double megabytes = 2e-6 * tokens * clusters * std::min(row_warps, 2) * slabs * kSlabColumns;
            double time = waves * (kStart + activations + warp_slabs * warps + kRowWarp * (row_warps - 1)) +
                          megabyte * megabytes;
            if (split > 1) time = time * kClusterSlope + kCluster + cluster_token * (tokens - 1);
            if (transformed && !transforms) time += kTransformKernel;
            if (best.warps == 0 || time < best_time) {
                best = {warps, k_warps, split, tiles, {}, static_cast<int>(shared), transforms};
                best_time = time, best_clusters = clusters;
            }
            break;
        }
    };
    for (int split = 1; split <= most_split; ++split) {
        for (int k_warps = 1; k_warps <= warps && k_warps <= ceil_div(slabs, split); k_warps *= 2) {
            if (transformed && tokens == 1) consider(split, k_warps, true);
            if (!alone) consider(split, k_warps, false);
        }
    }
    if (best.warps > 0) share_clusters(row_tiles, parts, best_clusters, best);
    return best;
}

}  // namespace hf_kbit
