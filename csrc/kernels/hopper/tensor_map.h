// How a kernel's bulk copies find boxes of activations.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/format.h"
#include "kernels/hopper/plan.h"

namespace hf_kbit::cuda {

using Encode = decltype(&cuTensorMapEncodeTiled);

inline Encode find_encode() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(found) : nullptr;
}

// Of rows of numbers of so many bytes, x [tokens, columns], boxes of 128 bytes of so many rows, swizzled as
// swizzled_matrix (wgmma.cuh) says.
inline cudaError_t map_of_rows(const void* x, CUtensorMapDataType type, int bytes, int64_t tokens, int64_t columns,
                               int box_tokens, CUtensorMap& map) {
    static const Encode encode = find_encode();
    if (!encode) return cudaErrorNotSupported;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(tokens)};
    const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(columns * bytes)};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(kWgmmaBoxBytes / bytes), static_cast<cuuint32_t>(box_tokens)},
                     steps[2] = {1, 1};
    const auto make = [&] {
        return encode(&map, type, 2, const_cast<void*>(x), sizes, row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = make();
    if (result != CUDA_SUCCESS) {
        // The driver wants a context, which a thread, as one of autograd's, has only after a call of the runtime.
        const cudaError_t error = cudaFree(nullptr);
        if (error != cudaSuccess) return error;
        result = make();
    }
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t map_of_rows(const void* x, Dtype dtype, int64_t tokens, int64_t columns, int box_tokens,
                               CUtensorMap& map) {
    const CUtensorMapDataType type =
        dtype == Dtype::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return map_of_rows(x, type, 2, tokens, columns, box_tokens, map);
}

}  // namespace hf_kbit::cuda
