// float16 and bfloat16 alike, T being __half or __nv_bfloat16: two of them in a register, and the tensor cores'
// product, also that of int8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_kbit::cuda {

// a in the lower half; both rounded to nearest even.
template <typename T>
__device__ __forceinline__ uint32_t pack_two(float a, float b) {
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 two = __floats2half2_rn(a, b);
        return *reinterpret_cast<const uint32_t*>(&two);
    } else {
        const __nv_bfloat162 two = __floats2bfloat162_rn(a, b);
        return *reinterpret_cast<const uint32_t*>(&two);
    }
}

// The way back.
template <typename T>
__device__ __forceinline__ float2 unpack_two(uint32_t two) {
    if constexpr (std::is_same_v<T, __half>) {
        return __half22float2(*reinterpret_cast<const __half2*>(&two));
    } else {
        // An instruction each; the library's conversion takes two for the upper half.
        return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000));
    }
}

#define HF_KBIT_MMA(type)                                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// d [16, 8] += a [16, 16] @ b [16, 8], spread over a warp's lanes as PTX says of mma.m16n8k16.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>) {
        HF_KBIT_MMA("f16");
    } else {
        HF_KBIT_MMA("bf16");
    }
}

#undef HF_KBIT_MMA

// The same of int8, d += a [16, 32] @ b [32, 8], exactly, as PTX says of mma.m16n8k32.
__device__ __forceinline__ void mma(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace hf_kbit::cuda
