// y = x @ W.T (+ bias) of 8-bit inputs on Hopper, for any number of tokens: gemm_wgmma.cuh, of int8. Compute
// capability 9.0. The numbers, to the last bit: docs/internals.md, "8-bit inputs".
//
//   x        int8 [M, 32 * B], its columns and scales as inputs/tokens_to_int8.cu makes them
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

template <int kBits, int kTokens>
__global__ void __launch_bounds__(wgmma_threads(kTokens), 1)
    gemm_int8_kernel(const __grid_constant__ WgmmaMaps<1> maps, const __grid_constant__ Int8Arguments arguments) {
    run_wgmma<kBits, int8_t, kTokens, true, false>(maps, arguments);
}

}  // namespace

cudaError_t gemm_int8(const Product& product, const void* inverses, const float* token_scales, Dtype dtype, int bits,
                      int64_t tokens, int64_t in_features, const WgmmaPlan& plan, int32_t* partial, uint32_t* ready,
                      const Gpu& gpu, cudaStream_t stream) {
    if (plan.token_tile == 0) return cudaErrorInvalidConfiguration;
    const int64_t columns = num_blocks(in_features) * kBlockSize;
    WgmmaMaps<1> maps;
    const cudaError_t error =
        map_of_rows(product.x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, tokens, columns, plan.token_tile, maps.of[0]);
    if (error != cudaSuccess) return error;
    Int8Arguments arguments{};
    int64_t tiles = 0;
    begin_arguments(&product, 1, tokens, in_features, plan, arguments, tiles);
    divide_tiles(plan, tokens, tiles, arguments);
    arguments.signs = signs_of<__half>(product.signed_scales);
    arguments.partial = reinterpret_cast<float*>(partial);
    arguments.ready = ready;
    arguments.inverses = static_cast<const __half*>(inverses);
    arguments.token_scales = token_scales;
    arguments.half = dtype == Dtype::float16;
    return dispatch(bits, [&](auto width) {
        return dispatch_token_tile(plan.token_tile, [&](auto token_tile) {
            constexpr int kTokens = token_tile();
            static Launcher launcher(gemm_int8_kernel<width(), kTokens>, wgmma_threads(kTokens), kAllShared);
            return launcher.launch_overlapping(gpu, plan.clusters * plan.split, plan.split, plan.shared_bytes, stream,
                                               maps, arguments);
        });
    });
}

}  // namespace hf_kbit::cuda
