// The products of 8-bit inputs of the CPU backend. The kernels are in csrc/cpu.
#include "ops/cpu_product.h"

namespace hf_kbit::backend {

bool takes_int8(int64_t) { return true; }

bool experts_take_int8(int64_t, int64_t) { return true; }

namespace {

cpu::Int8Weight int8_weight(const Packed& planes, const void* inverses) {
    return {words_of(planes), scales_of(planes),   codebook_of(planes), static_cast<const uint16_t*>(inverses),
            planes.bits,      planes.out_features, planes.in_features};
}

}  // namespace

void int8_inverses(const Packed& packed, Tensor& inverses) {
    const Packed planes = as_planes(packed);
    auto* found = static_cast<uint16_t*>(inverses.mutable_data_ptr());
    torch::stable::parallel_for(
        0, planes.out_features, row_grain(planes.in_features),
        [&](int64_t begin, int64_t end) { cpu::int8_inverses(int8_weight(planes, nullptr), found, begin, end); });
}

namespace {

// Tokens as the kernels of 8-bit inputs read them, a row of bytes each.
struct Int8Inputs {
    Tensor panel, tokens;
};

Int8Inputs int8_inputs(const Tensor& x, Dtype dtype, const Packed& packed) {
    const Tensor inputs = as_contiguous(x);
    const int64_t in_features = packed.in_features, count = x.numel() / in_features;
    Tensor panel = new_tensor(x, {count, cpu::int8_row_bytes(in_features)}, ScalarType::Byte);
    Tensor tokens = new_tensor(x, {count, static_cast<int64_t>(sizeof(cpu::Int8Token))}, ScalarType::Byte);
    auto* panel_data = static_cast<int8_t*>(panel.mutable_data_ptr());
    auto* tokens_data = static_cast<cpu::Int8Token*>(tokens.mutable_data_ptr());
    torch::stable::parallel_for(0, count, row_grain(in_features), [&](int64_t begin, int64_t end) {
        cpu::int8_pack(inputs.const_data_ptr(), dtype, in_features, column_scales_of(packed), panel_data, tokens_data,
                       begin, end);
    });
    return {panel, tokens};
}

// Their products with a matrix in planes, out [tokens, out_features], contiguous.
void multiply_int8(const Int8Inputs& inputs, const Packed& planes, const std::optional<Tensor>& bias,
                   const Tensor& inverses, Dtype dtype, Tensor& out) {
    const auto* panel = static_cast<const int8_t*>(inputs.panel.const_data_ptr());
    const auto* tokens = static_cast<const cpu::Int8Token*>(inputs.tokens.const_data_ptr());
    const int64_t count = inputs.panel.size(0), scratch_bytes = cpu::int8_scratch_bytes(count, planes.in_features);
    std::optional<Tensor> addend;
    if (bias) addend = as_contiguous(*bias);
    const void* bias_data = addend ? addend->const_data_ptr() : nullptr;
    void* out_data = out.mutable_data_ptr();
    const cpu::Int8Weight weight = int8_weight(planes, inverses.const_data_ptr());
    torch::stable::parallel_for(0, planes.out_features, row_grain(planes.in_features),
                                [&](int64_t begin, int64_t end) {
                                    Tensor scratch = new_tensor(out, {scratch_bytes}, ScalarType::Byte);
                                    cpu::gemm_int8(panel, tokens, count, weight, bias_data, out_data, dtype,
                                                   static_cast<int8_t*>(scratch.mutable_data_ptr()), begin, end);
                                });
}

}  // namespace

std::vector<Tensor> gemm_int8(const Tensor& x, Dtype dtype, const std::vector<Packed>& weights,
                              const std::vector<std::optional<Tensor>>& biases, const std::vector<Tensor>& inverses) {
    std::vector<Tensor> products;
    for (size_t i = 0; i < weights.size(); ++i) {
        const Packed& packed = weights[i];
        Shape shape = shape_of(x);
        shape.back() = packed.out_features;
        Tensor out = new_tensor(x, shape, x.scalar_type());
        if (out.numel() > 0) {
            multiply_int8(int8_inputs(x, dtype, packed), as_planes(packed), biases[i], inverses[i], dtype, out);
        }
        products.push_back(out);
    }
    return products;
}

Tensor gemm_experts_int8(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& rows, const Tensor& offsets,
                         const std::optional<Tensor>& inverses, bool swiglu) {
    Int8Inputs inputs = int8_inputs(swiglu ? gated(x) : x, dtype, packed);
    if (rows) inputs = {picked(inputs.panel, *rows), picked(inputs.tokens, *rows)};
    Tensor y = new_tensor(x, {inputs.panel.size(0), packed.out_features}, x.scalar_type());
    for_each_expert(packed, offsets, y, [&](int64_t expert, int64_t first, int64_t count) {
        const Packed planes = as_planes(matrix_of(packed, expert));
        const auto own = [&](Tensor of_all) { return torch::stable::select(of_all, 0, expert); };
        std::optional<Tensor> its_bias;
        if (bias) its_bias = own(*bias);
        Tensor its_inverses = inverses ? own(*inverses) : new_tensor(x, {packed.out_features}, ScalarType::Half);
        if (!inverses) int8_inverses(planes, its_inverses);
        Tensor to = torch::stable::narrow(y, 0, first, count);
        multiply_int8({torch::stable::narrow(inputs.panel, 0, first, count),
                       torch::stable::narrow(inputs.tokens, 0, first, count)},
                      planes, its_bias, its_inverses, dtype, to);
    });
    return y;
}

}  // namespace hf_kbit::backend
