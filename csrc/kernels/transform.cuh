// What a weight does to its input, in registers (hf_kbit/format/transforms.py): column scales, and the rotation within
// blocks of 32. Shared by the kernels that transform activations, and their gradients back, and those that decode a
// weight in its original basis.
//
// A lane has octets, eight neighbouring columns; the four lanes of a quad, t = 0 .. 3, have a block. Of the rotation's
// five rounds of sums and differences three stay in a lane, the last two exchange all eight values with lanes 1 and 2
// apart; with the scales about 90 instructions an octet. All of it is float32, each step rounded as in the reference:
// the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/half.cuh"

namespace hf_kbit::cuda {

constexpr int kOctet = 8;

// Column scales are used in sixteenths, as which float16 has their bits.
constexpr float kScaleUnit = 16;
constexpr uint32_t kScalesOfOne = 0xB0B0B0B0;    // four bytes, where a weight has none
constexpr float kRotationUnit = 0x1.6a09e6p-3f;  // 32**-0.5 as a float

// Eight E4M4 bytes to sixteenths of what they stand for.
__device__ __forceinline__ void decode_scales(uint2 bytes, float (&scales)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; i += 2) {
        const uint32_t two = __byte_perm(i < 4 ? bytes.x : bytes.y, 0, i % 4 ? 0x4342 : 0x4140) << 6;
        const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&two));
        scales[i] = both.x, scales[i + 1] = both.y;
    }
}

// Times the Hadamard matrix of 32 (without the root). All lanes of a warp.
__device__ __forceinline__ void add_and_subtract(float (&values)[kOctet], int t) {
#pragma unroll
    for (int distance = 1; distance < kOctet; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            if (i & distance) continue;
            const float first = values[i], second = values[i + distance];
            values[i] = __fadd_rn(first, second);
            values[i + distance] = __fsub_rn(first, second);
        }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const float sign = t & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kOctet; ++i) {
            // Rounded once: the product is exact.
            values[i] = __fmaf_rn(values[i], sign, __shfl_xor_sync(0xFFFFFFFF, values[i], distance));
        }
    }
}

// What is left of both units, in one product, which is rounded as the one with kRotationUnit: the other is a power of
// two.
__device__ __forceinline__ void multiply_by_units(float (&values)[kOctet], bool rotated) {
    const float unit = rotated ? kScaleUnit * kRotationUnit : kScaleUnit;
#pragma unroll
    for (float& value : values) value = __fmul_rn(value, unit);
}
__device__ __forceinline__ void multiply(float (&values)[kOctet], const float (&scales)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = __fmul_rn(values[i], scales[i]);
}

// An octet of a decoded weight, or of a gradient of activations, back to the original basis.
__device__ __forceinline__ void to_original(float (&values)[kOctet], uint2 bytes, bool rotated, int t) {
    if (rotated) add_and_subtract(values, t);
    multiply_by_units(values, rotated);
    float scales[kOctet];
    decode_scales(bytes, scales);
    multiply(values, scales);
}

// Eight 16-bit numbers, two in each word, and the way back, rounded.
template <typename T>
__device__ __forceinline__ void unpack_octet(uint4 octet, float (&values)[kOctet]) {
    const uint32_t words[4] = {octet.x, octet.y, octet.z, octet.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = unpack_two<T>(words[i]);
        values[2 * i] = two.x, values[2 * i + 1] = two.y;
    }
}
template <typename T>
__device__ __forceinline__ uint4 pack_octet(const float (&values)[kOctet]) {
    return make_uint4(pack_two<T>(values[0], values[1]), pack_two<T>(values[2], values[3]),
                      pack_two<T>(values[4], values[5]), pack_two<T>(values[6], values[7]));
}

// An octet of activations as the product wants it. scales as decode_scales gives them.
template <typename T>
__device__ __forceinline__ uint4 transform_octet(uint4 octet, const float (&scales)[kOctet], bool rotated, int t) {
    float values[kOctet];
    unpack_octet<T>(octet, values);
    multiply(values, scales);
    if (rotated) add_and_subtract(values, t);
    multiply_by_units(values, rotated);
    return pack_octet<T>(values);
}

// An octet of their gradient back to the original basis.
template <typename T>
__device__ __forceinline__ uint4 octet_to_original(uint4 octet, uint2 bytes, bool rotated, int t) {
    float values[kOctet];
    unpack_octet<T>(octet, values);
    to_original(values, bytes, rotated, t);
    return pack_octet<T>(values);
}

}  // namespace hf_kbit::cuda
