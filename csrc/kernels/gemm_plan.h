// How the decode GEMM divides its work: one pure function, unit-tested on a CPU (tests/csrc/test_gemm_plan.py).
//
// The unit of work is a slab (16 rows x 256 columns). A CTA owns consecutive row tiles; with `split` > 1 the CTAs of a
// cluster share their row tiles and divide the slabs along K. Of a CTA's warps `k_warps` divide the slabs and the
// others the row tiles. A warp goes through its slabs along K in the outer loop, so that its activations stay in
// registers, and through its row tiles in the inner one; its sums wait in shared memory until all warps are done.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/format.h"

namespace hf_kbit {

constexpr int kGemmTokens = 16;  // at most
constexpr int kGemmColumns = 8 * kBlockSize;

struct GemmPlan {
    int warps;         // of a CTA
    int k_warps;       // a power of two; the other factor of `warps` divides the row tiles
    int split;         // CTAs of a cluster
    int clusters;      // row tiles are divided evenly among these
    int shared_bytes;  // of a CTA
};

// Shared memory, from address 1024 of its window (below lies what the driver keeps): table, ring and barriers, the
// unit of the sums, sums.
constexpr int kSharedReserved = 1024;
// A byte of codes selects 256 bytes of the table, a pair of 5-bit codes 128: an entry for each lane. Where shared
// memory is small, two lanes have one entry at 5 bits.
constexpr int table_bytes(int bits, int warps) { return bits == 5 && warps == 16 ? 128 << 10 : 64 << 10; }
constexpr int slab_bytes(int bits) { return bits * 512 + 128; }
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

// Warps of a CTA on a GPU of compute capability `arch` (900 for 9.0): 16 on Hopper, which has the shared memory for
// them. Kernels are compiled for the one or the other.
constexpr int gemm_warps(int arch) { return arch / 100 == 9 ? 16 : 8; }
constexpr bool has_clusters(int arch) { return arch >= 900; }

// tokens 1 to 16; a GPU's processors, the shared memory a CTA may have there, and its compute capability. warps == 0
// where shared memory is too small.
inline GemmPlan plan_gemm(int tokens, int64_t out_features, int64_t in_features, int bits, int processors,
                          int shared_limit, int arch) {
    // Fitted to one H200 (132 processors), CUDA 13.0, 2026-11-21, in the time that a processor takes for a slab, about
    // 0.06 us: what a CTA takes to start and to finish, what meeting in a cluster costs, and what it costs that
    // several warps read the same columns of activations.
    constexpr double kStart = 40, kCluster = 12, kClusterSlope = 1.03, kRowWarp = 4;
    const int64_t row_tiles = ceil_div(out_features, kTileRows),
                  slabs = ceil_div(num_blocks(in_features), kSlabBlocks);
    const int warps = gemm_warps(arch), most_split = has_clusters(arch) && slabs > 1 && processors > 1 ? 2 : 1;
    GemmPlan best{};
    double best_time = 0;
    for (int split = 1; split <= most_split; ++split) {
        const int64_t cta_slabs = ceil_div(slabs, split);
        for (int k_warps = 1; k_warps <= warps && k_warps <= cta_slabs; k_warps *= 2) {
            // As many CTAs as there are processors, or several times as many where shared memory is too small for the
            // sums of all row tiles.
            for (int64_t waves = 1; waves <= row_tiles; ++waves) {
                const int64_t clusters = std::min(processors / split * waves, row_tiles);
                const auto tiles = static_cast<int>(ceil_div(row_tiles, clusters));
                const int shared = gemm_shared_bytes(bits, warps, k_warps, tokens, tiles);
                if (shared > shared_limit) continue;
                const int row_warps = warps / k_warps;
                const int64_t warp_slabs = ceil_div(cta_slabs, k_warps) * ceil_div(tiles, row_warps);
                double time = waves * (kStart + warp_slabs * warps + kRowWarp * (row_warps - 1));
                if (split > 1) time = time * kClusterSlope + kCluster;
                if (best.warps == 0 || time < best_time) {
                    best = {warps, k_warps, split, static_cast<int>(clusters), shared};
                    best_time = time;
                }
                break;
            }
        }
    }
    return best;
}

}  // namespace hf_kbit
