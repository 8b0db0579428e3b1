// What products of the CPU backend have in common: how work is divided, what kernels read of a weight, and the rows of
// experts.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>
#include <tuple>

#include <torch/csrc/stable/ops.h>

#include "cpu/kernels.h"
#include "ops/backend.h"

namespace hf_kbit::backend {

// Work for a thread, in weights: less is not worth waking one up.
constexpr int64_t kGrain = 1 << 15;
inline int64_t row_grain(int64_t in_features) { return std::max<int64_t>(1, kGrain / in_features); }
inline int64_t tile_grain(int64_t across) { return row_grain(across * kTrellisSteps); }  // of rows of tiles

// Weights decoded at a time for more tokens: 16 MB of float32, small beside the model and large enough for a matmul.
constexpr int64_t kSlice = 1 << 22;

// Whether matrix products of bfloat16 are faster here than those of float32.
inline bool has_bfloat16_arithmetic() {
#if defined(__x86_64__)
    static const bool found = [] {
        unsigned eax, ebx, ecx, edx;
        if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
        const bool amx = edx & (1u << 22);
        return amx || (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 5)));
    }();
    return found;
#else
    return false;
#endif
}

inline const int32_t* words_of(const Packed& packed) {
    return static_cast<const int32_t*>(packed.words.const_data_ptr());
}
inline const uint8_t* scales_of(const Packed& packed) {
    return static_cast<const uint8_t*>(packed.scales.const_data_ptr());
}
inline const float* codebook_of(const Packed& packed) {
    return static_cast<const float*>(packed.codebook.const_data_ptr());
}

inline const uint8_t* column_scales_of(const Packed& packed) {
    return packed.columns ? static_cast<const uint8_t*>(packed.columns->const_data_ptr()) : nullptr;
}

// The same weight as planes.
inline Packed as_planes(const Packed& packed) {
    if (packed.form == Form::planes) return packed;
    Packed planes = packed;
    planes.form = Form::planes;
    const Shape shape = {packed.out_features, packed.in_features};
    std::tie(planes.words, planes.scales) = hf_kbit::repack(packed.words, packed.scales, packed.bits, shape, true);
    return planes;
}

// multiply(expert, its first row, how many it has), of those that have any; what is left of `to` becomes zeros.
template <typename Multiply>
void for_each_expert(const Packed& packed, const Tensor& offsets, Tensor& to, const Multiply& multiply) {
    const auto* ends = static_cast<const int32_t*>(offsets.const_data_ptr());
    for (int64_t expert = 0; expert < packed.count; ++expert) {
        const int64_t count = ends[expert + 1] - ends[expert];
        if (count > 0) multiply(expert, ends[expert], count);
    }
    Tensor rest = torch::stable::narrow(to, 0, ends[packed.count], to.size(0) - ends[packed.count]);
    torch::stable::zero_(rest);
}

// x[rows]
inline Tensor picked(const Tensor& x, const Tensor& rows) {
    const Tensor from = as_contiguous(x);
    const auto* index = static_cast<const int32_t*>(rows.const_data_ptr());
    const size_t bytes = x.size(1) * x.element_size();
    Tensor to = new_tensor(x, {rows.size(0), x.size(1)}, x.scalar_type());
    for (int64_t i = 0; i < rows.size(0); ++i) {
        if (index[i] < 0 || index[i] >= x.size(0)) {
            refuse("rows", std::to_string(index[i]), "from 0 to " + std::to_string(x.size(0) - 1) + ", those of x");
        }
        std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + i * bytes,
                    static_cast<const char*>(from.const_data_ptr()) + index[i] * bytes, bytes);
    }
    return to;
}

}  // namespace hf_kbit::backend
