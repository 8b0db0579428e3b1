// What a device must provide for the ops of this folder. The CPU library links the files backend_cpu*.cpp, the CUDA
// library the files backend_cuda*.cpp; all other files of this folder are the same in both.
#pragma once

#include <array>

#include <torch/csrc/stable/ops.h>

#include "ops/arguments.h"

namespace hf_kbit::backend {

// weight [rows, in_features], contiguous, to planes and absmax, whose scales are searched or not, and have signs or
// not.
void quantize(const Tensor& weight, Dtype dtype, const Tensor& codebook, int bits, bool searched, bool signed_scales,
              int64_t rows, int64_t in_features, Tensor& planes, Tensor& absmax);

// out [count, out_features, in_features], contiguous, in the original basis: turned back if packed.rotated, times
// packed.columns.
void dequantize(const Packed& packed, Tensor& out, Dtype dtype);

// out [out_features, columns]: the columns of one matrix from `first` on, a multiple of 256.
void dequantize_columns(const Packed& packed, int64_t first, Tensor& out, Dtype dtype);

// out [*, in_features], not empty: the rows of one matrix that `indices`, int64 or int32 [*], names, decoded as by
// dequantize. Both contiguous.
void embed(const Tensor& indices, const Packed& packed, Tensor& out, Dtype dtype);

// From packed.form to the other one.
void repack(const Packed& packed, Tensor& words, Tensor& scales);

// x [*, in_features] @ W.T + bias, for one matrix.
Tensor gemm(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias);

// The same for each of several matrices.
std::vector<Tensor> gemm_group(const Tensor& x, Dtype dtype, const std::vector<Packed>& weights,
                               const std::vector<std::optional<Tensor>>& biases);

// y [R, out_features]: row i of x, or of x[rows], times the expert that has it, offsets[e] <= i < offsets[e + 1];
// zeros in rows from offsets[E] on. offsets: int32 [E + 1]; rows: int32 [R]; both contiguous. R is not 0. With swiglu
// x has twice the columns, and is gated first.
Tensor gemm_experts(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& rows, const Tensor& offsets, bool swiglu);

// Refuses offsets of experts that do not ascend from 0 to `rows` at most; not those on a GPU, which would have to be
// waited for.
void check_offsets(const Tensor& offsets, int64_t rows);

constexpr int64_t kMostRoutedExperts = 1 << 13;  // those that the kernel can count in the shared memory of any GPU

// Sorts the numbers of `experts`, int64 or int32 [T, k]; rows int32 [T * k], places int32 [T, k], offsets int32 [E +
// 1]. All contiguous, E at most kMostRoutedExperts.
void route_experts(const Tensor& experts, int64_t num_experts, Tensor& rows, Tensor& places, Tensor& offsets);

// out [T, N], of y's dtype: the rows of y [R, N] at `places`, int32 [T, k], times `weights` [T, k], of y's dtype or
// float32, added up. All contiguous, none empty.
void combine_experts(const Tensor& y, Dtype dtype, const Tensor& places, const Tensor& weights, Dtype of_weights,
                     Tensor& out);

// grad_x [tokens, in_features] = grad [tokens, out_features] @ W, both contiguous and not empty, for one matrix.
void gemm_gradient(const Tensor& grad, Dtype dtype, const Packed& packed, Tensor& grad_x);

// The same for the rows of experts, zeros in rows that none has.
void gemm_experts_gradient(const Tensor& grad, Dtype dtype, const Packed& packed, const Tensor& offsets,
                           Tensor& grad_x);

// --- trellises, and ops_trellis.cpp ---

// words, int16 [tiles, 16 * bits], of the path of least squared error for targets, float32 [tiles, 256], contiguous
// and not empty.
void encode_trellis(const Tensor& targets, int bits, int lead, Tensor& words);

// out [*, 16 * down, 16 * across], not empty: what a trellis, contiguous, stands for in float16, as dtype.
void decode_trellis(const Tensor& trellis, Code code, int bits, int64_t across, int64_t down, Tensor& out,
                    Dtype dtype);

// --- 8-bit inputs, and ops_int8.cpp ---

// Whether a product of so many tokens rounds its inputs to 8 bits where it may, or leaves them in 16; and one of so
// many rows with experts.
bool takes_int8(int64_t tokens);
bool experts_take_int8(int64_t rows, int64_t experts);

// What 1 stands for in the rows of a rotated matrix as int8, inverted: float16 [out_features].
void int8_inverses(const Packed& packed, Tensor& inverses);

// backend::gemm_group of 8-bit inputs and rotated matrices; inverses, contiguous, as int8_inverses finds them.
std::vector<Tensor> gemm_int8(const Tensor& x, Dtype dtype, const std::vector<Packed>& weights,
                              const std::vector<std::optional<Tensor>>& biases, const std::vector<Tensor>& inverses);

// --- ops_experts_int8.cpp ---

// backend::gemm_experts of 8-bit inputs and rotated matrices; inverses, [E, out_features], contiguous, or none.
Tensor gemm_experts_int8(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& rows, const Tensor& offsets,
                         const std::optional<Tensor>& inverses, bool swiglu);

}  // namespace hf_kbit::backend

