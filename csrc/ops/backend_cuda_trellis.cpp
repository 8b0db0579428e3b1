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
        check_dtype("words", words, {ScalarType::Short});
        check_side("suh", suh, across, matrix[1], block);
        check_side("svh", svh, down, matrix[0], block);
    }

    TrellisSides sides(ShapeRef matrix, int64_t block) const {
        return {read<uint16_t>(suh), read<uint16_t>(svh),    matrix[1], matrix[0], kTrellisTile * across,
                kTrellisTile * down, static_cast<int>(block)};
    }

    static void check_side(std::string_view name, const Tensor& scales, int64_t tiles, int64_t features,
                           int64_t block) {
        check_dtype(name, scales, {ScalarType::Half});
        const int64_t padded = kTrellisTile * tiles;
        if (scales.size(-1) == padded && padded % block == 0 && features <= padded) return;
        refuse(name, "shape " + to_string(shape_of(scales)),
               "[*, " + std::to_string(padded) + "], a multiple of " + std::to_string(block) + " and at least " +
                   std::to_string(features));
    }
};

// Products of x by up to kTrellisParts of them, whose widths are the same, with the tensors that own what kernels read
// and write.
struct Products {
    const Tensor x;
    const int64_t tokens;
    std::vector<Weight> weights;
    std::vector<std::optional<Tensor>> biases;
    std::vector<Tensor> y;
    std::vector<cuda::TrellisProduct> arguments;

    Products(const Tensor& x, const std::vector<std::optional<Tensor>>& of_biases, const std::vector<Tensor>& words,
             const std::vector<Tensor>& suh, const std::vector<Tensor>& svh, const std::vector<int64_t>& out_features,
             Code code, int64_t block)
        : x(readable(x)), tokens(x.numel() / x.size(-1)) {
        const size_t count = words.size();
        for (const size_t size : {of_biases.size(), suh.size(), svh.size(), out_features.size()}) {
            if (size != count || count < 1 || count > kTrellisParts) {
                refuse("words", std::to_string(count) + " beside " + std::to_string(size),
                       "1 to " + std::to_string(kTrellisParts) + ", and as many of each argument but x");
            }
        }
        for (size_t i = 0; i < count; ++i) {
            const Shape matrix{out_features[i], x.size(-1)};
            const Weight& own = weights.emplace_back(words[i], suh[i], svh[i], matrix, block);
            if (own.across != weights[0].across || own.bits != weights[0].bits) {
                refuse("words", "shape " + to_string(shape_of(words[i])) + " beside " + to_string(shape_of(words[0])),
                       "products of one width and as many bits");
            }
            if (of_biases[i]) check_dtype("bias", *of_biases[i], {x.scalar_type()});
            if (of_biases[i] && of_biases[i]->numel() != matrix[0]) {
                refuse("bias", "shape " + to_string(shape_of(*of_biases[i])), "[" + std::to_string(matrix[0]) + "]");
            }
            const auto& bias =
                biases.emplace_back(of_biases[i] ? std::optional<Tensor>(readable(*of_biases[i])) : std::nullopt);
            const Tensor& its_y = y.emplace_back(new_tensor(x, with_last(shape_of(x), matrix[0]), x.scalar_type()));
            arguments.push_back({this->x.const_data_ptr(), read<uint32_t>(own.tiles),
                                 bias ? bias->const_data_ptr() : nullptr, its_y.mutable_data_ptr(), own.across,
                                 own.down, own.bits, code, own.sides(matrix, block)});
        }
    }

    void check_at_most(int64_t most) const {
        if (tokens > most) refuse("x", std::to_string(tokens) + " rows", "at most " + std::to_string(most));
    }
};

// What kernels of a call leave each other: parts of one tensor, since each tensor takes the host microseconds.
class Workspace {
public:
    Workspace(const Tensor& like, std::initializer_list<int64_t> sizes) {
        int64_t bytes = 0;
        for (const int64_t size : sizes) {
            starts_.push_back(bytes);
            bytes += ceil_div(size, kApart) * kApart;
        }
        memory_ = new_tensor(like, {bytes}, ScalarType::Byte);
    }

