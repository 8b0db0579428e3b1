// The trellises of the CPU backend but for products. The kernels are in csrc/cpu.
#include "ops/cpu_product.h"

namespace hf_kbit::backend {

void encode_trellis(const Tensor& targets, int bits, int lead, Tensor& words) {
    const auto* from = static_cast<const float*>(targets.const_data_ptr());
    auto* to = static_cast<uint32_t*>(words.mutable_data_ptr());
    torch::stable::parallel_for(0, targets.size(0), 1, [&](int64_t begin, int64_t end) {
        Tensor scratch = new_tensor(words, {cpu::encode_trellis_scratch(bits)}, ScalarType::Byte);
        cpu::encode_trellis(from, bits, lead, to, scratch.mutable_data_ptr(), begin, end);
    });
}

void decode_trellis(const Tensor& trellis, Code code, int bits, int64_t across, int64_t down, Tensor& out,
                    Dtype dtype) {
    const Tensor words = in_words(trellis);
    const int64_t matrix = across * down, count = out.numel() / (matrix * kTrellisSteps), tile = 8 * bits;
    for (int64_t i = 0; i < count; ++i) {
        const auto* from = static_cast<const uint32_t*>(words.const_data_ptr()) + i * matrix * tile;
        char* to = static_cast<char*>(out.mutable_data_ptr()) + i * matrix * kTrellisSteps * bytes_of(dtype);
        const cpu::TrellisTiles tiles = {from, across, down * tile, tile, bits, code};
        torch::stable::parallel_for(0, down, tile_grain(across), [&](int64_t begin, int64_t end) {
            cpu::decode_trellis(tiles, to, dtype, begin, end);
        });
    }
}

}  // namespace hf_kbit::backend
