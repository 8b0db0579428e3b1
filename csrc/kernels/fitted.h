// All constants that were fitted to measurements of one GPU, an H200 (132 processors) with CUDA 13.0 unless a line
// says otherwise. docs/lab/2026-11-26-kernels.md says what was measured, and how well the plans choose with them.
//
// Other GPUs use the same constants: their plans are valid, but were not compared with other plans.
#pragma once

#include <cstdint>

namespace hf_kbit::fitted {

// Which kernel multiplies (path.h). 2026-11-21, 2026-11-23.
namespace path {
constexpr int64_t kLargeWeight = 40'000'000;                           // elements
constexpr int64_t kMostTokens = 4095, kMostTokensLarge = 8191;         // fused on Hopper; large: of such weights
constexpr int64_t kMostTokensMma = 256;                                // fused elsewhere
constexpr int64_t kFewFeatures = 1536, kFewFeaturesMostTokens = 1023;  // transformed; one H100, 2026-11-26
constexpr int fewest_wgmma(int bits, bool transformed) {               // tokens, of large weights
    const bool fast = bits == 2 || bits == 5;
    return transformed ? (fast ? 12 : 13) : (fast ? 13 : 16);
}
constexpr int64_t kFewRows = 8;  // of an expert: from these on hopper/experts_wgmma.cu multiplies; 2026-11-23
// Tokens from which on the gradient is decoded first, for a weight without a transform; 2026-11-23.
constexpr int64_t most_gradient_tokens(int bits) { return bits == 2 ? 2048 : bits == 5 ? 512 : 1024; }
}  // namespace path

// few_tokens/gemm.cu, in the time that a processor takes for a slab, about 0.06 us. 2026-11-22.
namespace few_tokens {
constexpr int kStart = 40;                             // a CTA's start and end
constexpr double kCluster = 12, kClusterSlope = 1.03;  // meeting in a cluster
constexpr double kClusterToken = 2;                    // each further token that meets there; Hopper alone
constexpr double kMegabyte = 2;                        // of activations from L2 to all CTAs; Hopper alone
constexpr double kRowWarp = 4;                         // several warps read the same columns of activations
constexpr double kTransform = 0.25;                    // transforming a slab in a CTA
constexpr double kTransformKernel = 17;                // a kernel that transforms first; of experts' rows:
constexpr double kTransformExperts = 30;
}  // namespace few_tokens

// Products of hopper/, in cycles.
struct WgmmaCycles {
    double piece, piece_bits5, piece_token;  // 64 columns of a warp
    double start, tile, group_token, cluster;
    double divided, divided_token, part, part_token;  // tiles that CTAs divide
};
constexpr WgmmaCycles kWgmma{21, 13, 0.47, 6000, 3500, 12, 1500, 5700, 43, 290, 7};  // gemm_wgmma.cu; 2026-11-22
// gemm_int8.cu at 4 bits, an H200 and an H100; 5 bits by instructions. 2026-11-26.
constexpr WgmmaCycles kInt8{27, 5, 0.24, 8500, 3200, 3.8, 3000, 3800, 38, 680, 9.1};

// Products of experts, in cycles.
struct ExpertsCycles {
    double slab[5], slab_bits5;  // tiles of 16 to 256 tokens
    double slab_of_steps[3];     // of 128 tokens, 32 at a time
    double tile, group_token;
};
// hopper/experts_wgmma.cu, 4 bits, Qwen3-30B-A3B and Mixtral-8x7B. 2026-11-23.
constexpr ExpertsCycles kExperts{{2550, 2890, 3930, 5470, 6040}, 800, {3800, 4100, 4700}, 1150, 100};
// hopper/experts_int8.cu: of kExperts as much as kInt8 is of kWgmma, which chooses the best tile in eight swept cells
// of Qwen3-30B-A3B (an H200). 2026-11-27.
constexpr ExpertsCycles kExpertsInt8{{2760, 2780, 3260, 3890, 3780}, 300, {3100, 3300, 3550}, 1150, 100};

// gradient/gradient_wgmma.cu, in cycles. 2026-11-23.
namespace gradient {
constexpr double kPiece = 1250, kTile = 9000;
constexpr double kAdd = 8000, kAddPart = 60;  // the second kernel, and each part that it reads
}  // namespace gradient

// mma/gemm_mma.cu, in cycles, on the H200 made to take this path. 2026-11-21.
struct MmaCycles {
    double piece, piece_token;  // 64 columns of a tile, and of each of its tokens
    double start;               // a CTA's start and end
    double add, add_token;      // the second kernel, and what it reads
};
constexpr MmaCycles kMma{425, 15, 3000, 5000, 55};
// Of 8-bit inputs, by instructions; it chooses the best plan in seven of eight swept cells. 2026-11-27.
constexpr MmaCycles kMmaInt8{465, 7.5, 3000, 5000, 55};

// trellis/many_tokens.cu, in cycles; steps of int8 are estimates, and what decodes first was fitted to 256 to 8,192
// tokens of 8192 x 8192 and 4096 x 4096 (docs/lab/2026-11-29-trellis-gpu.md). 2026-11-28, 2026-11-29.
namespace many_trellis {
constexpr int kSteps[2][4] = {{1050, 1200, 1900, 2800},
                              {1900, 2000, 2900, 3800}};  // float16, int8; tiles of 32 to 256
constexpr double kUnit = 3000, kUnitToken = 12;           // what a unit costs besides
constexpr double kSum = 0.15;                             // of 128 rows and a token
constexpr double kDecode = 4000, kDecodeTile = 0.2, kDecodedStep = 2900, kDecodedUnit = 6000;
// Weights of so many numbers in a launch are large. Of these few_tokens.cu is quicker up to so many tokens, of others
// up to all that it takes.
constexpr int kLarge = 3 << 23, kMostFewOfLarge = 8;
}  // namespace many_trellis

}  // namespace hf_kbit::fitted
