// The ops gemm_trellis and gemm_trellis_inference on CPUs. The kernels are in csrc/cpu.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Half.h>

#include "ops/cpu_product.h"

namespace hf_kbit::backend {

namespace {

// A product x @ W.T + bias of tokens [M, in_features].
struct TrellisProduct {
    Tensor x, suh, svh, words;
    std::optional<Tensor> bias;
    Dtype dtype;
    int64_t tokens, down;
    TrellisSides sides;
    cpu::TrellisTiles tiles;
    Tensor out;

    const void* bias_data() const { return bias ? bias->const_data_ptr() : nullptr; }
    void* out_data() { return out.mutable_data_ptr(); }
    int64_t grain() const { return tile_grain(tiles.across); }

    // By weights that are decoded in registers to whole numbers, of code mul1.
    void in_whole_numbers() {
        Tensor panel = new_tensor(x, {tiles.across * tokens * 2 * kTrellisTile}, ScalarType::Short);
        Tensor kept = new_tensor(x, {tokens * static_cast<int64_t>(sizeof(TrellisToken))}, ScalarType::Byte);
        auto* panel_data = static_cast<int16_t*>(panel.mutable_data_ptr());
        auto* kept_data = static_cast<TrellisToken*>(kept.mutable_data_ptr());
        torch::stable::parallel_for(0, tokens, row_grain(sides.padded_in), [&](int64_t begin, int64_t end) {
            cpu::pack_trellis(x.const_data_ptr(), dtype, tokens, sides, panel_data, kept_data, begin, end);
        });
        const int64_t rows = sides.block / kTrellisTile;
        torch::stable::parallel_for(0, down / rows, std::max<int64_t>(1, grain() / rows),
                                    [&](int64_t begin, int64_t end) {
                                        cpu::multiply_trellis(panel_data, kept_data, tokens, tiles, sides, bias_data(),
                                                              out_data(), dtype, begin * rows, end * rows);
                                    });
    }

    Tensor turned(Dtype compute, bool tile_order) {
        Tensor made = new_tensor(x, {tokens, sides.padded_in}, scalar_type(compute));
        torch::stable::parallel_for(0, tokens, row_grain(sides.padded_in), [&](int64_t begin, int64_t end) {
            cpu::turn_trellis(x.const_data_ptr(), dtype, sides, tile_order, made.mutable_data_ptr(), compute, begin,
                              end);
        });
        return made;
    }

    void finish(const Tensor& inner, Dtype compute) {
        torch::stable::parallel_for(0, tokens, row_grain(sides.padded_out), [&](int64_t begin, int64_t end) {
            cpu::finish_trellis(inner.const_data_ptr(), compute, sides, bias_data(), out_data(), dtype, begin, end);
        });
    }

    // By weights that are decoded in registers to float32.
    void by_few() {
        const Tensor inputs = turned(Dtype::float32, true);
        Tensor inner = new_tensor(x, {tokens, sides.padded_out}, ScalarType::Float);
        const auto* from = static_cast<const float*>(inputs.const_data_ptr());
        auto* to = static_cast<float*>(inner.mutable_data_ptr());
        torch::stable::parallel_for(0, down, grain(), [&](int64_t begin, int64_t end) {
            cpu::multiply_few_trellis(from, tokens, tiles, to, sides.padded_in, sides.padded_out, begin, end);
        });
        finish(inner, Dtype::float32);
    }

    // By weights that are decoded to tile registers.
    void by_tile_registers() {
        const Tensor inputs = turned(Dtype::bfloat16, true);
        Tensor panel = new_tensor(x, {cpu::trellis_tile_panel_size(tokens, sides.padded_in)}, ScalarType::BFloat16);
        torch::stable::zero_(panel);
        Tensor inner = new_tensor(x, {tokens, sides.padded_out}, ScalarType::Float);
        const auto* from = static_cast<const uint16_t*>(inputs.const_data_ptr());
        auto* panel_data = static_cast<uint16_t*>(panel.mutable_data_ptr());
        auto* to = static_cast<float*>(inner.mutable_data_ptr());
        torch::stable::parallel_for(0, tokens, row_grain(sides.padded_in), [&](int64_t begin, int64_t end) {
            cpu::pack_trellis_tiles(from, tokens, sides.padded_in, panel_data, begin, end);
        });
        torch::stable::parallel_for(0, down, grain(), [&](int64_t begin, int64_t end) {
            cpu::multiply_trellis_tiles(panel_data, tokens, tiles, to, sides.padded_out, begin, end);
        });
        finish(inner, Dtype::float32);
    }

