// The CPU backend: spreads rows over torch's thread pool. The kernels are in csrc/cpu.
#include <algorithm>

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "cpu/repack.h"
#include "ops/cpu_product.h"

namespace hf_kbit::backend {

namespace {

// Up to so many tokens the fused kernel is faster than decoding a slice and having torch multiply. (2 threads each of
// an EPYC Milan, 2026-11-21, and of a Xeon with AMX, 2026-11-23.)
int64_t fused_tokens(Dtype dtype) {
    if (dtype != Dtype::bfloat16 || !has_bfloat16_arithmetic()) return 32;
    static const bool tiles = std::string(cpu::instruction_set()) == "amx";
    return tiles ? cpu::kMostTileTokens : 16;
}

void dequantize_rows(const Packed& planes, int64_t begin, int64_t end, void* out, Dtype dtype) {
    // `out` is the row `begin`; the kernel counts rows from the first one.
    const int64_t blocks = num_blocks(planes.in_features);
    const int32_t* words = words_of(planes) + begin * blocks * planes.bits;
    const uint8_t* scales = scales_of(planes) + begin * blocks;
    torch::stable::parallel_for(0, end - begin, row_grain(planes.in_features), [&](int64_t first, int64_t last) {
        cpu::dequantize(words, scales, planes.signed_scales, codebook_of(planes), planes.bits, planes.in_features,
                        column_scales_of(planes), planes.rotated, out, dtype, first, last);
    });
}

// x as the stored weight meets it, in its own dtype or float32.
Tensor transformed(const Tensor& x, Dtype dtype, const Packed& packed, int64_t width, Dtype out_dtype) {
    const Tensor rows = as_contiguous(x);
    Shape shape = shape_of(x);
    shape.back() = width;
    Tensor out = new_tensor(x, shape, scalar_type(out_dtype));
    void* out_data = out.mutable_data_ptr();
    torch::stable::parallel_for(0, x.numel() / packed.in_features, row_grain(width), [&](int64_t begin, int64_t end) {
        cpu::transform(rows.const_data_ptr(), dtype, packed.in_features, column_scales_of(packed), packed.rotated,
                       out_data, out_dtype, begin, end);
    });
    return out;
}

Tensor fused_gemm(const Tensor& x, Dtype dtype, const Packed& planes, const std::optional<Tensor>& bias,
                  bool invariant, Tensor out) {
    const int64_t tokens = x.numel() / planes.in_features;
    const int64_t panel_size = cpu::gemm_panel_size(dtype, tokens, invariant, planes.in_features);
    Tensor panel = new_tensor(x, {panel_size}, ScalarType::Float);
    auto* panel_data = static_cast<float*>(panel.mutable_data_ptr());
    torch::stable::parallel_for(0, tokens, row_grain(planes.in_features), [&](int64_t begin, int64_t end) {
        cpu::gemm_pack(x.const_data_ptr(), dtype, tokens, invariant, planes.in_features, column_scales_of(planes),
                       planes.rotated, panel_data, begin, end);
    });
    const void* bias_data = bias ? bias->const_data_ptr() : nullptr;
    void* out_data = out.mutable_data_ptr();
    torch::stable::parallel_for(0, planes.out_features, row_grain(planes.in_features),
                                [&](int64_t begin, int64_t end) {
                                    cpu::gemm(panel_data, tokens, invariant, words_of(planes), scales_of(planes),
                                              planes.signed_scales, codebook_of(planes), planes.bits, bias_data,
                                              out_data, dtype, planes.out_features, planes.in_features, begin, end);
                                });
    return out;
}

}  // namespace

void quantize(const Tensor& weight, Dtype dtype, const Tensor& codebook, int bits, bool searched, bool signed_scales,
              int64_t rows, int64_t in_features, Tensor& planes, Tensor& absmax) {
    const void* weight_data = weight.const_data_ptr();
    const auto* levels = static_cast<const float*>(codebook.const_data_ptr());
    auto* words = static_cast<int32_t*>(planes.mutable_data_ptr());
    auto* scales = static_cast<uint8_t*>(absmax.mutable_data_ptr());
    torch::stable::parallel_for(0, rows, row_grain(in_features), [&](int64_t begin, int64_t end) {
        cpu::quantize(weight_data, dtype, levels, bits, searched, signed_scales, in_features, words, scales, begin,
                      end);
    });
}

void dequantize(const Packed& packed, Tensor& out, Dtype dtype) {
    dequantize_rows(as_planes(packed), 0, packed.count * packed.out_features, out.mutable_data_ptr(), dtype);
}

void dequantize_columns(const Packed& packed, int64_t first, Tensor& out, Dtype dtype) {
    dequantize(columns_of(as_planes(packed), first, out.size(1)), out, dtype);
}

void embed(const Tensor& indices, const Packed& packed, Tensor& out, Dtype dtype) {
    const bool wide = indices.scalar_type() == ScalarType::Long;
    const auto index = [&, data = indices.const_data_ptr()](int64_t i) {
        return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
    };
    for (int64_t i = 0; i < indices.numel(); ++i) {
        if (index(i) < 0 || index(i) >= packed.out_features) {
            refuse("indices", std::to_string(index(i)), "0 to " + std::to_string(packed.out_features - 1));
        }
    }
    auto* rows = static_cast<char*>(out.mutable_data_ptr());
    const auto decode = [&](const int32_t* words, const uint8_t* scales, int64_t i) {
        cpu::dequantize(words, scales, packed.signed_scales, codebook_of(packed), packed.bits, packed.in_features,
                        column_scales_of(packed), packed.rotated, rows + i * packed.in_features * bytes_of(dtype),
                        dtype, 0, 1);
    };
    const int64_t row_scales = num_blocks(packed.in_features), row_words = row_scales * packed.bits;
    torch::stable::parallel_for(0, indices.numel(), row_grain(packed.in_features), [&](int64_t begin, int64_t end) {
        if (packed.form == Form::planes) {
            for (int64_t i = begin; i < end; ++i) {
                decode(words_of(packed) + index(i) * row_words, scales_of(packed) + index(i) * row_scales, i);
            }
            return;
        }
        // Of the tiles that have a row, as planes those up to it.
        const int64_t slabs = num_slabs(packed.in_features);
        std::vector<int32_t> words(kTileRows * row_words);
        std::vector<uint8_t> scales(kTileRows * row_scales);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t slab = index(i) / kTileRows * slabs, row = index(i) % kTileRows;
            cpu::repack_inverse(words_of(packed) + slab * TileLayout::slab_words(packed.bits),
                                scales_of(packed) + slab * TileLayout::kSlabScales, packed.bits, row + 1,
                                packed.in_features, words.data(), scales.data(), 0, 1);
            decode(words.data() + row * row_words, scales.data() + row * row_scales, i);
        }
    });
}

