// The op of experts' 8-bit inputs.
#include <torch/csrc/stable/library.h>

#include "ops/backend.h"

namespace hf_kbit {

namespace {

Tensor gemm_experts_int8(const Tensor& x, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                         const std::optional<Tensor>& bias, const std::optional<Tensor>& rows, const Tensor& offsets,
                         int64_t out_features, const Tensor& columns, const std::optional<Tensor>& inverses,
                         bool swiglu) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), false);
    const Packed packed =
        check_product(x, weight, absmax, codebook, bias, out_features, columns, true, Matrices::experts, swiglu);
    const ExpertRows taken = check_rows(x, packed, rows, offsets);
    const std::optional<Tensor> known = check_int8(x, packed, inverses);
    if (taken.count == 0) return new_tensor(x, {0, out_features}, x.scalar_type());
    if (!backend::experts_take_int8(taken.count, packed.count)) {
        return backend::gemm_experts(x, dtype, packed, bias, taken.rows, taken.offsets, swiglu);
    }
    return backend::gemm_experts_int8(x, dtype, packed, bias, taken.rows, taken.offsets, known, swiglu);
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, HF_KBIT_DISPATCH_KEY, library) {
    library.impl("gemm_experts_int8", TORCH_BOX(&gemm_experts_int8));
}

}  // namespace

}  // namespace hf_kbit
