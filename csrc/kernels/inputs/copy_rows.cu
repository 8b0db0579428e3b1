// Rows that an index picks, or that an expert has, copied to where they belong: what products with experts take where
// no kernel multiplies by all of them at once. A CTA copies a row. And tokens in 8 bits, for a kernel that does: a
// warp copies a row, in pieces of 16 bytes.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 256, kWarp = 32;

template <typename T>
__global__ void copy_rows_kernel(const T* from, int64_t columns, const int32_t* index, int last_row,
                                 const int32_t* first, const int32_t* end, T* to) {
    int row = static_cast<int>(blockIdx.x);
    if (first && (row < *first || row >= *end)) return;
    to += row * columns;
    if (index) row = min(max(index[row], 0), last_row);
    from += row * columns;
    for (int64_t column = threadIdx.x; column < columns; column += kThreads) to[column] = from[column];
}

// pieces: of a row.
__global__ void copy_int8_tokens_kernel(const uint4* from, const float* from_scales, int pieces, const int32_t* index,
                                        int last_row, int count, uint4* to, float* to_scales) {
    wait_for_kernel_before();
    let_next_kernel_start();  // not before, as in transform_kernel
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int row = static_cast<int>(blockIdx.x) * (kThreads / kWarp) + static_cast<int>(threadIdx.x) / kWarp;
    if (row >= count) return;
    const int token = min(max(index[row], 0), last_row);
    if (lane == 0) to_scales[row] = from_scales[token];
    if (lane == 1 && row == count - 1) to_scales[count] = 0;
    from += int64_t{token} * pieces;
    to += int64_t{row} * pieces;
    constexpr int kLoads = 4;
    for (int first = lane; first < pieces; first += kLoads * kWarp) {
        uint4 loaded[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (first + i * kWarp < pieces) loaded[i] = from[first + i * kWarp];
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if (first + i * kWarp < pieces) store_16(to + first + i * kWarp, loaded[i]);
        }
    }
}

}  // namespace

cudaError_t copy_int8_tokens(const Int8Tokens& from, const Rows& rows, int64_t columns, int64_t count,
                             const Int8Tokens& to, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(copy_int8_tokens_kernel, kThreads, 0);
    return launcher.launch_overlapping(gpu, ceil_div(count, kThreads / kWarp), 1, 0, stream,
                                       reinterpret_cast<const uint4*>(from.out), from.scales,
                                       static_cast<int>(columns / 16), rows.index, static_cast<int>(rows.count - 1),
                                       static_cast<int>(count), reinterpret_cast<uint4*>(to.out), to.scales);
}

cudaError_t copy_rows(const void* from, Dtype dtype, int64_t columns, const Rows& rows, const int32_t* first,
                      const int32_t* end, int64_t count, void* to, const Gpu& gpu, cudaStream_t stream) {
    return dispatch<__half, __nv_bfloat16, float, double>(dtype, [&](auto value) {
        using T = decltype(value);
        static Launcher launcher(copy_rows_kernel<T>, kThreads, 0);
        return launcher.launch(gpu, count, 1, 0, stream, static_cast<const T*>(from), columns, rows.index,
                               static_cast<int>(rows.count - 1), first, end, static_cast<T*>(to));
    });
}

}  // namespace hf_kbit::cuda
