// The CUDA backend: the current device and stream, aligned pointers, launches. The kernels are in csrc/kernels.
#include <array>
#include <stdexcept>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "kernels/gemm_plan.h"
#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "ops/backend.h"

namespace hf_kbit::backend {

namespace {

// Makes the device of a tensor the current one; kernels go to torch's current stream there.
struct Launch {
    torch::stable::accelerator::DeviceGuard guard;
    cudaStream_t stream;

    explicit Launch(const Tensor& tensor) : guard(tensor.get_device_index()), stream(nullptr) {
        void* current = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
        stream = static_cast<cudaStream_t>(current);
    }
};

void check(const char* kernel, cudaError_t error) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string("hf_kbit: ") + kernel + ": " + cudaGetErrorString(error));
    }
}

// Kernels read 16 bytes at a time; a view may start anywhere.
Tensor aligned(const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : torch::stable::clone(tensor);
}

template <typename T>
const T* read(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace

void quantize(const Tensor& weight, Dtype dtype, const Tensor& codebook, int bits, int64_t rows, int64_t in_features,
              Tensor& planes, Tensor& absmax) {
    const Launch launch(weight);
    check("quantize", cuda::quantize(weight.const_data_ptr(), dtype, read<float>(codebook), bits, rows, in_features,
                                     write<int32_t>(planes), write<uint8_t>(absmax), launch.stream));
}

void dequantize(const Packed& packed, Tensor& out, Dtype dtype) {
    const Launch launch(packed.words);
    const Tensor words = aligned(packed.words), scales = aligned(packed.scales);
    const auto* codebook = read<float>(packed.codebook);
    check("dequantize",
          packed.form == Form::planes
              ? cuda::dequantize_planes(read<int32_t>(words), read<uint8_t>(scales), codebook, packed.bits,
                                        packed.count * packed.out_features, packed.in_features, out.mutable_data_ptr(),
                                        dtype, launch.stream)
              : cuda::dequantize_tiles(read<int32_t>(words), read<uint8_t>(scales), codebook, packed.bits,
                                       packed.count, packed.out_features, packed.in_features, out.mutable_data_ptr(),
                                       dtype, launch.stream));
}

void repack(const Packed& packed, Tensor& words, Tensor& scales) {
    const Launch launch(packed.words);
    const Tensor from = aligned(packed.words), scales_from = aligned(packed.scales);
    const auto run = packed.form == Form::planes ? cuda::repack : cuda::repack_inverse;
    check("repack",
          run(read<int32_t>(from), read<uint8_t>(scales_from), packed.bits, packed.count, packed.out_features,
              packed.in_features, write<int32_t>(words), write<uint8_t>(scales), launch.stream));
}

// Decodes and multiplies in one kernel where it can, else decodes the whole weight first.
Tensor gemm(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias) {
    const Launch launch(x);
    const int64_t tokens = x.numel() / packed.in_features;
    const bool fusable = packed.form == Form::tiles && (dtype == Dtype::float16 || dtype == Dtype::bfloat16);
    const GemmPath path = fusable ? gemm_path(tokens, cuda::Gpu().arch()) : GemmPath::dequantize;
    if (path == GemmPath::dequantize) return linear(x, decoded(packed, dtype), bias);

    // The kernels read rows in pieces of 16 bytes.
    constexpr int64_t kPiece = 8;
    const int64_t padding = (kPiece - packed.in_features % kPiece) % kPiece;
    Tensor rows = as_contiguous(x);
    if (padding > 0) {
        const std::array<int64_t, 2> after{0, padding};
        rows = torch::stable::pad(rows, {after.data(), after.size()});
    }
    rows = aligned(rows);
    const Tensor words = aligned(packed.words), scales = aligned(packed.scales);
    const Tensor bias_row = bias ? as_contiguous(*bias) : rows;
    Shape shape = shape_of(x);
    shape.back() = packed.out_features;
    Tensor y = new_tensor(x, shape, scalar_type(dtype));
    check("gemm", (path == GemmPath::decode ? cuda::gemm : cuda::gemm_wgmma)(
                      rows.const_data_ptr(), dtype, read<int32_t>(words), read<uint8_t>(scales),
                      read<float>(packed.codebook), packed.bits, bias ? bias_row.const_data_ptr() : nullptr, tokens,
                      packed.out_features, packed.in_features + padding, y.mutable_data_ptr(), launch.stream));
    return y;
}

}  // namespace hf_kbit::backend
