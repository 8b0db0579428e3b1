// Argument checks of the ops: every message names the tensor, what was found and what was expected. They throw
// std::invalid_argument, which Python sees as a ValueError. hf_kbit/ops/table.py has the same checks, in the same
// words, for compilers and for devices without a compiled library.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "common/format.h"
#include "common/trellis.h"

namespace hf_kbit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::vector<int64_t>;
using ShapeRef = torch::headeronly::HeaderOnlyArrayRef<int64_t>;

enum class Form { planes, tiles };

// A quantized weight after its checks: contiguous words and scales of `count` matrices [out_features, in_features].
struct Packed {
    Tensor words, scales, codebook;
    Form form;
    int bits;
    int64_t count, out_features, in_features;
    Shape lead;  // the leading dimensions, `count` matrices in all
    // How the stored weight was made from the one that it stands for, see hf_kbit/format/transforms.py.
    std::optional<Tensor> columns = std::nullopt;  // uint8 [in_features], contiguous: scales of all matrices' columns
    bool rotated = false;                          // then all columns of the last block hold numbers
    bool signed_scales = false;                    // as those of rotated weights are
};

// Our name for a floating dtype; refuses others, float64 too unless allowed.
Dtype float_dtype(std::string_view name, ScalarType dtype, bool allow_float64);
ScalarType scalar_type(Dtype dtype);
std::string dtype_name(ScalarType dtype);

void check_dtype(std::string_view name, const Tensor& tensor, std::initializer_list<ScalarType> expected);

// The width of a float32 codebook [2**bits].
int check_codebook(const Tensor& codebook);

// Our name for a code of trellises.
Code check_code(const std::string& code);

void check_same_device(std::string_view name, const Tensor& tensor, std::string_view other_name, const Tensor& other);

// Words and scales of matrices of one shape, [out_features, in_features], told apart by their last dimensions unless
// the form is given. Their codebook and transforms are not set.
Packed check_packed(const Tensor& weight, const Tensor& absmax, int64_t bits, ShapeRef shape,
                    std::optional<Form> form = std::nullopt);

// Weights with all that it takes to decode them: one matrix, those of experts, or any leading dimensions.
enum class Matrices { one, experts, any };
Packed check_weight(const Tensor& weight, const Tensor& absmax, const Tensor& codebook, ShapeRef shape,
                    const std::optional<Tensor>& columns, bool rotated, Matrices matrices);

// The weight of a product with x [*, in_features], or those of experts with x [tokens, in_features], twice as wide
// with swiglu, and the bias that goes with it.
Packed check_product(const Tensor& x, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                     const std::optional<Tensor>& bias, int64_t out_features, const std::optional<Tensor>& columns,
                     bool rotated, Matrices matrices = Matrices::one, bool swiglu = false);

Shape words_shape(Form form, int64_t out_features, int64_t in_features, int bits);
Shape scales_shape(Form form, int64_t out_features, int64_t in_features);

Shape concat(Shape first, const Shape& second);
[[noreturn]] void refuse(std::string_view name, const std::string& found, const std::string& expected);
std::string to_string(const Shape& shape);
Shape shape_of(const Tensor& tensor);

// As kernels read it: contiguous, from a multiple of its numbers' size on, which torch.frombuffer does not ask for.
// The tensor itself where it can be: for small inputs the host's time of a call of torch counts.
Tensor as_contiguous(const Tensor& tensor);

// The same of int16 that kernels read as 32-bit words.
Tensor in_words(const Tensor& halves);

}  // namespace hf_kbit
