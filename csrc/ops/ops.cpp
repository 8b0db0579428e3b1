// The ops: check the arguments, make the outputs, call the backend. Registered for the backend's dispatch key,
// they take precedence over hf_kbit/format/reference.py.
#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "ops/backend.h"

namespace hf_kbit {

Tensor new_tensor(const Tensor& like, const Shape& shape, ScalarType dtype) {
    return torch::stable::empty(shape, dtype, std::nullopt, like.device());
}

Tensor decoded(const Packed& packed, Dtype dtype) {
    const Shape shape = concat(packed.lead, {packed.out_features, packed.in_features});
    Tensor out = new_tensor(packed.words, shape, scalar_type(dtype));
    if (out.numel() > 0) backend::dequantize(packed, out, dtype);
    return out;
}

Tensor viewed(const Tensor& tensor, int64_t rows, int64_t columns) {
    const std::array<int64_t, 2> shape{rows, columns};
    return torch::stable::view(tensor, {shape.data(), shape.size()});
}

void check_torch(const char* function, int32_t error) {
    if (error != 0) throw std::runtime_error(std::string("torch's ") + function + " failed, and says why above");
}

namespace {

std::atomic<bool> asked_for_batch_invariance{false};

}  // namespace

bool batch_invariant() { return asked_for_batch_invariance.load(std::memory_order_relaxed); }

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
    using torch::stable::detail::from;
    if (x.dim() != 2) {  // else the result may be a view, which nobody may change in place when it comes from our op
        Shape shape = shape_of(x);
        const int64_t columns = shape.back();
        shape.back() = weight.size(0);
        const Tensor rows = linear(viewed(as_contiguous(x), x.numel() / columns, columns), weight, bias);
        return call<2>("aten::_unsafe_view", "", {from(rows), from(shape)});
    }
    return call<3>("aten::linear", "", {from(x), from(weight), from(bias)});
}

void multiply_into(Tensor& out, const Tensor& a, const Tensor& b) {
    using torch::stable::detail::from;
    call<3>("aten::mm", "out", {from(a), from(b), from(out)});
}

Tensor grouped_product(const Tensor& a, const Tensor& b, const Tensor& ends) {
    using torch::stable::detail::from;
    const std::optional<Tensor> bias = std::nullopt, groups = ends;
    const std::optional<ScalarType> dtype = std::nullopt;
    return call<5>("aten::_grouped_mm", "", {from(a), from(b), from(groups), from(bias), from(dtype)});
}

Tensor gated(const Tensor& x) {
    using torch::stable::detail::from;
    const int64_t columns = x.size(1) / 2;
    Tensor halves = x;
    const Tensor gates = call<1>("aten::silu", "", {from(torch::stable::narrow(halves, 1, 0, columns))});
    return call<2>("aten::mul", "Tensor", {from(gates), from(torch::stable::narrow(halves, 1, columns, columns))});
}

Packed columns_of(const Packed& planes, int64_t first, int64_t count) {
    Packed columns = planes;
    const auto narrowed = [&](Tensor tensor, int64_t of_block) {
        return as_contiguous(
            torch::stable::narrow(tensor, 1, first / kBlockSize * of_block, num_blocks(count) * of_block));
    };
    columns.words = narrowed(planes.words, planes.bits), columns.scales = narrowed(planes.scales, 1);
    if (planes.columns) {
        Tensor all = *planes.columns;
        columns.columns = torch::stable::narrow(all, 0, first, count);
    }
    columns.in_features = count;
    return columns;
}

Packed matrix_of(const Packed& packed, int64_t index) {
    Packed matrix = packed;
    matrix.words = torch::stable::select(packed.words, 0, index);
    matrix.scales = torch::stable::select(packed.scales, 0, index);
    matrix.count = 1;
    matrix.lead = {};
    return matrix;
}

int64_t slice_size(int64_t bytes) {
    constexpr int64_t kSliceBytes = 64 << 20, kLeast = kSlabBlocks * kBlockSize;
    int64_t size = kLeast;
    while (2 * size * bytes <= kSliceBytes) size *= 2;
    return size;
}

void gradient_in_slices(const Tensor& grad, Dtype dtype, const Packed& packed, Tensor& grad_x) {
    // Of planes the columns are copied before they are decoded.
    const int64_t bytes = packed.out_features * (bytes_of(dtype) + (packed.form == Form::planes));
    const int64_t slice = slice_size(bytes);
    for (int64_t first = 0; first < packed.in_features; first += slice) {
        const int64_t columns = std::min(slice, packed.in_features - first);
        Tensor dense = new_tensor(grad, {packed.out_features, columns}, grad.scalar_type());
        backend::dequantize_columns(packed, first, dense, dtype);
        Tensor part = torch::stable::narrow(grad_x, 1, first, columns);
        multiply_into(part, grad, dense);
    }
}

