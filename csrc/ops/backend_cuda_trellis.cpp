// The trellises of the CUDA backend. The kernels are in csrc/kernels.
#include <torch/csrc/stable/library.h>

#include "ops/cuda_launch.h"

namespace hf_kbit::backend {

void encode_trellis(const Tensor& targets, int bits, int lead, Tensor& words) {
    const Launch launch(targets);
    const int64_t tiles = targets.size(0), ctas = cuda::encode_trellis_ctas(bits, tiles, launch.gpu);
    Tensor workspace = new_tensor(targets, {ctas * cuda::encode_trellis_bytes(bits, launch.gpu)}, ScalarType::Byte);
    check("encode_trellis", cuda::encode_trellis(read<float>(targets), bits, lead, tiles, write<uint32_t>(words),
                                                 workspace.mutable_data_ptr(), ctas, launch.gpu, launch.stream));
}

void decode_trellis(const Tensor& trellis, Code code, int bits, int64_t across, int64_t down, Tensor& out,
                    Dtype dtype) {
    const Launch launch(trellis);
    const Tensor words = aligned(trellis);
    const int64_t count = out.numel() / (across * down * kTrellisSteps);
    check("decode_trellis", cuda::decode_trellis(read<uint32_t>(words), code, bits, count, across, down,
                                                 out.mutable_data_ptr(), dtype, launch.gpu, launch.stream));
}

namespace {

Tensor readable(const Tensor& tensor) { return aligned(as_contiguous(tensor)); }

Shape with_last(Shape shape, int64_t last) {
    shape.back() = last;
    return shape;
}

// A weight as hf_kbit/ops/trellis.py gives it, in memory as kernels read it, with tiles as files have them.
struct Weight {
    Tensor tiles, suh, svh;
    int64_t across, down;
    int bits;

    Weight(const Tensor& words, const Tensor& suh, const Tensor& svh, ShapeRef matrix, int64_t block)
        : tiles(readable(torch::stable::transpose(words, -3, -2))),
          suh(readable(suh)),
          svh(readable(svh)),
          across(words.size(-2)),
          down(words.size(-3)),
          bits(static_cast<int>(words.size(-1) / kTrellisTile)) {
        check_side("suh", suh, across, matrix[1], block);
        check_side("svh", svh, down, matrix[0], block);
    }

    static void check_side(std::string_view name, const Tensor& scales, int64_t tiles, int64_t features,
                           int64_t block) {
        const int64_t padded = kTrellisTile * tiles;
        if (scales.size(-1) == padded && padded % block == 0 && features <= padded) return;
        refuse(name, "shape " + to_string(shape_of(scales)),
               "[*, " + std::to_string(padded) + "], a multiple of " + std::to_string(block) + " and at least " +
                   std::to_string(features));
    }
};

// A product of x by it, with the tensors that own what kernels read and write.
struct Product {
    const Weight weight;
    const Tensor x;
    const std::optional<Tensor> bias;
    const int64_t tokens;
    Tensor y;
    const cuda::TrellisProduct arguments;

    Product(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& words, const Tensor& suh,
            const Tensor& svh, ShapeRef matrix, int64_t block)
        : weight(words, suh, svh, matrix, block),
          x(readable(x)),
          bias(bias ? std::optional<Tensor>(readable(*bias)) : std::nullopt),
          tokens(x.numel() / x.size(-1)),
          y(new_tensor(x, with_last(shape_of(x), matrix[0]), x.scalar_type())),
          arguments{this->x.const_data_ptr(),
                    read<uint32_t>(weight.tiles),
                    this->bias ? this->bias->const_data_ptr() : nullptr,
                    y.mutable_data_ptr(),
                    weight.across,
                    weight.down,
                    weight.bits,
                    {read<uint16_t>(weight.suh), read<uint16_t>(weight.svh), x.size(-1), matrix[0],
                     kTrellisTile * weight.across, kTrellisTile * weight.down, static_cast<int>(block)}} {
        if (x.size(-1) != matrix[1]) {
            refuse("x", "shape " + to_string(shape_of(x)), "[*, " + std::to_string(matrix[1]) + "]");
        }
        if (bias && bias->numel() != matrix[0]) {
            refuse("bias", "shape " + to_string(shape_of(*bias)), "[" + std::to_string(matrix[0]) + "]");
        }
    }

