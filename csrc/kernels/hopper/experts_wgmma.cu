// Each row of y is a row of x times the weight of an expert (+ its bias) on Hopper: gemm_wgmma.cuh, of experts.
//
//   x        float16 or bfloat16 [R, K], as transform.cu gathers and orders it    y  [R, N], of x's dtype
//   words    int32 [E, N/16, K/256, bits, 32, 4]    scales  uint8 [E, N/16, K/256, 8, 16]
//   offsets  int32 [E + 1]: the first row of each expert, and the end of all    codebook  float32 [2**bits]
//   bias     [E, N] or null
//
// As many CTAs as there are processors, or can be tiles, if these are fewer, take the tiles in turns.
#include "kernels/dispatch.h"
#include "kernels/hopper/gemm_wgmma.cuh"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

template <int kBits, typename T, int kTokens>
__global__ void __launch_bounds__(wgmma_threads(kTokens), 1)
    experts_wgmma_kernel(const __grid_constant__ WgmmaMaps<1> maps,
                         const __grid_constant__ WgmmaArguments<1> arguments) {
    run_wgmma<kBits, T, kTokens, true, true>(maps, arguments);
}

}  // namespace

cudaError_t experts_wgmma(const Product& product, const int32_t* offsets, int experts, Dtype dtype, int bits,
                          int64_t rows, int64_t in_features, const WgmmaPlan& plan, const Gpu& gpu,
                          cudaStream_t stream) {
    WgmmaMaps<1> maps;
    WgmmaArguments<1> arguments{};
    int64_t tiles = 0;  // were there one weight
    const cudaError_t error = begin_arguments(&product, 1, dtype, rows, in_features, plan, maps, arguments, tiles);
    if (error != cudaSuccess) return error;
    list_experts(offsets, experts, plan, arguments);
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        return dispatch_token_tile(plan.token_tile, [&](auto token_tile) {
            constexpr int kTokens = token_tile();
            static Launcher launcher(experts_wgmma_kernel<width(), decltype(value), kTokens>, wgmma_threads(kTokens),
                                     kAllShared);
            return launcher.launch_overlapping(gpu, plan.clusters, 1, plan.shared_bytes, stream, maps, arguments);
        });
    });
}

}  // namespace hf_kbit::cuda