    template <typename T>
    T* part(size_t i) {
        return reinterpret_cast<T*>(write<std::byte>(memory_) + starts_.at(i));
    }

private:
    static constexpr int64_t kApart = 256;  // bytes: where torch's tensors start
    std::vector<int64_t> starts_;
    Tensor memory_;
};

constexpr cuda::TrellisExperts kNoExperts = {nullptr, nullptr, 0, 1, 1, false};

// Products that share x, widths, code and block, up to kTrellisParts, or one of rows of experts.
void few_tokens(const std::vector<cuda::TrellisProduct>& products, const cuda::TrellisExperts& experts,
                const Tensor& x, int64_t tokens, const Launch& launch) {
    const auto& one = products.at(0);
    std::vector<int64_t> downs;
    for (const auto& product : products) downs.push_back(product.down);
    const int64_t rows = experts.offsets ? tokens * experts.weights : 1,
                  items = tokens * experts.weights * static_cast<int64_t>(products.size());
    const FewTrellisPlan plan = plan_few_trellis(rows, one.across, downs, one.bits,
                                                 static_cast<int>(experts.offsets ? 2 : 2 * tokens), launch.gpu);
    Workspace own(x, {2 * items * one.sides.padded_in, items * static_cast<int64_t>(sizeof(TrellisToken)),
                      4 * few_trellis_sums(plan, experts.offsets ? rows : tokens), 4 * rows * few_trellis_counts(plan),
                      experts.offsets ? 4 * rows : 0});
    const cuda::FewTrellisRoom room{own.part<int8_t>(0), own.part<TrellisToken>(1), own.part<int32_t>(2),
                                    own.part<uint32_t>(3), own.part<int32_t>(4)};
    check("few_trellis_tokens",
          cuda::few_trellis_tokens(products, experts, float_dtype("x", x.scalar_type(), false), tokens, plan, room,
                                   launch.gpu, launch.stream),
          plan);
}

// Products of up to kFewTrellisTokens tokens by weights of code mul1 (hf_kbit/ops/trellis.py).
std::vector<Tensor> gemm_trellis_few(const Tensor& x, std::vector<std::optional<Tensor>> biases,
                                     std::vector<Tensor> words, std::vector<Tensor> suh, std::vector<Tensor> svh,
                                     std::vector<int64_t> out_features, int64_t block) {
    const Launch launch(x);
    const Products products(x, biases, words, suh, svh, out_features, Code::mul1, block);
    products.check_at_most(kFewTrellisTokens);
    few_tokens(products.arguments, kNoExperts, products.x, products.tokens, launch);
    return products.y;
}

// Kernels that work in whole numbers, or in 8 bits, take code mul1.
Code check_code_of(const std::string& how, const std::string& code, bool mul1) {
    const Code its = check_code(code);
    if (mul1 && its != Code::mul1) refuse("code", code + " and " + how, "mul1");
    return its;
}

