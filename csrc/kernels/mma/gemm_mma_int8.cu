// y = x @ W.T (+ bias) of 8-bit inputs on GPUs without wgmma, for any number of tokens: gemm_mma.cuh, of int8. The
// numbers, to the last bit: docs/internals.md, "8-bit inputs".
//
//   x        int8 [M, 32 * B], its columns and scales as inputs/tokens_to_int8.cu makes them
//   words    int32 [N/16, K/256, bits, 32, 4]     scales   uint8 [N/16, K/256, 8, 16]
//   codebook float32 [2**bits]                    inverses float16 [N]
//   bias     [N] or null                          y        [M, N], of one dtype
//
// From compute capability 9.0 on the launch overlaps with that of tokens_to_int8.cu.
#include "kernels/mma/gemm_mma.cuh"

namespace hf_kbit::cuda {

cudaError_t gemm_mma_int8(const Int8Product& product, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                          const MmaPlan& plan, int32_t* partial, const Gpu& gpu, cudaStream_t stream) {
    MmaInt8Arguments arguments{
        mma_arguments(product, tokens, num_blocks(in_features) * kBlockSize, plan, partial),
        static_cast<const __half*>(product.inverses),
        product.token_scales,
        reinterpret_cast<float*>(partial + mma_partial_sums(plan)),
        dtype == Dtype::float16,
    };
    arguments.signs = signs_of<__half>(product.signed_scales);
    return dispatch(bits, [&](auto width) {
        const auto run = plan.token_tile == 32   ? launch_mma<width(), int8_t, 32>
                         : plan.token_tile == 64 ? launch_mma<width(), int8_t, 64>
                                                 : launch_mma<width(), int8_t, 96>;
        return run(arguments, plan, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