    // By some rows after another, which are decoded and which torch multiplies by.
    void in_slices(Dtype compute) {
        const Tensor inputs = turned(compute, false);
        Tensor inner = new_tensor(x, {tokens, sides.padded_out}, scalar_type(compute));
        const int64_t step = std::max<int64_t>(1, kSlice / (tiles.across * kTrellisSteps));
        for (int64_t first = 0; first < down; first += step) {
            const int64_t rows = std::min(step, down - first);
            cpu::TrellisTiles some = tiles;
            some.words = tiles.at(0, first);
            Tensor dense = new_tensor(x, {rows * kTrellisTile, sides.padded_in}, scalar_type(compute));
            torch::stable::parallel_for(0, rows, grain(), [&](int64_t begin, int64_t end) {
                cpu::decode_trellis(some, dense.mutable_data_ptr(), compute, begin, end);
            });
            Tensor part = torch::stable::narrow(inner, 1, first * kTrellisTile, rows * kTrellisTile);
            torch::stable::copy_(part, linear(inputs, dense, std::nullopt));
        }
        finish(inner, compute);
    }

    // So that gradients can be checked numerically.
    void in_float64() {
        const auto rotate = [&](double* numbers, int64_t count) {
            for (int64_t distance = 1; distance < sides.block; distance *= 2) {
                for (int64_t i = 0; i < count; ++i) {
                    if (i & distance) continue;
                    const double first = numbers[i], second = numbers[i + distance];
                    numbers[i] = first + second, numbers[i + distance] = first - second;
                }
            }
        };
        const auto scale = [](const Tensor& halves, int64_t i) {
            return static_cast<double>(static_cast<const torch::headeronly::Half*>(halves.const_data_ptr())[i]);
        };
        Tensor inputs = new_tensor(x, {tokens, sides.padded_in}, ScalarType::Double);
        torch::stable::zero_(inputs);
        auto* numbers = static_cast<double*>(inputs.mutable_data_ptr());
        for (int64_t i = 0; i < tokens * sides.in_features; ++i) {
            const int64_t column = i % sides.in_features;
            numbers[i / sides.in_features * sides.padded_in + column] =
                static_cast<const double*>(x.const_data_ptr())[i] * scale(suh, column);
        }
        rotate(numbers, inputs.numel());
        Tensor dense = new_tensor(x, {sides.padded_out, sides.padded_in}, ScalarType::Float);
        cpu::decode_trellis(tiles, dense.mutable_data_ptr(), Dtype::float32, 0, down);
        const Tensor inner = linear(inputs, torch::stable::to(dense, ScalarType::Double), std::nullopt);
        numbers = static_cast<double*>(inner.mutable_data_ptr());
        rotate(numbers, inner.numel());
        for (int64_t i = 0; i < tokens * sides.out_features; ++i) {
            const int64_t row = i % sides.out_features;
            const double y = numbers[i / sides.out_features * sides.padded_out + row] * scale(svh, row) / sides.block;
            static_cast<double*>(out.mutable_data_ptr())[i] =
                bias ? y + static_cast<const double*>(bias_data())[row] : y;
        }
    }