void repack(const Packed& packed, Tensor& words, Tensor& scales) {
    const int64_t row_tiles = ceil_div(packed.out_features, kTileRows);
    const int64_t words_from = packed.words.numel() / packed.count, scales_from = packed.scales.numel() / packed.count;
    const int64_t words_to = words.numel() / packed.count, scales_to = scales.numel() / packed.count;
    const auto run = packed.form == Form::planes ? cpu::repack : cpu::repack_inverse;
    auto* out_words = static_cast<int32_t*>(words.mutable_data_ptr());
    auto* out_scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
    for (int64_t i = 0; i < packed.count; ++i) {
        torch::stable::parallel_for(0, row_tiles, 1, [&](int64_t begin, int64_t end) {
            run(words_of(packed) + i * words_from, scales_of(packed) + i * scales_from, packed.bits,
                packed.out_features, packed.in_features, out_words + i * words_to, out_scales + i * scales_to, begin,
                end);
        });
    }
}

Tensor gemm(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias) {
    const Packed planes = as_planes(packed);
    const int64_t tokens = x.numel() / packed.in_features;
    Shape shape = shape_of(x);
    shape.back() = packed.out_features;
    Tensor out = new_tensor(x, shape, x.scalar_type());
    if (tokens == 0) return out;
    const bool invariant = batch_invariant();
    if (dtype == Dtype::float64) {
        if (invariant) refuse("x", "dtype float64", "another dtype, as batch-invariant products were asked for");
        return linear(x, decoded(planes, dtype), bias);
    }
    const bool matrix_units = dtype == Dtype::bfloat16 && has_bfloat16_arithmetic();
    if (invariant || tokens <= fused_tokens(dtype)) {
        std::optional<Tensor> contiguous_bias;
        if (bias) contiguous_bias = as_contiguous(*bias);
        return fused_gemm(as_contiguous(x), dtype, planes, contiguous_bias, invariant, out);
    }
    // Many tokens: transform x, decode a slice of rows as it is stored, multiply, go on. 16-bit products run in
    // float32 where the CPU has no arithmetic for them, which is several times faster and more accurate.
    const bool native = dtype == Dtype::float32 || matrix_units;
    const Dtype compute = native ? dtype : Dtype::float32;
    const auto cast = [&](const Tensor& tensor) {
        return native ? tensor : torch::stable::to(tensor, scalar_type(compute));
    };
    Packed stored = planes;
    stored.columns = std::nullopt, stored.rotated = false;
    if (planes.rotated) stored.in_features = num_blocks(planes.in_features) * kBlockSize;
    const bool plain = !planes.columns && !planes.rotated;
    const Tensor inputs = plain ? cast(x) : transformed(x, dtype, planes, stored.in_features, compute);
    std::optional<Tensor> addend;
    if (bias) addend = cast(*bias);
    const int64_t step = std::max<int64_t>(1, kSlice / stored.in_features);
    for (int64_t begin = 0; begin < packed.out_features; begin += step) {
        const int64_t rows = std::min(step, packed.out_features - begin);
        Tensor dense = new_tensor(x, {rows, stored.in_features}, scalar_type(compute));
        dequantize_rows(stored, begin, begin + rows, dense.mutable_data_ptr(), compute);
        std::optional<Tensor> part_bias;
        if (addend) part_bias = torch::stable::narrow(*addend, 0, begin, rows);
        Tensor part = torch::stable::narrow(out, -1, begin, rows);
        torch::stable::copy_(part, linear(inputs, dense, part_bias));
    }
    return out;
}

