// y = x @ W.T (+ bias) for 17 to 256 tokens on GPUs without wgmma: gemm_mma.cuh, of float16 and bfloat16.
#include "kernels/mma/gemm_mma.cuh"

namespace hf_kbit::cuda {

cudaError_t gemm_mma(const Product& product, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                     const MmaPlan& plan, float* partial, const Gpu& gpu, cudaStream_t stream) {
    MmaArguments arguments = mma_arguments(product, tokens, in_features, plan, partial);
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        using T = decltype(value);
        arguments.signs = signs_of<T>(product.signed_scales);
        const auto run = plan.token_tile == 32 ? launch_mma<width(), T, 32> : launch_mma<width(), T, 64>;
        return run(arguments, plan, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
