// AVX-512 with AMX: tiles of bfloat16, and AVX512_BF16 to round to it. All but products of bfloat16 is avx512.cpp's.
//
// A tile register holds 16 rows of 64 bytes; TDPBF16PS adds the products of 16 rows of 32 weights and 32 x 16 inputs
// to 16 x 16 sums of float32. The order of the 32 is free, as long as inputs have the same. So what decode_group
// gives, a weight of each of 16 blocks of a row, is put down as it comes: two such vectors, rounded, are a row of a
// tile, and a group of 512 columns is 16 tiles. The panel has the inputs in this order, as pairs of columns for 16
// tokens: panel[group][token / 16][tile][pair][token % 16][2]. Columns past the last one are zeros; rows and tokens
// past the last one are whatever memory holds, for nothing of them gets into the sums of others.
//
// kWeightRows x 512 weights are decoded to a buffer that stays in the L2 cache and are multiplied with all tokens,
// whose part of the panel is read once for so many rows; 32 x 32 sums at a time, which are 4 of the 8 registers.
#if defined(HF_KBIT_AMX)

#include "cpu/amx_bfloat16.h"
#include "cpu/avx512.h"

namespace hf_kbit::cpu {

namespace {

static_assert(kGroupTiles == kGroupVectors / 2);
constexpr int64_t kFewestTokens = 5;  // fewer are faster without tiles (a Xeon, 2 threads, 2026-11-23)

bool uses_tiles(Dtype dtype, int64_t tokens, bool batch_invariant) {
    return dtype == Dtype::bfloat16 && kFewestTokens <= tokens && tokens <= kMostTileTokens && !batch_invariant;
}

// The tiles of one row and group, rounded to bfloat16.
template <int bits>
void decode_row(const Group<Avx512, bits>& group, uint32_t sign, const Avx512::Levels<bits>& levels,
                uint16_t* weights) {
    const auto scales = Avx512::load_scales(group.scales, sign);
    Avx512::F first;
    decode_group<Avx512>(group.words, levels, [&](int v, int, Avx512::F values) {
        const auto scaled = Avx512::mul(values, scales);
        if (v % 2 == 0) {
            first = scaled;
        } else {
            const auto row = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled, first));
            _mm512_store_si512(weights + v / 2 * kTile, row);
        }
    });
}

// out[token][row] of `rows` rows of a tile of sums and `tokens` of its tokens.
void store_tile(const float* totals, int rows, int64_t tokens, const uint16_t* bias, uint16_t* out,
                int64_t out_features) {
    const __m512i column = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              Avx512::splat(kEdge));
    uint16_t padded[kEdge] = {};
    if (bias != nullptr) std::memcpy(padded, bias, static_cast<size_t>(rows) * sizeof *bias);
    const auto addend = Avx512::load_as<Dtype::bfloat16>(padded);
    for (int64_t t = 0; t < tokens; ++t) {
        const auto sums = _mm512_i32gather_ps(column, totals + t, sizeof *totals);
        Avx512::store_as<Dtype::bfloat16>(padded, Avx512::add(sums, addend));
        std::memcpy(out + t * out_features, padded, static_cast<size_t>(rows) * sizeof *out);
    }
}

template <int bits>
void tile_gemm_rows(const uint16_t* panel, int64_t tokens, const int32_t* planes, const uint8_t* absmax, uint32_t sign,
                    const float* codebook, const uint16_t* bias, uint16_t* out, int64_t out_features,
                    int64_t in_features, int64_t begin, int64_t end) {
    const Avx512::Levels<bits> levels(codebook);
    const TileRegisters registers;
    const int64_t blocks = num_blocks(in_features), groups = ceil_div(blocks, kEdge);
    const int token_tiles = static_cast<int>(ceil_div(tokens, kEdge));
    alignas(64) uint16_t weights[kWeightRows / kEdge * kGroupSize];
    alignas(64) float totals[kWeightRows / kEdge * kRowStep];
    for (int64_t row = begin; row < end; row += kWeightRows) {
        const int rows = static_cast<int>(end - row < kWeightRows ? end - row : kWeightRows);
        std::memset(totals, 0, sizeof totals);
        for (int64_t g = 0; g < groups; ++g) {
            for (int r = 0; r < rows; ++r) {
                const int64_t block = (row + r) * blocks;
                const Group<Avx512, bits> group(planes + block * bits, absmax + block, g, blocks);
                decode_row<bits>(group, sign, levels, weights + r / kEdge * kGroupSize + r % kEdge * 2 * kEdge);
            }
            finish_writing();
            const uint16_t* x = panel + g * token_tiles * kGroupSize;
            for (int t = 0; t < token_tiles; t += 2) {
                const auto multiply =
                    t + 2 <= token_tiles ? multiply_group<Bfloat16Tiles, 2> : multiply_group<Bfloat16Tiles, 1>;
                for (int r = 0; r < rows; r += 2 * kEdge) {
                    multiply(weights + r / kEdge * kGroupSize, x + t * kGroupSize,
                             totals + r / kEdge * kRowStep + t * kEdge * kEdge);
                }
            }
        }
        for (int r = 0; r < rows; r += kEdge) {
            for (int t = 0; t < token_tiles; ++t) {
                const int64_t first = row + r, token = t * kEdge;
                store_tile(totals + r / kEdge * kRowStep + t * kEdge * kEdge, rows - r < kEdge ? rows - r : kEdge,
                           tokens - token < kEdge ? tokens - token : kEdge, bias ? bias + first : nullptr,
                           out + token * out_features + first, out_features);
            }
        }
    }
}

