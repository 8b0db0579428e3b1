// The ops of 8-bit inputs of a weight.
#include <torch/csrc/stable/library.h>

#include "ops/backend.h"

namespace hf_kbit {

namespace {

constexpr int64_t kMostInt8Features = INT32_MAX / (127 * 127) / kBlockSize * kBlockSize;  // whose sums int32 holds

}  // namespace

std::optional<Tensor> check_int8(const Tensor& x, const Packed& packed, const std::optional<Tensor>& inverses) {
    if (packed.in_features > kMostInt8Features) {
        refuse("x", "shape " + to_string(shape_of(x)),
               "[*, in_features] of " + std::to_string(kMostInt8Features) + " in_features at most for 8-bit inputs");
    }
    if (!inverses) return std::nullopt;
    check_dtype("inverses", *inverses, {ScalarType::Half});
    check_same_device("inverses", *inverses, "weight", packed.words);
    const Shape expected = concat(packed.lead, {packed.out_features});
    if (shape_of(*inverses) != expected) {
        refuse("inverses", "shape " + to_string(shape_of(*inverses)), to_string(expected));
    }
    return as_contiguous(*inverses);
}

namespace {

Tensor int8_inverses(const Tensor& weight, const Tensor& absmax, const Tensor& codebook, ShapeRef shape) {
    const Packed packed = check_weight(weight, absmax, codebook, shape, std::nullopt, true, Matrices::one);
    Tensor inverses = new_tensor(weight, {packed.out_features}, ScalarType::Half);
    backend::int8_inverses(packed, inverses);
    return inverses;
}

Tensor gemm_int8(const Tensor& x, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                 const std::optional<Tensor>& bias, int64_t out_features, const Tensor& columns,
                 const std::optional<Tensor>& inverses) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), false);
    const Packed packed = check_product(x, weight, absmax, codebook, bias, out_features, columns, true);
    const std::optional<Tensor> known = check_int8(x, packed, inverses);
    if (!backend::takes_int8(x.numel() / packed.in_features)) return backend::gemm(x, dtype, packed, bias);
    if (known) return backend::gemm_int8(x, dtype, {packed}, {bias}, {*known})[0];
    Tensor found = new_tensor(weight, {out_features}, ScalarType::Half);
    backend::int8_inverses(packed, found);
    return backend::gemm_int8(x, dtype, {packed}, {bias}, {found})[0];
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, HF_KBIT_DISPATCH_KEY, library) {
    library.impl("int8_inverses", TORCH_BOX(&int8_inverses));
    library.impl("gemm_int8", TORCH_BOX(&gemm_int8));
}

}  // namespace

}  // namespace hf_kbit
