// Which product runs, and how it divides its work: pure functions, unit-tested on a CPU
// (tests/csrc/test_gemm_plan.py).
//
// Over 350 lines: the plans of the kernels stand beside the choice between them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

#include "common/format.h"

namespace hf_kbit {

constexpr int kGemmTokens = 16;  // at most, in gemm.cu

// The smallest i with 2^i >= n.
constexpr int log2_ceil(int64_t n) {
    int log2 = 0;
    while (int64_t{1} << log2 < n) ++log2;
    return log2;
}

// For tiles and float16 or bfloat16; everything else is dequantized.
enum class GemmPath { decode, wgmma, mma, dequantize };
constexpr int kMmaMostTokens = 256;
// What the fused kernels need: asynchronous copies, and bfloat16 on tensor cores.
constexpr bool has_gemm(int arch) { return arch >= 800; }
// gemm_mma.cu is compiled and chosen for all GPUs but Hopper's.
constexpr bool has_mma_path(int arch) { return has_gemm(arch) && arch != 900; }

// Kernels put a table where it begins this far into shared memory. Below lies what the driver keeps, 1024 bytes now
// (sm_75: none); were it more, the table had to move.
constexpr int kSharedReserved = 1024;

// The fused kernels count features, row tiles and slabs in 32 bits; only addresses of words, scales and y have 64. A
// weight beyond these sizes has trillions of elements, or more than 134 million rows or columns.
constexpr int64_t kMostFeatures = int64_t{1} << 27, kMostSlabs = int64_t{1} << 30;
static_assert(8 * kMostFeatures < INT32_MAX, "eight tokens' columns");
static_assert(kMostSlabs + 16 * num_slabs(kMostFeatures) < INT32_MAX,
              "a step of a CTA's 16 warps beyond the last slab");
constexpr bool fits_gemm(int64_t out_features, int64_t in_features) {
    if (out_features > kMostFeatures || in_features > kMostFeatures) return false;
    const TileLayout layout(out_features, in_features);
    return layout.row_tiles * layout.slabs <= kMostSlabs;
}

// The kernels that go through any weight, in either form, count its blocks in 32 bits, with a few turns of the largest
// grid to spare: 129 billion weights.
constexpr int64_t kMostBlocks = int64_t{15} << 28;

// Few tokens of a large weight for which gemm_wgmma.cu is faster: on one H200 (CUDA 13.0, 2026-11-23) from these
// numbers of tokens on, and of 58 million weights or more, it takes 0.87 to 1.02 of gemm.cu's time; of 25 million or
// fewer 1.01 to 1.8 times its time.
constexpr int64_t kLargeWeight = 40'000'000;
constexpr bool wgmma_for_few(int64_t tokens, int64_t out_features, int64_t in_features, int bits, bool transformed) {
    const bool fast = bits == 2 || bits == 5;  // beside gemm.cu
    const int fewest = transformed ? (fast ? 12 : 13) : (fast ? 13 : 16);
    return tokens >= fewest && out_features * in_features >= kLargeWeight;
}

// On one H200 (CUDA 13.0, 2026-11-21) gemm.cu is else the fastest up to 16 tokens. For thousands of them it takes so
// much less time to decode than to multiply that cuBLAS on decoded slices is about as fast as gemm_wgmma.cu: at 4096
// tokens the latter takes 0.89 to 1.0 of that time for large weights, where 5 bits without a transform take 0.94 to
// 1.04, and 1.0 to 1.06 for 4096 x 4096; at 8192 tokens 0.96 to 1.05 (2026-11-23). gemm_mma.cu, made to run there,
// is 2.1 to 3.9 times as fast as to decode first for 32 tokens, 1.2 to 1.6 times for 128, and 0.8 to 1.0 times for
// 256, where cuBLAS has wgmma, twice as fast as mma.sync; of the GPUs that take this path only those of
// capability 10.0 have such an instruction.
//
// A transformed weight of few rows, such as those of keys and values, is turned back as it is decoded for less than it
// costs to transform every token. On one H100 (CUDA 13.0, 2026-11-26), from 1024 tokens on, that takes 0.41 to 0.99 of
// the time for up to 1536 rows of 1024 to 14336 columns; for 2048 rows 0.7 to 1.08, for 4096 rows 0.9 to 1.2.
//
// With batch_invariant any number of tokens takes the kernel that is made for many: there a token's sums are added up
// in the same order, whatever tokens are beside it.
constexpr int64_t kFewFeatures = 1536, kFewFeaturesMostTokens = 1023;
inline GemmPath gemm_path(int64_t tokens, int64_t out_features, int64_t in_features, int bits, bool transformed,
                          bool batch_invariant, int arch, int shared_reserved) {
    if (tokens < 1 || !has_gemm(arch) || shared_reserved > kSharedReserved || !fits_gemm(out_features, in_features)) {
        return GemmPath::dequantize;
    }
    const GemmPath many = has_mma_path(arch) ? GemmPath::mma : GemmPath::wgmma;
    if (batch_invariant) return many;
    if (tokens <= kGemmTokens &&
        (many == GemmPath::mma || !wgmma_for_few(tokens, out_features, in_features, bits, transformed))) {
        return GemmPath::decode;
    }
    const int64_t most = many == GemmPath::mma                         ? kMmaMostTokens
                         : transformed && out_features <= kFewFeatures ? kFewFeaturesMostTokens
                         : out_features * in_features >= kLargeWeight  ? 8191
                                                                       : 4095;
    return tokens <= most ? many : GemmPath::dequantize;
}

// --- up to 16 tokens: gemm.cu ---------------------------------------------------------------------

// The unit of work is a slab (16 rows x 256 columns). A CTA owns consecutive row tiles; with `split` > 1 the CTAs of a
// cluster share their row tiles and divide the slabs along K. Of a CTA's warps `k_warps` divide the slabs and the
// others the row tiles. A warp goes through its slabs along K in the outer loop, so that its activations stay in
// registers, and through its row tiles in the inner one; its sums wait in shared memory until all warps are done.
//
// One launch may multiply the same activations by several weights, its parts. A CTA has row tiles of one of them.
//
// Where weights have column scales or a rotation, each CTA transforms the activations of its slabs by itself, into
// shared memory, while its first slabs are under way: those of one token. More, or very many columns, are too much
// work to do once for every CTA, and a kernel before it transforms them all.
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

// Shared memory, from kSharedReserved on: table, ring and barriers, the unit of the sums, sums; then what a CTA
// transforms.
// A byte of codes selects 256 bytes of the table, a pair of 5-bit codes 128: an entry for each lane. Where shared
// memory is small, two lanes have one entry at 5 bits.
constexpr int table_bytes(int bits, int warps) { return bits == 5 && warps == 16 ? 128 << 10 : 64 << 10; }
constexpr int kScaleBytes = TileLayout::kSlabScales;  // of a slab
constexpr int word_bytes(int bits) { return TileLayout::slab_words(bits) * 4; }
constexpr int slab_bytes(int bits) { return word_bytes(bits) + kScaleBytes; }
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

// tokens 1 to 16; the row tiles of each of 1 to kGemmParts parts; whether activations need to be transformed; a GPU's
// processors, 1 or more, the shared memory a CTA may have there, and its architecture. It takes 0.02 to 0.2 us (one
// thread of the EPYC, 2026-11-22), as long as to look up what it found before, which is why nothing is kept. With
// `alone` no other kernel may transform activations. warps == 0 where shared memory is too small.
inline GemmPlan plan_gemm(int tokens, const int64_t* row_tiles, int parts, int64_t in_features, int bits,
                          bool transformed, int processors, int shared_limit, int arch, bool alone = false) {
    // Fitted to one H200 (132 processors), CUDA 13.0, 2026-11-22, in the time that a processor takes for a slab, about
    // 0.06 us: what a CTA takes to start and to finish, what meeting in a cluster costs, and what it costs that
    // several warps read the same columns of activations.
    constexpr double kStart = 40, kCluster = 12, kClusterSlope = 1.03, kRowWarp = 4;
    // A further token that meets in a cluster, and a megabyte of activations that all CTAs together bring from L2:
    // once for one warp of a row tile, about twice for more, most of which find them in L1. Other GPUs have not been
    // measured, and leave them out. For 40 weights and 1 to 16 tokens what is chosen so takes 0.5% longer than the
    // best division on average, 6% at most (without these two, 1.3 and 22%).
    const double cluster_token = arch / 100 == 9 ? 2 : 0, megabyte = arch / 100 == 9 ? 2 : 0;
    // To transform a slab in a CTA, and to have a kernel before it (2026-11-22).
    constexpr double kTransform = 0.25, kTransformKernel = 17;
    const int64_t slabs = num_slabs(in_features),
                  all_tiles = std::accumulate(row_tiles, row_tiles + parts, int64_t{0});
    const int warps = gemm_warps(arch);
    const int most_split = has_clusters(arch) && slabs > 1 && processors > 1 ? kGemmMostSplit : 1;
    GemmPlan best{};
    double best_time = 0;
    int64_t best_clusters = 0;
    const auto consider = [&](int split, int k_warps, bool transforms) {
        const int64_t cta_slabs = ceil_div(slabs, split);
        const int64_t own_bytes = transforms ? cta_slabs * kSlabActivations : 0;
        if (transforms && cta_slabs > kTransformOctets * warps) return;
        if (gemm_shared_bytes(bits, warps, k_warps, tokens, 1) + own_bytes > shared_limit) return;
        // As many CTAs as there are processors, or several times as many where shared memory is too small for the sums
        // of all row tiles.
        for (int64_t waves = 1; waves <= all_tiles; ++waves) {
            const int64_t clusters = std::clamp<int64_t>(processors / split * waves, parts, all_tiles);
            const auto tiles = static_cast<int>(most_tiles(row_tiles, parts, clusters));
            const int64_t shared = gemm_shared_bytes(bits, warps, k_warps, tokens, tiles) + own_bytes;
            if (shared > shared_limit) continue;
            const int row_warps = warps / k_warps;
            const int64_t warp_slabs = ceil_div(cta_slabs, k_warps) * ceil_div(tiles, row_warps);
            const double activations = transforms ? kTransform * ceil_div(cta_slabs, warps) * warps : 0;
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

// --- more tokens, on Hopper: gemm_wgmma.cu --------------------------------------------------------

// A CTA has a tile of 16, 32, 64, 128 or 256 tokens and `groups` of warps; a group has a tile of rows, 16 for each of
// its warps. The groups of a CTA and the CTAs of a cluster of `split` have the same rows and divide the slabs along K.
// Without either, CTAs take whole tiles in turns, and where the last turn would leave some of them idle, all of them
// divide the slabs of its tiles evenly, each those that follow the ones of the CTA before it. Who has the last slab of
// a tile adds up the sums of its parts, which the others leave in memory. After Osama et al., Stream-K, 2023.
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

// A stage of x has 64 columns or twice as many.
constexpr int kWgmmaColumns = 64;
constexpr int wgmma_stage_pieces(int token_tile) { return token_tile > 32 ? 1 : 2; }
constexpr int wgmma_stage_bytes(int token_tile) {
    return wgmma_stage_pieces(token_tile) * token_tile * kWgmmaColumns * 2;
}

// Of the groups that share rows, those that add up the sums of an equal part of the tokens each.
constexpr int wgmma_owners(int parties, int token_tile) { return std::min(parties, token_tile / 8); }
// What they are sent, float32.
constexpr int wgmma_exchange_bytes(int token_tile, int groups, int split) {
    const int parties = groups * split;
    return groups * (parties - 1) * (token_tile / wgmma_owners(parties, token_tile)) * wgmma_rows(token_tile, groups) *
           4;
}

constexpr int kWgmmaTableBytes = 64 << 10;
constexpr int wgmma_x_address() { return kSharedReserved + kWgmmaTableBytes; }

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

// A CTA leaves at most one part of a tile: its sums, float32, and for each of its warps whether they are there.
constexpr int64_t wgmma_partial_sums(const WgmmaPlan& plan) {
    return plan.divided == 0 ? 0 : int64_t{plan.clusters} * wgmma_rows(plan.token_tile, 1) * plan.token_tile;
}
constexpr int64_t wgmma_partial_flags(const WgmmaPlan& plan) {
    return plan.divided == 0 ? 0 : int64_t{plan.clusters} * wgmma_warps(plan.token_tile);
}

// From wgmma_x_address on: x, words and scales, a pair of barriers for each stage of both; in the end sums of others.
constexpr int wgmma_shared_bytes(int bits, int token_tile, int groups, int split, int x_stages, int ring_stages) {
    const int slabs = wgmma_warps(token_tile) * ring_stages * (slab_bytes(bits) + 16),
              x = groups * x_stages * (wgmma_stage_bytes(token_tile) + 16);
    return wgmma_x_address() + std::max(x + slabs, wgmma_exchange_bytes(token_tile, groups, split));
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

// Cycles, fitted to one H200 (132 processors), CUDA 13.0, 2026-11-22: a slab of a CTA, whose warps decode 64 columns
// at a time and share the tensor cores and shared memory; a tile, and how its groups compete for x.
constexpr double wgmma_slab_cycles(int bits, int token_tile) {
    constexpr double kPiece = 21, kPieceBits5 = 13, kPieceToken = 0.47;
    return 4 * wgmma_warps(token_tile) * (kPiece + (bits == 5 ? kPieceBits5 : 0) + kPieceToken * token_tile);
}
constexpr double wgmma_tile_cycles(int64_t slabs, int bits, int token_tile, int groups, int split) {
    constexpr double kTile = 3500, kGroupToken = 12;
    return ceil_div(slabs, groups * split) * wgmma_slab_cycles(bits, token_tile) + kTile +
           (groups > 1 ? kGroupToken * groups * token_tile : 0);
}

// With batch_invariant a CTA goes through all slabs of its tiles. On a GPU of compute capability 9.0; processors: 1 or
// more.
inline WgmmaPlan plan_wgmma(int64_t tokens, int64_t out_features, int64_t in_features, int bits, bool batch_invariant,
                            int processors, int shared_limit) {
    // Cycles as above: a CTA's start; what it costs to meet in a cluster, to divide tiles, and to add up the parts of
    // one. For 24 weights of 58 million numbers or more and 24 to 1024 tokens what is chosen so takes 0.5% longer than
    // the best division on average, 14% at most; for 12 smaller ones 2.4%, and 26% at most: for 384 tokens on 4096 x
    // 4096, tiles of 256 take longer than they do for 512 tokens, for a reason that is not known.
    constexpr double kStart = 6000, kCluster = 1500, kDivided = 5700, kDividedToken = 43, kPart = 290, kPartToken = 7;
    const int64_t slabs = num_slabs(in_features);
    WgmmaPlan best{};
    double best_time = 0;
    const auto consider = [&](int token_tile, int groups, int split, bool divides) {
        const int64_t tiles = wgmma_tiles(tokens, out_features, token_tile, groups);
        const int64_t clusters =
            divides ? std::min<int64_t>(processors, tiles * slabs) : std::min<int64_t>(processors / split, tiles);
        if (clusters < 1 || (groups * split > 1 && clusters < tiles)) return;  // parties have one tile
        const int64_t divided = divides ? tiles % clusters : 0;
        WgmmaPlan plan{token_tile, groups, split, static_cast<int>(clusters), static_cast<int>(divided), 0, 0, 0};
        if (!fit_stages(plan, shared_limit, [&](int x_stages, int ring_stages) {
                return wgmma_shared_bytes(bits, token_tile, groups, split, x_stages, ring_stages);
            })) {
            return;
        }
        const double tile = wgmma_tile_cycles(slabs, bits, token_tile, groups, split) + (split > 1 ? kCluster : 0);
        double time = kStart + ceil_div(tiles - divided, clusters) * tile;
        if (divided > 0) {
            time += ceil_div(divided * slabs, clusters) * wgmma_slab_cycles(bits, token_tile) + kDivided +
                    kDividedToken * token_tile + ceil_div(clusters, divided) * (kPart + kPartToken * token_tile);
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

// --- experts: gemm.cu for few rows, on Hopper experts_wgmma.cu for many -------------------------------

// The plan of products of so many rows with experts, each with some that follow each other. How many each has, the
// host does not know, and with it how many tiles there are: CTAs, the plan's clusters, take them in turns.
constexpr int kMostExperts = 1024;

// Rows for each expert from which on experts_wgmma.cu is as fast as gemm.cu, on one H200 (CUDA 13.0, 2026-11-23), for
// 8 and for 128 experts, 4 bits; at half as many it takes 1.3 times as long.
constexpr int64_t kFewRows = 8;

// The first row and the tiles of tokens before it of each expert, and of the end of all: 16 bytes at a time.
constexpr int expert_table_bytes(int experts) { return (experts + 2) / 2 * 16; }
// As wgmma_shared_bytes, but what groups exchange lies behind the table, as the next tile is under way meanwhile.
constexpr int experts_shared_bytes(int bits, int token_tile, int groups, int x_stages, int ring_stages, int experts) {
    return wgmma_x_address() + groups * x_stages * (wgmma_stage_bytes(token_tile) + 16) +
           wgmma_warps(token_tile) * ring_stages * (slab_bytes(bits) + 16) + expert_table_bytes(experts) +
           wgmma_exchange_bytes(token_tile, groups, 1);
}

// Tiles of 128 tokens are multiplied in as many steps of rows as those that they have take, others whole.
constexpr int kExpertStep = 32;
constexpr int expert_steps(int token_tile) { return token_tile == 128 ? 4 : 1; }

// At most so many tiles of tokens have a row: those without a full one, and all full ones.
constexpr int64_t most_token_tiles(int64_t rows, int64_t experts, int token_tile) {
    const int64_t with_rows = std::min(rows, experts);
    return with_rows + (rows - with_rows) / token_tile;
}

// Whether the kernel multiplies. It counts tiles in 32 bits, whatever the offsets are, a turn beyond the last one too.
inline bool experts_are_fused(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int arch,
                              int shared_reserved) {
    constexpr int64_t kMostTiles = 1 << 30, kLeastTokens = 16, kLeastRows = 4 * kTileRows;
    return rows > 0 && rows <= INT32_MAX && experts > 0 && experts <= kMostExperts && arch == 900 &&
           shared_reserved <= kSharedReserved && fits_gemm(out_features, in_features) &&
           ceil_div(rows, kLeastTokens) * experts <= kMostTiles / ceil_div(out_features, kLeastRows);
}

// The tiles of tokens that there are in the mean, with more than `beyond` rows each, if each row has any of the
// experts, at random: an expert then has so many rows as a Poisson distribution says, and a tile for the first and for
// each that follows a full one.
inline double expected_token_tiles(int64_t rows, int64_t experts, int token_tile, int beyond = 0) {
    const double mean = static_cast<double>(rows) / static_cast<double>(experts);
    if (mean > 4 * token_tile) return experts * ((mean - beyond) / token_tile + 0.5);
    double tiles = beyond == 0 ? 1 - std::exp(-mean) : 0;
    for (int full = beyond == 0 ? token_tile : beyond; full < mean + 5 * std::sqrt(mean); full += token_tile) {
        tiles += 0.5 * std::erfc((full + 0.5 - mean) / std::sqrt(2 * mean));  // the chance of more rows than these
    }
    return experts * tiles;
}

// Few rows of experts, in gemm.cu: a part has up to `rows` of an expert, and all clusters divide its row tiles. Where
// these are several a kernel before transforms them. On GPUs without experts_wgmma.cu any number of rows is few.
struct FewExpertsPlan {
    GemmPlan gemm;       // of a part; warps 0: rows are too many
    int rows;            // 1 or 8
    int least_clusters;  // of a part, whose CTAs have room for the sums of no more row tiles; of one row, those it has
    int waves;           // of the GPU's processors at most, for which parts are divided
    int clusters;        // of all parts, as many as there may be
};

// What a CTA takes to start, in slabs, as in plan_gemm.
constexpr int kExpertStart = 40;

// The clusters of each part with which all parts take least time, in up to so many waves: how many parts there are is
// known on the GPU alone.
constexpr int expert_clusters(int parts, int row_tiles, int slabs, int processors, int least, int waves) {
    int best = least;
    float best_time = 0;
    for (int wave = 1; wave <= waves && parts > 0; ++wave) {
        const int clusters = std::min(processors * wave / parts, row_tiles);
        if (clusters < least) continue;
        const int tiles = (row_tiles + clusters - 1) / clusters;
        const float time = static_cast<float>(wave) * static_cast<float>(kExpertStart + tiles * slabs);
        if (best_time == 0 || time < best_time) best = clusters, best_time = time;
    }
    return best;
}

inline FewExpertsPlan plan_few_experts(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features,
                                       int bits, bool batch_invariant, int processors, int shared_limit, int arch,
                                       int shared_reserved) {
    constexpr int kPartRows = 8, kMostWaves = 8;
    constexpr double kTransform = 30;  // a kernel before, in slabs
    FewExpertsPlan plan{};
    if (rows < 1 || batch_invariant || !has_gemm(arch) || shared_reserved > kSharedReserved ||
        experts > kMostExperts || !fits_gemm(out_features, in_features)) {
        return plan;
    }
    const int64_t row_tiles[kGemmParts] = {ceil_div(out_features, kTileRows)}, slabs = num_slabs(in_features);
    const auto tiles = static_cast<int>(row_tiles[0]);
    const auto clusters_of = [&](int parts, int ctas, int least) {
        return expert_clusters(parts, tiles, static_cast<int>(slabs), ctas, least, kMostWaves);
    };
    // In slabs, as if all parts had as many processors.
    const auto time_of = [&](int parts) {
        const int clusters = clusters_of(parts, processors, 1);
        return static_cast<double>(ceil_div(int64_t{parts} * clusters, processors)) *
               static_cast<double>(kExpertStart + ceil_div(tiles, clusters) * slabs);
    };
    const auto joined = static_cast<int>(std::ceil(expected_token_tiles(rows, experts, kPartRows)));
    const bool alone = rows <= experts && time_of(static_cast<int>(rows)) <= time_of(joined) + kTransform;
    if (!alone && arch == 900 && rows >= kFewRows * experts) return plan;
    plan.rows = alone ? 1 : kPartRows;
    const int parts = alone ? static_cast<int>(rows) : joined;
    plan.gemm = plan_gemm(plan.rows, row_tiles, 1, in_features, bits, true, clusters_of(parts, processors, 1),
                          shared_limit, arch, alone);
    GemmPlan& gemm = plan.gemm;
    if (gemm.warps == 0) return plan;
    // Room for the sums of more row tiles, should there be more parts.
    const int64_t transformed = alone ? ceil_div(slabs, gemm.split) * kSlabActivations : 0;
    const auto bytes = [&](int of_tiles) {
        return gemm_shared_bytes(bits, gemm.warps, gemm.k_warps, plan.rows, of_tiles) + transformed;
    };
    for (int more = 1 << 20; more > 0; more /= 2) {
        if (gemm.tiles + more <= tiles && bytes(gemm.tiles + more) <= shared_limit) gemm.tiles += more;
    }
    gemm.shared_bytes = static_cast<int>(bytes(gemm.tiles));
    processors /= gemm.split;
    plan.least_clusters = static_cast<int>(ceil_div(tiles, gemm.tiles));
    const int clusters = clusters_of(parts, processors, plan.least_clusters);
    if (alone) plan.least_clusters = clusters;
    plan.waves = static_cast<int>(ceil_div(int64_t{parts} * clusters, processors)) + (alone ? 0 : 1);
    const int64_t most = alone ? rows : most_token_tiles(rows, experts, kPartRows);
    plan.clusters = static_cast<int>(std::max<int64_t>(processors * plan.waves, most * plan.least_clusters));
    return plan;
}

// Cycles of a tile with so many steps of tokens, as wgmma_tile_cycles, but where each tile has another expert's
// weight: fitted to one H200, CUDA 13.0, 2026-11-23, for Qwen3-30B-A3B's and Mixtral-8x7B's experts, 4 bits, 1 to 4096
// tokens.
constexpr double expert_tile_cycles(int64_t slabs, int bits, int token_tile, int groups, int steps) {
    constexpr double kSlab[] = {2550, 2890, 3930, 5470, 6040}, kSlabBits5 = 800;
    constexpr double kSlabOfSteps[] = {3800, 4100, 4700};  // of 128 tokens
    constexpr double kTile = 1150, kGroupToken = 100;
    const bool whole = steps == expert_steps(token_tile);
    const double slab = whole ? kSlab[log2_ceil(token_tile / 16)] : kSlabOfSteps[steps - 1];
    return ceil_div(slabs, groups) * (slab + (bits == 5 ? kSlabBits5 : 0)) + kTile +
           (groups > 1 ? kGroupToken * groups * token_tile : 0);
}

// With batch_invariant a CTA goes through all slabs of its tiles. rows, experts and processors: 1 or more.
inline WgmmaPlan plan_experts(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int bits,
                              bool batch_invariant, int processors, int shared_limit) {
    const int64_t slabs = num_slabs(in_features);
    WgmmaPlan best{};
    double best_time = 0;
    for (int token_tile = 16; token_tile <= 256; token_tile *= 2) {
        const double token_tiles = expected_token_tiles(rows, experts, token_tile);
        const int most_groups = batch_invariant ? 1 : wgmma_most_groups(token_tile);
        for (int groups = 1; groups <= most_groups && groups <= slabs; groups *= 2) {
            const int64_t row_groups = ceil_div(out_features, wgmma_rows(token_tile, groups));
            const int64_t most_tiles = row_groups * most_token_tiles(rows, experts, token_tile);
            WgmmaPlan plan{token_tile, groups, 1, static_cast<int>(std::min<int64_t>(processors, most_tiles)),
                           0,          0,      0, 0};
            if (!fit_stages(plan, shared_limit, [&](int x_stages, int ring_stages) {
                    return experts_shared_bytes(bits, token_tile, groups, x_stages, ring_stages,
                                                static_cast<int>(experts));
                })) {
                continue;
            }
            double of_tiles = 0;  // cycles of all tiles of the same rows: of each step what it adds
            for (int step = 0; step < expert_steps(token_tile); ++step) {
                const auto up_to = [&](int steps) {
                    return steps == 0 ? 0 : expert_tile_cycles(slabs, bits, token_tile, groups, steps);
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

// --- the gradient of many tokens, on Hopper: gradient_wgmma.cu ----------------------------------------

// A CTA has a tile of 256 tokens and 128 columns, half a slab of each row tile, or a part of its rows. It goes through
// them in pieces of 64: gradients of outputs, words and scales of four row tiles.
struct GradientPlan {
    int tiles;
    int parts;   // of each tile
    int pieces;  // of each part, an even number; those of the last one may end beyond the rows, times zeros
};

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

// Whether the gradient takes the kernel; else some columns of the weight at a time are decoded for cuBLAS. On one H200
// (CUDA 13.0, 2026-11-23) the kernel takes 0.33 to 1.05 of the time of that up to 256 tokens. What it costs to decode
// first, more for transformed weights, is the same for any number of tokens, and cuBLAS multiplies 1.1 times as fast,
// 1.35 times at 5 bits. Beyond 512 tokens the kernel does not divide tiles: it is taken only where no more than a
// tenth of its turns are idle.
inline bool gradient_is_fused(int64_t tokens, int64_t out_features, int64_t in_features, int bits, bool transformed,
                              int processors, int arch, int shared_reserved) {
    if (tokens < 1 || arch != 900 || shared_reserved > kSharedReserved || !fits_gemm(out_features, in_features)) {
        return false;
    }
    if (tokens <= 512) return true;
    const int64_t plain = bits == 2 ? 2048 : bits == 5 ? 512 : 1024, tiles = gradient_tiles(tokens, in_features);
    return tokens <= std::min<int64_t>(2048, transformed ? 2 * plain : plain) &&
           10 * tiles >= 9 * ceil_div(tiles, processors) * processors;
}

// processors: 1 or more.
inline GradientPlan plan_gradient(int64_t tokens, int64_t out_features, int64_t in_features, int processors) {
    // Cycles, fitted to one H200 (132 processors), CUDA 13.0, 2026-11-23: a piece; the start and end of a tile; the
    // second kernel, and each part that it reads. For 6 weights and 16 to 1024 tokens at 4 bits it chooses
    // the fastest of up to eight divisions, or one within 1% of it.
    constexpr double kPiece = 1250, kTile = 9000, kAdd = 8000, kAddPart = 60;
    const int64_t tiles = gradient_tiles(tokens, in_features);
    const int64_t all_pieces = ceil_div(out_features, kGradientPieceTiles * kTileRows);
    GradientPlan best{};
    double best_time = 0;
    for (int64_t split = 1; split == 1 || (tiles * split <= processors && split <= all_pieces); ++split) {
        const int64_t pieces = ceil_div(all_pieces, 2 * split) * 2, parts = ceil_div(all_pieces, pieces);
        const double add = parts == 1 ? 0 : kAdd + kAddPart * static_cast<double>(tiles * parts);
        const double time = static_cast<double>(ceil_div(tiles * parts, processors)) * (kTile + pieces * kPiece) + add;
        if (best.parts == 0 || time < best_time) {
            best = {static_cast<int>(tiles), static_cast<int>(parts), static_cast<int>(pieces)};
            best_time = time;
        }
    }
    return best;
}

// --- more tokens, elsewhere: gemm_mma.cu ------------------------------------------------------------

// A CTA has a tile of 256 rows and 32 or 64 tokens, or with `split` > 1 a part of its slabs.
struct MmaPlan {
    int token_tile;
    int tiles;
    int split;
};

constexpr int kMmaWarps = 8, kMmaRows = 256, kMmaTableBytes = 64 << 10, kMmaStages = 4;
constexpr int mma_stage_bytes(int token_tile) { return token_tile * 2 * kBlockSize * 2; }  // 64 columns
constexpr int mma_shared_bytes(int token_tile) {
    return kSharedReserved + kMmaTableBytes + kMmaStages * mma_stage_bytes(token_tile);
}
// What the parts of tiles have in memory, float32.
constexpr int64_t mma_partial_sums(const MmaPlan& plan) {
    return plan.split == 1 ? 0 : int64_t{plan.tiles} * plan.split * kMmaRows * plan.token_tile;
}

// With batch_invariant a CTA goes through all slabs of its tile. processors: 1 or more.
inline MmaPlan plan_mma(int64_t tokens, int64_t out_features, int64_t in_features, bool batch_invariant,
                        int processors) {
    // Cycles, fitted to one H200 (132 processors) that was made to take this path, CUDA 13.0, 2026-11-21: 64 columns
    // of a tile and of each of its tokens; a CTA's start and end; the second kernel, and what it reads.
    constexpr double kPiece = 425, kPieceToken = 15, kStart = 3000, kAdd = 5000, kAddToken = 55;
    const int64_t slabs = num_slabs(in_features);
    MmaPlan best{};
    double best_time = 0;
    for (const int token_tile : {32, 64}) {
        const int64_t tiles = ceil_div(out_features, kMmaRows) * ceil_div(tokens, token_tile);
        const int64_t most_split = batch_invariant ? 1 : slabs;
        for (int64_t split = 1; split <= most_split && (split == 1 || tiles * split <= processors); ++split) {
            const double cta = kStart + ceil_div(slabs, split) * 4 * (kPiece + kPieceToken * token_tile);
            const double add = split == 1 ? 0 : kAdd + kAddToken * token_tile;
            const double time = ceil_div(tiles * split, processors) * cta + add;
            if (best.tiles == 0 || time < best_time) {
                best = {token_tile, static_cast<int>(tiles), static_cast<int>(split)};
                best_time = time;
            }
        }
    }
    return best;
}

}  // namespace hf_kbit
