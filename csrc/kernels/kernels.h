// The CUDA kernels: raw device pointers and a stream in, a launch error out; nothing of torch.
//
// Shapes: N out_features, K in_features, B = ceil(K / 32) blocks a row, everything row-major and contiguous. planes is
// int32 [N, B * bits], absmax uint8 [N, B]; tiles are int32 [N/16, K/256, bits, 32, 4] with scales uint8
// [N/16, K/256, 8, 16], rounded up (layout: hf_kbit/format/reference.py, `repack`). `count` matrices lie one after
// another. gpu is the current one. Sizes are within what fits_gemm or kMostBlocks (plan.h) say.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "common/format.h"
#include "common/trellis.h"
#include "kernels/few_tokens/experts_plan.h"
#include "kernels/gpu.h"
#include "kernels/gradient/plan.h"
#include "kernels/hopper/experts_plan.h"
#include "kernels/mma/plan.h"
#include "kernels/trellis/few_plan.h"
#include "kernels/trellis/many_plan.h"

namespace hf_kbit::cuda {

// weight [rows, K] (float32, float16, bfloat16) to planes and absmax, whose scales are searched or not, and have
// signs or not; codebook float32 [2**bits], ascending.
cudaError_t quantize(const void* weight, Dtype dtype, const float* codebook, int bits, bool searched,
                     bool signed_scales, int64_t rows, int64_t in_features, int32_t* planes, uint8_t* absmax,
                     const Gpu& gpu, cudaStream_t stream);

// What 1 stands for in the rows of a rotated weight as int8, inverted: float16 [N] (docs/internals.md).
cudaError_t int8_inverses(const int32_t* words, const uint8_t* scales, const float* codebook, int bits,
                          int64_t out_features, int64_t in_features, void* out, const Gpu& gpu, cudaStream_t stream);

// What a weight does to its input before the product (hf_kbit/format/transforms.py): times `columns`, E4M4 bytes of K
// rounded up to a multiple of eight, null for none; then perhaps the rotation within blocks of 32, of K padded with
// zeros.
struct Transform {
    const uint8_t* columns;
    bool rotated;