std::vector<Tensor> gemm_group(const Tensor& x, Dtype dtype, const std::vector<Packed>& weights,
                               const std::vector<std::optional<Tensor>>& biases) {
    std::vector<Tensor> products;
    for (size_t i = 0; i < weights.size(); ++i) products.push_back(gemm(x, dtype, weights[i], biases[i]));
    return products;
}

void gemm_gradient(const Tensor& grad, Dtype dtype, const Packed& packed, Tensor& grad_x) {
    gradient_in_slices(grad, dtype, packed, grad_x);
}

void check_offsets(const Tensor& offsets, int64_t rows) {
    const auto* ends = static_cast<const int32_t*>(offsets.const_data_ptr());
    if (ends[0] != 0) refuse("offsets", std::to_string(ends[0]), "0 first");
    for (int64_t expert = 0; expert + 1 < offsets.size(0); ++expert) {
        if (ends[expert + 1] < ends[expert] || ends[expert + 1] > rows) {
            refuse("offsets", std::to_string(ends[expert + 1]) + " behind " + std::to_string(ends[expert]),
                   "not less, and at most " + std::to_string(rows));
        }
    }
}

Tensor gemm_experts(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& rows, const Tensor& offsets, bool swiglu) {
    Tensor inputs = swiglu ? gated(x) : x;
    if (rows) inputs = picked(inputs, *rows);
    Tensor y = new_tensor(x, {inputs.size(0), packed.out_features}, x.scalar_type());
    for_each_expert(packed, offsets, y, [&](int64_t expert, int64_t first, int64_t count) {
        std::optional<Tensor> its_bias;
        if (bias) its_bias = torch::stable::select(*bias, 0, expert);
        Tensor to = torch::stable::narrow(y, 0, first, count);
        torch::stable::copy_(
            to, gemm(torch::stable::narrow(inputs, 0, first, count), dtype, matrix_of(packed, expert), its_bias));
    });
    return y;
}