std::tuple<Tensor, Tensor> quantize(const Tensor& weight, const Tensor& codebook, bool search, bool signed_scales) {
    const Dtype dtype = float_dtype("weight", weight.scalar_type(), false);
    Shape shape = shape_of(weight);
    if (shape.size() < 2 || weight.numel() == 0) {
        refuse("weight", "shape " + to_string(shape), "[*, out_features, in_features], none 0");
    }
    check_same_device("codebook", codebook, "weight", weight);
    const int bits = check_codebook(codebook);
    const int64_t in_features = shape.back(), blocks = num_blocks(in_features);
    shape.back() = blocks * bits;
    Tensor planes = new_tensor(weight, shape, ScalarType::Int);
    shape.back() = blocks;
    Tensor absmax = new_tensor(weight, shape, ScalarType::Byte);
    backend::quantize(as_contiguous(weight), dtype, as_contiguous(codebook), bits, search, signed_scales,
                      weight.numel() / in_features, in_features, planes, absmax);
    return {planes, absmax};
}

Tensor dequantize(const Tensor& weight, const Tensor& absmax, const Tensor& codebook, ShapeRef shape, ScalarType dtype,
                  const std::optional<Tensor>& columns, bool rotated) {
    const Dtype out_dtype = float_dtype("dtype", dtype, true);
    return decoded(check_weight(weight, absmax, codebook, shape, columns, rotated, Matrices::any), out_dtype);
}

Tensor embed(const Tensor& indices, const Tensor& weight, const Tensor& absmax, const Tensor& codebook, ShapeRef shape,
             ScalarType dtype, const std::optional<Tensor>& columns, bool rotated) {
    check_dtype("indices", indices, {ScalarType::Long, ScalarType::Int});
    const Dtype out_dtype = float_dtype("dtype", dtype, true);
    const Packed packed = check_weight(weight, absmax, codebook, shape, columns, rotated, Matrices::one);
    check_same_device("indices", indices, "weight", weight);
    Tensor out = new_tensor(weight, concat(shape_of(indices), {packed.in_features}), dtype);
    if (out.numel() > 0) backend::embed(as_contiguous(indices), packed, out, out_dtype);
    return out;
}

std::tuple<Tensor, Tensor> repack(const Tensor& weight, const Tensor& absmax, int64_t bits, ShapeRef shape,
                                  bool inverse) {
    const Packed packed = check_packed(weight, absmax, bits, shape, inverse ? Form::tiles : Form::planes);
    const Form target = inverse ? Form::planes : Form::tiles;
    Tensor words =
        new_tensor(weight, concat(packed.lead, words_shape(target, shape[0], shape[1], packed.bits)), ScalarType::Int);
    Tensor scales =
        new_tensor(weight, concat(packed.lead, scales_shape(target, shape[0], shape[1])), ScalarType::Byte);
    if (packed.count > 0) backend::repack(packed, words, scales);
    return {words, scales};
}

Tensor gemm(const Tensor& x, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
            const std::optional<Tensor>& bias, int64_t out_features, const std::optional<Tensor>& columns,
            bool rotated) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), true);
    const Packed packed = check_product(x, weight, absmax, codebook, bias, out_features, columns, rotated);
    return backend::gemm(x, dtype, packed, bias);
}

