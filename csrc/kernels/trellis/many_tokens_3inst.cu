// Products of a trellis of code 3inst on Hopper, in float16: many_tokens.cuh, compiled by itself.
#include "kernels/trellis/many_tokens.cuh"

namespace hf_kbit::cuda {

cudaError_t multiply_many_trellis_3inst(const CUtensorMap& map, const ManyTrellisArguments& arguments, int bits,
                                        const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    return multiply_many_trellis<Code::three_inst, __half>(map, arguments, bits, plan, gpu, stream);
}

}  // namespace hf_kbit::cuda
