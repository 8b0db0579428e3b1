// wgmma of m64nNk16, of int8 m64nNk32, with A in registers and B in shared memory, for each number of columns N in
// use.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace hf_kbit::cuda {

// wgmma is sm_90a's alone; plans ask for it there only.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// All threads of a warpgroup go down or up to so many registers.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// B [N, 64], of int8 [N, 128], a row of 128 bytes, in the layout of 128-byte swizzling; from a multiple of 1024 on.
__device__ __forceinline__ uint64_t swizzled_matrix(uint32_t smem) {
    constexpr uint64_t kRows8 = 1024 >> 4, kSwizzle128 = 1;
    return (smem & 0x3FFFF) >> 4 | uint64_t{1} << 16 | kRows8 << 32 | kSwizzle128 << 62;
}

// The names of accumulators in PTX: "%0, ..., %N/2-1".
#define HF_KBIT_TEN(tens)                                                                                  \
    ", %" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
    "7, %" #tens "8, %" #tens "9"
#define HF_KBIT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define HF_KBIT_16 HF_KBIT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define HF_KBIT_32 HF_KBIT_16 ", %16, %17, %18, %19" HF_KBIT_TEN(2) ", %30, %31"
#define HF_KBIT_48 HF_KBIT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HF_KBIT_64 \
    HF_KBIT_32 ", %32, %33, %34, %35, %36, %37, %38, %39" HF_KBIT_TEN(4) HF_KBIT_TEN(5) ", %60, " \
                                                                                        "%61, %62, %63"
#define HF_KBIT_128                                                                                          \
    HF_KBIT_64 ", %64, %65, %66, %67, %68, %69" HF_KBIT_TEN(7) HF_KBIT_TEN(8) HF_KBIT_TEN(9) HF_KBIT_TEN(10) \
        HF_KBIT_TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
// The accumulators themselves, as operands of a constraint.
#define HF_KBIT_D8(is, i) \
    is(d[i]), is(d[i + 1]), is(d[i + 2]), is(d[i + 3]), is(d[i + 4]), is(d[i + 5]), is(d[i + 6]), is(d[i + 7])
#define HF_KBIT_D16(is, i) HF_KBIT_D8(is, i), HF_KBIT_D8(is, i + 8)
#define HF_KBIT_D32(is, i) HF_KBIT_D16(is, i), HF_KBIT_D16(is, i + 16)
#define HF_KBIT_D48(is, i) HF_KBIT_D32(is, i), HF_KBIT_D16(is, i + 32)
#define HF_KBIT_D64(is, i) HF_KBIT_D32(is, i), HF_KBIT_D32(is, i + 32)
#define HF_KBIT_D128(is, i) HF_KBIT_D64(is, i), HF_KBIT_D64(is, i + 64)

#define HF_KBIT_WGMMA(n, types, last, is, count, a0, a1, a2, a3, b, add)                                          \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types \
                 " {" HF_KBIT_##count "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", add" last ";\n}"     \
                 : HF_KBIT_D##count(is, 0)                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(accumulate))

#define HF_KBIT_WGMMA_OF(n, ...)                                                   \
    if constexpr (kColumns == n) {                                                 \
        if constexpr (std::is_same_v<T, __half>) {                                 \
            HF_KBIT_WGMMA(n, "k16.f32.f16.f16", ", 1, 1, 0", "+f", __VA_ARGS__);   \
        } else if constexpr (std::is_same_v<T, int8_t>) {                          \
            HF_KBIT_WGMMA(n, "k32.s32.s8.s8", "", "+r", __VA_ARGS__);              \
        } else {                                                                   \
            HF_KBIT_WGMMA(n, "k16.f32.bf16.bf16", ", 1, 1, 0", "+f", __VA_ARGS__); \
        }                                                                          \
    }

// Begins d [64, kColumns] = a [64, 16] @ b [16, kColumns] (+ d, if accumulate) for a warpgroup: a as of mma.m16n8k16
// in each of its warps, d a float32 fragment m16n8 of each eight columns, perhaps followed by others. Of int8 a is
// [64, 32], as of mma.m16n8k32, b [32, kColumns], and d int32.
template <typename T, int kColumns, typename Sum, int kSums>
__device__ __forceinline__ void wgmma(Sum (&d)[kSums], const uint32_t (&a)[4], uint64_t columns, int accumulate) {
    static_assert(kSums >= kColumns / 2);
    static_assert(std::is_same_v<Sum, std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>>);
    HF_KBIT_WGMMA_OF(16, 8, 8, 9, 10, 11, 12, 13)
    HF_KBIT_WGMMA_OF(32, 16, 16, 17, 18, 19, 20, 21)
    HF_KBIT_WGMMA_OF(64, 32, 32, 33, 34, 35, 36, 37)
    HF_KBIT_WGMMA_OF(96, 48, 48, 49, 50, 51, 52, 53)
    HF_KBIT_WGMMA_OF(128, 64, 64, 65, 66, 67, 68, 69)
    HF_KBIT_WGMMA_OF(256, 128, 128, 129, 130, 131, 132, 133)
}

// The same in int8 of 256 columns, with A [64, 32] in shared memory as B is.
__device__ __forceinline__ void wgmma_of_shared(int32_t (&d)[128], uint64_t rows, uint64_t columns, int accumulate) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 "
        "{" HF_KBIT_128 "}, %128, %129, add;\n}"
        : HF_KBIT_D128("+r", 0)
        : "l"(rows), "l"(columns), "r"(accumulate));
}

#undef HF_KBIT_WGMMA_OF
#undef HF_KBIT_WGMMA
#undef HF_KBIT_D128
#undef HF_KBIT_D64
#undef HF_KBIT_D48
#undef HF_KBIT_D32
#undef HF_KBIT_D16
#undef HF_KBIT_D8
#undef HF_KBIT_128
#undef HF_KBIT_64
#undef HF_KBIT_48
#undef HF_KBIT_32
#undef HF_KBIT_16
#undef HF_KBIT_8
#undef HF_KBIT_TEN

}  // namespace hf_kbit::cuda
