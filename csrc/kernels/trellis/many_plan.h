// How many_tokens.cu divides its work.
//
// A unit of work is 128 outputs, a tile of tokens, and a part of K in whole steps, each of two stages. CTAs take units
// in turns; of fewer than 256 tokens two groups of warps divide the steps of a unit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/trellis.h"
#include "kernels/fitted.h"
#include "kernels/plan.h"

namespace hf_kbit {

// Of a call, at most: above, decoding into memory first is quicker.
constexpr int kManyTrellisTokens = 1024;
constexpr int kManyTrellisTiles = 8, kManyTrellisRows = kManyTrellisTiles * kTrellisTile;  // of a unit, along N
// Inputs: a piece has as many as four lanes decode of a row, a stage those of 128 bytes.
constexpr int kManyTrellisPiece = 64;
constexpr int many_trellis_pieces(bool int8) { return int8 ? 2 : 1; }  // of a stage
// Weights as int8: a value is 4 * kSumScale * (q + kInt8Zero), if what a sum is above a multiple of four is 3/2 on
// average.
constexpr float kInt8Zero = (510.5f + kSumZero / kSumScale) / 4;
constexpr int64_t kMostInt8TrellisFeatures = 1 << 17;  // int32 holds sums of 128 times 127

// The sums of 256 tokens leave registers for eight warps only; fewer tokens need more warps to hide what decoding
// waits for. One more warpgroup brings inputs and weights.
constexpr int many_trellis_groups(int token_tile) { return token_tile == 256 ? 1 : 2; }
constexpr int many_trellis_warps(int token_tile) { return 8 * many_trellis_groups(token_tile); }
constexpr int many_trellis_threads(int token_tile) { return 32 * many_trellis_warps(token_tile) + 128; }

// Shared memory: of each group a ring of stages, each its inputs, words and two barriers. The tiles along K
// are shifted against each other, by 16 or 32 bytes, so that lanes' words lie in different banks.
constexpr int many_trellis_input_bytes(int token_tile) { return token_tile * 128; }
constexpr int many_trellis_strip_bytes(int bits) { return kManyTrellisTiles * 32 * bits; }
constexpr int many_trellis_strip_start(int bits, int strip) {
    const int shift = bits == 8 ? 16 * (strip % 2 + 4 * (strip / 2)) : 32 * strip;
    return strip * many_trellis_strip_bytes(bits) + shift;
}
constexpr int many_trellis_word_bytes(int bits) { return 4 * many_trellis_strip_bytes(bits) + 128; }
constexpr int many_trellis_stage_bytes(int bits, int token_tile, bool int8) {
    return many_trellis_input_bytes(token_tile) + many_trellis_pieces(int8) * many_trellis_word_bytes(bits) + 16;
}
// Where groups give each other the sums of half of the tokens.
constexpr int many_trellis_exchange_bytes(int token_tile) {
    return many_trellis_groups(token_tile) == 1 ? 0 : kManyTrellisRows * token_tile * 4;
}
constexpr int kManyTrellisShared = 227 * 1024, kManyTrellisAlign = 1024, kManyTrellisMostStages = 12;
constexpr int many_trellis_stages(int bits, int token_tile, bool int8) {
    const int room = kManyTrellisShared - kManyTrellisAlign - many_trellis_exchange_bytes(token_tile);
    const int stages = room / (many_trellis_groups(token_tile) * many_trellis_stage_bytes(bits, token_tile, int8));
    return stages < kManyTrellisMostStages ? stages : kManyTrellisMostStages;
}
constexpr int many_trellis_shared_bytes(int bits, int token_tile, bool int8) {
    return kManyTrellisAlign + many_trellis_exchange_bytes(token_tile) +
           many_trellis_groups(token_tile) * many_trellis_stages(bits, token_tile, int8) *
               many_trellis_stage_bytes(bits, token_tile, int8);
}

// The most of a call, where the kernels run.
constexpr int many_trellis_tokens(const Gpu& gpu) {
    return gpu.arch == 900 && gpu.shared_limit >= kManyTrellisShared ? kManyTrellisTokens : 0;
}

struct ManyTrellisPlan {
    int token_tile;
    int token_tiles;
    int row_tiles;
    int split;  // CTAs that divide K
    int ctas;
    bool int8;     // inputs
    bool decodes;  // all weights into memory first: of int8 and whole K alone
};
inline std::string to_string(const ManyTrellisPlan& plan) {
    return print_fields({{"token_tile", plan.token_tile},
                         {"token_tiles", plan.token_tiles},
                         {"row_tiles", plan.row_tiles},
                         {"split", plan.split},
                         {"ctas", plan.ctas},
                         {"int8", plan.int8},
                         {"decodes", plan.decodes}});
}

constexpr int many_trellis_steps(int64_t across, bool int8) {
    return static_cast<int>(ceil_div(across * kTrellisTile, 2 * many_trellis_pieces(int8) * kManyTrellisPiece));
}
// float16
constexpr int64_t many_trellis_sums(const ManyTrellisPlan& plan, int64_t tokens) {
    return plan.decodes ? 0 : plan.split * tokens * plan.row_tiles * kManyTrellisRows;
}
// Columns of the inputs in memory.
constexpr int64_t many_trellis_width(int64_t padded_in) {
    return ceil_div(padded_in, kManyTrellisPiece) * kManyTrellisPiece;
}

constexpr int64_t many_trellis_decoded(const ManyTrellisPlan& plan, int64_t across) {
    return plan.decodes ? plan.row_tiles * kManyTrellisRows * many_trellis_width(across * kTrellisTile) : 0;
}

// The least time by what was measured on Hopper (fitted.h).
inline ManyTrellisPlan plan_many_trellis(int64_t across, const std::vector<int64_t>& downs, int64_t tokens, bool int8,
                                         const Gpu& gpu) {
    using namespace fitted::many_trellis;
    const int steps = many_trellis_steps(across, int8);
    int row_tiles = 0;
    for (const int64_t down : downs) row_tiles += static_cast<int>(ceil_div(down, kManyTrellisTiles));
    ManyTrellisPlan best{};
    double best_time = 0;
    for (int i = 0; i < 4; ++i) {
        const int token_tile = 32 << i;
        const double step = kSteps[int8][i];
        const auto token_tiles = static_cast<int>(ceil_div(tokens, token_tile));
        const int64_t tiles = int64_t{row_tiles} * token_tiles;
        // Each group has a step of its own.
        const int most_split = std::clamp(steps / many_trellis_groups(token_tile), 1, 8);
        for (int split = 1; split <= most_split; ++split) {
            const int64_t units = tiles * split;
            const double unit = static_cast<double>(ceil_div(steps, split)) * step + kUnit + kUnitToken * token_tile;
            const double sums = static_cast<double>(split) * static_cast<double>(tokens * row_tiles) * kSum;
            const double time = static_cast<double>(ceil_div(units, gpu.processors)) * unit + sums;
            if (best.token_tile != 0 && time >= best_time) continue;
            const auto ctas = static_cast<int>(std::min<int64_t>(units, gpu.processors));
            best = {token_tile, token_tiles, row_tiles, split, ctas, int8, false};
            best_time = time;
        }
    }
    if (int8) {
        const auto token_tiles = static_cast<int>(ceil_div(tokens, 256));
        const int64_t units = int64_t{row_tiles} * token_tiles;
        const double tiles = static_cast<double>(across * row_tiles * kManyTrellisTiles);
        const double decode = kDecode + kDecodeTile * tiles, unit = steps * kDecodedStep + kDecodedUnit;
        const double time = decode + static_cast<double>(ceil_div(units, gpu.processors)) * unit;
        const auto ctas = static_cast<int>(std::min<int64_t>(units, gpu.processors));
        if (time < best_time) best = {256, token_tiles, row_tiles, 1, ctas, int8, true};
    }
    return best;
}

// Of experts a tile has rows of one of them. These are counted on the GPU; here as many as there may be.
inline int64_t most_many_trellis_tiles(const ManyTrellisPlan& plan, int64_t experts, int64_t rows, int64_t groups) {
    return groups * (rows / plan.token_tile + std::min(experts, rows));
}
// Tiles that hold half as many again as an expert has on average, and a CTA for each processor.
inline ManyTrellisPlan plan_many_trellis_experts(int64_t down, int64_t rows, int64_t experts, bool int8,
                                                 const Gpu& gpu) {
    int token_tile = 32;
    while (token_tile < 256 && 2 * token_tile * experts < 3 * rows) token_tile *= 2;
    return {token_tile, 0, static_cast<int>(ceil_div(down, kManyTrellisTiles)), 1, gpu.processors, int8, false};
}

}  // namespace hf_kbit