    void check_at_most(int64_t most) const {
        if (tokens > most) refuse("x", std::to_string(tokens) + " rows", "at most " + std::to_string(most));
    }
};

// y of products that share x, widths, code and block, up to kFewTrellisParts, or of one of rows of experts.
std::vector<Tensor> few_tokens(const std::vector<Product>& products, const cuda::TrellisExperts& experts,
                               const Launch& launch) {
    const Product& one = products.at(0);
    std::vector<cuda::TrellisProduct> arguments;
    std::vector<int64_t> downs;
    std::vector<Tensor> y;
    for (const Product& product : products) {
        product.check_at_most(experts.owners ? kFewTrellisRows : kFewTrellisTokens);
        if (product.weight.across != one.weight.across || product.weight.bits != one.weight.bits) {
            refuse("words",
                   "shape " + to_string(shape_of(product.weight.tiles)) + " beside " +
                       to_string(shape_of(one.weight.tiles)),
                   "products of one width and as many bits");
        }
        arguments.push_back(product.arguments);
        downs.push_back(product.weight.down);
        y.push_back(product.y);
    }
    const int64_t tokens = one.tokens, rows = experts.owners ? tokens : 1,
                  items = tokens * static_cast<int64_t>(products.size());
    const FewTrellisPlan plan = plan_few_trellis(rows, one.weight.across, downs, one.weight.bits,
                                                 static_cast<int>(2 * tokens / rows), launch.gpu);
    const Tensor& x = one.x;
    Tensor columns = new_tensor(x, {2 * items, arguments[0].sides.padded_in}, ScalarType::Char);
    Tensor of_tokens = new_tensor(x, {items * static_cast<int64_t>(sizeof(TrellisToken))}, ScalarType::Byte);
    Tensor sums = new_tensor(x, {few_trellis_sums(plan, tokens)}, ScalarType::Int);
    Tensor counts = new_tensor(x, {rows * few_trellis_counts(plan)}, ScalarType::Int);
    check("few_trellis_tokens",
          cuda::few_trellis_tokens(arguments, experts, float_dtype("x", x.scalar_type(), false), tokens, plan,
                                   write<int8_t>(columns), write<TrellisToken>(of_tokens), write<int32_t>(sums),
                                   write<uint32_t>(counts), launch.gpu, launch.stream),
          plan);
    return y;
}

// Products of up to kFewTrellisTokens tokens by weights of code mul1 and one width (hf_kbit/ops/trellis.py).
std::vector<Tensor> gemm_trellis_few(const Tensor& x, std::vector<std::optional<Tensor>> biases,
                                     std::vector<Tensor> words, std::vector<Tensor> suh, std::vector<Tensor> svh,
                                     std::vector<int64_t> out_features, int64_t block) {
    const size_t count = words.size();
    for (const size_t size : {biases.size(), suh.size(), svh.size(), out_features.size()}) {
        if (size != count || count < 1 || count > kFewTrellisParts) {
            refuse("words", std::to_string(count) + " beside " + std::to_string(size),
                   "1 to " + std::to_string(kFewTrellisParts) + ", and as many of each argument but x");
        }
    }
    const Launch launch(x);
    const Tensor rows = readable(x);
    std::vector<Product> products;
    for (size_t i = 0; i < count; ++i) {
        const Shape matrix{out_features[i], x.size(-1)};
        products.emplace_back(rows, biases[i], words[i], suh[i], svh[i], matrix, block);
    }
    return few_tokens(products, {nullptr, 1}, launch);
}

// Rows by the weights of their owners, int32 [R], among words [experts, ...]; zeros for those of none.
Tensor gemm_trellis_rows(const Tensor& x, const Tensor& owners, const Tensor& words, const Tensor& suh,
                         const Tensor& svh, ShapeRef matrix, int64_t block) {
    const Launch launch(x);
    const Tensor own = as_contiguous(owners);
    std::vector<Product> products;
    products.emplace_back(x, std::nullopt, words, suh, svh, matrix, block);
    return few_tokens(products, {read<int32_t>(own), static_cast<int>(words.size(0))}, launch)[0];
}

// A product of as many tokens as hf_kbit_cuda_many_trellis_tokens says.
Tensor gemm_trellis_many(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& words, const Tensor& suh,
                         const Tensor& svh, ShapeRef matrix, int64_t block) {
    const Dtype dtype = float_dtype("x", x.scalar_type(), false);
    const Launch launch(x);
    Product product(x, bias, words, suh, svh, matrix, block);
    product.check_at_most(many_trellis_tokens(launch.gpu));
    const int64_t tokens = product.tokens;
    const ManyTrellisPlan plan =
        plan_many_trellis(product.arguments.across, product.arguments.down, tokens, launch.gpu);
    const int64_t width = many_trellis_width(product.arguments.sides.padded_in);
    Tensor inputs = new_tensor(x, {tokens, width}, ScalarType::Half);
    Tensor units = new_tensor(x, {tokens}, ScalarType::Float);
    const int64_t sum_bytes = many_trellis_sums(plan, tokens) * many_trellis_sum_bytes(plan.token_tile);
    Tensor sums = new_tensor(x, {sum_bytes}, ScalarType::Byte);
    check("many_trellis_tokens",
          cuda::many_trellis_tokens(product.arguments, dtype, tokens, plan, write<uint16_t>(inputs),
                                    write<float>(units), sums.mutable_data_ptr(), launch.gpu, launch.stream),
          plan);
    return product.y;
}

// The weights [*, N, K] in 16 bits of trellises whose sides are rotated in blocks of 128.
Tensor dense_trellis(const Tensor& words, const Tensor& suh, const Tensor& svh, ShapeRef matrix, std::string code,
                     ScalarType dtype) {
    const Dtype out_dtype = float_dtype("dtype", dtype, false);
    const Launch launch(words);
    const Weight weight(words, suh, svh, matrix, 128);
    const Shape shape = shape_of(words);
    Tensor out = new_tensor(words, concat(Shape(shape.begin(), shape.end() - 3), {matrix[0], matrix[1]}), dtype);
    if (out.numel() > 0) {
        const int64_t count = out.numel() / (matrix[0] * matrix[1]);
        check("dense_trellis", cuda::dense_trellis(read<uint32_t>(weight.tiles), check_code(code), weight.bits,
                                                   read<uint16_t>(weight.suh), read<uint16_t>(weight.svh), count,
                                                   weight.across, weight.down, matrix[0], matrix[1],
                                                   out.mutable_data_ptr(), out_dtype, launch.gpu, launch.stream));
    }
    return out;
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, CUDA, library) {
    library.impl("gemm_trellis_few", TORCH_BOX(&gemm_trellis_few));
    library.impl("gemm_trellis_rows", TORCH_BOX(&gemm_trellis_rows));
    library.impl("gemm_trellis_many", TORCH_BOX(&gemm_trellis_many));
    library.impl("dense_trellis", TORCH_BOX(&dense_trellis));
}

}  // namespace

}  // namespace hf_kbit::backend
