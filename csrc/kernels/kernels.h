// The CUDA kernels: raw device pointers and a stream in, a launch error out; nothing of torch.
//
// Shapes: N out_features, K in_features, B = ceil(K / 32) blocks a row, everything row-major and contiguous. planes is
// int32 [N, B * bits], absmax uint8 [N, B]; tiles are int32 [N/16, K/256, bits, 32, 4] with scales uint8
// [N/16, K/256, 8, 16], rounded up (layout: hf_kbit/reference.py, `repack`). `count` matrices lie one after another.
// gpu is the current one. Sizes are within what fits_gemm or kMostBlocks (gemm_plan.h) say.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/format.h"
#include "kernels/gemm_plan.h"
#include "kernels/gpu.h"

namespace hf_kbit::cuda {

// weight [rows, K] (float32, float16, bfloat16) to planes and absmax, whose scales are searched or not; codebook
// float32 [2**bits], ascending.
cudaError_t quantize(const void* weight, Dtype dtype, const float* codebook, int bits, bool searched, int64_t rows,
                     int64_t in_features, int32_t* planes, uint8_t* absmax, const Gpu& gpu, cudaStream_t stream);

// The decoded weight, out [rows, K]: the float32 product level * scale, rounded once to dtype. Of tiles, which may be
// the first of longer rows, row_slabs are in memory for 16 rows.
cudaError_t dequantize_planes(const int32_t* planes, const uint8_t* absmax, const float* codebook, int bits,
                              int64_t rows, int64_t in_features, void* out, Dtype dtype, const Gpu& gpu,
                              cudaStream_t stream);
cudaError_t dequantize_tiles(const int32_t* words, const uint8_t* scales, const float* codebook, int bits,
                             int64_t count, int64_t out_features, int64_t in_features, int64_t row_slabs, void* out,
                             Dtype dtype, const Gpu& gpu, cudaStream_t stream);

// Planes to tiles (zeros where they pad) and tiles to planes.
cudaError_t repack(const int32_t* planes, const uint8_t* absmax, int bits, int64_t count, int64_t out_features,
                   int64_t in_features, int32_t* words, uint8_t* scales, const Gpu& gpu, cudaStream_t stream);
cudaError_t repack_inverse(const int32_t* words, const uint8_t* scales, int bits, int64_t count, int64_t out_features,
                           int64_t in_features, int32_t* planes, uint8_t* absmax, const Gpu& gpu, cudaStream_t stream);

// y [tokens, N] = x [tokens, K] @ W.T + bias for W in tiles, float16 or bfloat16; bias [N] may be null, codebook is
// float32 [2**bits].
struct Product {
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    const void* bias;
    void* y;
    int64_t out_features;
};

// `count` products, at most kGemmParts, of the same x of up to 16 tokens, in one launch; K is a multiple of 8 (W may
// have fewer columns in its last block).
cudaError_t gemm(const void* x, Dtype dtype, const Product* products, int count, int bits, int64_t tokens,
                 int64_t in_features, const Gpu& gpu, cudaStream_t stream);
// One product, on GPUs of another compute capability than 9.0, as plan_mma says; partial: as many floats as
// mma_partial_sums says.
cudaError_t gemm_mma(const void* x, Dtype dtype, const Product& product, int bits, int64_t tokens, int64_t in_features,
                     const MmaPlan& plan, float* partial, const Gpu& gpu, cudaStream_t stream);
// One product in one launch, on GPUs of compute capability 9.0.
cudaError_t gemm_wgmma(const void* x, Dtype dtype, const Product& product, int bits, int64_t tokens,
                       int64_t in_features, const Gpu& gpu, cudaStream_t stream);

}  // namespace hf_kbit::cuda
