// The stored format and the tile layout as compiled code sees them. hf_kbit/format/spec.py defines the format,
// hf_kbit/format/reference.py the tiles; the tests compare every kernel with both.
#pragma once

#include <cstdint>

namespace hf_kbit {

constexpr int kBlockSize = 32;  // in_features that share one scale
constexpr int kMinBits = 2;
constexpr int kMaxBits = 5;

// Steps between E4M4 bytes, down and up from that of absmax, in which a scale is searched.
constexpr int search_below(bool signed_scales) { return signed_scales ? 13 : 16; }
constexpr int search_above(bool signed_scales) { return signed_scales ? 9 : 6; }

// The bit of an absmax byte that is its sign, where scales have signs; the others are E4M4 then, of its lower half.
constexpr uint32_t kSignBit = 0x80;
constexpr int most_scale(bool signed_scales) { return signed_scales ? 0x7F : 0xFF; }  // of bytes, without a sign

constexpr int kTileRows = 16;   // out_features of a tile
constexpr int kSlabBlocks = 8;  // blocks along K of a slab: four tiles of 64 columns
constexpr int kSlabColumns = kSlabBlocks * kBlockSize;
constexpr int kLanes = 32;  // of a warp, among which the words of a slab are divided

enum class Dtype { float32, float16, bfloat16, float64 };
constexpr int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t num_blocks(int64_t in_features) { return ceil_div(in_features, kBlockSize); }

constexpr int64_t num_slabs(int64_t in_features) { return ceil_div(num_blocks(in_features), kSlabBlocks); }

// How the tiles of a weight lie in memory: slab after slab, along K first. All slabs are whole.
struct TileLayout {
    int64_t row_tiles;  // of kTileRows rows
    int64_t slabs;      // of a row tile

    constexpr TileLayout(int64_t out_features, int64_t in_features)
        : row_tiles(ceil_div(out_features, kTileRows)), slabs(num_slabs(in_features)) {}

    // Of a slab: its 32-bit words, in `bits` turns of four for each lane, and its scales, a byte each.
    static constexpr int slab_words(int bits) { return bits * kLanes * 4; }
    static constexpr int kSlabScales = kTileRows * kSlabBlocks;
};

}  // namespace hf_kbit
