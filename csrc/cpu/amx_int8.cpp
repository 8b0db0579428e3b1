// AVX-512 with AMX: tiles of int8, for products of 8-bit inputs with more than a few tokens. All else is
// avx512_int8.cpp's, and so are the order of the numbers of a group and the bytes of weights, which are 128 too large.
//
// TDPBUSD adds the products of 16 rows of 64 unsigned weights and 64 x 16 signed inputs to 16 x 16 sums of int32. A
// vector of a decoded row is a row of a tile as it comes. Of up to kMostTileTokens tokens at a time each thread makes
// tiles in `scratch`, x[group][token / 16][tile][4 columns][token % 16][4], and multiplies them with kWeightRows x 512
// weights, which are decoded once for all of them and stay in L1. Rows and tokens past the last one are whatever
// memory holds, for nothing of them gets into the sums of others.
#if defined(HF_KBIT_AMX_INT8)

#include "cpu/amx.h"
#include "cpu/avx512_int8.h"

namespace hf_kbit::cpu {

namespace {

constexpr int kGroupTiles = Avx512Int8::kWidth * kBlockSize / Avx512Int8::kVectorBytes;
constexpr int kGroupBytes = kGroupTiles * kTileBytes;  // of 16 rows, or of 16 tokens
constexpr int64_t kFewestTokens = 6;                   // fewer are faster without tiles (a Xeon, 2026-11-27)

// What two tiles of rows add with the first tile of tokens, and with the other.
struct Int8Tiles {
    static constexpr int kGroupTiles = cpu::kGroupTiles;
    static void first() {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 5, 6);
    }
    static void second() {
        _tile_dpbusd(2, 4, 7);
        _tile_dpbusd(3, 5, 7);
    }
};

int64_t groups_of(int64_t in_features) { return ceil_div(num_blocks(in_features), Avx512Int8::kWidth); }

int64_t scratch_bytes(int64_t count, int64_t in_features) {
    if (count < kFewestTokens) return avx512_int8.gemm.scratch_bytes(count, in_features);
    const int64_t tokens = count < kMostTileTokens ? count : kMostTileTokens;
    return groups_of(in_features) * ceil_div(tokens, kEdge) * kGroupBytes;
}

// A tile of 64 bytes of each of `held` tokens: a transposition of 16 x 16 words, pairs first, then fours.
void make_tile(const int8_t* tokens, int64_t row_bytes, int64_t held, int8_t* tile) {
    __m512i rows[kEdge], pairs[kEdge], fours[kEdge];
    for (int i = 0; i < kEdge; ++i) {
        rows[i] = i < held ? _mm512_load_si512(tokens + i * row_bytes) : _mm512_setzero_si512();
    }
    for (int i = 0; i < kEdge; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < kEdge; i += 4) {
        for (int half = 0; half < 2; ++half) {
            fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + half + 2]);
            fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + half + 2]);
        }
    }
    // fours[4 i + c] has word 4 q + c of tokens 4 i to 4 i + 3 in its quarter q.
    for (int c = 0; c < 4; ++c) {
        const auto store = [&](int word, __m512i row) { _mm512_store_si512(tile + word * 64, row); };
        const auto low = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x44);
        const auto low_after = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x44);
        const auto high = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xEE);
        const auto high_after = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xEE);
        store(c, _mm512_shuffle_i32x4(low, low_after, 0x88));
        store(4 + c, _mm512_shuffle_i32x4(low, low_after, 0xDD));
        store(8 + c, _mm512_shuffle_i32x4(high, high_after, 0x88));
        store(12 + c, _mm512_shuffle_i32x4(high, high_after, 0xDD));
    }
}

// The tiles of `count` tokens of the panel.
void make_tiles(const int8_t* panel, int64_t count, int64_t in_features, int8_t* tiles) {
    const int64_t row_bytes = avx512_int8.row_bytes(in_features), token_tiles = ceil_div(count, kEdge);
    for (int64_t g = 0; g < groups_of(in_features); ++g) {
        for (int64_t t = 0; t < token_tiles; ++t) {
            for (int tile = 0; tile < kGroupTiles; ++tile, tiles += kTileBytes) {
                make_tile(panel + t * kEdge * row_bytes + (g * kGroupTiles + tile) * 64, row_bytes, count - t * kEdge,
                          tiles);
            }
        }
    }
}

