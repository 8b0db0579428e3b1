// One wrapper for each PTX instruction that C++ has no name for, or does not emit reliably.
#pragma once

#include <cstdint>

namespace hf_kbit::cuda {

// Copies 16 bytes from global to shared memory without passing through registers; both addresses are multiples of 16.
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem) {
    asm volatile(
        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(smem))),
        "l"(gmem)
        : "memory");
}

// Stores 16 bytes at a multiple of 16. The compiler splits a plain store of a uint4 where it has taken the value
// apart.
__device__ __forceinline__ void store_16(void* gmem, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace hf_kbit::cuda
