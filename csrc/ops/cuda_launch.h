// What a call of a CUDA kernel takes: the current device and stream, and aligned pointers.
#pragma once

#include <array>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "ops/backend.h"

namespace hf_kbit::backend {

using cuda::check;

// Makes the device of a tensor the current one; kernels go to torch's current stream there.
struct Launch {
    torch::stable::accelerator::DeviceGuard guard;
    const cuda::Gpu& gpu;
    cudaStream_t stream;

    explicit Launch(const Tensor& tensor)
        : guard(tensor.get_device_index()), gpu(cuda::current_gpu()), stream(nullptr) {
        void* current = nullptr;
        check_torch("aoti_torch_get_current_cuda_stream",
                    aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &current));
        stream = static_cast<cudaStream_t>(current);
    }
};

// Kernels read 16 bytes at a time; a view may start anywhere.
inline Tensor aligned(const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : torch::stable::clone(tensor);
}

// As kernels read activations and column scales: rows in pieces of eight numbers, zeros where they pad.
inline Tensor in_pieces(const Tensor& tensor) {
    constexpr int64_t kPiece = 8;
    const int64_t padding = (kPiece - tensor.size(-1) % kPiece) % kPiece;
    Tensor rows = as_contiguous(tensor);
    if (padding > 0) {
        const std::array<int64_t, 2> after{0, padding};
        rows = torch::stable::pad(rows, {after.data(), after.size()});
    }
    return aligned(rows);
}

template <typename T>
const T* read(const Tensor& tensor) {
    return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* write(Tensor& tensor) {
    return static_cast<T*>(tensor.mutable_data_ptr());
}

// What a weight does to its input, with the tensor that owns the copy of `columns`, if there is one, until the launch.
struct HeldTransform {
    std::optional<Tensor> columns;
    bool rotated;

    explicit HeldTransform(const Packed& packed) : rotated(packed.rotated) {
        if (packed.columns) columns = in_pieces(*packed.columns);
    }
    cuda::Transform from(int64_t column) const {
        return {columns ? read<uint8_t>(*columns) + column : nullptr, rotated};
    }
};

// Tiles are padded to whole slabs.
inline void check_size(const Packed& packed) {
    const TileLayout layout(packed.out_features, packed.in_features);
    const int64_t blocks = packed.form == Form::planes ? packed.out_features * num_blocks(packed.in_features)
                                                       : layout.row_tiles * kTileRows * layout.slabs * kSlabBlocks;
    if (packed.count > kMostBlocks / blocks) {
        refuse("weight", std::to_string(packed.count) + " times " + std::to_string(blocks) + " blocks of 32 weights",
               "at most " + std::to_string(kMostBlocks) + " blocks on a GPU");
    }
}

}  // namespace hf_kbit::backend
