// One wrapper for each PTX instruction that C++ has no name for, or does not emit reliably; and a warp's running sum.
#pragma once

#include <cstdint>

namespace hf_kbit::cuda {

// Of the GPU that code is compiled for, as Gpu::arch; 0 on the host.
#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__;
#else
constexpr int kArch = 0;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* smem) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// threadIdx.x % 32, read anew: the compiler keeps neither it nor what follows from it in registers.
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)::"memory");
    return lane;
}

// Loads 16 bytes that are read once. Volatile: a load ahead of its use stays there.
__device__ __forceinline__ void load_16_once(const void* gmem, uint32_t* to) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(gmem));
}

// Stores 16 bytes at a multiple of 16. The compiler splits a plain store of a uint4 where it has taken the value
// apart.
__device__ __forceinline__ void store_16(void* gmem, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(gmem), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

// A word of memory by which a thread of one CTA tells those of others that what it, and threads that it has
// synchronised with, stored before is there.
__device__ __forceinline__ void store_release(uint32_t* gmem, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(gmem), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* gmem) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(gmem) : "memory");
    return value;
}

// --- addresses of shared memory as numbers: for tables whose index is put together bit by bit ---

__device__ __forceinline__ uint4 load_shared_16(uint32_t smem) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t smem) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(smem) : "memory");
    return value;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t smem) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem) : "memory");
    return value;
}
__device__ __forceinline__ float load_shared_float(uint32_t smem) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem) : "memory");
    return value;
}
__device__ __forceinline__ void store_shared_16(uint32_t smem, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t smem, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem), "r"(value.x), "r"(value.y) : "memory");
}
__device__ __forceinline__ void store_shared_4(uint32_t smem, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared_float(uint32_t smem, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(value) : "memory");
}

// Loads from kOffset above the address. Not volatile: for memory that no longer changes.
template <int kOffset>
__device__ __forceinline__ uint32_t look_up_4(uint32_t smem) {
    uint32_t value;
    asm("ld.shared.u32 %0, [%1+%2];" : "=r"(value) : "r"(smem), "n"(kOffset));
    return value;
}
template <int kOffset>
__device__ __forceinline__ uint2 look_up_8(uint32_t smem) {
    uint2 value;
    asm("ld.shared.v2.u32 {%0, %1}, [%2+%3];" : "=r"(value.x), "=r"(value.y) : "r"(smem), "n"(kOffset));
    return value;
}

// --- asynchronous copies ---

// Copies 16 bytes from global to shared memory without passing through registers; both addresses are multiples of 16.
// GPUs before sm_80 copy at once.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* gmem) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem), "l"(gmem) : "memory");
#else
    store_shared_16(smem, *static_cast<const uint4*>(gmem));
#endif
}
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem) { cp_async_16(shared_address(smem), gmem); }
// Writes zeros instead, and reads nothing, where there is nothing to copy; from sm_80 on.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t smem, const void* gmem, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem), "r"(there ? 16 : 0)
                 : "memory");
}

// Four bytes; from sm_80 on.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* gmem) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(gmem) : "memory");
}
// Has this thread arrive at a barrier once all its copies so far have; from sm_80 on.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// --- barriers ---

// Waits for so many threads of the CTA.
__device__ __forceinline__ void named_barrier(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Is one of them, and goes on.
__device__ __forceinline__ void arrive_named_barrier(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// --- bulk copies and their barriers, from sm_90 on ---

// So many arrivals complete a phase of the barrier.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// For a thread whose reads of shared memory, or those of threads that it has synchronised with, must be done before
// bulk copies write there: its own after this, or those of a thread that it tells so by a barrier. Reads may wait in a
// queue that bulk copies do not pass through.
__device__ __forceinline__ void release_to_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and has the phase wait for as many bytes.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nwait_%=:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra wait_%=;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Copies a multiple of 16 bytes; addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t smem, const void* gmem, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(gmem), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Arrives, for this thread alone.
__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Copies a box of a tensor map from these coordinates on, zeros where it ends; counts as the bytes of the whole box.
__device__ __forceinline__ void bulk_copy_box(uint32_t smem, const void* map, int column, int row, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
        "[%4];" ::"r"(smem),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// Makes initialised barriers visible to the cluster and to bulk copies that count there.
__device__ __forceinline__ void fence_init_barrier() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// The same, by a fence for all of shared memory.
__device__ __forceinline__ void fence_barriers() {
    fence_init_barrier();
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- launches that overlap, from sm_90 on; before, nothing ---

// Lets the kernel that follows in the stream start, if it was launched to overlap, once all CTAs have come here or
// ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the kernel before has ended and all that it wrote is visible; without such a launch, for nothing.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// --- clusters, from sm_90 on ---

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Of the same place in shared memory of a CTA of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t smem, int rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem), "r"(rank));
    return there;
}
__device__ __forceinline__ uint4 load_cluster_16(uint32_t there) {
    uint4 value;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(there)
                 : "memory");
    return value;
}
__device__ __forceinline__ void store_cluster_16(uint32_t there, float a, float b, float c, float d) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
__device__ __forceinline__ void store_cluster_16(uint32_t there, int a, int b, int c, int d) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// --- a warp ---

// The largest number of all lanes, from sm_80 on.
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t number) {
    uint32_t largest;
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(largest) : "r"(number));
    return largest;
}

// The sum of the values of all lanes of a warp up to this one, by all of them.
__device__ __forceinline__ int sum_up_to_lane(int value, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int further = __shfl_up_sync(0xFFFFFFFF, value, distance);
        if (lane >= distance) value += further;
    }
    return value;
}

// --- a warp's 8 x 8 matrices of 16-bit numbers, a row in four lanes ---

// Four of them, as of 8-bit numbers 8 x 16. Lane i has the address of row i % 8 of matrix i / 8, of 16 bytes.
__device__ __forceinline__ uint4 load_matrices(uint32_t smem) {
    uint4 value;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(smem)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t two) {
    uint32_t transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(two));
    return transposed;
}

}  // namespace hf_kbit::cuda
