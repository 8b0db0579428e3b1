// How few_tokens.cu divides its work.
//
// The unit of work is a step: 64 outputs and 64 inputs, four tiles by four. A CTA owns 64 outputs and consecutive
// steps along K, which its warps take in turns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/trellis.h"
#include "kernels/plan.h"

namespace hf_kbit {

constexpr int kFewTrellisTokens = 16;                 // of weights that share inputs
constexpr int64_t kFewTrellisRows = 1 << 12;          // of experts
constexpr int64_t kMostFewTrellisFeatures = 1 << 15;  // int32 holds sums of bytes times inputs of 7 bits
constexpr int kFewTrellisWarps = 8, kFewTrellisThreads = 32 * kFewTrellisWarps;
constexpr int kFewTrellisTiles = 4, kFewTrellisPitch = 16 * kFewTrellisTiles + 4;

// Of two columns of int8 for each token, groups of eight; and CTAs of a processor that have the registers they need.
constexpr int few_trellis_groups(int columns) { return columns <= 8 ? 1 : columns <= 16 ? 2 : 4; }
constexpr int few_trellis_ctas(int bits, int groups) { return groups == 4 || (groups == 2 && bits > 5) ? 1 : 2; }

// Shared memory: of each warp a ring of stages, then, in its place, sums. With more than three stages so many weights
// are on their way that what makes the inputs waits for them.
constexpr int few_trellis_stage_bytes(int bits, int groups) { return (32 * bits + 8 + 32 * groups) * 16; }
constexpr int few_trellis_depth(int bits, int groups, int arch) {
    const int shared = (arch >= 900 && arch < 1200 ? 227 : 99) * 1024;  // that all GPUs have
    const int room = shared / few_trellis_ctas(bits, groups) - 1024;
    const int depth = room / (kFewTrellisWarps * few_trellis_stage_bytes(bits, groups));
    return depth < 2 ? 2 : depth > 3 ? 3 : depth;
}
constexpr int few_trellis_shared_bytes(int bits, int groups, int arch) {
    return std::max(kFewTrellisWarps * few_trellis_depth(bits, groups, arch) * few_trellis_stage_bytes(bits, groups),
                    kFewTrellisWarps * 8 * groups * kFewTrellisPitch * 4);
}

// CTAs of a cluster that turn a token, an octet each thread at a time; without clusters one has more threads.
constexpr int kTurnClusterThreads = 128, kTurnThreads = 1024, kMostTurnCluster = 8;
inline int few_trellis_turn_cluster(int64_t padded_in, const Gpu& gpu) {
    int cluster = 1;
    while (gpu.arch >= 900 && cluster < kMostTurnCluster && cluster * 8 * kTurnClusterThreads < padded_in)
        cluster *= 2;
    return cluster;
}

// Tiles along N that a weight takes of those that share a launch: whole blocks of 128 outputs.
constexpr int64_t few_trellis_tiles(int64_t down) { return ceil_div(down, 8) * 8; }

struct FewTrellisPlan {
    int down;            // tiles along N of all weights
    int split;           // CTAs that have the same outputs
    int steps_of_split;  // at most, of each
    int ctas;            // of all weights, or of a row of experts
    int shared_bytes;
};
inline std::string to_string(const FewTrellisPlan& plan) {
    return print_fields({{"down", plan.down},
                         {"split", plan.split},
                         {"steps_of_split", plan.steps_of_split},
                         {"ctas", plan.ctas},
                         {"shared_bytes", plan.shared_bytes}});
}
// int32: the sums of CTAs, and of each 128 outputs how many have theirs.
constexpr int64_t few_trellis_sums(const FewTrellisPlan& plan, int64_t tokens) {
    return plan.split * 2 * tokens * plan.down * kTrellisTile;
}
constexpr int64_t few_trellis_counts(const FewTrellisPlan& plan) { return ceil_div(plan.down, 8); }

// Of weights with so many tiles each, times so many rows of experts, and so many columns of int8: as many CTAs as are
// at work at a time, but a step for each warp.
inline FewTrellisPlan plan_few_trellis(int64_t rows, int64_t across, const std::vector<int64_t>& downs, int bits,
                                       int columns, const Gpu& gpu) {
    int64_t down = 0;
    for (const int64_t its : downs) down = few_trellis_tiles(down) + its;
    const auto owners = static_cast<int>(ceil_div(down, kFewTrellisTiles));
    const auto steps = static_cast<int>(ceil_div(across, kFewTrellisTiles));
    const int most = std::max(1, steps / kFewTrellisWarps), groups = few_trellis_groups(columns);
    const int64_t all = rows * owners;
    const auto wanted = static_cast<int>((few_trellis_ctas(bits, groups) * gpu.processors + all / 2) / all);
    const int each = static_cast<int>(ceil_div(steps, std::clamp(wanted, 1, most)));
    const auto split = static_cast<int>(ceil_div(steps, each));
    return {static_cast<int>(down), split, each, owners * split, few_trellis_shared_bytes(bits, groups, gpu.arch)};
}

}  // namespace hf_kbit
