// The trellises of the CPU backend. The kernels are in csrc/cpu.
#include <torch/csrc/stable/library.h>

#include "ops/cpu_product.h"

namespace hf_kbit::backend {

namespace {

int64_t rows_grain(int64_t across) { return row_grain(across * kTrellisSteps); }

// Weights decoded at a time: with few tokens so that they stay in the cache.
int64_t decoded_weights(int64_t tokens) { return tokens <= 16 ? 1 << 18 : 1 << 22; }

// Up to so many tokens the product in integers is faster than decoding.
int64_t whole_number_tokens(Dtype dtype) { return dtype == Dtype::bfloat16 && has_bfloat16_arithmetic() ? 16 : 32; }

}  // namespace

void encode_trellis(const Tensor& targets, int bits, int lead, Tensor& words) {
    const auto* from = static_cast<const float*>(targets.const_data_ptr());
    auto* to = static_cast<uint32_t*>(words.mutable_data_ptr());
    torch::stable::parallel_for(0, targets.size(0), 1, [&](int64_t begin, int64_t end) {
        Tensor scratch = new_tensor(words, {cpu::encode_trellis_scratch(bits)}, ScalarType::Byte);
        cpu::encode_trellis(from, bits, lead, to, scratch.mutable_data_ptr(), begin, end);
    });
}

void decode_trellis(const Tensor& trellis, Code code, int bits, int64_t across, int64_t down, Tensor& out,
                    Dtype dtype) {
    const Tensor words = in_words(trellis);
    const int64_t count = out.numel() / (across * down * kTrellisSteps), tile = 8 * bits;
    for (int64_t i = 0; i < count; ++i) {
        const cpu::TrellisTiles tiles = {static_cast<const uint32_t*>(words.const_data_ptr()) + i * across * down * tile,
                                         across, down * tile, tile, bits, code};
        char* to = static_cast<char*>(out.mutable_data_ptr()) + i * across * down * kTrellisSteps * bytes_of(dtype);
        torch::stable::parallel_for(0, down, rows_grain(across), [&](int64_t begin, int64_t end) {
            cpu::decode_trellis(tiles, to, dtype, begin, end);
        });
    }
}

}  // namespace hf_kbit::backend

namespace hf_kbit {

namespace {

using namespace backend;

// The op gemm_trellis of one matrix on a CPU, but for float64 (hf_kbit/ops/trellis.py).
Tensor gemm_trellis_cpu(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& words, const Tensor& suh,
                        const Tensor& svh, ShapeRef matrix, std::string name, int64_t block) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), false);
    const Code code = check_code(name);
    const int64_t out_features = matrix[0];
    const int64_t in_features = x.size(-1), tokens = x.numel() / std::max<int64_t>(in_features, 1);
    const int64_t down = words.size(0), across = words.size(1);
    const auto scales = [](const Tensor& tensor) { return static_cast<const uint16_t*>(tensor.const_data_ptr()); };
    const Tensor inputs = as_contiguous(x), of_inputs = as_contiguous(suh), of_outputs = as_contiguous(svh);
    std::optional<Tensor> addend;
    if (bias) addend = as_contiguous(*bias);
    const void* bias_data = addend ? addend->const_data_ptr() : nullptr;
    const cpu::TrellisSides sides = {scales(of_inputs), scales(of_outputs), in_features, out_features,
                                     kTrellisTile * across, kTrellisTile * down, static_cast<int>(block)};
    // As files have tiles, which are seen with rows first, or as they are.
    const bool apart = words.stride(-1) != 1 || words.stride(0) % 2 || words.stride(1) % 2 ||
                       reinterpret_cast<uintptr_t>(words.const_data_ptr()) % 4;
    const Tensor held = apart ? in_words(words) : words;
    const cpu::TrellisTiles tiles = {static_cast<const uint32_t*>(held.const_data_ptr()),
                                     across,
                                     held.stride(1) / 2,
                                     held.stride(0) / 2,
                                     static_cast<int>(words.size(2) / kTrellisTile),
                                     code};
    Shape shape = shape_of(x);
    shape.back() = out_features;
    Tensor out = new_tensor(x, shape, x.scalar_type());
    if (out.numel() == 0) return out;
    void* out_data = out.mutable_data_ptr();
    const bool whole_numbers = code == Code::mul1 && dtype != Dtype::float32;
    if (whole_numbers && tokens <= whole_number_tokens(dtype)) {
        Tensor panel = new_tensor(x, {across * tokens * 2 * kTrellisTile}, ScalarType::Short);
        Tensor kept = new_tensor(x, {tokens * static_cast<int64_t>(sizeof(cpu::TrellisToken))}, ScalarType::Byte);
        auto* panel_data = static_cast<int16_t*>(panel.mutable_data_ptr());
        auto* kept_data = static_cast<cpu::TrellisToken*>(kept.mutable_data_ptr());
        torch::stable::parallel_for(0, tokens, row_grain(in_features), [&](int64_t begin, int64_t end) {
            cpu::pack_trellis(inputs.const_data_ptr(), dtype, tokens, sides, panel_data, kept_data, begin, end);
        });
        const int64_t rows = block / kTrellisTile;
        torch::stable::parallel_for(0, down / rows, std::max<int64_t>(1, rows_grain(across) / rows),
                                    [&](int64_t begin, int64_t end) {
                                        cpu::multiply_trellis(panel_data, kept_data, tokens, tiles, sides, bias_data,
                                                              out_data, dtype, begin * rows, end * rows);
                                    });
        return out;
    }
    const bool native = dtype == Dtype::bfloat16 && has_bfloat16_arithmetic();
    const Dtype compute = native ? dtype : Dtype::float32;
    Tensor turned = new_tensor(x, {tokens, sides.padded_in}, scalar_type(compute));
    Tensor inner = new_tensor(x, {tokens, sides.padded_out}, scalar_type(compute));
    torch::stable::parallel_for(0, tokens, row_grain(in_features), [&](int64_t begin, int64_t end) {
        cpu::turn_trellis(inputs.const_data_ptr(), dtype, sides, turned.mutable_data_ptr(), compute, begin, end);
    });
    const int64_t step = std::max<int64_t>(1, decoded_weights(tokens) / (across * kTrellisSteps));
    for (int64_t first = 0; first < down; first += step) {
        cpu::TrellisTiles some = tiles;
        some.words = tiles.at(0, first);
        const int64_t rows = std::min(step, down - first);
        Tensor dense = new_tensor(x, {rows * kTrellisTile, sides.padded_in}, scalar_type(compute));
        torch::stable::parallel_for(0, rows, rows_grain(across), [&](int64_t begin, int64_t end) {
            cpu::decode_trellis(some, dense.mutable_data_ptr(), compute, begin, end);
        });
        Tensor part = torch::stable::narrow(inner, 1, first * kTrellisTile, rows * kTrellisTile);
        torch::stable::copy_(part, linear(turned, dense, std::nullopt));
    }
    torch::stable::parallel_for(0, tokens, row_grain(sides.padded_out), [&](int64_t begin, int64_t end) {
        cpu::finish_trellis(inner.const_data_ptr(), compute, sides, bias_data, out_data, dtype, begin, end);
    });
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, CPU, library) { library.impl("gemm_trellis_cpu", TORCH_BOX(&gemm_trellis_cpu)); }

}  // namespace

}  // namespace hf_kbit
