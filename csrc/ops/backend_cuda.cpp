// The CUDA backend but for products, which backend_cuda_gemm.cpp and backend_cuda_int8.cpp have. The kernels are in
// csrc/kernels.
#include <stdexcept>

#include "kernels/path.h"
#include "ops/cuda_launch.h"

namespace hf_kbit::backend {

void quantize(const Tensor& weight, Dtype dtype, const Tensor& codebook, int bits, bool searched, bool signed_scales,
              int64_t rows, int64_t in_features, Tensor& planes, Tensor& absmax) {
    const Launch launch(weight);
    check("quantize",
          cuda::quantize(weight.const_data_ptr(), dtype, read<float>(codebook), bits, searched, signed_scales, rows,
                         in_features, write<int32_t>(planes), write<uint8_t>(absmax), launch.gpu, launch.stream));
}

namespace {

// From a number of slabs on, where there are more columns than the output has.
void dequantize_tiles(const Packed& packed, int64_t first_slab, int64_t columns, Tensor& out, Dtype dtype) {
    check_size(packed);
    const Launch launch(packed.words);
    const Tensor words = aligned(packed.words), scales = aligned(packed.scales);
    const HeldTransform transform(packed);
    check("dequantize",
          cuda::dequantize_tiles(read<int32_t>(words) + first_slab * TileLayout::slab_words(packed.bits),
                                 read<uint8_t>(scales) + first_slab * TileLayout::kSlabScales,
                                 read<float>(packed.codebook), transform.from(first_slab * kSlabColumns), packed.bits,
                                 packed.count, packed.out_features, columns, num_slabs(packed.in_features),
                                 out.mutable_data_ptr(), dtype, launch.gpu, launch.stream));
}

}  // namespace

void dequantize(const Packed& packed, Tensor& out, Dtype dtype) {
    if (packed.form == Form::tiles) return dequantize_tiles(packed, 0, packed.in_features, out, dtype);
    check_size(packed);
    const Launch launch(packed.words);
    const Tensor words = aligned(packed.words), scales = aligned(packed.scales);
    const HeldTransform transform(packed);
    check("dequantize",
          cuda::dequantize_planes(read<int32_t>(words), read<uint8_t>(scales), read<float>(packed.codebook),
                                  transform.from(0), packed.bits, packed.count * packed.out_features,
                                  packed.in_features, out.mutable_data_ptr(), dtype, launch.gpu, launch.stream));
}

void dequantize_columns(const Packed& packed, int64_t first, Tensor& out, Dtype dtype) {
    if (packed.form == Form::tiles) {
        dequantize_tiles(packed, first / kSlabColumns, out.size(1), out, dtype);
    } else {
        dequantize(columns_of(packed, first, out.size(1)), out, dtype);
    }
}

void embed(const Tensor& indices, const Packed& packed, Tensor& out, Dtype dtype) {
    check_size(packed);
    const Launch launch(packed.words);
    const Tensor words = aligned(packed.words), scales = aligned(packed.scales);
    const HeldTransform transform(packed);
    check("embed", cuda::embed(indices.const_data_ptr(), indices.scalar_type() == ScalarType::Long, indices.numel(),
                               read<int32_t>(words), read<uint8_t>(scales), packed.form == Form::tiles,
                               read<float>(packed.codebook), transform.from(0), packed.bits, packed.out_features,
                               packed.in_features, out.mutable_data_ptr(), dtype, launch.gpu, launch.stream));
}

void repack(const Packed& packed, Tensor& words, Tensor& scales) {
    check_size(packed);
    const Launch launch(packed.words);
    const Tensor from = aligned(packed.words), scales_from = aligned(packed.scales);
    const auto run = packed.form == Form::planes ? cuda::repack : cuda::repack_inverse;
    check("repack",
          run(read<int32_t>(from), read<uint8_t>(scales_from), packed.bits, packed.count, packed.out_features,
              packed.in_features, write<int32_t>(words), write<uint8_t>(scales), launch.gpu, launch.stream));
}

void check_offsets(const Tensor&, int64_t) {}

void route_experts(const Tensor& experts, int64_t num_experts, Tensor& rows, Tensor& places, Tensor& offsets) {
    const Launch launch(experts);
    check("route_experts",
          cuda::route_experts(experts.const_data_ptr(), experts.scalar_type() == ScalarType::Long, experts.size(0),
                              experts.size(1), num_experts, write<int32_t>(rows), write<int32_t>(places),
                              write<int32_t>(offsets), launch.gpu, launch.stream));
}

void combine_experts(const Tensor& y, Dtype dtype, const Tensor& places, const Tensor& weights, Dtype of_weights,
                     Tensor& out) {
    const Launch launch(y);
    const Tensor from = aligned(y);
    check("combine_experts",
          cuda::combine_experts(from.const_data_ptr(), dtype, read<int32_t>(places), weights.const_data_ptr(),
                                of_weights, places.size(0), places.size(1), y.size(0), y.size(1),
                                out.mutable_data_ptr(), launch.gpu, launch.stream));
}

}  // namespace hf_kbit::backend

// For hf_kbit/ops/native.py: the most tokens and products that compiled models give gemm_group, and the architecture
// of the code that runs on the current GPU, or 0 without one.
#define HF_KBIT_EXPORT extern "C" __attribute__((visibility("default")))
HF_KBIT_EXPORT int hf_kbit_cuda_group_tokens() { return hf_kbit::kJoinedTokens; }
HF_KBIT_EXPORT int hf_kbit_cuda_group_products() { return hf_kbit::kGemmParts; }
HF_KBIT_EXPORT int hf_kbit_cuda_arch() {
    try {
        return hf_kbit::cuda::current_gpu().arch;
    } catch (const std::exception&) {
        return 0;
    }
}
// The most tokens of gemm_trellis_many on the current GPU.
HF_KBIT_EXPORT int hf_kbit_cuda_many_trellis_tokens() {
    try {
        return hf_kbit::many_trellis_tokens(hf_kbit::cuda::current_gpu());
    } catch (const std::exception&) {
        return 0;
    }
}