std::vector<Tensor> gemm_group(const Tensor& x, std::vector<Tensor> weights, std::vector<Tensor> absmaxes,
                               std::vector<Tensor> codebooks, std::vector<std::optional<Tensor>> biases,
                               std::vector<int64_t> out_features, std::vector<std::optional<Tensor>> columns,
                               std::vector<int64_t> rotated, std::vector<std::optional<Tensor>> inverses) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), true);
    const size_t count = weights.size();
    for (const size_t size : {absmaxes.size(), codebooks.size(), biases.size(), out_features.size(), columns.size(),
                              rotated.size(), inverses.size()}) {
        if (size != count) refuse("weights", std::to_string(count), "as many of each argument but x");
    }
    struct {
        std::vector<Packed> weights;
        std::vector<std::optional<Tensor>> biases;
    } exact, rounded;  // of 16-bit inputs, and of 8-bit ones
    std::vector<Tensor> known;
    for (size_t i = 0; i < count; ++i) {
        const Packed packed = check_product(x, weights[i], absmaxes[i], codebooks[i], biases[i], out_features[i],
                                            columns[i], rotated[i] != 0);
        if (inverses[i]) {
            if (!columns[i] || !rotated[i]) refuse("inverses", "those of a weight that is not rotated", "none of it");
            float_dtype("x", x.scalar_type(), false);
            inverses[i] = check_int8(x, packed, inverses[i]);
            if (!backend::takes_int8(x.numel() / packed.in_features)) inverses[i].reset();
        }
        auto& group = inverses[i] ? rounded : exact;
        group.weights.push_back(packed);
        group.biases.push_back(biases[i]);
        if (inverses[i]) known.push_back(*inverses[i]);
    }
    const std::vector<Tensor> of_exact = backend::gemm_group(x, dtype, exact.weights, exact.biases);
    const std::vector<Tensor> of_rounded = backend::gemm_int8(x, dtype, rounded.weights, rounded.biases, known);
    auto next_exact = of_exact.begin(), next_rounded = of_rounded.begin();
    std::vector<Tensor> products;
    for (const std::optional<Tensor>& its : inverses) products.push_back(its ? *next_rounded++ : *next_exact++);
    return products;
}

// Says which rows are whose; as kernels read it.
Tensor check_index(std::string_view name, const Tensor& index, const Shape& expected, const Tensor& weight) {
    check_dtype(name, index, {ScalarType::Int});
    check_same_device(name, index, "weight", weight);
    if (shape_of(index) != expected) refuse(name, "shape " + to_string(shape_of(index)), to_string(expected));
    return as_contiguous(index);
}

ExpertRows check_rows(const Tensor& x, const Packed& packed, const std::optional<Tensor>& rows,
                      const Tensor& offsets) {
    const Tensor ends = check_index("offsets", offsets, {packed.count + 1}, packed.words);
    std::optional<Tensor> picked;
    if (rows) {
        if (rows->dim() != 1) refuse("rows", "shape " + to_string(shape_of(*rows)), "one dimension");
        picked = check_index("rows", *rows, shape_of(*rows), packed.words);
        if (x.size(0) == 0 && rows->size(0) > 0) refuse("x", "no rows", "those that rows picks");
    }
    const int64_t count = rows ? rows->size(0) : x.size(0);
    backend::check_offsets(ends, count);
    return {picked, ends, count};
}

Tensor gemm_experts(const Tensor& x, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                    const std::optional<Tensor>& bias, const std::optional<Tensor>& rows, const Tensor& offsets,
                    int64_t out_features, const std::optional<Tensor>& columns, bool rotated, bool swiglu) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), true);
    const Packed packed =
        check_product(x, weight, absmax, codebook, bias, out_features, columns, rotated, Matrices::experts, swiglu);
    const ExpertRows taken = check_rows(x, packed, rows, offsets);
    if (taken.count == 0) return new_tensor(x, {0, out_features}, x.scalar_type());
    return backend::gemm_experts(x, dtype, packed, bias, taken.rows, taken.offsets, swiglu);
}

std::tuple<Tensor, Tensor, Tensor> route_experts(const Tensor& experts, int64_t num_experts) {
    check_dtype("experts", experts, {ScalarType::Long, ScalarType::Int});
    if (experts.dim() != 2) refuse("experts", "shape " + to_string(shape_of(experts)), "[tokens, experts of each]");
    if (num_experts < 1 || num_experts > backend::kMostRoutedExperts) {
        refuse("num_experts", std::to_string(num_experts), "1 to " + std::to_string(backend::kMostRoutedExperts));
    }
    if (experts.numel() > INT32_MAX) {
        refuse("experts", std::to_string(experts.numel()) + " numbers", "a count that fits into 32 bits");
    }
    Tensor rows = new_tensor(experts, {experts.numel()}, ScalarType::Int);
    Tensor places = new_tensor(experts, shape_of(experts), ScalarType::Int);
    Tensor offsets = new_tensor(experts, {num_experts + 1}, ScalarType::Int);
    backend::route_experts(as_contiguous(experts), num_experts, rows, places, offsets);
    return {rows, places, offsets};
}