void tile_gemm(const float* panel, int64_t tokens, bool batch_invariant, const int32_t* planes, const uint8_t* absmax,
               bool signed_scales, const float* codebook, int bits, const void* bias, void* out, Dtype dtype,
               int64_t out_features, int64_t in_features, int64_t begin, int64_t end) {
    if (!uses_tiles(dtype, tokens, batch_invariant)) {
        return avx512_implementation.gemm.multiply(panel, tokens, batch_invariant, planes, absmax, signed_scales,
                                                   codebook, bits, bias, out, dtype, out_features, in_features, begin,
                                                   end);
    }
    with_bits(bits, [&](auto width) {
        tile_gemm_rows<width()>(reinterpret_cast<const uint16_t*>(panel), tokens, planes, absmax,
                                signed_scales ? kSignBit : 0, codebook, static_cast<const uint16_t*>(bias),
                                static_cast<uint16_t*>(out), out_features, in_features, begin, end);
    });
}

int64_t tile_gemm_panel_size(Dtype dtype, int64_t tokens, bool batch_invariant, int64_t in_features) {
    if (!uses_tiles(dtype, tokens, batch_invariant)) {
        return avx512_implementation.gemm.panel_size(dtype, tokens, batch_invariant, in_features);
    }
    const int64_t numbers = ceil_div(num_blocks(in_features), kEdge) * ceil_div(tokens, kEdge) * kGroupSize;
    return numbers * static_cast<int64_t>(sizeof(uint16_t)) / static_cast<int64_t>(sizeof(float));
}

// Columns [first, first + 512) of a row of x, up to `held`, as column `token` of its tiles.
void pack_token(const char* row, int64_t first, int64_t held, const uint8_t* columns, bool rotated, int token,
                uint32_t* tiles) {
    for (int pair = 0; pair < kEdge / 2; ++pair) {
        alignas(64) uint32_t words[kBlockSize] = {};
        for (int side = 0; side < 2; ++side) {
            const int64_t column = kBlockSize * (2 * pair + side);
            if (column >= held) continue;
            Block<Avx512> values;
            transform_block<Avx512, Dtype::bfloat16>(row, first + column, held - column, columns, rotated, values);
            for (int half = 0; half < 2; ++half) {
                const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values[half]));
                const auto wide = _mm512_sll_epi32(_mm512_cvtepu16_epi32(rounded), _mm_cvtsi32_si128(16 * side));
                uint32_t* target = words + half * kEdge;
                _mm512_store_si512(target, Avx512::bit_or(_mm512_load_si512(target), wide));
            }
        }
        for (int i = 0; i < kBlockSize; ++i) {
            // Weight i is in vector 4 j + part of decode_group, of which two make a row of a tile.
            const int v = 4 * (i % 8) + i / 8, tile = v / 2, half = v % 2;
            tiles[(tile * kEdge + half * kEdge / 2 + pair) * kEdge + token] = words[i];
        }
    }
}

void tile_gemm_pack(const void* x, Dtype dtype, int64_t tokens, bool batch_invariant, int64_t in_features,
                    const uint8_t* columns, bool rotated, float* panel, int64_t begin, int64_t end) {
    if (!uses_tiles(dtype, tokens, batch_invariant)) {
        return avx512_implementation.gemm.pack(x, dtype, tokens, batch_invariant, in_features, columns, rotated, panel,
                                               begin, end);
    }
    constexpr int64_t kGroupColumns = kBlockSize * kEdge;
    const int64_t groups = ceil_div(in_features, kGroupColumns), token_tiles = ceil_div(tokens, kEdge);
    for (int64_t tile_begin = begin, tile_end; tile_begin < end; tile_begin = tile_end) {
        const int64_t tile = tile_begin / kEdge;
        tile_end = end < (tile + 1) * kEdge ? end : (tile + 1) * kEdge;
        for (int64_t g = 0; g < groups; ++g) {
            auto* tiles = reinterpret_cast<uint32_t*>(panel) + (g * token_tiles + tile) * kGroupSize / 2;
            for (int64_t token = tile_begin; token < tile_end; ++token) {
                const auto* row = static_cast<const char*>(x) + token * in_features * size_of(dtype);
                pack_token(row, g * kGroupColumns, in_features - g * kGroupColumns, columns, rotated,
                           static_cast<int>(token % kEdge), tiles);
            }
        }
    }
}

}  // namespace

const GemmImplementation amx_gemm = {tile_gemm_panel_size, tile_gemm_pack, tile_gemm};

}  // namespace hf_kbit::cpu

#endif
