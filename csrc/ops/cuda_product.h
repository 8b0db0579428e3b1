// What products of the CUDA backend have in common: which weights their kernels take, and what these read and write.
#pragma once

#include <vector>

#include "kernels/hopper/plan.h"
#include "ops/cuda_launch.h"

namespace hf_kbit::backend {

inline bool fusable(const Packed& packed, Dtype dtype) {
    return packed.form == Form::tiles && (dtype == Dtype::float16 || dtype == Dtype::bfloat16);
}

// What a product's kernel reads and writes, with tensors that own the copies among it until the launch, and the new y.
struct Held {
    Tensor x, words, scales, codebook, y;
    std::optional<Tensor> bias;
    HeldTransform owner;
    cuda::Transform transform;  // that x still has to go through
    int bits;
    bool signed_scales;
    bool ordered = false;  // as x shall have its columns (Transformed)

    // x in pieces; y has the leading dimensions of `shape`.
    Held(const Tensor& x, Shape shape, Dtype dtype, const Packed& packed, const std::optional<Tensor>& with_bias)
        : x(x),
          words(aligned(packed.words)),
          scales(aligned(packed.scales)),
          codebook(packed.codebook),
          owner(packed),
          transform(owner.from(0)),
          bits(packed.bits),
          signed_scales(packed.signed_scales) {
        if (with_bias) bias = as_contiguous(*with_bias);
        shape.back() = packed.out_features;
        y = new_tensor(x, shape, scalar_type(dtype));
    }
    cuda::Product product() {
        return {x.const_data_ptr(),
                read<int32_t>(words),
                read<uint8_t>(scales),
                read<float>(codebook),
                bias ? bias->const_data_ptr() : nullptr,
                y.mutable_data_ptr(),
                y.size(-1),
                transform,
                signed_scales,
                ordered};
    }
};

// Products of weights of one width and form of scales that follow each other, as many as a launch takes on Hopper.
struct WgmmaLaunch {
    size_t first;
    int count;
    WgmmaPlan plan;
};

// plan(rows of the weights, how many there are, bits)
template <typename Plan>
std::vector<WgmmaLaunch> plan_launches(const std::vector<Held>& held, const Plan& plan) {
    std::vector<WgmmaLaunch> launches;
    for (size_t first = 0; first < held.size(); first += launches.back().count) {
        int64_t rows[kGemmParts];
        int count = 0;
        for (size_t i = first; i < held.size() && count < kGemmParts; ++i) {
            if (held[i].bits != held[first].bits || held[i].signed_scales != held[first].signed_scales) break;
            rows[count++] = held[i].y.size(-1);
        }
        launches.push_back({first, count, plan(rows, count, held[first].bits)});
    }
    return launches;
}

}  // namespace hf_kbit::backend