namespace hf_kbit {

// Whether the last bit of a token's product must not depend on the tokens beside it: set by hf_kbit/ops/ for all
// products of the process. Where a backend has no such product it refuses.
bool batch_invariant();

// Throws unless a function of torch's C interface returned 0. Our own: torch's macros for it differ between versions.
void check_torch(const char* function, int32_t error);

// The result of an op for the arguments on the stack, whose first one it replaces.
template <size_t count>
Tensor call(const char* op, const char* overload, std::array<StableIValue, count> stack) {
    check_torch(op, torch_call_dispatcher(op, overload, stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// For the backends: the op `repack`, a new tensor on the device of `like`, decoded weights, a view, aten::linear,
// aten::mm into `out`.
std::tuple<Tensor, Tensor> repack(const Tensor& weight, const Tensor& absmax, int64_t bits, ShapeRef shape,
                                  bool inverse);
Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype);
Tensor decoded(const Packed& packed, Dtype dtype);
Tensor viewed(const Tensor& tensor, int64_t rows, int64_t columns);
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
void multiply_into(Tensor& out, const Tensor& a, const Tensor& b);

// aten::_grouped_mm: rows of a [R, N], before each of `ends`, int32, times the matrices of b [E, N, K].
Tensor grouped_product(const Tensor& a, const Tensor& b, const Tensor& ends);

// silu(first half of the columns) * the second.
Tensor gated(const Tensor& x);

// backend::gemm_gradient by decoding some columns of a large weight at a time.
void gradient_in_slices(const Tensor& grad, Dtype dtype, const Packed& packed, Tensor& grad_x);

// What backend::gemm_experts is given of rows, checked; `count` is R, and may be 0.
struct ExpertRows {
    std::optional<Tensor> rows;
    Tensor offsets;
    int64_t count;
};
ExpertRows check_rows(const Tensor& x, const Packed& packed, const std::optional<Tensor>& rows, const Tensor& offsets);

// What products of 8-bit inputs check besides: that int32 holds the sums, and that inverses, returned as kernels read
// them, are of this weight.
std::optional<Tensor> check_int8(const Tensor& x, const Packed& packed, const std::optional<Tensor>& inverses);

// One of several matrices.
Packed matrix_of(const Packed& packed, int64_t index);

// Planes of `count` columns from `first` on, a multiple of 32, of one matrix in planes.
Packed columns_of(const Packed& planes, int64_t first, int64_t count);

// How many rows or columns of a weight, of so many bytes each, to decode at a time: beside a layer of any size this is
// the memory that a product takes. A power of two, so that slices keep all processors busy.
int64_t slice_size(int64_t bytes);

}  // namespace hf_kbit
