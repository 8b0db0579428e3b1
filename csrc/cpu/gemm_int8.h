// Products of 8-bit inputs, to the last bit what docs/internals.md says.
//
// A block has as many different weights as there are levels, so they are computed once a block: level * multiplier,
// rounded, is a table of bytes, in which the block's codes are looked up. Sums are int32, and hold the scales of
// blocks already. A group is V::kWidth blocks of a row: its weights come out of V::decode_int8 as vectors of bytes, in
// an order that costs the fewest instructions, and the inputs are put into the same.
//
// - One token: each vector goes straight into a sum.
// - More tokens: some rows are decoded to `scratch`, in L1 or L2, and multiplied in register tiles of kTileRows x
//   kTileTokens.
//
// V offers, beside what algorithms.h says:
//   Bytes, Sums                  vectors of int8 weights or inputs, kVectorBytes of them, and of int32 sums
//   load_bytes, store_bytes      aligned
//   no_sums, add_sums, total     zeros; the sum of two; that of all lanes
//   dot(sums, weights, inputs)   adds products to sums
//   kOffset                      by which its weights are too large: that times the sum of a token's inputs comes off
//   kTileRows, kTileTokens       of a register tile; a power of two
//   block_of_byte, index_of_byte which block of a group is in a byte of a vector, and which of the block's weights
//   kRun                         how many weights that follow each other do so in bytes, at least
//   round_to_half                to float16 and back
//   Int8Levels<bits>, decode_int8(words, multipliers, levels, sink)
// and for int8_table:
//   as_words                     the bits of floats
//   pack                         16-bit numbers of two vectors as bytes, saturated
//   interleave(even, odd)        of 16-bit numbers the low bytes
#pragma once

#include <math.h>

#include <memory>

#include "cpu/gemm.h"
#include "cpu/implementation.h"