namespace {

// A counting sort.
template <typename Number>
void route(const Tensor& experts, int64_t num_experts, int32_t* rows, int32_t* places, int32_t* offsets) {
    const auto* numbers = static_cast<const Number*>(experts.const_data_ptr());
    const int64_t count = experts.numel(), slots = experts.size(1);
    const auto expert_of = [&](int64_t i) {
        return numbers[i] >= 0 && numbers[i] < num_experts ? static_cast<int64_t>(numbers[i]) : num_experts;
    };
    std::vector<int32_t> next(num_experts + 2);
    for (int64_t i = 0; i < count; ++i) ++next[expert_of(i) + 1];
    for (int64_t expert = 0; expert <= num_experts; ++expert) next[expert + 1] += next[expert];
    std::copy_n(next.begin(), num_experts + 1, offsets);
    for (int64_t i = 0; i < count; ++i) {
        places[i] = next[expert_of(i)]++;
        rows[places[i]] = static_cast<int32_t>(i / slots);
    }
}

template <typename T, typename Weight>
void combine(const Tensor& y, const Tensor& places, const Tensor& weights, Tensor& out) {
    using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto* from = static_cast<const T*>(y.const_data_ptr());
    const auto* place = static_cast<const int32_t*>(places.const_data_ptr());
    const auto* weight = static_cast<const Weight*>(weights.const_data_ptr());
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    const int64_t slots = places.size(1), columns = y.size(1), last_row = y.size(0) - 1;
    for (int64_t i = 0; i < places.numel(); ++i) {
        if (place[i] < 0 || place[i] > last_row) {
            refuse("places", std::to_string(place[i]), "from 0 to " + std::to_string(last_row) + ", rows of y");
        }
    }
    torch::stable::parallel_for(0, places.size(0), row_grain(slots * columns), [&](int64_t begin, int64_t end) {
        std::vector<Sum> sums(columns);
        for (int64_t token = begin; token < end; ++token) {
            std::fill(sums.begin(), sums.end(), Sum{0});
            for (int64_t i = token * slots; i < (token + 1) * slots; ++i) {
                const T* row = from + place[i] * columns;
                const auto times = static_cast<Sum>(weight[i]);
                for (int64_t column = 0; column < columns; ++column) {
                    sums[column] += times * static_cast<Sum>(row[column]);
                }
            }
            for (int64_t column = 0; column < columns; ++column) {
                to[token * columns + column] = static_cast<T>(sums[column]);
            }
        }
    });
}

}  // namespace

void route_experts(const Tensor& experts, int64_t num_experts, Tensor& rows, Tensor& places, Tensor& offsets) {
    const auto run = experts.scalar_type() == ScalarType::Long ? route<int64_t> : route<int32_t>;
    const auto write = [](Tensor& tensor) { return static_cast<int32_t*>(tensor.mutable_data_ptr()); };
    run(experts, num_experts, write(rows), write(places), write(offsets));
}

void combine_experts(const Tensor& y, Dtype dtype, const Tensor& places, const Tensor& weights, Dtype of_weights,
                     Tensor& out) {
    using torch::headeronly::BFloat16;
    using torch::headeronly::Half;
    const bool same = of_weights == dtype;
    switch (dtype) {
        case Dtype::float64:
            return (same ? combine<double, double> : combine<double, float>)(y, places, weights, out);
        case Dtype::float32:
            return combine<float, float>(y, places, weights, out);
        case Dtype::float16:
            return (same ? combine<Half, Half> : combine<Half, float>)(y, places, weights, out);
        case Dtype::bfloat16:
            return (same ? combine<BFloat16, BFloat16> : combine<BFloat16, float>)(y, places, weights, out);
    }
}

void gemm_experts_gradient(const Tensor& grad, Dtype dtype, const Packed& packed, const Tensor& offsets,
                           Tensor& grad_x) {
    Tensor rows = grad;
    for_each_expert(packed, offsets, grad_x, [&](int64_t expert, int64_t first, int64_t count) {
        Tensor to = torch::stable::narrow(grad_x, 0, first, count);
        gemm_gradient(torch::stable::narrow(rows, 0, first, count), dtype, matrix_of(packed, expert), to);
    });
}

}  // namespace hf_kbit::backend

// For hf_kbit/ops/native.py: "avx512", "avx2" or "portable", or what is wrong with the environment variable
// HF_KBIT_CPU.
extern "C" __attribute__((visibility("default"))) const char* hf_kbit_cpu_instruction_set() {
    try {
        return hf_kbit::cpu::instruction_set();
    } catch (const std::exception& error) {
        static const std::string message = error.what();
        return message.c_str();
    }
}
