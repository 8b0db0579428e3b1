// Products of more than 16 tokens by a trellis of code mul1 on Hopper, in int8: many_tokens.cuh, compiled by itself.
#include "kernels/trellis/many_tokens.cuh"

namespace hf_kbit::cuda {

cudaError_t multiply_many_trellis_int8(const CUtensorMap& map, const ManyTrellisArguments& arguments, int bits,
                                       const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    return multiply_many_trellis<Code::mul1, int8_t>(map, arguments, bits, plan, gpu, stream);
}

}  // namespace hf_kbit::cuda