// out[token][row] of `rows` rows of a tile of sums and `count` of its tokens.
template <Dtype dtype>
void store_tile(const int32_t* totals, int rows, int64_t count, const Int8Token* tokens, Avx512::F units,
                const char* bias, char* out, int64_t out_features) {
    const __m512i column = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              Avx512::splat(kEdge));
    const auto bytes = static_cast<size_t>(rows * size_of(dtype));
    alignas(64) char padded[kEdge * sizeof(double)] = {};
    if (bias != nullptr) std::memcpy(padded, bias, bytes);
    const auto addend = Avx512::load_as<dtype>(padded);
    for (int64_t t = 0; t < count; ++t, out += out_features * size_of(dtype)) {
        const auto offset = static_cast<uint32_t>(Avx512Int8::kOffset) * static_cast<uint32_t>(tokens[t].sum);
        const auto sums = _mm512_sub_epi32(_mm512_i32gather_epi32(column, totals + t, 4), Avx512::splat(offset));
        auto y = Avx512::mul(Avx512::mul(_mm512_cvtepi32_ps(sums), Avx512::broadcast(tokens[t].scale)), units);
        if (bias != nullptr) y = Avx512::add(y, addend);
        Avx512::store_as<dtype>(padded, y);
        std::memcpy(out, padded, bytes);
    }
}

template <int bits, Dtype dtype>
void tile_gemm_rows(const int8_t* panel, const Int8Token* tokens, int64_t count, const Int8Weight& weight,
                    const char* bias, char* out, int8_t* tiles, int64_t begin, int64_t end) {
    float numbers[1 << bits];
    const float unit = int8_levels(weight.codebook, bits, numbers);
    const Avx512Int8::Int8Levels<bits> levels(numbers);
    const TileRegisters registers;
    const int64_t groups = groups_of(weight.in_features), out_features = weight.out_features;
    const int token_tiles = static_cast<int>(ceil_div(count, kEdge));
    alignas(64) int8_t weights[kWeightRows / kEdge * kGroupBytes];
    alignas(64) int32_t totals[kWeightRows / kEdge * kRowStep];
    make_tiles(panel, count, weight.in_features, tiles);
    for (int64_t row = begin; row < end; row += kWeightRows) {
        const int rows = static_cast<int>(end - row < kWeightRows ? end - row : kWeightRows);
        std::memset(totals, 0, sizeof totals);
        for (int64_t g = 0; g < groups; ++g) {
            for (int r = 0; r < rows; ++r) {
                int8_t* target = weights + r / kEdge * kGroupBytes + r % kEdge * 64;
                decode_int8_group<Avx512Int8, bits>(weight, row + r, g, levels, [&](int v, __m512i bytes) {
                    Avx512Int8::store_bytes(target + v * kTileBytes, bytes);
                });
            }
            finish_writing();
            const int8_t* x = tiles + g * token_tiles * kGroupBytes;
            for (int t = 0; t < token_tiles; t += 2) {
                const auto multiply =
                    t + 2 <= token_tiles ? multiply_group<Int8Tiles, 2> : multiply_group<Int8Tiles, 1>;
                for (int r = 0; r < rows; r += 2 * kEdge) {
                    multiply(weights + r / kEdge * kGroupBytes, x + t * kGroupBytes,
                             totals + r / kEdge * kRowStep + t * kEdge * kEdge);
                }
            }
        }
        for (int r = 0; r < rows; r += kEdge) {
            const int64_t first = row + r;
            const int held = rows - r < kEdge ? rows - r : kEdge;
            float units[kEdge] = {};
            for (int i = 0; i < held; ++i) units[i] = unit / float_of_float16(weight.inverses[first + i]);
            for (int t = 0; t < token_tiles; ++t) {
                const int64_t token = t * kEdge;
                store_tile<dtype>(totals + r / kEdge * kRowStep + t * kEdge * kEdge, held,
                                  count - token < kEdge ? count - token : kEdge, tokens + token, Avx512::load(units),
                                  bias ? bias + first * size_of(dtype) : nullptr,
                                  out + (token * out_features + first) * size_of(dtype), out_features);
            }
        }
    }
}

void tile_gemm(const int8_t* panel, const Int8Token* tokens, int64_t count, const Int8Weight& weight, const void* bias,
               void* out, Dtype dtype, int8_t* scratch, int64_t begin, int64_t end) {
    if (count < kFewestTokens) {
        return avx512_int8.gemm.multiply(panel, tokens, count, weight, bias, out, dtype, scratch, begin, end);
    }
    const int64_t row_bytes = avx512_int8.row_bytes(weight.in_features);
    with_bits(weight.bits, [&](auto width) {
        with_dtype(dtype, [&](auto type) {
            for (int64_t first = 0; first < count; first += kMostTileTokens) {
                const int64_t held = count - first < kMostTileTokens ? count - first : kMostTileTokens;
                tile_gemm_rows<width(), type()>(
                    panel + first * row_bytes, tokens + first, held, weight, static_cast<const char*>(bias),
                    static_cast<char*>(out) + first * weight.out_features * size_of(dtype), scratch, begin, end);
            }
        });
    });
}

}  // namespace

const Int8GemmImplementation amx_int8_gemm = {scratch_bytes, tile_gemm};

}  // namespace hf_kbit::cpu

#endif
