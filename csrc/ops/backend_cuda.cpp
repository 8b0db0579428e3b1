// The CUDA backend: the current device and stream, aligned pointers, launches. The kernels are in csrc/kernels.
#include <algorithm>
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

namespace {

Tensor viewed(const Tensor& tensor, int64_t rows, int64_t columns) {
    const std::array<int64_t, 2> shape{rows, columns};
    return torch::stable::view(tensor, {shape.data(), shape.size()});
}

// Decodes a slice of rows at a time, small enough to be in L2 still when it is multiplied.
Tensor gemm_in_slices(const Tensor& x, Dtype dtype, Packed packed, const std::optional<Tensor>& bias) {
    constexpr int64_t kSliceBytes = 32 << 20;
    const int64_t tokens = x.numel() / packed.in_features, out_features = packed.out_features;
    // Of the weight, and with a bias of the product, which then is copied.
    const int64_t row_bytes = (packed.in_features + (bias ? tokens : 0)) * bytes_of(dtype);
    const int64_t slice = std::max<int64_t>(1, kSliceBytes / (row_bytes * kTileRows)) * kTileRows;
    if (slice >= out_features || tokens == 0) return linear(x, decoded(packed, dtype), bias);

    Tensor words = packed.words, scales = packed.scales;
    const bool tiled = packed.form == Form::tiles;
    Shape shape = shape_of(x);
    shape.back() = out_features;
    Tensor y = new_tensor(x, shape, scalar_type(dtype)), y_rows = viewed(y, tokens, out_features);
    const Tensor x_rows = viewed(as_contiguous(x), tokens, packed.in_features);
    for (int64_t first = 0; first < out_features; first += slice) {
        packed.out_features = std::min(slice, out_features - first);
        // The first dimension is that of rows or of row tiles.
        const int64_t at = tiled ? first / kTileRows : first;
        const int64_t count = tiled ? ceil_div(packed.out_features, kTileRows) : packed.out_features;
        packed.words = torch::stable::narrow(words, 0, at, count);
        packed.scales = torch::stable::narrow(scales, 0, at, count);
        const Tensor weight = decoded(packed, dtype);
        Tensor part = torch::stable::narrow(y_rows, 1, first, packed.out_features);
        if (bias) {
            Tensor all = *bias;
            torch::stable::copy_(part,
                                 linear(x_rows, weight, torch::stable::narrow(all, 0, first, packed.out_features)));
        } else {
            std::array<StableIValue, 3> stack{torch::stable::detail::from(x_rows),
                                              torch::stable::detail::from(torch::stable::transpose(weight, 0, 1)),
                                              torch::stable::detail::from(part)};
            STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
            torch::stable::detail::to<Tensor>(stack[0]);  // takes over the reference
        }
    }
    return y;
}

}  // namespace

// Decodes and multiplies in one kernel where it can, else decodes first.
Tensor gemm(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias) {
    const Launch launch(x);
    const int64_t tokens = x.numel() / packed.in_features;
    const bool fusable = packed.form == Form::tiles && (dtype == Dtype::float16 || dtype == Dtype::bfloat16);
    const cuda::Gpu gpu;
    const GemmPath path = fusable ? gemm_path(tokens, packed.bits, gpu.arch()) : GemmPath::dequantize;
    if (path == GemmPath::dequantize) return gemm_in_slices(x, dtype, packed, bias);

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
                      packed.out_features, packed.in_features + padding, y.mutable_data_ptr(), gpu, launch.stream));
    return y;
}

}  // namespace hf_kbit::backend
