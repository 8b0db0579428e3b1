// Each row of y is a row of x times the weight of an expert (+ its bias) of 8-bit inputs on Hopper: gemm_wgmma.cuh, of
// experts and int8. The numbers, to the last bit: docs/internals.md, "8-bit inputs".
//
//   x        int8 [R, 32 * B], rows in the order of experts, as inputs/tokens_to_int8.cu gathers and makes them
//   words    int32 [E, N/16, K/256, bits, 32, 4]    scales    uint8 [E, N/16, K/256, 8, 16]
//   offsets  int32 [E + 1], as in experts_wgmma.cu  codebook  float32 [2**bits]    inverses  float16 [E, N]
//   bias     [E, N] or null                         y         [R, N], of one dtype
//
// The launch overlaps with that of tokens_to_int8.cu.
#include "kernels/dispatch.h"
#include "kernels/hopper/gemm_wgmma.cuh"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

template <int kBits, int kTokens>
__global__ void __launch_bounds__(wgmma_threads(kTokens), 1)
    experts_int8_kernel(const __grid_constant__ WgmmaMaps<1> maps,
                        const __grid_constant__ Int8Arguments<1> arguments) {
    run_wgmma<kBits, int8_t, kTokens, true, true>(maps, arguments);
}

}  // namespace

cudaError_t experts_int8(const Int8Product& product, const int32_t* offsets, int experts, Dtype dtype, int bits,
                         int64_t rows, int64_t in_features, const WgmmaPlan& plan, const Gpu& gpu,
                         cudaStream_t stream) {
    if (plan.token_tile == 0) return cudaErrorInvalidConfiguration;
    WgmmaMaps<1> maps;
    Int8Arguments<1> arguments{};
    int64_t tiles = 0;  // were there one weight
    const cudaError_t error = begin_arguments(&product, 1, dtype, rows, in_features, plan, maps, arguments, tiles);
    if (error != cudaSuccess) return error;
    list_experts(offsets, experts, plan, arguments);
    return dispatch(bits, [&](auto width) {
        return dispatch_token_tile(plan.token_tile, [&](auto token_tile) {
            constexpr int kTokens = token_tile();
            static Launcher launcher(experts_int8_kernel<width(), kTokens>, wgmma_threads(kTokens), kAllShared);
            return launcher.launch_overlapping(gpu, plan.clusters, 1, plan.shared_bytes, stream, maps, arguments);
        });
    });
}

}  // namespace hf_kbit::cuda
