// The trellises of the CUDA backend. The kernels are in csrc/kernels.
#include "ops/cuda_launch.h"

namespace hf_kbit::backend {

void encode_trellis(const Tensor& targets, int bits, int lead, Tensor& words) {
    const Launch launch(targets);
    const int64_t tiles = targets.size(0), ctas = cuda::encode_trellis_ctas(bits, tiles, launch.gpu);
    Tensor workspace = new_tensor(targets, {ctas * cuda::encode_trellis_bytes(bits, launch.gpu)}, ScalarType::Byte);
    check("encode_trellis", cuda::encode_trellis(read<float>(targets), bits, lead, tiles, write<uint32_t>(words),
                                                 workspace.mutable_data_ptr(), ctas, launch.gpu, launch.stream));
}

void decode_trellis(const Tensor& trellis, Code code, int bits, int64_t across, int64_t down, Tensor& out,
                    Dtype dtype) {
    const Launch launch(trellis);
    const Tensor words = aligned(trellis);
    const int64_t count = out.numel() / (across * down * kTrellisSteps);
    check("decode_trellis", cuda::decode_trellis(read<uint32_t>(words), code, bits, count, across, down,
                                                 out.mutable_data_ptr(), dtype, launch.gpu, launch.stream));
}

}  // namespace hf_kbit::backend
