#include "ops/arguments.h"

#include <algorithm>
#include <stdexcept>

#include <torch/csrc/stable/ops.h>

namespace hf_kbit {

namespace {

std::string device_name(const Tensor& tensor) {
    const auto device = tensor.device();
    switch (device.type()) {
        case torch::headeronly::DeviceType::CPU:
            return "cpu";
        case torch::headeronly::DeviceType::CUDA:
            return "cuda:" + std::to_string(device.index());
        default:
            return "another device";
    }
}

// More than any memory holds; what is computed from sizes up to here does not overflow.
constexpr int64_t kMostFeatures = int64_t{1} << 48;

// Whether the last dimensions of `shape` are `expected`.
bool ends_with(const Shape& shape, const Shape& expected) {
    return shape.size() >= expected.size() && std::equal(expected.rbegin(), expected.rend(), shape.rbegin());
}

}  // namespace

std::string dtype_name(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return "float32";
        case ScalarType::Half:
            return "float16";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Byte:
            return "uint8";
        case ScalarType::Short:
            return "int16";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        case ScalarType::Bool:
            return "bool";
        default:
            return std::string(torch::headeronly::toString(dtype));
    }
}

void refuse(std::string_view name, const std::string& found, const std::string& expected) {
    throw std::invalid_argument(std::string(name) + ": found " + found + ", expected " + expected);
}

