// y = x @ W.T (+ bias) of 8-bit inputs on Hopper, for any number of tokens: gemm_wgmma.cuh, of int8, of one weight, or
// of several for the same tokens. Compute capability 9.0. The numbers, to the last bit: docs/internals.md, "8-bit
// inputs". Several have kernels of their own, so that one pays nothing.
//
//   x        int8 [M, 32 * B] of each weight, its columns and scales as inputs/tokens_to_int8.cu makes them
//   words    int32 [N/16, K/256, bits, 32, 4]     scales   uint8 [N/16, K/256, 8, 16]
//   codebook float32 [2**bits]                    inverses float16 [N]
//   bias     [N] or null                          y        [M, N], of one dtype
//
// The launch overlaps with that of tokens_to_int8.cu.
//
// After Dettmers et al., LLM.int8(), arXiv:2208.07339: a scale for each token, one for each row.
#include "kernels/dispatch.h"
#include "kernels/hopper/gemm_wgmma.cuh"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

template <int kBits, int kTokens, int kWeights>
__global__ void __launch_bounds__(wgmma_threads(kTokens), 1)
    gemm_int8_kernel(const __grid_constant__ WgmmaMaps<kWeights> maps,
                     const __grid_constant__ Int8Arguments<kWeights> arguments) {
    run_wgmma<kBits, int8_t, kTokens, true, false>(maps, arguments);
}

template <int kWeights>
cudaError_t multiply(const Int8Product* products, int count, Dtype dtype, int bits, int64_t tokens,
                     int64_t in_features, const WgmmaPlan& plan, int32_t* partial, uint32_t* ready, const Gpu& gpu,
                     cudaStream_t stream) {
    WgmmaMaps<kWeights> maps;
    Int8Arguments<kWeights> arguments{};
    int64_t tiles = 0;
    const cudaError_t error =
        begin_arguments(products, count, dtype, tokens, in_features, plan, maps, arguments, tiles);
    if (error != cudaSuccess) return error;
    divide_tiles(plan, tokens, tiles, arguments);
    arguments.partial = reinterpret_cast<float*>(partial);
    arguments.ready = ready;
    return dispatch(bits, [&](auto width) {
        return dispatch_token_tile(plan.token_tile, [&](auto token_tile) {
            constexpr int kTokens = token_tile();
            static Launcher launcher(gemm_int8_kernel<width(), kTokens, kWeights>, wgmma_threads(kTokens), kAllShared);
            return launcher.launch_overlapping(gpu, plan.clusters * plan.split, plan.split, plan.shared_bytes, stream,
                                               maps, arguments);
        });
    });
}

}  // namespace

cudaError_t gemm_int8(const Int8Product* products, int count, Dtype dtype, int bits, int64_t tokens,
                      int64_t in_features, const WgmmaPlan& plan, int32_t* partial, uint32_t* ready, const Gpu& gpu,
                      cudaStream_t stream) {
    if (plan.token_tile == 0 || count > kGemmParts) return cudaErrorInvalidConfiguration;
    const auto& run = count == 1 ? multiply<1> : multiply<kGemmParts>;
    return run(products, count, dtype, bits, tokens, in_features, plan, partial, ready, gpu, stream);
}

}  // namespace hf_kbit::cuda
