// Numbers on their way through the rotations of a trellis's sides.
#pragma once

#include <cuda_bf16.h>

#include "kernels/inputs/swiglu.cuh"
#include "kernels/kernels.h"
#include "kernels/transform.cuh"

namespace hf_kbit::cuda {

constexpr uint32_t kAllLanes = 0xFFFFFFFF;

__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// At a multiple of 16 bytes.
template <typename T>
__device__ __forceinline__ void eight_floats(const T* from, float (&to)[8]) {
    unpack_octet<T>(*reinterpret_cast<const uint4*>(from), to);
}
// Columns `first` to `first` + 7 of a row of so many; zeros beyond the last.
template <typename T>
__device__ __forceinline__ uint4 octet_of(const T* row, int first, int columns) {
    if (columns % 8 == 0 && first < columns) return *reinterpret_cast<const uint4*>(row + first);
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t two[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int column = first + 2 * i + j;
            two[j] = column < columns ? reinterpret_cast<const uint16_t*>(row)[column] : 0;
        }
        words[i] = two[0] | two[1] << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
// Those of a token, times those of suh, which is padded. With swiglu a token has its gates, then as many numbers.
template <typename T>
__device__ __forceinline__ void eight_scaled(const T* x, const __half* suh, int first, int in_features, bool swiglu,
                                             float (&to)[8]) {
    if (first >= in_features) {
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = 0;
        return;
    }
    uint4 octet = octet_of(x, first, in_features);
    if (swiglu) octet = swiglu_octet<T>(octet, octet_of(x + in_features, first, in_features));
    float scales[8];
    unpack_octet<T>(octet, to);
    eight_floats(suh + first, scales);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = __fmul_rn(to[i], scales[i]);
}

// Which row of x a row is.
__device__ __forceinline__ int picked(const TrellisExperts& experts, int row) {
    return experts.rows ? min(max(experts.rows[row], 0), experts.x_rows - 1) : row;
}
// Whose a row is: as many experts as end before it. For all threads of a CTA.
__device__ __forceinline__ int owner_of(const TrellisExperts& experts, int row) {
    int owner = 0;
    for (int chunk = 0; chunk < experts.count; chunk += static_cast<int>(blockDim.x)) {
        const int expert = chunk + static_cast<int>(threadIdx.x);
        owner += __syncthreads_count(expert < experts.count && experts.offsets[expert + 1] <= row);
    }
    return owner;
}

__device__ __forceinline__ void store(__half* to, float y) { *to = __float2half_rn(y); }
__device__ __forceinline__ void store(__nv_bfloat16* to, float y) { *to = __float2bfloat16_rn(y); }

// Number: float or __half2.
template <typename Number>
__device__ __forceinline__ void turn_two(Number& a, Number& b) {
    const Number sum = a + b;
    b = a - b, a = sum;
}
// Numbers of one lane, by themselves.
template <typename Number, int count>
__device__ __forceinline__ void turn_own(Number (&values)[count]) {
#pragma unroll
    for (int distance = 1; distance < count; distance *= 2) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (!(i & distance)) turn_two(values[i], values[i + distance]);
        }
    }
}
// A number itself and that of the lane `distance` from this one.
__device__ __forceinline__ float turned_with_lane(float value, int distance) {
    const float sign = threadIdx.x & distance ? -1.0f : 1.0f;
    return __fmaf_rn(sign, value, __shfl_xor_sync(kAllLanes, value, distance));
}

}  // namespace hf_kbit::cuda