// As few_tokens.
void many_tokens(const std::vector<cuda::TrellisProduct>& products, const cuda::TrellisExperts& experts,
                 const Tensor& x, int64_t tokens, bool int8, const Launch& launch) {
    const auto& one = products.at(0);
    std::vector<int64_t> downs;
    for (const auto& product : products) downs.push_back(product.down);
    const ManyTrellisPlan plan = experts.offsets
                                     ? plan_many_trellis_experts(one.down, tokens, experts.count, int8, launch.gpu)
                                     : plan_many_trellis(one.across, downs, tokens, int8, launch.gpu);
    const int64_t rows = tokens * experts.weights * static_cast<int64_t>(products.size());
    if (int8 && one.sides.in_features > kMostInt8TrellisFeatures) {
        refuse("x", std::to_string(one.sides.in_features) + " columns of 8 bits",
               "at most " + std::to_string(kMostInt8TrellisFeatures));
    }
    // Places of sums are int32 in the kernel.
    const int64_t sums = many_trellis_sums(plan, tokens * experts.weights);
    if (rows >= int64_t{1} << 31 || sums / plan.split >= int64_t{1} << 31) {
        refuse("x", std::to_string(tokens) + " rows", "fewer than 2**31 outputs");
    }
    const int64_t tiles =
        experts.offsets ? 1 + most_many_trellis_tiles(plan, experts.count, tokens, experts.weights) : 0;
    Workspace own(x, {(int8 ? 1 : 2) * rows * many_trellis_width(one.sides.padded_in), 4 * rows, 2 * sums,
                      int8 ? 4 * rows : 0, many_trellis_decoded(plan, one.across), experts.offsets ? 4 * rows : 0,
                      tiles * static_cast<int64_t>(sizeof(cuda::ManyTrellisTile))});
    const cuda::ManyTrellisRoom room{own.part<void>(0),
                                     own.part<float>(1),
                                     own.part<uint16_t>(2),
                                     own.part<int32_t>(3),
                                     own.part<int8_t>(4),
                                     own.part<int32_t>(5),
                                     own.part<cuda::ManyTrellisTile>(6)};
    check("many_trellis_tokens",
          cuda::many_trellis_tokens(products, experts, float_dtype("x", x.scalar_type(), false), tokens, plan, room,
                                    launch.gpu, launch.stream),
          plan);
}

// Products of as many tokens as hf_kbit_cuda_many_trellis_tokens says; of any number, if inputs are rounded to 8
// bits.
std::vector<Tensor> gemm_trellis_many(const Tensor& x, std::vector<std::optional<Tensor>> biases,
                                      std::vector<Tensor> words, std::vector<Tensor> suh, std::vector<Tensor> svh,
                                      std::vector<int64_t> out_features, std::string code, int64_t block, bool int8) {
    const Launch launch(x);
    const Products products(x, biases, words, suh, svh, out_features, check_code_of("int8", code, int8), block);
    if (!int8) products.check_at_most(many_trellis_tokens(launch.gpu));
    many_tokens(products.arguments, kNoExperts, products.x, products.tokens, int8, launch);
    return products.y;
}