    constexpr bool any() const { return columns || rotated; }  // constexpr: on GPUs too
};

// The decoded weight, out [rows, K], in its original basis: the scales have signs if the weight is rotated; the
// float32 product level * scale, rotated back, times columns, rounded once to dtype. Of tiles, which may be the first
// of longer rows, row_slabs are in memory for 16 rows.
cudaError_t dequantize_planes(const int32_t* planes, const uint8_t* absmax, const float* codebook,
                              const Transform& transform, int bits, int64_t rows, int64_t in_features, void* out,
                              Dtype dtype, const Gpu& gpu, cudaStream_t stream);
cudaError_t dequantize_tiles(const int32_t* words, const uint8_t* scales, const float* codebook,
                             const Transform& transform, int bits, int64_t count, int64_t out_features,
                             int64_t in_features, int64_t row_slabs, void* out, Dtype dtype, const Gpu& gpu,
                             cudaStream_t stream);

// out [count, K]: the rows that `indices`, int64 (wide) or int32 [count], names of a table [rows, K], in planes or
// `tiled`, decoded to the same bits. An index that names none stops the kernel with an assertion.
cudaError_t embed(const void* indices, bool wide, int64_t count, const int32_t* words, const uint8_t* scales,
                  bool tiled, const float* codebook, const Transform& transform, int bits, int64_t rows,
                  int64_t in_features, void* out, Dtype dtype, const Gpu& gpu, cudaStream_t stream);

// Planes to tiles (zeros where they pad) and tiles to planes.
cudaError_t repack(const int32_t* planes, const uint8_t* absmax, int bits, int64_t count, int64_t out_features,
                   int64_t in_features, int32_t* words, uint8_t* scales, const Gpu& gpu, cudaStream_t stream);
cudaError_t repack_inverse(const int32_t* words, const uint8_t* scales, int bits, int64_t count, int64_t out_features,
                           int64_t in_features, int32_t* planes, uint8_t* absmax, const Gpu& gpu, cudaStream_t stream);

// x [tokens, K] as weights want it: out [tokens, 32 * B], all of one 16-bit dtype. K is a multiple of 8. Ordered: of
// each block of 32 columns first 0, 1, 8, 9, 16, 17, 24 and 25, then 2, 3, 10, 11 and so on, the order in which four
// lanes with eight columns each hand them to an instruction of 16 columns.
struct Transformed {
    Transform transform;
    bool ordered;
    void* out;
};

// Which of `count` rows a kernel reads: those that `index`, int32, picks, in its order, the nearest one where it picks
// one that is not there; or each, where it is null.
struct Rows {
    const int32_t* index;
    int64_t count;
};

// Of the same rows of x, `count` of them, at most kGemmParts. With swiglu rows have 2 K numbers, g and u, and are
// silu(g) * u first. Besides sets `num_zeros` words of `zeros` to zero, for a kernel that follows. Overlaps with the
// kernel launched before it.
cudaError_t transform(const void* x, const Rows& rows, bool swiglu, Dtype dtype, const Transformed* outputs, int count,
                      int64_t tokens, int64_t in_features, uint32_t* zeros, int num_zeros, const Gpu& gpu,
                      cudaStream_t stream);

// y [tokens, N] = x [tokens, K] @ W.T + bias for W in tiles, float16 or bfloat16; bias [N] may be null, codebook is
// float32 [2**bits]. K is a multiple of 8 (W may have fewer columns in its last block).
struct Product {
    const void* x;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    const void* bias;
    void* y;
    int64_t out_features;
    Transform transform;  // for a plan that says so; else x is what `transform` makes, or there is none
    bool signed_scales;
    bool ordered;  // the columns of x: for gemm_wgmma, as wgmma_ordered says
};

// `count` products, at most kGemmParts, of up to 16 tokens in one launch, as plan_gemm says; x is the same for all
// but where it comes from `transform`, and scales of all have signs, or of none; with signs there is a transform. From
// sm_90 on `awaits` lets the launch overlap with the kernel launched before it, on whose results nothing but x may
// depend.
cudaError_t gemm(const Product* products, int count, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                 const GemmPlan& plan, bool awaits, const Gpu& gpu, cudaStream_t stream);
// y [count, N], as experts_wgmma has it, but of x whose columns are not ordered, as plan_few_experts says. Where the
// plan transforms, x is what rows.index picks, of 2 K numbers with swiglu (`transform`).
struct FewExperts {
    Rows rows;
    const int32_t* offsets;
    int64_t count, experts;  // rows of y
    bool swiglu;
};
cudaError_t gemm_few_experts(const Product& product, const FewExperts& few, Dtype dtype, int bits, int64_t in_features,
                             const FewExpertsPlan& plan, const Gpu& gpu, cudaStream_t stream);
// One product, on GPUs of another compute capability than 9.0, as plan_mma says; partial: as many floats as
// mma_partial_sums says.
cudaError_t gemm_mma(const Product& product, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                     const MmaPlan& plan, float* partial, const Gpu& gpu, cudaStream_t stream);
// `count` products, at most kGemmParts, in one launch, on GPUs of compute capability 9.0, as plan_wgmma says; x is
// ordered for all or none, and scales of all have signs, or of none; partial and ready: as many floats and zeros as
// wgmma_partial_sums and wgmma_partial_flags say.
cudaError_t gemm_wgmma(const Product* products, int count, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                       const WgmmaPlan& plan, float* partial, uint32_t* ready, bool awaits, const Gpu& gpu,
                       cudaStream_t stream);

// 8-bit inputs (docs/internals.md) of a weight that rotates, and whose `columns` are those of a Transform: out
// [tokens, 32 * B], of each block of 32 columns first 0 to 3, 8 to 11, 16 to 19 and 24 to 27, then the others, and
// scales [tokens + 1], the last one 0.
struct Int8Tokens {
    const uint8_t* columns;
    int8_t* out;
    float* scales;
};
// Of the same rows of x [*, K], float16 or bfloat16, `count` of them, at most kGemmParts; K is a multiple of 8. With
// swiglu, on GPUs of compute capability 9.0, rows have 2 K numbers, as in transform. Besides sets `num_zeros` words of
// `zeros` to zero.
cudaError_t tokens_to_int8(const void* x, const Rows& rows, bool swiglu, Dtype dtype, const Int8Tokens* outputs,
                           int count, int64_t tokens, int64_t in_features, uint32_t* zeros, int num_zeros,
                           const Gpu& gpu, cudaStream_t stream);
// Of 8-bit inputs: x and token_scales are those of tokens_to_int8.
struct Int8Product : Product {
    const void* inverses;  // of the weights' rows, float16 (reference.py, int8_inverses)
    const float* token_scales;
};
// y [tokens, N], of dtype, of `count` products, at most kGemmParts, in one launch, as plan_int8 says, on GPUs of
// compute capability 9.0; scales of all have signs, or of none; partial and ready: as many numbers and zeros as
// wgmma_partial_sums and wgmma_partial_flags say. Overlaps with the kernel launched before it, on whose results
// nothing but x, token_scales and ready may depend.
cudaError_t gemm_int8(const Int8Product* products, int count, Dtype dtype, int bits, int64_t tokens,
                      int64_t in_features, const WgmmaPlan& plan, int32_t* partial, uint32_t* ready, const Gpu& gpu,
                      cudaStream_t stream);
// The same as plan_mma_int8 says, on GPUs of another compute capability; partial: as many numbers as
// mma_int8_partial_words says.
cudaError_t gemm_mma_int8(const Int8Product& product, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                          const MmaPlan& plan, int32_t* partial, const Gpu& gpu, cudaStream_t stream);

// Where the tokens of `tokens` rows of `slots` numbers each go, int64 (wide) or int32, in an order by number, and by
// row where numbers are equal; those that are not from 0 to experts - 1 come last. rows: the row of each in that
// order; places: of each of `numbers` its place in it; offsets [experts + 1]: the first place of each expert, and of
// those that none has. At most INT32_MAX numbers, and experts + 33 ints of shared memory.
cudaError_t route_experts(const void* numbers, bool wide, int64_t tokens, int64_t slots, int64_t experts,
                          int32_t* rows, int32_t* places, int32_t* offsets, const Gpu& gpu, cudaStream_t stream);

// out [tokens, columns]: the rows y[places[i, j]] of `rows`, times weights[i, j] each, added up over the slots j in
// float32 (float64 of float64) and rounded once. weights: of y's dtype or float32. y at a multiple of 16 bytes.
// Overlaps with the kernel launched before it, as gemm.
cudaError_t combine_experts(const void* y, Dtype dtype, const int32_t* places, const void* weights, Dtype of_weights,
                            int64_t tokens, int64_t slots, int64_t rows, int64_t columns, void* out, const Gpu& gpu,
                            cudaStream_t stream);

// y [rows, N]: each row one of x [rows, K], whose columns are ordered, by the weight of an expert, all of them in
// tiles one after another, bias [experts, N] likewise; expert i has the rows from offsets[i] on, before offsets[i +
// 1], rows that none has become zeros. offsets [experts + 1]: whatever they are, only numbers may be wrong. As
// plan_experts says, on GPUs of compute capability 9.0. Overlaps with the kernel launched before it, as gemm.
cudaError_t experts_wgmma(const Product& product, const int32_t* offsets, int experts, Dtype dtype, int bits,
                          int64_t rows, int64_t in_features, const WgmmaPlan& plan, const Gpu& gpu,
                          cudaStream_t stream);

// The same of 8-bit inputs, dtype that of y, as plan_experts_int8 says. Overlaps with the kernel launched before it,
// on whose results nothing but product.x and token_scales may depend.
cudaError_t experts_int8(const Int8Product& product, const int32_t* offsets, int experts, Dtype dtype, int bits,
                         int64_t rows, int64_t in_features, const WgmmaPlan& plan, const Gpu& gpu,
                         cudaStream_t stream);

// to[i] = from[rows.index[i]], or from[i], for rows i below count, or, where `first` and `end` are given, those of
// them from *first on, before *end; all have so many columns.
cudaError_t copy_rows(const void* from, Dtype dtype, int64_t columns, const Rows& rows, const int32_t* first,
                      const int32_t* end, int64_t count, void* to, const Gpu& gpu, cudaStream_t stream);

// The same of 8-bit inputs of so many columns, and of their scales: to.scales [count + 1], the last one 0. Overlaps
// with the kernel launched before it, on whose results nothing but `from` may depend.
cudaError_t copy_int8_tokens(const Int8Tokens& from, const Rows& rows, int64_t columns, int64_t count,
                             const Int8Tokens& to, const Gpu& gpu, cudaStream_t stream);

// dx [tokens, in_features] = dy @ W for W in tiles, float16 or bfloat16, back through the weight's transform; on GPUs
// of compute capability 9.0. dy is [tokens, dy_columns], a multiple of 8, not fewer than out_features; what is there
// beyond them must be zeros.
struct Gradient {
    const void* dy;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    void* dx;
    int64_t out_features, in_features, dy_columns;
    Transform transform;
    bool signed_scales;
};
// As plan_gradient says; partial: as many floats as gradient_partial_sums says.
cudaError_t gradient_wgmma(const Gradient& gradient, Dtype dtype, int bits, int64_t tokens, const GradientPlan& plan,
                           float* partial, const Gpu& gpu, cudaStream_t stream);

// --- trellises (hf_kbit/format/trellis.py), of 1 to 8 bits ---

// words, 32-bit ones [tiles, 8 * bits]: the path of least squared error for `targets`, float32 [tiles, 256]. `lead` is
// 1 to 128. workspace, uint8, has encode_trellis_bytes for each of `ctas`, which encode_trellis_ctas says.
int64_t encode_trellis_ctas(int bits, int64_t tiles, const Gpu& gpu);
int64_t encode_trellis_bytes(int bits, const Gpu& gpu);
cudaError_t encode_trellis(const float* targets, int bits, int lead, int64_t tiles, uint32_t* words, void* workspace,
                           int64_t ctas, const Gpu& gpu, cudaStream_t stream);

// out [count, 16 * down, 16 * across]: what words, 32-bit ones [count, across, down, 8 * bits], stand for, in float16,
// as float16, float32 or bfloat16.
cudaError_t decode_trellis(const uint32_t* words, Code code, int bits, int64_t count, int64_t across, int64_t down,
                           void* out, Dtype dtype, const Gpu& gpu, cudaStream_t stream);

// out [count, rows, columns], float16 or bfloat16: the weights of trellises [count, across, down, 8 * bits] whose
// sides, suh float16 [count, 16 * across] and svh [count, 16 * down], are rotated in blocks of 128, and padded to
// them.
cudaError_t dense_trellis(const uint32_t* words, Code code, int bits, const uint16_t* suh, const uint16_t* svh,
                          int64_t count, int64_t across, int64_t down, int64_t rows, int64_t columns, void* out,
                          Dtype dtype, const Gpu& gpu, cudaStream_t stream);

// y [tokens, out_features] = x [tokens, in_features] @ W.T + bias, float16 or bfloat16, of a trellis of code mul1. x,
// words, bias, suh and svh are at multiples of 16 bytes.
struct TrellisProduct {
    const void* x;
    const uint32_t* words;  // 32-bit ones [across, down, 8 * bits]
    const void* bias;       // or null
    void* y;
    int64_t across, down;
    int bits;
    Code code;
    TrellisSides sides;
};

// Of experts, rows of x, or those that `rows` picks, follow each other: expert i has those from offsets[i] up to, not
// including, offsets[i + 1], of [count + 1]; rows beyond the last have no expert, and y of zeros. Each has so many
// weights one below the other, all of a product's shape, whose outputs are side by side. With swiglu x has twice as
// many columns, gates first (inputs/swiglu.cuh). Without offsets there is one weight. Whatever offsets and rows say,
// only the x_rows rows of x are read.
struct TrellisExperts {
    const int32_t *offsets, *rows;
    int x_rows, count, weights;
    bool swiglu;
};

// What the two kernels tell each other: of each product columns [2 * tokens, padded_in] and tokens [tokens]; sums, as
// many as few_trellis_sums says; counts, of each row of experts as many as few_trellis_counts says; and of experts the
// rows' weights.
struct FewTrellisRoom {
    int8_t* columns;
    TrellisToken* tokens;
    int32_t* sums;
    uint32_t* counts;
    int32_t* weights;
};

// Up to kTrellisParts products of the same x, across, bits, in_features and block, of up to kFewTrellisTokens
// tokens; or one of experts, of up to kFewTrellisRows, rows times weights. in_features are at most
// kMostFewTrellisFeatures. Overlaps with the kernel launched before it. Compute capability 8.0 and newer.
cudaError_t few_trellis_tokens(const std::vector<TrellisProduct>& products, const TrellisExperts& experts, Dtype dtype,
                               int64_t tokens, const FewTrellisPlan& plan, const FewTrellisRoom& room, const Gpu& gpu,
                               cudaStream_t stream);

// Rows `first` to `end` - 1 of a weight's inputs; the first tile's weight is how many others there are.
struct ManyTrellisTile {
    int weight, first, end;
};
// What the kernels tell each other, rows being tokens times parts, or times weights of an expert: inputs, float16 or
// int8 [rows, many_trellis_width], units [rows], sums, float16, as many as many_trellis_sums says; of int8 row_sums
// [rows], and decoded, as many as many_trellis_decoded says; of experts the rows' weights [rows], and tiles, 1 +
// most_many_trellis_tiles.
struct ManyTrellisRoom {
    void* inputs;
    float* units;
    uint16_t* sums;
    int32_t* row_sums;
    int8_t* decoded;
    int32_t* weights;
    ManyTrellisTile* tiles;
};

// Up to kTrellisParts products of the same x, across, bits, code, in_features and block, or one of experts. Of as many
// tokens as many_trellis_tokens (a plan's) says, or any number of int8 or of experts; out_features and in_features are
// at most kMostFeatures, of int8 kMostInt8TrellisFeatures, sums of those who divide K at most 2**31 each. Compute
// capability 9.0.
cudaError_t many_trellis_tokens(const std::vector<TrellisProduct>& products, const TrellisExperts& experts,
                                Dtype dtype, int64_t tokens, const ManyTrellisPlan& plan, const ManyTrellisRoom& room,
                                const Gpu& gpu, cudaStream_t stream);

}  // namespace hf_kbit::cuda
