// The products of 8-bit inputs of the CUDA backend: which kernels make them, and what comes before their launches.
#include <algorithm>
#include <tuple>

#include "kernels/path.h"
#include "ops/cuda_product.h"

namespace hf_kbit::backend {

void int8_inverses(const Packed& packed, Tensor& inverses) {
    const Launch launch(packed.words);
    Tensor words = packed.words, scales = packed.scales;
    if (packed.form == Form::planes) {
        const std::array<int64_t, 2> shape{packed.out_features, packed.in_features};
        std::tie(words, scales) = hf_kbit::repack(words, scales, packed.bits, {shape.data(), shape.size()}, false);
    }
    words = aligned(words), scales = aligned(scales);
    check("int8_inverses",
          cuda::int8_inverses(read<int32_t>(words), read<uint8_t>(scales), read<float>(packed.codebook), packed.bits,
                              packed.out_features, packed.in_features, inverses.mutable_data_ptr(), launch.gpu,
                              launch.stream));
}

// So that a token is rounded alike whatever tokens are beside it, batch-invariant products all take 8-bit inputs.
bool takes_int8(int64_t tokens) { return tokens > kMost16BitTokens || batch_invariant(); }

bool experts_take_int8(int64_t rows, int64_t experts) { return rows > kMost16BitRows * experts || batch_invariant(); }

namespace {

// Products of x as 8-bit inputs, which they hold.
struct HeldInt8 {
    Tensor made;
    std::vector<cuda::Int8Product> products;
    int32_t* sums;
    uint32_t* zeros;
};

// Makes the `tokens` of x, which all have in common, int8, once for those with the same column scales; up to
// kGemmParts different ones are one launch. One allocation for these, each with its scales, and numbers for sums of
// divided tiles, then zeros.
HeldInt8 to_int8(std::vector<Held>& held, Dtype dtype, int64_t tokens, const std::vector<Tensor>& inverses,
                 int64_t num_sums, int64_t num_zeros, const Launch& launch) {
    const Tensor x = held[0].x;
    const int64_t in_features = x.size(-1), token_bytes = tokens * num_blocks(in_features) * kBlockSize;
    const int64_t output_bytes = token_bytes + ceil_div(tokens + 1, 4) * 16;
    std::vector<cuda::Int8Tokens> outputs;
    std::vector<size_t> numbers;  // of each weight's output
    for (const Held& one : held) {
        const auto same = [&](const cuda::Int8Tokens& output) { return output.columns == one.transform.columns; };
        numbers.push_back(std::find_if(outputs.begin(), outputs.end(), same) - outputs.begin());
        if (numbers.back() == outputs.size()) outputs.push_back({one.transform.columns, nullptr, nullptr});
    }
    const auto count = static_cast<int64_t>(outputs.size());
    Tensor made = new_tensor(x, {count * output_bytes + (num_sums + num_zeros) * 4}, ScalarType::Byte);
    uint8_t* to = write<uint8_t>(made);
    for (cuda::Int8Tokens& output : outputs) {
        output.out = reinterpret_cast<int8_t*>(to);
        output.scales = reinterpret_cast<float*>(to + token_bytes);
        to += output_bytes;
    }
    auto* const sums = reinterpret_cast<int32_t*>(to);
    auto* const zeros = reinterpret_cast<uint32_t*>(sums + num_sums);
    for (int64_t first = 0; first < count; first += kGemmParts) {
        check("tokens_to_int8",
              cuda::tokens_to_int8(x.const_data_ptr(), {nullptr, tokens}, false, dtype, &outputs[first],
                                   static_cast<int>(std::min<int64_t>(kGemmParts, count - first)), tokens, in_features,
                                   zeros, first == 0 ? static_cast<int>(num_zeros) : 0, launch.gpu, launch.stream));
    }
    std::vector<cuda::Int8Product> products;
    for (size_t i = 0; i < held.size(); ++i) {
        const cuda::Int8Tokens& output = outputs[numbers[i]];
        products.push_back({held[i].product(), inverses[i].const_data_ptr(), output.scales});
        products.back().x = output.out;
    }
    return {made, products, sums, zeros};
}

void multiply_by_mma(std::vector<Held>& held, const std::vector<Tensor>& inverses, Dtype dtype, int64_t tokens,
                     const Launch& launch) {
    const int64_t in_features = held[0].x.size(-1);
    std::vector<MmaPlan> plans;
    int64_t sums = 0;  // one launch after the other uses the same sums
    for (const Held& one : held) {
        plans.push_back(plan_mma_int8(tokens, one.y.size(-1), in_features, launch.gpu));
        sums = std::max(sums, mma_int8_partial_words(plans.back()));
    }
    const HeldInt8 int8 = to_int8(held, dtype, tokens, inverses, sums, 0, launch);
    for (size_t i = 0; i < held.size(); ++i) {
        check("gemm_mma_int8",
              cuda::gemm_mma_int8(int8.products[i], dtype, held[i].bits, tokens, in_features, plans[i], int8.sums,
                                  launch.gpu, launch.stream),
              plans[i]);
    }
}

void multiply_by_wgmma(std::vector<Held>& held, const std::vector<Tensor>& inverses, Dtype dtype, int64_t tokens,
                       const Launch& launch) {
    const int64_t in_features = held[0].x.size(-1);
    const auto launches = plan_launches(held, [&](const int64_t* rows, int count, int bits) {
        return plan_int8(tokens, rows, count, in_features, bits, launch.gpu);
    });
    int64_t sums = 0, flags = 0;  // one launch after the other uses the same sums
    for (const WgmmaLaunch& one : launches) {
        sums = std::max(sums, wgmma_partial_sums(one.plan));
        flags += wgmma_partial_flags(one.plan);
    }
    const HeldInt8 int8 = to_int8(held, dtype, tokens, inverses, sums, flags, launch);
    uint32_t* flag = int8.zeros;
    for (const auto& [first, count, plan] : launches) {
        check("gemm_int8",
              cuda::gemm_int8(&int8.products[first], count, dtype, held[first].bits, tokens, in_features, plan,
                              int8.sums, flag, launch.gpu, launch.stream),
              plan);
        flag += wgmma_partial_flags(plan);
    }
}

}  // namespace

// On Hopper one kernel for weights of the same width, but for large ones of many tokens, elsewhere one for each, which
// decodes to int8 and multiplies, after another one for x. Where there is none inputs stay in 16 bits.
std::vector<Tensor> gemm_int8(const Tensor& x, Dtype dtype, const std::vector<Packed>& weights,
                              const std::vector<std::optional<Tensor>>& biases, const std::vector<Tensor>& inverses) {
    std::vector<Tensor> products, known;
    if (weights.empty()) return products;
    const Launch launch(x);
    const int64_t tokens = x.numel() / x.size(-1);
    std::vector<Held> held;
    Tensor rows = x;
    for (size_t i = 0; i < weights.size(); ++i) {
        const Packed& packed = weights[i];
        if (!fusable(packed, dtype) || !int8_is_fused(tokens, packed.out_features, packed.in_features, launch.gpu)) {
            products.push_back(gemm(x, dtype, packed, biases[i]));
            continue;
        }
        if (weights.size() > 1 && !int8_is_joined(tokens, packed.out_features, packed.in_features)) {
            products.push_back(gemm_int8(x, dtype, {packed}, {biases[i]}, {inverses[i]})[0]);
            continue;
        }
        if (held.empty()) rows = in_pieces(x);
        held.emplace_back(rows, shape_of(x), dtype, packed, biases[i]);
        known.push_back(inverses[i]);
        products.push_back(held.back().y);
    }
    if (held.empty()) return products;
    (has_mma_path(launch.gpu.arch) ? multiply_by_mma : multiply_by_wgmma)(held, known, dtype, tokens, launch);
    return products;
}

namespace {

// Of tiles: those of all experts are the tiles of one matrix, whose rows are padded for each.
Tensor inverses_of_experts(const Packed& packed) {
    const int64_t rows = ceil_div(packed.out_features, kTileRows) * kTileRows;
    Packed all = packed;
    all.out_features = packed.count * rows;
    Tensor found = new_tensor(packed.words, {packed.count, rows}, ScalarType::Half);
    int8_inverses(all, found);
    return as_contiguous(torch::stable::narrow(found, 1, 0, packed.out_features));
}

// Of `count` rows of experts, with their scales; an allocation. Where rows pick tokens often enough these are made
// int8 first, then copied.
struct Int8Rows {
    Tensor made;
    const int8_t* x;
    const float* scales;
};
Int8Rows rows_to_int8(const Held& held, const cuda::Rows& rows, bool swiglu, Dtype dtype, int64_t count,
                      const Launch& launch) {
    const int64_t in_features = held.x.size(-1) / (swiglu ? 2 : 1), columns = num_blocks(in_features) * kBlockSize;
    const bool copied = rows.index && int8_rows_are_copied(count, rows.count, swiglu);
    const auto bytes = [&](int64_t tokens) { return tokens * columns + ceil_div(tokens + 1, 4) * 16; };
    Tensor made = new_tensor(held.x, {bytes(count) + (copied ? bytes(rows.count) : 0)}, ScalarType::Byte);
    const auto at = [&](int64_t first, int64_t tokens) {
        uint8_t* const to = write<uint8_t>(made) + first;
        return cuda::Int8Tokens{held.transform.columns, reinterpret_cast<int8_t*>(to),
                                reinterpret_cast<float*>(to + tokens * columns)};
    };
    const auto make = [&](const cuda::Rows& of, int64_t tokens, const cuda::Int8Tokens& to) {
        check("tokens_to_int8", cuda::tokens_to_int8(held.x.const_data_ptr(), of, swiglu, dtype, &to, 1, tokens,
                                                     in_features, nullptr, 0, launch.gpu, launch.stream));
    };
    const cuda::Int8Tokens found = at(0, count);
    if (copied) {
        const cuda::Int8Tokens tokens = at(bytes(count), rows.count);
        make({nullptr, rows.count}, rows.count, tokens);
        check("copy_int8_tokens",
              cuda::copy_int8_tokens(tokens, rows, columns, count, found, launch.gpu, launch.stream));
    } else {
        make(rows, count, found);
    }
    return {made, found.out, found.scales};
}

}  // namespace

// In one kernel, after those for x, as gemm_int8.
Tensor gemm_experts_int8(const Tensor& x, Dtype dtype, const Packed& packed, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& rows, const Tensor& offsets,
                         const std::optional<Tensor>& inverses, bool swiglu) {
    const Launch launch(x);
    const int64_t count = rows ? rows->size(0) : x.size(0), in_features = packed.in_features;
    if (!fusable(packed, dtype) ||
        !experts_are_fused(count, packed.count, packed.out_features, in_features, launch.gpu)) {
        return gemm_experts(x, dtype, packed, bias, rows, offsets, swiglu);
    }
    if (swiglu && in_features % 8 != 0) {  // halves of rows are read in pieces of eight numbers
        return gemm_experts_int8(gated(x), dtype, packed, bias, rows, offsets, inverses, false);
    }
    const Tensor known = inverses ? *inverses : inverses_of_experts(packed);
    Held held(in_pieces(x), {count, in_features}, dtype, packed, bias);
    const cuda::Rows taken{rows ? read<int32_t>(*rows) : nullptr, x.size(0)};
    const Int8Rows inputs = rows_to_int8(held, taken, swiglu, dtype, count, launch);
    cuda::Int8Product product{held.product(), known.const_data_ptr(), inputs.scales};
    product.x = inputs.x;
    const WgmmaPlan plan =
        plan_experts_int8(count, packed.count, packed.out_features, in_features, packed.bits, launch.gpu);
    check("gemm_experts_int8",
          cuda::experts_int8(product, read<int32_t>(offsets), static_cast<int>(packed.count), dtype, packed.bits,
                             count, in_features, plan, launch.gpu, launch.stream),
          plan);
    return held.y;
}

}  // namespace hf_kbit::backend