Tensor combine_experts(const Tensor& y, const Tensor& places, const Tensor& weights) {
    const Dtype dtype = float_dtype("y", y.scalar_type(), true);
    if (y.dim() != 2) refuse("y", "shape " + to_string(shape_of(y)), "[rows, out_features]");
    if (places.dim() != 2) refuse("places", "shape " + to_string(shape_of(places)), "[tokens, experts of each]");
    check_dtype("places", places, {ScalarType::Int});
    if (shape_of(weights) != shape_of(places)) {
        refuse("weights", "shape " + to_string(shape_of(weights)), to_string(shape_of(places)));
    }
    if (weights.scalar_type() != ScalarType::Float) check_dtype("weights", weights, {y.scalar_type()});
    check_same_device("places", places, "y", y);
    check_same_device("weights", weights, "y", y);
    if (y.size(0) == 0 && places.numel() > 0) refuse("y", "no rows", "those at places");
    Tensor out = new_tensor(y, {places.size(0), y.size(1)}, y.scalar_type());
    if (out.numel() == 0) return out;
    if (places.size(1) == 0) {
        torch::stable::zero_(out);
        return out;
    }
    backend::combine_experts(as_contiguous(y), dtype, as_contiguous(places), as_contiguous(weights),
                             float_dtype("weights", weights.scalar_type(), true), out);
    return out;
}

// The weight of a gradient, or those of experts.
Packed check_gradient(const Tensor& grad, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                      ShapeRef shape, const std::optional<Tensor>& columns, bool rotated, Matrices matrices) {
    const Packed packed = check_weight(weight, absmax, codebook, shape, columns, rotated, matrices);
    const bool experts = matrices == Matrices::experts;
    if ((experts ? grad.dim() != 2 : grad.dim() < 1) || grad.size(-1) != packed.out_features) {
        refuse("grad", "shape " + to_string(shape_of(grad)),
               (experts ? "[rows, " : "[*, ") + std::to_string(packed.out_features) + "]");
    }
    check_same_device("grad", grad, "weight", weight);
    return packed;
}

Tensor gemm_gradient(const Tensor& grad, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                     ShapeRef shape, const std::optional<Tensor>& columns, bool rotated) {
    const Dtype dtype = float_dtype("grad", grad.scalar_type(), true);
    const Packed packed = check_gradient(grad, weight, absmax, codebook, shape, columns, rotated, Matrices::one);
    Shape grad_shape = shape_of(grad);
    grad_shape.back() = packed.in_features;
    Tensor grad_x = new_tensor(grad, grad_shape, grad.scalar_type());
    if (grad_x.numel() == 0) return grad_x;
    const int64_t tokens = grad.numel() / packed.out_features;
    const Tensor grad_rows = viewed(as_contiguous(grad), tokens, packed.out_features);
    Tensor grad_x_rows = viewed(grad_x, tokens, packed.in_features);
    backend::gemm_gradient(grad_rows, dtype, packed, grad_x_rows);
    return grad_x;
}

Tensor gemm_experts_gradient(const Tensor& grad, const Tensor& weight, const Tensor& absmax, const Tensor& codebook,
                             const Tensor& offsets, ShapeRef shape, const std::optional<Tensor>& columns,
                             bool rotated) {
    const Dtype dtype = float_dtype("grad", grad.scalar_type(), true);
    const Packed packed = check_gradient(grad, weight, absmax, codebook, shape, columns, rotated, Matrices::experts);
    const Tensor ends = check_index("offsets", offsets, {packed.count + 1}, weight);
    backend::check_offsets(ends, grad.size(0));
    Tensor grad_x = new_tensor(grad, {grad.size(0), packed.in_features}, grad.scalar_type());
    if (grad_x.numel() > 0) backend::gemm_experts_gradient(as_contiguous(grad), dtype, packed, ends, grad_x);
    return grad_x;
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, HF_KBIT_DISPATCH_KEY, library) {
    library.impl("quantize", TORCH_BOX(&quantize));
    library.impl("dequantize", TORCH_BOX(&dequantize));
    library.impl("embed", TORCH_BOX(&embed));
    library.impl("repack", TORCH_BOX(&repack));
    library.impl("gemm", TORCH_BOX(&gemm));
    library.impl("gemm_inference", TORCH_BOX(&gemm));
    library.impl("gemm_gradient", TORCH_BOX(&gemm_gradient));
    library.impl("gemm_group", TORCH_BOX(&gemm_group));
    library.impl("route_experts", TORCH_BOX(&route_experts));
    library.impl("gemm_experts", TORCH_BOX(&gemm_experts));
    library.impl("combine_experts", TORCH_BOX(&combine_experts));
    library.impl("gemm_experts_gradient", TORCH_BOX(&gemm_experts_gradient));
}

}  // namespace hf_kbit

// For hf_kbit/ops/native.py.
extern "C" __attribute__((visibility("default"))) void hf_kbit_set_batch_invariant(int enabled) {
    hf_kbit::asked_for_batch_invariance.store(enabled != 0, std::memory_order_relaxed);
}
