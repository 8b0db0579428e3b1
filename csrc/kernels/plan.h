// What all plans share: the sizes that kernels can count, the bytes of a slab, and how a plan prints itself.
// Everything in plan files is a pure function, tested on a CPU (tests/csrc/test_plans.py).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "common/format.h"
#include "kernels/arch.h"

namespace hf_kbit {

// The smallest i with 2^i >= n.
constexpr int log2_ceil(int64_t n) {
    int log2 = 0;
    while (int64_t{1} << log2 < n) ++log2;
    return log2;
}

// As in "warps=16 split=2".
inline std::string print_fields(std::initializer_list<std::pair<const char*, int64_t>> fields) {
    std::string text;
    for (const auto& [name, value] : fields) {
        text += (text.empty() ? "" : " ") + std::string(name) + "=" + std::to_string(value);
    }
    return text;
}

// The fused kernels need asynchronous copies, and bfloat16 on tensor cores.
constexpr bool has_gemm(int arch) { return arch >= 800; }

// Kernels put a table where it begins this far into shared memory. Below lies what the driver keeps, 1024 bytes now
// (sm_75: none); were it more, the table had to move.
constexpr int kSharedReserved = 1024;
constexpr int kPairTableBytes = 64 << 10;  // of pairs of levels, in the kernels for many tokens

// The fused kernels count features, row tiles and slabs in 32 bits; only addresses of words, scales and y have 64. A
// weight beyond these sizes has trillions of elements, or more than 134 million rows or columns.
constexpr int64_t kMostFeatures = int64_t{1} << 27, kMostSlabs = int64_t{1} << 30;
static_assert(8 * kMostFeatures < INT32_MAX, "eight tokens' columns");
static_assert(kMostSlabs + 16 * num_slabs(kMostFeatures) < INT32_MAX,
              "a step of a CTA's 16 warps beyond the last slab");
constexpr bool fits_gemm(int64_t out_features, int64_t in_features) {
    if (out_features > kMostFeatures || in_features > kMostFeatures) return false;
    const TileLayout layout(out_features, in_features);
    return layout.row_tiles * layout.slabs <= kMostSlabs;
}

// Whether the fused kernels run on a GPU, and can count the slabs of a weight.
constexpr bool can_fuse(int64_t out_features, int64_t in_features, const Gpu& gpu) {
    return has_gemm(gpu.arch) && gpu.shared_reserved <= kSharedReserved && fits_gemm(out_features, in_features);
}

// The kernels that go through any weight, in either form, count its blocks in 32 bits, with a few turns of the largest
// grid to spare: 129 billion weights.
constexpr int64_t kMostBlocks = int64_t{15} << 28;

constexpr int kScaleBytes = TileLayout::kSlabScales;  // of a slab
constexpr int word_bytes(int bits) { return TileLayout::slab_words(bits) * 4; }
constexpr int slab_bytes(int bits) { return word_bytes(bits) + kScaleBytes; }

}  // namespace hf_kbit
