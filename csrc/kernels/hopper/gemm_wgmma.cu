// y = x @ W.T (+ bias) for more than 16 tokens on Hopper: gemm_wgmma.cuh, of one weight. Compute capability 9.0.
#include "kernels/dispatch.h"
#include "kernels/hopper/gemm_wgmma.cuh"
#include "kernels/hopper/tensor_map.h"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

template <int kBits, typename T, int kTokens, bool kOrdered>
__global__ void __launch_bounds__(wgmma_threads(kTokens), 1)
    gemm_wgmma_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ WgmmaArguments arguments) {
    run_wgmma<kBits, T, kTokens, kOrdered, false>(x_map, arguments);
}

template <int kBits, typename T, int kTokens, bool kOrdered>
cudaError_t launch(const CUtensorMap& map, const WgmmaArguments& arguments, const WgmmaPlan& plan, bool awaits,
                   const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(gemm_wgmma_kernel<kBits, T, kTokens, kOrdered>, wgmma_threads(kTokens), kAllShared);
    const int ctas = plan.clusters * plan.split;
    return awaits ? launcher.launch_overlapping(gpu, ctas, plan.split, plan.shared_bytes, stream, map, arguments)
                  : launcher.launch(gpu, ctas, plan.split, plan.shared_bytes, stream, map, arguments);
}

}  // namespace

cudaError_t gemm_wgmma(const Product& product, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                       const WgmmaPlan& plan, float* partial, uint32_t* ready, bool awaits, const Gpu& gpu,
                       cudaStream_t stream) {
    if (plan.token_tile == 0) return cudaErrorInvalidConfiguration;
    CUtensorMap map;
    const cudaError_t error = map_of_rows(product.x, dtype, tokens, in_features, plan.token_tile, map);
    if (error != cudaSuccess) return error;
    WgmmaArguments arguments = wgmma_arguments(product, dtype, tokens, in_features, plan);
    arguments.partial = partial;
    arguments.ready = ready;
    arguments.token_tiles = static_cast<int>(ceil_div(tokens, plan.token_tile));
    const int64_t tiles = wgmma_tiles(tokens, product.out_features, plan.token_tile, plan.groups);
    arguments.whole = static_cast<int>(tiles - plan.divided);
    arguments.turns = arguments.whole / plan.clusters;
    arguments.division = divide_wgmma(plan, arguments.slabs);
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        return dispatch_token_tile(plan.token_tile, [&](auto token_tile) {
            using T = decltype(value);
            constexpr int kBits = width(), kTokens = token_tile();
            if constexpr (!wgmma_ordered(kBits, kTokens, false, false)) {
                if (!product.ordered) {
                    return launch<kBits, T, kTokens, false>(map, arguments, plan, awaits, gpu, stream);
                }
            }
            return product.ordered ? launch<kBits, T, kTokens, true>(map, arguments, plan, awaits, gpu, stream)
                                   : cudaErrorInvalidValue;
        });
    });
}

}  // namespace hf_kbit::cuda