std::string to_string(const Shape& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

Shape shape_of(const Tensor& tensor) {
    const auto sizes = tensor.sizes();
    return Shape(sizes.begin(), sizes.end());
}

Tensor as_contiguous(const Tensor& tensor) {
    if (!tensor.is_contiguous()) return torch::stable::contiguous(tensor);
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    return address % tensor.element_size() == 0 ? tensor : torch::stable::clone(tensor);
}

Tensor in_words(const Tensor& halves) {
    const Tensor rows = as_contiguous(halves);
    return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % 4 == 0 ? rows : torch::stable::clone(rows);
}

Shape concat(Shape first, const Shape& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

Dtype float_dtype(std::string_view name, ScalarType dtype, bool allow_float64) {
    switch (dtype) {
        case ScalarType::Float:
            return Dtype::float32;
        case ScalarType::Half:
            return Dtype::float16;
        case ScalarType::BFloat16:
            return Dtype::bfloat16;
        case ScalarType::Double:
            if (allow_float64) return Dtype::float64;
            [[fallthrough]];
        default:
            refuse(name, "dtype " + dtype_name(dtype),
                   allow_float64 ? "float32, float16, bfloat16 or float64" : "float32, float16 or bfloat16");
    }
}

ScalarType scalar_type(Dtype dtype) {
    switch (dtype) {
        case Dtype::float16:
            return ScalarType::Half;
        case Dtype::bfloat16:
            return ScalarType::BFloat16;
        case Dtype::float64:
            return ScalarType::Double;
        default:
            return ScalarType::Float;
    }
}

void check_dtype(std::string_view name, const Tensor& tensor, std::initializer_list<ScalarType> expected) {
    const ScalarType found = tensor.scalar_type();
    if (std::find(expected.begin(), expected.end(), found) != expected.end()) return;
    std::string names;
    for (const ScalarType dtype : expected) names += (names.empty() ? "" : " or ") + dtype_name(dtype);
    refuse(name, "dtype " + dtype_name(found), names);
}

int check_codebook(const Tensor& codebook) {
    check_dtype("codebook", codebook, {ScalarType::Float});
    if (codebook.dim() == 1) {
        for (int bits = kMinBits; bits <= kMaxBits; ++bits) {
            if (codebook.size(0) == int64_t{1} << bits) return bits;
        }
    }
    refuse("codebook", "shape " + to_string(shape_of(codebook)), "one dimension of 4, 8, 16 or 32 levels");
}

void check_same_device(std::string_view name, const Tensor& tensor, std::string_view other_name, const Tensor& other) {
    if (tensor.device() != other.device()) {
        throw std::invalid_argument(std::string(name) + ": found on " + device_name(tensor) + ", expected on " +
                                    device_name(other) + " like " + std::string(other_name));
    }
}

Shape words_shape(Form form, int64_t out_features, int64_t in_features, int bits) {
    if (form == Form::planes) return {out_features, num_blocks(in_features) * bits};
    const TileLayout layout(out_features, in_features);
    return {layout.row_tiles, layout.slabs, bits, kLanes, 4};
}

Shape scales_shape(Form form, int64_t out_features, int64_t in_features) {
    if (form == Form::planes) return {out_features, num_blocks(in_features)};
    const TileLayout layout(out_features, in_features);
    return {layout.row_tiles, layout.slabs, kTileRows / 2, 2 * kSlabBlocks};
}

Packed check_packed(const Tensor& weight, const Tensor& absmax, int64_t bits, ShapeRef shape,
                    std::optional<Form> form) {
    if (bits < kMinBits || bits > kMaxBits) refuse("bits", std::to_string(bits), "one of 2, 3, 4, 5");
    if (shape.size() != 2 || std::min(shape[0], shape[1]) < 1 || std::max(shape[0], shape[1]) > kMostFeatures) {
        refuse("shape", to_string(shape.vec()), "[out_features, in_features], both from 1 to 2**48");
    }
    check_dtype("weight", weight, {ScalarType::Int});
    check_dtype("absmax", absmax, {ScalarType::Byte});
    check_same_device("absmax", absmax, "weight", weight);

    const Shape words = shape_of(weight), scales = shape_of(absmax);
    if (!form) {
        const bool planes = !words.empty() && !scales.empty() && words.back() == scales.back() * bits;
        form = planes ? Form::planes : Form::tiles;
    }
    const Shape expected_words = words_shape(*form, shape[0], shape[1], static_cast<int>(bits));
    const Shape expected_scales = scales_shape(*form, shape[0], shape[1]);
    const auto check_shape = [&](std::string_view name, const Shape& found, const Shape& expected) {
        if (ends_with(found, expected)) return;
        refuse(name, "shape " + to_string(found),
               to_string(expected) + " for the " + (form == Form::planes ? "planes" : "tiles") + " of a " +
                   to_string(shape.vec()) + " weight in " + std::to_string(bits) + " bits");
    };
    check_shape("weight", words, expected_words);
    check_shape("absmax", scales, expected_scales);
    const Shape lead(words.begin(), words.end() - static_cast<int64_t>(expected_words.size()));
    if (lead != Shape(scales.begin(), scales.end() - static_cast<int64_t>(expected_scales.size()))) {
        refuse("absmax", "shape " + to_string(scales), "the leading dimensions of weight " + to_string(words));
    }
    int64_t count = 1;
    for (const int64_t size : lead) count *= size;
    return {as_contiguous(weight),
            as_contiguous(absmax),
            absmax,
            *form,
            static_cast<int>(bits),
            count,
            shape[0],
            shape[1],
            lead};
}

Packed check_weight(const Tensor& weight, const Tensor& absmax, const Tensor& codebook, ShapeRef shape,
                    const std::optional<Tensor>& columns, bool rotated, Matrices matrices) {
    Packed packed = check_packed(weight, absmax, check_codebook(codebook), shape);
    check_same_device("codebook", codebook, "weight", weight);
    packed.codebook = as_contiguous(codebook);
    const bool experts = matrices == Matrices::experts;
    if (matrices != Matrices::any && packed.lead.size() != (experts ? 1 : 0)) {
        refuse("weight", "shape " + to_string(shape_of(weight)),
               experts ? "one leading dimension, that of experts" : "one matrix, without leading dimensions");
    }
    packed.rotated = packed.signed_scales = rotated;
    if (columns) {
        check_dtype("columns", *columns, {ScalarType::Byte});
        check_same_device("columns", *columns, "weight", weight);
        if (columns->dim() != 1 || columns->size(0) != packed.in_features) {
            refuse("columns", "shape " + to_string(shape_of(*columns)), to_string({packed.in_features}));
        }
        packed.columns = as_contiguous(*columns);
    }
    return packed;
}

Packed check_product(const Tensor& x, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                     const std::optional<Tensor>& bias, int64_t out_features, const std::optional<Tensor>& columns,
                     bool rotated, Matrices matrices, bool swiglu) {
    if (matrices == Matrices::experts && (x.dim() != 2 || (swiglu && x.size(1) % 2 != 0))) {
        refuse("x", "shape " + to_string(shape_of(x)), swiglu ? "[tokens, 2 * in_features]" : "[tokens, in_features]");
    }
    if (x.dim() < 1) refuse("x", "a scalar", "[*, in_features]");
    check_same_device("x", x, "weight", weight);
    const std::array<int64_t, 2> shape{out_features, x.size(-1) / (swiglu ? 2 : 1)};
    const Packed packed =
        check_weight(weight, absmax, codebook, {shape.data(), shape.size()}, columns, rotated, matrices);
    if (bias) {
        check_dtype("bias", *bias, {x.scalar_type()});
        const Shape expected = concat(packed.lead, {out_features});
        if (shape_of(*bias) != expected) refuse("bias", "shape " + to_string(shape_of(*bias)), to_string(expected));
        check_same_device("bias", *bias, "x", x);
    }
    return packed;
}

}  // namespace hf_kbit