// y [R, weights * N] of experts (kernels.h), words [experts, weights, ...], matrix being [N, K] of one; offsets and
// rows int32. how: "few", of at most kFewTrellisRows rows times weights, "many" or "int8".
Tensor gemm_trellis_experts(const Tensor& x, const std::optional<Tensor>& rows, const Tensor& offsets,
                            const Tensor& words, const Tensor& suh, const Tensor& svh, ShapeRef matrix,
                            std::string code, int64_t block, bool swiglu, std::string how) {
    const Launch launch(x);
    const Tensor own_x = readable(x), own_offsets = as_contiguous(offsets);
    const auto own_rows = rows ? std::optional<Tensor>(as_contiguous(*rows)) : std::nullopt;
    const Weight weight(words, suh, svh, matrix, block);
    const int64_t tokens = rows ? rows->numel() : x.size(0), count = words.size(0), weights = words.size(1);
    if (offsets.numel() != count + 1) {
        refuse("offsets", std::to_string(offsets.numel()), std::to_string(count + 1));
    }
    if (x.dim() != 2 || x.size(0) == 0 || x.size(1) != matrix[1] * (swiglu ? 2 : 1)) {
        refuse("x", "shape " + to_string(shape_of(x)), "rows of " + std::to_string(matrix[1] * (swiglu ? 2 : 1)));
    }
    Tensor y = new_tensor(x, {tokens, weights * matrix[0]}, x.scalar_type());
    const cuda::TrellisProduct product{own_x.const_data_ptr(),
                                       read<uint32_t>(weight.tiles),
                                       nullptr,
                                       y.mutable_data_ptr(),
                                       weight.across,
                                       weight.down,
                                       weight.bits,
                                       check_code_of(how, code, how != "many"),
                                       weight.sides(matrix, block)};
    const cuda::TrellisExperts experts{read<int32_t>(own_offsets),  own_rows ? read<int32_t>(*own_rows) : nullptr,
                                       static_cast<int>(x.size(0)), static_cast<int>(count),
                                       static_cast<int>(weights),   swiglu};
    if (how != "few") {
        many_tokens({product}, experts, x, tokens, how == "int8", launch);
    } else if (tokens * weights <= kFewTrellisRows) {
        few_tokens({product}, experts, x, tokens, launch);
    } else {
        refuse("x", std::to_string(tokens) + " rows", "at most " + std::to_string(kFewTrellisRows / weights));
    }
    return y;
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

// --- products, each by what is fastest ---

bool is_half(const Tensor& x, const cuda::Gpu& gpu) {
    return (x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::BFloat16) && gpu.arch >= 800;
}

enum class Way { few, many, int8, none };

// The kernels that multiply x by weights of so many rows, padded, in a launch.
Way way_of(const Tensor& x, int64_t rows, Code code, bool int8, const cuda::Gpu& gpu) {
    const int64_t width = x.size(-1), tokens = x.numel() / width;
    const bool mul1 = code == Code::mul1;
    if (!is_half(x, gpu) || tokens == 0) return Way::none;
    const int64_t most = width <= kMostFeatures && rows <= kMostFeatures ? many_trellis_tokens(gpu) : 0;
    if (mul1 && width <= kMostFewTrellisFeatures) {
        const bool large = most > 0 && rows * width >= fitted::many_trellis::kLarge;
        if (tokens <= (large ? fitted::many_trellis::kMostFewOfLarge : kFewTrellisTokens) || batch_invariant())
            return Way::few;
    }
    if (most == 0 || batch_invariant()) return Way::none;
    if (int8 && mul1 && width <= kMostInt8TrellisFeatures && tokens * rows < int64_t{1} << 31) return Way::int8;
    return tokens <= most ? Way::many : Way::none;
}

// Of what is decoded first.
Tensor by_the_weight(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& words, const Tensor& suh,
                     const Tensor& svh, const Shape& matrix, const std::string& code, int64_t block,
                     const cuda::Gpu& gpu) {
    using torch::stable::detail::from;
    if (x.numel() == 0) return new_tensor(x, with_last(shape_of(x), matrix[0]), x.scalar_type());
    if (batch_invariant()) {  // here, since of an error from Python torch would leave no words
        refuse("set_batch_invariant",
               "a product of " + dtype_name(x.scalar_type()) + " on cuda by " + std::to_string(matrix[1]) +
                   " columns of a trellis of code " + code,
               "float16 or bfloat16 on a GPU of compute capability 8.0 or newer, code mul1 and at most " +
                   std::to_string(kMostFewTrellisFeatures) + " columns");
    }
    if (is_half(x, gpu) && block == 128) {
        return linear(x, dense_trellis(words, suh, svh, {matrix.data(), matrix.size()}, code, x.scalar_type()), bias);
    }
    return call<8>("hf_kbit::gemm_trellis_decoded", "",
                   {from(x), from(bias), from(words), from(suh), from(svh), from(matrix), from(code), from(block)});
}

// As many at a time as the kernels take, of which none sees the others.
void few_in_turn(const Products& products, const Launch& launch) {
    for (int64_t start = 0; start < products.tokens; start += kFewTrellisTokens) {
        auto some = products.arguments;
        for (auto& one : some) {
            one.x = static_cast<const uint16_t*>(one.x) + start * one.sides.in_features;
            one.y = static_cast<uint16_t*>(one.y) + start * one.sides.out_features;
        }
        const int64_t count = std::min<int64_t>(products.tokens - start, kFewTrellisTokens);
        few_tokens(some, kNoExperts, products.x, count, launch);
    }
}

// Of weights of one width, in a launch if there are kernels for it.
std::vector<Tensor> in_a_launch(const Tensor& x, const std::vector<std::optional<Tensor>>& biases,
                                const std::vector<Tensor>& words, const std::vector<Tensor>& suh,
                                const std::vector<Tensor>& svh, const std::vector<int64_t>& out_features,
                                const std::string& code, int64_t block, bool int8) {
    const Launch launch(x);
    const Code its = check_code(code);
    int64_t rows = 0;
    for (const Tensor& scales : svh) rows += ceil_div(scales.size(-1), kManyTrellisRows) * kManyTrellisRows;
    const Way way = way_of(x, rows, its, int8, launch.gpu);
    if (way != Way::none) {
        const Products products(x, biases, words, suh, svh, out_features, its, block);
        if (way == Way::few) {
            few_in_turn(products, launch);
        } else {
            many_tokens(products.arguments, kNoExperts, products.x, products.tokens, way == Way::int8, launch);
        }
        return products.y;
    }
    std::vector<Tensor> made;
    for (size_t i = 0; i < words.size(); ++i) {
        const Shape matrix{out_features.at(i), x.size(-1)};
        made.push_back(
            by_the_weight(x, biases.at(i), words[i], suh.at(i), svh.at(i), matrix, code, block, launch.gpu));
    }
    return made;
}

template <bool int8>
Tensor gemm_trellis(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& words, const Tensor& suh,
                    const Tensor& svh, ShapeRef matrix, std::string code, int64_t block) {
    if (x.dim() == 0 || x.size(-1) != matrix[1]) {
        refuse("x", "shape " + to_string(shape_of(x)),
               "[*, " + std::to_string(matrix[1]) + "], the in_features of the weight");
    }
    return in_a_launch(x, {bias}, {words}, {suh}, {svh}, {matrix[0]}, code, block, int8).at(0);
}

std::vector<Tensor> gemm_trellis_group(const Tensor& x, std::vector<std::optional<Tensor>> biases,
                                       std::vector<Tensor> words, std::vector<Tensor> suh, std::vector<Tensor> svh,
                                       std::vector<int64_t> out_features, std::string code, int64_t block, bool int8) {
    const auto alike = [&](const Tensor& own) {
        return own.size(-1) == words[0].size(-1) && own.size(-2) == words[0].size(-2);
    };
    const size_t most = std::all_of(words.begin(), words.end(), alike) ? kTrellisParts : 1;
    std::vector<Tensor> made;
    for (size_t start = 0; start < words.size(); start += most) {
        const size_t stop = std::min(start + most, words.size());
        const auto some = [&](const auto& all) {
            return std::decay_t<decltype(all)>(all.begin() + start, all.begin() + stop);
        };
        for (Tensor& y :
             in_a_launch(x, some(biases), some(words), some(suh), some(svh), some(out_features), code, block, int8)) {
            made.push_back(std::move(y));
        }
    }
    return made;
}

STABLE_TORCH_LIBRARY_IMPL(hf_kbit, CUDA, library) {
    library.impl("gemm_trellis_few", TORCH_BOX(&gemm_trellis_few));
    library.impl("gemm_trellis_many", TORCH_BOX(&gemm_trellis_many));
    library.impl("gemm_trellis_experts", TORCH_BOX(&gemm_trellis_experts));
    library.impl("dense_trellis", TORCH_BOX(&dense_trellis));
    library.impl("gemm_trellis", TORCH_BOX(&gemm_trellis<false>));
    library.impl("gemm_trellis_inference", TORCH_BOX(&gemm_trellis<false>));
    library.impl("gemm_trellis_int8", TORCH_BOX(&gemm_trellis<true>));
    library.impl("gemm_trellis_group", TORCH_BOX(&gemm_trellis_group));
}

}  // namespace

}  // namespace hf_kbit::backend
