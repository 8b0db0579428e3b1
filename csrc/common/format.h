// The stored format and the tile layout as compiled code sees them. hf_kbit/format.py defines the format,
// hf_kbit/reference.py the tiles; the tests compare every kernel with both.
#pragma once

#include <cstdint>

namespace hf_kbit {

constexpr int kBlockSize = 32;  // in_features that share one scale
constexpr int kMinBits = 2;
constexpr int kMaxBits = 5;

// Steps between E4M4 bytes, down and up from that of absmax, in which a scale is searched.
constexpr int kSearchBelow = 16;
constexpr int kSearchAbove = 6;

constexpr int kTileRows = 16;   // out_features of a tile
constexpr int kSlabBlocks = 8;  // blocks along K of a slab: four tiles of 64 columns
constexpr int kLanes = 32;

enum class Dtype { float32, float16, bfloat16, float64 };
constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t num_blocks(int64_t in_features) { return ceil_div(in_features, kBlockSize); }

}  // namespace hf_kbit
