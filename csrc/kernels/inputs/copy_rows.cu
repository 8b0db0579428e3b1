// Rows that an index picks, or that an expert has, copied to where they belong: what products with experts take where
// no kernel multiplies by all of them at once. A CTA copies a row.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 256;

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

}  // namespace

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