    // Up to how many tokens one way is faster than the next was measured on a Xeon with AMX, 2026-11-29.
    void run() {
        static const bool has_vectors = std::string(cpu::instruction_set()) != "portable";
        const bool native = dtype == Dtype::bfloat16 && has_bfloat16_arithmetic();
        const bool registers = native && cpu::has_trellis_tiles();
        const bool whole = dtype != Dtype::float32 && tiles.code == Code::mul1;
        // Both ways of few tokens add up each token's sums in one order, however many there are.
        const bool any_number = batch_invariant();
        if (dtype == Dtype::float64) {
            if (any_number) refuse("set_batch_invariant", "a product in float64", "float32, float16 or bfloat16");
            in_float64();
        } else if (whole && (any_number || tokens <= (registers || !has_vectors ? 4 : native ? 16 : 32))) {
            in_whole_numbers();
        } else if (registers && tokens > 1 && tokens <= cpu::kMostTileTokens && !any_number) {
            by_tile_registers();
        } else if (any_number || tokens <= (has_vectors ? 16 : 4)) {
            by_few();
        } else {
            in_slices(native ? dtype : Dtype::float32);
        }
    }
};

Tensor gemm_trellis(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& words, const Tensor& suh,
                    const Tensor& svh, ShapeRef matrix, std::string code, int64_t block) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), true);
    check_dtype("words", words, {ScalarType::Short});
    if (words.dim() != 3 || words.size(2) % 16 != 0 || words.size(2) < 16 || words.size(2) > 16 * kMostTrellisBits) {
        refuse("words", "shape " + to_string(shape_of(words)), "[out_features / 16, in_features / 16, 16 * bits]");
    }
    if (block != 32 && block != 64 && block != 128) refuse("block", std::to_string(block), "32, 64 or 128");
    const int64_t across = words.size(1), down = words.size(0);
    const auto check_side = [&](std::string_view name, const Tensor& scales, int64_t tiles, int64_t features) {
        check_dtype(name, scales, {ScalarType::Half});
        check_same_device(name, scales, "x", x);
        const int64_t padded = kTrellisTile * tiles;
        if (scales.dim() != 1 || scales.size(0) != padded || padded % block != 0 || features > padded) {
            refuse(name, "shape " + to_string(shape_of(scales)),
                   "[" + std::to_string(padded) + "], a multiple of " + std::to_string(block) + " and at least " +
                       std::to_string(features));
        }
    };
    check_same_device("words", words, "x", x);
    check_side("suh", suh, across, matrix[1]);
    check_side("svh", svh, down, matrix[0]);
    const int64_t in_features = matrix[1];
    if (x.dim() == 0 || x.size(-1) != in_features) {
        refuse("x", "shape " + to_string(shape_of(x)), "[*, " + std::to_string(in_features) + "]");
    }
    if (bias) {
        check_dtype("bias", *bias, {x.scalar_type()});
        if (bias->dim() != 1 || bias->size(0) != matrix[0]) {
            refuse("bias", "shape " + to_string(shape_of(*bias)), "[" + std::to_string(matrix[0]) + "]");
        }
    }
    Shape shape = shape_of(x);
    shape.back() = matrix[0];
    Tensor out = new_tensor(x, shape, x.scalar_type());
    if (out.numel() == 0) return out;
    // Tiles as files have them, of which a view has rows first, are read where they are.
    const bool apart = words.stride(-1) != 1 || words.stride(0) % 2 != 0 || words.stride(1) % 2 != 0 ||
                       reinterpret_cast<uintptr_t>(words.const_data_ptr()) % 4 != 0;
    TrellisProduct product = {as_contiguous(x),
                              as_contiguous(suh),
                              as_contiguous(svh),
                              apart ? in_words(words) : words,
                              std::nullopt,
                              dtype,
                              x.numel() / in_features,
                              down,
                              {},
                              {},
                              out};
    if (bias) product.bias = as_contiguous(*bias);
    product.sides = {static_cast<const uint16_t*>(product.suh.const_data_ptr()),
                     static_cast<const uint16_t*>(product.svh.const_data_ptr()),
                     in_features,
                     matrix[0],
                     kTrellisTile * across,
                     kTrellisTile * down,
                     static_cast<int>(block)};
    product.tiles = {static_cast<const uint32_t*>(product.words.const_data_ptr()),
                     across,
                     product.words.stride(1) / 2,
                     product.words.stride(0) / 2,
                     static_cast<int>(words.size(2) / kTrellisTile),
                     check_code(code)};
    product.run();
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, CPU, library) {
    library.impl("gemm_trellis", TORCH_BOX(&gemm_trellis));
    library.impl("gemm_trellis_inference", TORCH_BOX(&gemm_trellis));
    library.impl("gemm_trellis_int8", TORCH_BOX(&gemm_trellis));  // has no kernels of its own
}

}  // namespace

}  // namespace hf_kbit::backend
