// The products of the CUDA backend but those of 8-bit inputs: which kernels make them, and what comes before and
// between their launches.
#include <algorithm>

#include "kernels/path.h"
#include "ops/cuda_product.h"

namespace hf_kbit::backend {

namespace {

// Decodes some rows at a time.
Tensor gemm_in_slices(const Tensor& x, Dtype dtype, Packed packed, const std::optional<Tensor>& bias) {
    const int64_t tokens = x.numel() / packed.in_features, out_features = packed.out_features;
    // With a bias the product of a slice is made, then copied.
    const int64_t slice = slice_size((packed.in_features + (bias ? tokens : 0)) * bytes_of(dtype));
    if (slice >= out_features || tokens == 0) return linear(x, decoded(packed, dtype), bias);

    Tensor words = packed.words, scales = packed.scales;
    const bool tiled = packed.form == Form::tiles;
    Shape shape = shape_of(x);
    shape.back() = out_features;
    Tensor y = new_tensor(x, shape, scalar_type(dtype)), y_rows = viewed(y, tokens, out_features);
    const Tensor x_rows = viewed(as_contiguous(x), tokens, packed.in_features);
    for (int64_t first = 0; first < out_features; first += slice) {
        packed.out_features = std::min(slice, out_features - first);
        // The first dimension is that of rows or of row tiles.
        const int64_t at = tiled ? first / kTileRows : first;
        const int64_t count = tiled ? ceil_div(packed.out_features, kTileRows) : packed.out_features;
        packed.words = torch::stable::narrow(words, 0, at, count);
        packed.scales = torch::stable::narrow(scales, 0, at, count);
        const Tensor weight = decoded(packed, dtype);
        Tensor part = torch::stable::narrow(y_rows, 1, first, packed.out_features);
        if (bias) {
            Tensor all = *bias;
            torch::stable::copy_(part,
                                 linear(x_rows, weight, torch::stable::narrow(all, 0, first, packed.out_features)));
        } else {
            multiply_into(part, x_rows, torch::stable::transpose(weight, 0, 1));
        }
    }
    return y;
}

bool any_transform(const std::vector<Held>& held) {
    return std::any_of(held.begin(), held.end(), [](const Held& one) { return one.transform.any(); });
}

// What products of experts have as x: the rows that an index picks, with swiglu of twice the columns
// (cuda::transform).
struct ExpertRows {
    cuda::Rows rows;
    bool swiglu;
};

// Replaces x, which all have in common, or what `of_experts` says of it, by what each weight wants; up to kGemmParts
// different ones are one launch. Besides sets `flags` to zero, if there are any.
void transform_inputs(std::vector<Held>& held, Dtype dtype, int64_t tokens, const Launch& launch,
                      std::optional<Tensor> flags = std::nullopt,
                      const std::optional<ExpertRows>& of_experts = std::nullopt) {
    const Tensor x = held[0].x;
    const bool swiglu = of_experts && of_experts->swiglu;
    const int64_t in_features = x.size(-1) / (swiglu ? 2 : 1), columns = num_blocks(in_features) * kBlockSize;
    std::vector<cuda::Transformed> outputs;
    std::vector<Tensor> made;
    const bool moves = of_experts && (of_experts->rows.index || swiglu);
    for (Held& one : held) {
        if (!moves && !one.transform.any() && !one.ordered && columns == in_features) continue;
        const auto same = [&](const cuda::Transformed& output) {
            return output.transform.columns == one.transform.columns &&
                   output.transform.rotated == one.transform.rotated && output.ordered == one.ordered;
        };
        const auto index = static_cast<size_t>(std::find_if(outputs.begin(), outputs.end(), same) - outputs.begin());
        if (index == outputs.size()) {
            made.push_back(new_tensor(x, {tokens, columns}, scalar_type(dtype)));
            outputs.push_back({one.transform, one.ordered, made.back().mutable_data_ptr()});
        }
        one.x = made[index];
        one.transform = {};
    }
    for (size_t first = 0; first < outputs.size(); first += kGemmParts) {
        const auto count = static_cast<int>(std::min<size_t>(kGemmParts, outputs.size() - first));
        uint32_t* const zeros = flags && first == 0 ? reinterpret_cast<uint32_t*>(write<int32_t>(*flags)) : nullptr;
        check("transform", cuda::transform(x.const_data_ptr(), of_experts ? of_experts->rows : cuda::Rows{}, swiglu,
                                           dtype, &outputs[first], count, tokens, in_features, zeros,
                                           zeros ? static_cast<int>(flags->numel()) : 0, launch.gpu, launch.stream));
    }
}

// Up to 16 tokens and kGemmParts weights of one width: one launch, perhaps after that of transform_inputs.
void multiply_few(std::vector<Held>& held, Dtype dtype, int64_t tokens, const Launch& launch) {
    const cuda::Gpu& gpu = launch.gpu;
    const auto count = static_cast<int>(held.size());
    const int bits = held[0].bits;
    const bool transformed = any_transform(held);
    int64_t row_tiles[kGemmParts];
    for (int i = 0; i < count; ++i) row_tiles[i] = ceil_div(held[i].y.size(-1), kTileRows);
    const GemmPlan plan =
        plan_gemm(static_cast<int>(tokens), row_tiles, count, held[0].x.size(-1), bits, transformed, gpu);
    const bool awaits = transformed && !plan.transforms;
    if (awaits) transform_inputs(held, dtype, tokens, launch);
    cuda::Product products[kGemmParts];
    for (int i = 0; i < count; ++i) products[i] = held[i].product();
    check("gemm",
          cuda::gemm(products, count, dtype, bits, tokens, held[0].x.size(-1), plan, awaits, gpu, launch.stream),
          plan);
}

void multiply_by_mma(std::vector<Held>& held, Dtype dtype, int64_t tokens, const Launch& launch) {
    const cuda::Gpu& gpu = launch.gpu;
    if (any_transform(held)) transform_inputs(held, dtype, tokens, launch);
    for (Held& one : held) {
        const int64_t in_features = one.x.size(-1);
        const cuda::Product product = one.product();
        const MmaPlan plan = plan_mma(tokens, product.out_features, in_features, batch_invariant(), gpu);
        Tensor partial = new_tensor(one.x, {mma_partial_sums(plan)}, ScalarType::Float);
        check("gemm_mma",
              cuda::gemm_mma(product, dtype, one.bits, tokens, in_features, plan, write<float>(partial), gpu,
                             launch.stream),
              plan);
    }
}

// The first launch may overlap with that of transform_inputs.
void multiply_by_wgmma(std::vector<Held>& held, Dtype dtype, int64_t tokens, const Launch& launch) {
    const Tensor x = held[0].x;
    const auto launches = plan_launches(held, [&](const int64_t* rows, int count, int bits) {
        return plan_wgmma(tokens, rows, count, x.size(-1), bits, batch_invariant(), launch.gpu);
    });
    bool awaits = any_transform(held);
    int64_t sums = 0, flags = 0;  // one launch after the other uses the same sums
    for (const auto& [first, count, plan] : launches) {
        const auto begin = held.begin() + first, end = begin + count;
        const bool transformed = std::any_of(begin, end, [](const Held& one) { return one.transform.any(); });
        const bool ordered = wgmma_ordered(begin->bits, plan.token_tile, transformed, batch_invariant());
        std::for_each(begin, end, [&](Held& one) { one.ordered = ordered; });
        awaits = awaits || ordered;
        sums = std::max(sums, wgmma_partial_sums(plan));
        flags += wgmma_partial_flags(plan);
    }
    std::optional<Tensor> partial, ready;
    if (flags > 0) {
        partial = new_tensor(x, {sums}, ScalarType::Float);
        ready = new_tensor(x, {flags}, ScalarType::Int);
    }
    if (awaits) {
        transform_inputs(held, dtype, tokens, launch, ready);
    } else if (ready) {
        torch::stable::zero_(*ready);
    }
    auto* flag = ready ? reinterpret_cast<uint32_t*>(write<int32_t>(*ready)) : nullptr;
    for (const auto& [first, count, plan] : launches) {
        cuda::Product products[kGemmParts];
        for (int i = 0; i < count; ++i) products[i] = held[first + i].product();
        check("gemm_wgmma",
              cuda::gemm_wgmma(products, count, dtype, held[first].bits, tokens, held[first].x.size(-1), plan,
                               partial ? write<float>(*partial) : nullptr, flag, awaits, launch.gpu, launch.stream),
              plan);
        flag += wgmma_partial_flags(plan);
        awaits = false;
    }
}

// More tokens: as many launches as the kernel takes, perhaps after that of transform_inputs.
void multiply_many(std::vector<Held>& held, Dtype dtype, int64_t tokens, const Launch& launch) {
    (has_mma_path(launch.gpu.arch) ? multiply_by_mma : multiply_by_wgmma)(held, dtype, tokens, launch);
}

// joined: with others in one launch, if the tokens are few.
GemmPath path_of(const Packed& packed, Dtype dtype, int64_t tokens, bool joined, const cuda::Gpu& gpu) {
    const bool transformed = packed.columns || packed.rotated;
    GemmPath path = fusable(packed, dtype) ? gemm_path(tokens, packed.out_features, packed.in_features, packed.bits,
                                                       transformed, batch_invariant(), gpu)
                                           : GemmPath::dequantize;
    if (path == GemmPath::dequantize && tokens > 0 && batch_invariant()) {
        refuse("x",
               "dtype " + dtype_name(scalar_type(dtype)) + ", the weight in " +
                   (packed.form == Form::tiles ? "tiles" : "bit-planes"),
               "float16 or bfloat16, the weight in tiles (hf_kbit.ops.repack), on a GPU of compute capability 8.0 or "
               "newer,"
               " as batch-invariant products were asked for");
    }
    if (joined && tokens <= kGemmTokens && path == GemmPath::wgmma && !batch_invariant()) path = GemmPath::decode;
    return path;
}

}  // namespace

// Decodes and multiplies in one kernel where it can, else decodes first.
Tensor gemm(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias) {
    const Launch launch(x);
    const int64_t tokens = x.numel() / packed.in_features;
    const GemmPath path = path_of(packed, dtype, tokens, false, launch.gpu);
    if (path == GemmPath::dequantize) return gemm_in_slices(x, dtype, packed, bias);
    std::vector<Held> held;
    held.emplace_back(in_pieces(x), shape_of(x), dtype, packed, bias);
    (path == GemmPath::decode ? multiply_few : multiply_many)(held, dtype, tokens, launch);
    return held[0].y;
}

// For weights of the same width and form of scales one launch, of few tokens or on Hopper, else one for each; what x
// becomes for a weight is made once for all of them.
std::vector<Tensor> gemm_group(const Tensor& x, Dtype dtype, const std::vector<Packed>& weights,
                               const std::vector<std::optional<Tensor>>& biases) {
    const Launch launch(x);
    bool together = weights.size() > 1 && weights.size() <= kGemmParts;
    for (const Packed& packed : weights) {
        together = together && packed.bits == weights[0].bits && packed.signed_scales == weights[0].signed_scales;
    }
    std::vector<GemmPath> paths;
    for (const Packed& packed : weights) {
        paths.push_back(path_of(packed, dtype, x.numel() / packed.in_features, together, launch.gpu));
    }
    for (const GemmPath path : paths) together = together && path == GemmPath::decode;
    std::vector<Tensor> products;
    std::vector<Held> held;
    Tensor rows = x;
    for (size_t i = 0; i < weights.size(); ++i) {
        if (paths[i] == GemmPath::dequantize || (paths[i] == GemmPath::decode && !together)) {
            products.push_back(gemm(x, dtype, weights[i], biases[i]));
            continue;
        }
        if (held.empty()) rows = in_pieces(x);
        held.emplace_back(rows, shape_of(x), dtype, weights[i], biases[i]);
        products.push_back(held.back().y);
    }
    if (held.empty()) return products;
    (together ? multiply_few : multiply_many)(held, dtype, x.numel() / x.size(-1), launch);
    return products;
}

namespace {

// Rows of `from` to those of `to`, as cuda::copy_rows; both contiguous.
void copy_rows(const Tensor& from, Dtype dtype, const cuda::Rows& rows, const int32_t* first, const int32_t* end,
               Tensor& to, const Launch& launch) {
    check("copy_rows", cuda::copy_rows(from.const_data_ptr(), dtype, to.size(1), rows, first, end, to.size(0),
                                       to.mutable_data_ptr(), launch.gpu, launch.stream));
}

// Whether torch multiplies the rows of all experts in one kernel; elsewhere it would wait for the GPU to know whose
// they are (torch 2.11, GroupedBlas.cpp). Its rows are multiples of 16 bytes.
bool has_grouped_product(const Packed& packed, Dtype dtype, const cuda::Gpu& gpu) {
    const int major = gpu.arch / 100;
    return dtype == Dtype::bfloat16 && (major == 9 || major == 10) && packed.in_features % 8 == 0 &&
           packed.out_features % 8 == 0;
}

// Rows times the matrices [E, *, columns of `to`] of their experts; zeros in rows that none has.
void multiply_by_groups(const Tensor& rows, Dtype dtype, const Tensor& matrices, const Tensor& offsets, Tensor& to,
                        const Launch& launch) {
    const int64_t experts = matrices.size(0);
    Tensor all = offsets;
    const Tensor product = grouped_product(rows, matrices, torch::stable::narrow(all, 0, 1, experts));
    const auto* ends = read<int32_t>(offsets);
    torch::stable::zero_(to);
    copy_rows(product, dtype, {}, ends, ends + experts, to, launch);
}

// Which expert has a row is known on the GPU alone: `multiply` gives all rows times one expert, of which its own stay.
template <typename Multiply>
void multiply_by_each(const Packed& packed, Dtype dtype, const Tensor& offsets, Tensor& to, const Launch& launch,
                      const Multiply& multiply) {
    torch::stable::zero_(to);
    for (int64_t expert = 0; expert < packed.count; ++expert) {
        const auto* ends = read<int32_t>(offsets) + expert;
        copy_rows(multiply(matrix_of(packed, expert), expert), dtype, {}, ends, ends + 1, to, launch);
    }
}

}  // namespace

// In one kernel where it can; else torch does so with all matrices decoded, where it can; else one expert after the
// other, which takes as long as if each had all rows.
Tensor gemm_experts(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& rows, const Tensor& offsets, bool swiglu) {
    const Launch launch(x);
    const cuda::Gpu& gpu = launch.gpu;
    const int64_t count = rows ? rows->size(0) : x.size(0), out_features = packed.out_features;
    const ExpertRows of_experts{{rows ? read<int32_t>(*rows) : nullptr, x.size(0)}, swiglu};
    // Halves of rows are read in pieces of eight numbers.
    const bool fused = fusable(packed, dtype) && !(swiglu && packed.in_features % 8 != 0);
    const FewExpertsPlan few = plan_few_experts(fused ? count : 0, packed.count, out_features, packed.in_features,
                                                packed.bits, batch_invariant(), gpu);
    const bool is_few = few.gemm.warps > 0;
    if (is_few || (fused && experts_are_fused(count, packed.count, out_features, packed.in_features, gpu))) {
        std::vector<Held> held;
        held.emplace_back(in_pieces(x), Shape{count, packed.in_features}, dtype, packed, bias);
        held[0].ordered = !is_few;
        const bool transforms = few.gemm.transforms;  // by itself
        if (!transforms) transform_inputs(held, dtype, count, launch, std::nullopt, of_experts);
        const int64_t in_features = held[0].x.size(-1) / (transforms && swiglu ? 2 : 1);
        if (is_few) {
            const cuda::Rows all{nullptr, count};
            const cuda::FewExperts few_experts{transforms ? of_experts.rows : all, read<int32_t>(offsets), count,
                                               packed.count, transforms && swiglu};
            check("gemm_experts",
                  cuda::gemm_few_experts(held[0].product(), few_experts, dtype, packed.bits, in_features, few, gpu,
                                         launch.stream),
                  few);
        } else {
            const WgmmaPlan plan =
                plan_experts(count, packed.count, out_features, in_features, packed.bits, batch_invariant(), gpu);
            check("gemm_experts",
                  cuda::experts_wgmma(held[0].product(), read<int32_t>(offsets), static_cast<int>(packed.count), dtype,
                                      packed.bits, count, in_features, plan, gpu, launch.stream),
                  plan);
        }
        return held[0].y;
    }
    if (swiglu) return gemm_experts(gated(x), dtype, packed, bias, rows, offsets, false);
    Tensor inputs = as_contiguous(x);
    if (rows) {
        inputs = new_tensor(x, {count, packed.in_features}, x.scalar_type());
        copy_rows(as_contiguous(x), dtype, of_experts.rows, nullptr, nullptr, inputs, launch);
    }
    Tensor y = new_tensor(x, {count, out_features}, x.scalar_type());
    if (!bias && has_grouped_product(packed, dtype, gpu)) {
        multiply_by_groups(inputs, dtype, torch::stable::transpose(decoded(packed, dtype), 1, 2), offsets, y, launch);
        return y;
    }
    multiply_by_each(packed, dtype, offsets, y, launch, [&](const Packed& matrix, int64_t expert) {
        std::optional<Tensor> its_bias;
        if (bias) its_bias = torch::stable::select(*bias, 0, expert);
        return gemm(inputs, dtype, matrix, its_bias);
    });
    return y;
}

void gemm_experts_gradient(const Tensor& grad, Dtype dtype, const Packed& packed, const Tensor& offsets,
                           Tensor& grad_x) {
    const Launch launch(grad);
    if (has_grouped_product(packed, dtype, launch.gpu)) {
        return multiply_by_groups(grad, dtype, decoded(packed, dtype), offsets, grad_x, launch);
    }
    multiply_by_each(packed, dtype, offsets, grad_x, launch, [&](const Packed& matrix, int64_t) {
        Tensor part = new_tensor(grad_x, shape_of(grad_x), grad_x.scalar_type());
        gemm_gradient(grad, dtype, matrix, part);
        return part;
    });
}

// Decodes and multiplies in one kernel where it can and that is faster, else decodes first.
void gemm_gradient(const Tensor& grad, Dtype dtype, const Packed& packed, Tensor& grad_x) {
    const Launch launch(grad);
    const cuda::Gpu& gpu = launch.gpu;
    const int64_t tokens = grad.size(0), out_features = packed.out_features, in_features = packed.in_features;
    if (!fusable(packed, dtype) ||
        !gradient_is_fused(tokens, out_features, in_features, packed.bits, packed.columns || packed.rotated, gpu)) {
        return gradient_in_slices(grad, dtype, packed, grad_x);
    }
    const Tensor dy = in_pieces(grad), words = aligned(packed.words), scales = aligned(packed.scales);
    const HeldTransform transform(packed);
    const GradientPlan plan = plan_gradient(tokens, out_features, in_features, gpu);
    Tensor partial = new_tensor(grad, {gradient_partial_sums(plan)}, ScalarType::Float);
    const cuda::Gradient gradient{
        dy.const_data_ptr(),       read<int32_t>(words), read<uint8_t>(scales), read<float>(packed.codebook),
        grad_x.mutable_data_ptr(), out_features,         in_features,           dy.size(-1),
        transform.from(0),         packed.signed_scales};
    check("gemm_gradient",
          cuda::gradient_wgmma(gradient, dtype, packed.bits, tokens, plan, write<float>(partial), gpu, launch.stream),
          plan);
}

}  // namespace hf_kbit::backend