namespace hf_kbit::cpu {

// The levels that float16 has of a codebook, as of 2**14 to 2**15; returns what 16 times an inverse of 1 stands for.
static inline float int8_levels(const float* codebook, int bits, float* levels) {
    float largest = 0;
    for (int n = 0; n < 1 << bits; ++n) {
        const float magnitude = float_of(bits_of(codebook[n]) & 0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
    }
    int exponent;
    frexpf(largest, &exponent);
    const int shift = 15 - exponent < 126 ? 15 - exponent : 126;
    const float unit = float_of(static_cast<uint32_t>(127 + shift) << 23);
    for (int n = 0; n < 1 << bits; ++n) levels[n] = float_of_float16(float16_of_float(codebook[n] * unit));
    return float_of(static_cast<uint32_t>(127 + 4 - shift) << 23);
}

// Levels as V::decode_int8 multiplies them: so that the products, rounded and packed to bytes, become a table of each
// block. Codes have their bits at the top of a nibble there: a table of few levels has gaps, and is made by fewer
// instructions. At 5 bits there are two tables.
template <class V, int bits>
struct TableLevels {
    static constexpr int kTables = bits == 5 ? 2 : 1, kVectors = bits == 2 ? 1 : bits == 3 ? 2 : 4;
    typename V::F vectors[kTables][kVectors];

    explicit TableLevels(const float* levels) {
        for (int t = 0; t < kTables; ++t) {
            for (int i = 0; i < kVectors; ++i) {
                float chosen[V::kWidth];
                for (int lane = 0; lane < V::kWidth; ++lane) {
                    // Of four vectors the first two become the even bytes of a table.
                    const int n = bits < 4 ? 4 * i + lane % 4 : 8 * (i % 2) + 2 * (lane % 4) + i / 2;
                    chosen[lane] = levels[16 * t + n];
                }
                vectors[t][i] = V::load(chosen);
            }
        }
    }
};

// The tables of as many blocks as a table has lanes for. Rounding to an integer leaves it in the low half of a dword,
// which a saturating pack keeps.
template <class V, int bits>
static inline __attribute__((always_inline)) typename V::I int8_table(const TableLevels<V, bits>& levels, int t,
                                                                      typename V::F multipliers) {
    constexpr int kVectors = TableLevels<V, bits>::kVectors;
    typename V::I rounded[kVectors];
    for (int i = 0; i < kVectors; ++i) {
        rounded[i] = V::as_words(V::fma(levels.vectors[t][i], multipliers, V::broadcast(kToInteger + V::kOffset)));
    }
    if constexpr (bits == 2) {
        return rounded[0];
    } else {
        const typename V::I even = V::pack(rounded[0], rounded[1]);
        if constexpr (bits == 3) return even;
        return V::interleave(even, V::pack(rounded[kVectors - 2], rounded[kVectors - 1]));
    }
}

// --- inverses of rows ---

template <class V, int bits>
static void int8_inverses_of(const Int8Weight& weight, uint16_t* inverses, int64_t begin, int64_t end) {
    constexpr float kMost = 0x1p15f;
    float magnitudes[1 << bits];
    int8_levels(weight.codebook, bits, magnitudes);
    for (float& level : magnitudes) level = float_of(bits_of(level) & 0x7FFFFFFF);
    const typename V::template Levels<bits> levels(magnitudes);
    const int64_t blocks = num_blocks(weight.in_features);
    for (int64_t row = begin; row < end; ++row) {
        float largest = 0;
        for (int64_t block = row * blocks; block < (row + 1) * blocks; ++block) {
            Block<V> values;
            levels.of_block(weight.planes + block * bits, values);
            for (int v = 1; v < kBlockSize / V::kWidth; ++v) values[0] = V::max(values[0], values[v]);
            const float scale = decode_scale(weight.absmax[block] & ~kSignBit, 0) * (1.0f / 16);
            const float found = V::largest(values[0]) * scale;
            largest = found > largest ? found : largest;
        }
        const float inverse = 127 * (1 / largest);
        inverses[row] = float16_of_float(inverse < kMost ? inverse : kMost);
    }
}

template <class V>
static void int8_inverses_with(const Int8Weight& weight, uint16_t* inverses, int64_t begin, int64_t end) {
    with_bits(weight.bits, [&](auto width) { int8_inverses_of<V, width()>(weight, inverses, begin, end); });
}

// --- tokens ---

template <class V>
static int64_t int8_row_bytes_with(int64_t in_features) {
    return ceil_div(num_blocks(in_features), V::kWidth) * V::kWidth * kBlockSize;
}

template <class V>
static void int8_pack_with(const void* x, Dtype dtype, int64_t in_features, const uint8_t* columns, int8_t* panel,
                           Int8Token* tokens, int64_t begin, int64_t end) {
    constexpr int kGroup = V::kWidth * kBlockSize, kRuns = kGroup / V::kRun;
    constexpr float kFewest = 0x1p-100f;
    int source[kRuns];  // for each run of a group, its first column
    for (int i = 0; i < kRuns; ++i) {
        const int v = i * V::kRun / V::kVectorBytes, byte = i * V::kRun % V::kVectorBytes;
        source[i] = kBlockSize * V::block_of_byte(v, byte) + V::index_of_byte(v, byte);
    }
    const int64_t row_bytes = int8_row_bytes_with<V>(in_features);
    const std::unique_ptr<float[]> transformed(new float[static_cast<size_t>(row_bytes)]());  // a token, and zeros
    with_dtype(dtype, [&](auto type) {
        for (int64_t token = begin; token < end; ++token) {
            const char* row = static_cast<const char*>(x) + token * in_features * size_of(type());
            float* numbers = transformed.get();
            uint32_t largest_bits = 0;  // as integers magnitudes have the same order, and NaN is the largest
            for (int64_t first = 0; first < in_features; first += kBlockSize, numbers += kBlockSize) {
                Block<V> values;
                transform_block<V, type()>(row, first, in_features - first, columns, true, values);
                for (int v = 0; v < kBlockSize / V::kWidth; ++v) V::store(numbers + v * V::kWidth, values[v]);
                for (int i = 0; i < kBlockSize; ++i) {
                    const uint32_t magnitude = bits_of(numbers[i]) & 0x7FFFFFFF;
                    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
                }
            }
            const float largest = float_of(largest_bits);
            const bool usual = largest_bits >= bits_of(kFewest) && largest_bits < 0x7F800000;
            const float inverse = usual ? 127 * (1 / largest) : 0;
            int8_t* target = panel + token * row_bytes;
            int32_t sum = 0;
            numbers = transformed.get();
            if (!usual) std::memset(target, 0, static_cast<size_t>(row_bytes));
            for (int64_t first = 0; usual && first < row_bytes; first += kGroup, numbers += kGroup) {
                int8_t group[kGroup];
                for (int i = 0; i < kGroup; ++i) {
                    group[i] = static_cast<int8_t>(bits_of(numbers[i] * inverse + kToInteger) & 0xFF);
                }
                for (int i = 0; i < kGroup; ++i) sum += group[i];
                for (const int from : source) {
                    std::memcpy(target, group + from, V::kRun);
                    target += V::kRun;
                }
            }
            tokens[token] = {largest * (1.0f / 127), sum};
        }
    });
}

// --- products ---

// With few tokens the rows decoded at a time stay in L1; with more, so many that inputs are seldom read again.
template <class V>
static int64_t int8_scratch_rows(int64_t tokens) {
    return tokens <= 8 ? V::kTileRows : 32;
}

template <class V>
static int64_t int8_scratch_bytes_with(int64_t tokens, int64_t in_features) {
    return tokens == 1 ? 0 : int8_scratch_rows<V>(tokens) * int8_row_bytes_with<V>(in_features);
}

// Calls sink(v, weights) for the vectors of group `g` of a row.
template <class V, int bits, class Sink>
static inline __attribute__((always_inline)) void decode_int8_group(
    const Int8Weight& weight, int64_t row, int64_t g, const typename V::template Int8Levels<bits>& levels, Sink sink) {
    const int64_t blocks = num_blocks(weight.in_features);
    const auto unit = V::broadcast(float_of_float16(weight.inverses[row]) * (1.0f / 16));
    const Group<V, bits> group(weight.planes + row * blocks * bits, weight.absmax + row * blocks, g, blocks);
    const auto multipliers = V::round_to_half(V::mul(V::load_scales(group.scales, kSignBit), unit));
    V::template decode_int8<bits>(group.words, multipliers, levels, sink);
}

// Calls sink(at, v, weights) for the vectors of all groups, `at` of all of them and `v` of its group.
template <class V, int bits, class Sink>
static inline __attribute__((always_inline)) void decode_int8_row(const Int8Weight& weight, int64_t row,
                                                                  const typename V::template Int8Levels<bits>& levels,
                                                                  Sink sink) {
    constexpr int kVectors = V::kWidth * kBlockSize / V::kVectorBytes;
    const int64_t groups = ceil_div(num_blocks(weight.in_features), V::kWidth);
    for (int64_t g = 0; g < groups; ++g) {
        decode_int8_group<V, bits>(weight, row, g, levels,
                                   [&](int v, typename V::Bytes weights) { sink(g * kVectors + v, v, weights); });
    }
}

// sums[row][token] of a tile.
template <class V, int tokens>
static inline void multiply_int8_tile(const int8_t* weights, const int8_t* x, int64_t row_bytes,
                                      int32_t (&sums)[V::kTileRows][V::kTileTokens]) {
    typename V::Sums tile[V::kTileRows][tokens];
    for (auto& row : tile) {
        for (auto& sum : row) sum = V::no_sums();
    }
    for (int64_t at = 0; at < row_bytes; at += V::kVectorBytes) {
        typename V::Bytes inputs[tokens];
        for (int t = 0; t < tokens; ++t) inputs[t] = V::load_bytes(x + t * row_bytes + at);
        for (int row = 0; row < V::kTileRows; ++row) {
            const auto held = V::load_bytes(weights + row * row_bytes + at);
            for (int t = 0; t < tokens; ++t) tile[row][t] = V::dot(tile[row][t], held, inputs[t]);
        }
    }
    for (int row = 0; row < V::kTileRows; ++row) {
        for (int t = 0; t < tokens; ++t) sums[row][t] = V::total(tile[row][t]);
    }
}

template <class V, int bits>
static void gemm_int8_rows(const int8_t* panel, const Int8Token* tokens, int64_t count, const Int8Weight& weight,
                           const void* bias, void* out, Dtype dtype, int8_t* scratch, int64_t begin, int64_t end) {
    float numbers[1 << bits];
    const float unit = int8_levels(weight.codebook, bits, numbers);
    const typename V::template Int8Levels<bits> levels(numbers);
    // Sums wrap around, and are right when the offset is taken off.
    const auto store = [&](int64_t token, int64_t row, int32_t total) {
        const auto offset = static_cast<uint32_t>(V::kOffset) * static_cast<uint32_t>(tokens[token].sum);
        const auto sum = static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(total) - offset));
        const float y = sum * tokens[token].scale * (unit / float_of_float16(weight.inverses[row]));
        store_scalar(out, dtype, token * weight.out_features + row, bias ? y + load_scalar(bias, dtype, row) : y);
    };
    if (count == 1) {
        for (int64_t row = begin; row < end; ++row) {
            typename V::Sums sums[2] = {V::no_sums(), V::no_sums()};
            decode_int8_row<V, bits>(weight, row, levels, [&](int64_t at, int v, typename V::Bytes weights) {
                sums[v % 2] = V::dot(sums[v % 2], weights, V::load_bytes(panel + at * V::kVectorBytes));
            });
            store(0, row, V::total(V::add_sums(sums[0], sums[1])));
        }
        return;
    }
    const int64_t row_bytes = int8_row_bytes_with<V>(weight.in_features), rows_at_once = int8_scratch_rows<V>(count);
    for (int64_t first = begin; first < end; first += rows_at_once) {
        const int64_t rows = end - first < rows_at_once ? end - first : rows_at_once;
        for (int64_t r = 0; r < rows; ++r) {
            int8_t* target = scratch + r * row_bytes;
            decode_int8_row<V, bits>(weight, first + r, levels, [&](int64_t at, int, typename V::Bytes weights) {
                V::store_bytes(target + at * V::kVectorBytes, weights);
            });
        }
        for (int64_t t = 0; t < count;) {
            const int64_t left = count - t;
            const int width = left >= V::kTileTokens ? V::kTileTokens : left >= 2 ? 2 : 1;
            const auto multiply = width == 1   ? multiply_int8_tile<V, 1>
                                  : width == 2 ? multiply_int8_tile<V, 2>
                                               : multiply_int8_tile<V, V::kTileTokens>;
            for (int64_t r = 0; r < rows; r += V::kTileRows) {  // rows past the last are of an earlier turn, or noise
                int32_t sums[V::kTileRows][V::kTileTokens];
                multiply(scratch + r * row_bytes, panel + t * row_bytes, row_bytes, sums);
                for (int row = 0; row < V::kTileRows && r + row < rows; ++row) {
                    for (int i = 0; i < width; ++i) store(t + i, first + r + row, sums[row][i]);
                }
            }
            t += width;
        }
    }
}

template <class V>
static void gemm_int8_with(const int8_t* panel, const Int8Token* tokens, int64_t count, const Int8Weight& weight,
                           const void* bias, void* out, Dtype dtype, int8_t* scratch, int64_t begin, int64_t end) {
    with_bits(weight.bits, [&](auto width) {
        gemm_int8_rows<V, width()>(panel, tokens, count, weight, bias, out, dtype, scratch, begin, end);
    });
}

template <class V>
static constexpr Int8Implementation int8_implementation_with() {
    return {int8_inverses_with<V>,
            int8_row_bytes_with<V>,
            int8_pack_with<V>,
            {int8_scratch_bytes_with<V>, gemm_int8_with<V>}};
}

}  // namespace hf_kbit::cpu
