// Numbers on their way through the rotations of a trellis's sides.
#pragma once

#include <cuda_bf16.h>

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
// Columns `first` to `first` + 7 of a token times those of suh; zeros beyond the last.
template <typename T>
__device__ __forceinline__ void eight_scaled(const T* x, const __half* suh, int first, int in_features,
                                             float (&to)[8]) {
    if (in_features % 8 == 0 && first < in_features) {
        float scales[8];
        eight_floats(x + first, to);
        eight_floats(suh + first, scales);
#pragma unroll
        for (int i = 0; i < 8; ++i) to[i] = __fmul_rn(to[i], scales[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const bool there = first + i < in_features;
            to[i] = there ? __fmul_rn(as_float(x[first + i]), __half2float(suh[first + i])) : 0.0f;
        }
    }
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
    const float other = __shfl_xor_sync(kAllLanes, value, distance);
    return threadIdx.x & distance ? other - value : value + other;
}

}  // namespace hf_kbit::cuda
