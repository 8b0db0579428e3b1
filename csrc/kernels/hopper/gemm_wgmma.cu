// y = x @ W.T (+ bias) for more than 16 tokens on Hopper: gemm_wgmma.cuh, of one weight, or of several for the same x.
// Compute capability 9.0. Several have kernels of their own, so that one pays nothing.
#include "kernels/dispatch.h"
#include "kernels/hopper/gemm_wgmma.cuh"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

template <int kBits, typename T, int kTokens, bool kOrdered, int kWeights>
__global__ void __launch_bounds__(wgmma_threads(kTokens), 1)
    gemm_wgmma_kernel(const __grid_constant__ WgmmaMaps<kWeights> maps,
                      const __grid_constant__ WgmmaArguments<kWeights> arguments) {
    run_wgmma<kBits, T, kTokens, kOrdered, false>(maps, arguments);
}

template <int kBits, typename T, int kTokens, bool kOrdered, int kWeights>
cudaError_t launch(const WgmmaMaps<kWeights>& maps, const WgmmaArguments<kWeights>& arguments, const WgmmaPlan& plan,
                   bool awaits, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(gemm_wgmma_kernel<kBits, T, kTokens, kOrdered, kWeights>, wgmma_threads(kTokens),
                             kAllShared);
    const int ctas = plan.clusters * plan.split;
    return awaits ? launcher.launch_overlapping(gpu, ctas, plan.split, plan.shared_bytes, stream, maps, arguments)
                  : launcher.launch(gpu, ctas, plan.split, plan.shared_bytes, stream, maps, arguments);
}

template <int kWeights>
cudaError_t multiply(const Product* products, int count, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                     const WgmmaPlan& plan, float* partial, uint32_t* ready, bool awaits, const Gpu& gpu,
                     cudaStream_t stream) {
    WgmmaMaps<kWeights> maps;
    WgmmaArguments<kWeights> arguments{};
    int64_t tiles = 0;
    const cudaError_t error =
        begin_arguments(products, count, dtype, tokens, in_features, plan, maps, arguments, tiles);
    if (error != cudaSuccess) return error;
    arguments.partial = partial;
    arguments.ready = ready;
    divide_tiles(plan, tokens, tiles, arguments);
    const bool ordered = products[0].ordered;
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        return dispatch_token_tile(plan.token_tile, [&](auto token_tile) {
            using T = decltype(value);
            constexpr int kBits = width(), kTokens = token_tile();
            if constexpr (!wgmma_ordered(kBits, kTokens, false, false)) {
                if (!ordered) return launch<kBits, T, kTokens, false>(maps, arguments, plan, awaits, gpu, stream);
            }
            return ordered ? launch<kBits, T, kTokens, true>(maps, arguments, plan, awaits, gpu, stream)
                           : cudaErrorInvalidValue;
        });
    });
}

}  // namespace

cudaError_t gemm_wgmma(const Product* products, int count, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                       const WgmmaPlan& plan, float* partial, uint32_t* ready, bool awaits, const Gpu& gpu,
                       cudaStream_t stream) {
    if (plan.token_tile == 0 || count > kGemmParts) return cudaErrorInvalidConfiguration;
    const auto& run = count == 1 ? multiply<1> : multiply<kGemmParts>;
    return run(products, count, dtype, bits, tokens, in_features, plan, partial, ready, awaits, gpu, stream);
}

}  // namespace hf_kbit::cuda
