// Weights that have a trellis: their values, and products by them. common/trellis.h has what both rest on.
//
// A chunk is what 32 weights of a tile own that follow each other: all 16 inputs of two outputs, `chunk` and 8 more.
// Four neighbours are one output's, of inputs 2 i, 2 i + 1, 2 i + 8 and 2 i + 9; the next four the other output's.
//
// V offers besides what algorithms.h says: add_words, multiply_words, from_words (numbers as float32), as_floats (bits
// as float32), round_to_half, and of vectors H of 2 * kWidth 16-bit numbers
//   Tile(words, bits).windows(part)  those of 2 * kWidth weights of a tile that follow each other
//   mul1_sums(windows)               of each the sum of the four bytes of its product with code mul1's factor
//   load_halves, words_of(a, side)   kWidth of its numbers as 32-bit ones
//   add_products(sums, a, b)         to lane i the products of lanes 2 i and 2 i + 1
//   as_rows(values)                  a chunk's values as the inputs of its first output, then those of its second
#pragma once

#include <memory>

#include "common/trellis.h"
#include "cpu/gemm_int8.h"
#include "cpu/kernels.h"
#include "cpu/scalar.h"

namespace hf_kbit::cpu {

constexpr int kChunk = 32, kChunks = kTrellisSteps / kChunk;

template <class V>
constexpr int kParts = kChunk / (2 * V::kWidth);  // vectors of windows of a chunk

// --- values --------------------------------------------------------------------------------------

// What windows stand for, exactly. 32-bit numbers; of mul1 sums of four bytes.
template <class V, Code code>
static inline typename V::F trellis_values(typename V::I found) {
    if constexpr (code == Code::mul1) {
        const auto more = V::from_words(V::add_words(found, V::splat(1024)));
        return V::add(V::mul(more, V::broadcast(kSumScale)), V::broadcast(kSumShift));
    } else {
        // Both halves are normal numbers, for their exponents are 12 to 15: the flipped bits of it are kept.
        const auto x = V::add_words(V::multiply_words(found, V::splat(code_factor(code))), V::splat(code_added(code)));
        const auto halves = V::bit_xor(V::bit_and(x, V::splat(kHalvesMask)), V::splat(kHalvesFlipped));
        const auto as_float = [](typename V::I half) {
            const auto sign = V::shift_left(V::bit_and(half, V::splat(0x8000)), 16);
            const auto magnitude = V::shift_left(V::bit_and(half, V::splat(0x7FFF)), 13);
            return V::as_floats(V::bit_or(sign, V::add_words(magnitude, V::splat(112u << 23))));
        };
        return V::add(as_float(halves), as_float(V::shift_right(halves, 16)));
    }
}

// Rows of tiles [begin, end): out [16 * end, 16 * across], row-major.
template <class V, Code code, Dtype dtype>
static void decode_trellis_rows(const TrellisTiles& tiles, void* out, int64_t begin, int64_t end) {
    constexpr int kVectors = kChunk / V::kWidth;
    const int64_t row_bytes = tiles.across * kTrellisTile * size_of(dtype);
    for (int64_t row = begin; row < end; ++row) {
        char* to = static_cast<char*>(out) + row * kTrellisTile * row_bytes;
        for (int64_t column = 0; column < tiles.across; ++column, to += kTrellisTile * size_of(dtype)) {
            const typename V::Tile tile(tiles.at(column, row), tiles.bits);
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                typename V::F values[kVectors];
                for (int part = 0; part < kParts<V>; ++part) {
                    auto found = tile.windows(chunk * kParts<V> + part);
                    if constexpr (code == Code::mul1) found = V::mul1_sums(found);
                    for (int side = 0; side < 2; ++side) {
                        values[2 * part + side] = trellis_values<V, code>(V::words_of(found, side));
                    }
                }
                V::as_rows(values);
                for (int v = 0; v < kVectors; ++v) {
                    const int row_of = chunk + v * V::kWidth / kTrellisTile * 8, first = v * V::kWidth % kTrellisTile;
                    V::template store_as<dtype>(to + row_of * row_bytes + first * size_of(dtype),
                                                dtype == Dtype::float16 ? values[v] : V::round_to_half(values[v]));
                }
            }
        }
    }
}

template <class V>
static void decode_trellis_with(const TrellisTiles& tiles, void* out, Dtype dtype, int64_t begin, int64_t end) {
    with_dtype(dtype, [&](auto type) {
        const auto run = tiles.code == Code::mul1  ? decode_trellis_rows<V, Code::mul1, type()>
                         : tiles.code == Code::mcg ? decode_trellis_rows<V, Code::mcg, type()>
                                                   : decode_trellis_rows<V, Code::three_inst, type()>;
        run(tiles, out, begin, end);
    });
}

// --- rotations -----------------------------------------------------------------------------------

// Blocks of `count` numbers times Hadamard's matrix: without its root, so that 1 / block is due once for both sides.
template <class V>
static void rotate_trellis(float* numbers, int64_t count, int block) {
    for (int64_t i = 0; i < count; i += V::kWidth) {
        auto values = V::template butterfly<2>(V::template butterfly<1>(V::load(numbers + i)));
        if constexpr (V::kWidth > 4) values = V::template butterfly<4>(values);
        if constexpr (V::kWidth > 8) values = V::template butterfly<8>(values);
        V::store(numbers + i, values);
    }
    for (int distance = V::kWidth; distance < block; distance *= 2) {
        for (int64_t i = 0; i < count; i += V::kWidth) {
            if (i & distance) continue;
            const auto first = V::load(numbers + i), second = V::load(numbers + i + distance);
            V::store(numbers + i, V::add(first, second));
            V::store(numbers + i + distance, V::sub(first, second));
        }
    }
}

// A row of x as the weight between the rotations meets it, times the root of a block: `sides.padded_in` numbers.
template <class V, Dtype dtype>
static void turn_trellis_row(const char* row, const TrellisSides& sides, float* numbers) {
    int64_t i = 0;
    for (; i + V::kWidth <= sides.in_features; i += V::kWidth) {
        const auto scales = V::template load_as<Dtype::float16>(sides.suh + i);
        V::store(numbers + i, V::mul(V::template load_as<dtype>(row + i * size_of(dtype)), scales));
    }
    for (; i < sides.in_features; ++i) numbers[i] = load_scalar(row, dtype, i) * float_of_float16(sides.suh[i]);
    for (; i < sides.padded_in; ++i) numbers[i] = 0;
    rotate_trellis<V>(numbers, sides.padded_in, sides.block);
}

// Outputs [first, first + count) of a token, whole blocks, of what is between the rotations.
template <class V>
static void finish_trellis_row(float* numbers, int64_t first, int64_t count, float scale, const TrellisSides& sides,
                               const void* bias, void* out, Dtype dtype) {
    rotate_trellis<V>(numbers, count, sides.block);
    const int64_t held = sides.out_features - first < count ? sides.out_features - first : count;
    with_dtype(dtype, [&](auto type) {
        int64_t i = 0;
        for (; i + V::kWidth <= held; i += V::kWidth) {
            const int64_t at = (first + i) * size_of(type());
            const auto scales = V::template load_as<Dtype::float16>(sides.svh + first + i);
            auto y = V::mul(V::mul(V::load(numbers + i), V::broadcast(scale)), scales);
            if (bias) y = V::add(y, V::template load_as<type()>(static_cast<const char*>(bias) + at));
            V::template store_as<type()>(static_cast<char*>(out) + at, y);
        }
        for (; i < held; ++i) {
            const float y = numbers[i] * scale * float_of_float16(sides.svh[first + i]);
            store_scalar(out, type(), first + i, bias ? y + load_scalar(bias, type(), first + i) : y);
        }
    });
}

// Rows [begin, end) of x [M, in_features], turned, in float32 or rounded to bfloat16.
template <class V>
static void turn_trellis_with(const void* x, Dtype dtype, const TrellisSides& sides, void* out, Dtype out_dtype,
                              int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(sides.padded_in)]);
    with_dtype(dtype, [&](auto type) {
        for (int64_t token = begin; token < end; ++token) {
            const char* row = static_cast<const char*>(x) + token * sides.in_features * size_of(type());
            turn_trellis_row<V, type()>(row, sides, numbers.get());
            char* to = static_cast<char*>(out) + token * sides.padded_in * size_of(out_dtype);
            for (int64_t i = 0; i < sides.padded_in; i += V::kWidth) {
                const auto values = V::load(numbers.get() + i);
                if (out_dtype == Dtype::float32) {
                    V::template store_as<Dtype::float32>(to + 4 * i, values);
                } else {
                    V::template store_as<Dtype::bfloat16>(to + 2 * i, values);
                }
            }
        }
    });
}

// Tokens [begin, end) of out [M, out_features], of `inner` [M, padded_out], float32 or bfloat16.
template <class V>
static void finish_trellis_with(const void* inner, Dtype inner_dtype, const TrellisSides& sides, const void* bias,
                                void* out, Dtype dtype, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(sides.padded_out)]);
    for (int64_t token = begin; token < end; ++token) {
        const char* from = static_cast<const char*>(inner) + token * sides.padded_out * size_of(inner_dtype);
        for (int64_t i = 0; i < sides.padded_out; i += V::kWidth) {
            V::store(numbers.get() + i, inner_dtype == Dtype::float32
                                            ? V::template load_as<Dtype::float32>(from + 4 * i)
                                            : V::template load_as<Dtype::bfloat16>(from + 2 * i));
        }
        char* to = static_cast<char*>(out) + token * sides.out_features * size_of(dtype);
        finish_trellis_row<V>(numbers.get(), 0, sides.padded_out, 1.0f / static_cast<float>(sides.block), sides, bias, to,
                          dtype);
    }
}

// --- products in integers ------------------------------------------------------------------------

// Inputs are rounded to 14 bits of a token's largest, and a weight of mul1 is the sum of four bytes, which its float16
// value is the nearest one of a multiple of: so a product is a sum of whole numbers, the same in any order, of which
// nothing is lost. Lanes of 32 bits are added to totals of 64 before they could overflow.
constexpr int kMostInput = 8191;
constexpr int64_t kSumUnits = 1774, kShiftUnits = -905216;  // value * 2**18 = kSumUnits * sum + kShiftUnits
constexpr float kUnit = 0x1p-18f;
constexpr int64_t kFlushedTiles = (int64_t{1} << 31) / (int64_t{kMostSum} * kMostInput * 2);  // of one part
constexpr int kBandSums = 256;  // vectors of sums that stay in L1

// Rows [begin, end) of x, turned and rounded, in the order of a chunk's windows, of which both outputs have the same
// inputs: panel [padded_in / 16, M, 32].
template <class V>
static void pack_trellis_with(const void* x, Dtype dtype, int64_t count, const TrellisSides& sides, int16_t* panel,
                              TrellisToken* tokens, int64_t begin, int64_t end) {
    constexpr float kFewest = 0x1p-100f;
    const std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(sides.padded_in)]);
    with_dtype(dtype, [&](auto type) {
        for (int64_t token = begin; token < end; ++token) {
            const char* row = static_cast<const char*>(x) + token * sides.in_features * size_of(type());
            turn_trellis_row<V, type()>(row, sides, numbers.get());
            uint32_t largest_bits = 0;  // as integers magnitudes have the same order, and NaN is the largest
            for (int64_t i = 0; i < sides.padded_in; ++i) {
                const uint32_t magnitude = bits_of(numbers[i]) & 0x7FFFFFFF;
                largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
            }
            const float largest = float_of(largest_bits);
            const bool usual = largest_bits >= bits_of(kFewest) && largest_bits < 0x7F800000;
            const float inverse = usual ? kMostInput / largest : 0;
            int64_t sum = 0;
            for (int64_t tile = 0; tile < sides.padded_in / kTrellisTile; ++tile) {
                int16_t rounded[kTrellisTile] = {};
                for (int i = 0; usual && i < kTrellisTile; ++i) {
                    const float scaled = numbers[tile * kTrellisTile + i] * inverse;
                    rounded[i] = static_cast<int16_t>(bits_of(scaled + kToInteger) & 0xFFFF);
                    sum += rounded[i];
                }
                int16_t* to = panel + (tile * count + token) * kChunk;
                for (int i = 0; i < 8; i += 2, to += 8) {
                    for (int output = 0; output < 2; ++output) {
                        std::memcpy(to + 4 * output, rounded + i, 4);
                        std::memcpy(to + 4 * output + 2, rounded + i + 8, 4);
                    }
                }
            }
            tokens[token] = {largest * (1.0f / kMostInput), sum};
        }
    });
}

// Of `rows` rows of tiles from `first` on, and kTokens tokens from `panel` on: totals [16 * rows][kTokens].
template <class V, int kTokens>
static void add_trellis_band(const int16_t* panel, int64_t count, const TrellisTiles& tiles, int64_t first, int rows,
                             int64_t* totals) {
    using I = typename V::I;
    alignas(64) I sums[kBandSums];
    const int vectors = rows * kChunks * kTokens;
    constexpr int64_t kStep = kFlushedTiles / kParts<V>;
    for (int64_t begin = 0; begin < tiles.across; begin += kStep) {
        const int64_t end = tiles.across - begin < kStep ? tiles.across : begin + kStep;
        for (int i = 0; i < vectors; ++i) sums[i] = V::splat(0);
        for (int64_t column = begin; column < end; ++column) {
            typename V::H inputs[kTokens][kParts<V>];
            for (int t = 0; t < kTokens; ++t) {
                for (int part = 0; part < kParts<V>; ++part) {
                    inputs[t][part] = V::load_halves(panel + (column * count + t) * kChunk + part * 2 * V::kWidth);
                }
            }
            I* own = sums;
            for (int row = 0; row < rows; ++row) {
                const typename V::Tile tile(tiles.at(column, first + row), tiles.bits);
#pragma GCC unroll 8
                for (int chunk = 0; chunk < kChunks; ++chunk, own += kTokens) {
                    typename V::H weights[kParts<V>];
                    for (int part = 0; part < kParts<V>; ++part) {
                        weights[part] = V::mul1_sums(tile.windows(chunk * kParts<V> + part));
                    }
                    for (int t = 0; t < kTokens; ++t) {
                        for (int part = 0; part < kParts<V>; ++part) {
                            own[t] = V::add_products(own[t], weights[part], inputs[t][part]);
                        }
                    }
                }
            }
        }
        alignas(64) int32_t lanes[V::kWidth];
        for (int i = 0; i < vectors; ++i) {
            std::memcpy(lanes, sums + i, sizeof lanes);
            const int chunk = i / kTokens % kChunks, output = i / kTokens / kChunks * kTrellisTile + chunk;
            for (int lane = 0; lane < V::kWidth; ++lane) {
                totals[(output + lane / 2 % 2 * 8) * kTokens + i % kTokens] += lanes[lane];
            }
        }
    }
}

template <class V, int kTokens>
static void multiply_trellis_tokens(const int16_t* panel, const TrellisToken* tokens, int64_t count, int64_t token,
                                    const TrellisTiles& tiles, const TrellisSides& sides, const void* bias, void* out,
                                    Dtype dtype, int64_t begin, int64_t end) {
    constexpr int kRows = kBandSums / (kChunks * kTokens);  // of tiles: a block of the rotation at least
    static_assert(kRows * kTrellisTile % 128 == 0);
    for (int64_t row = begin; row < end; row += kRows) {
        const int rows = static_cast<int>(end - row < kRows ? end - row : kRows);
        int64_t totals[kRows * kTrellisTile * kTokens] = {};
        add_trellis_band<V, kTokens>(panel + token * kChunk, count, tiles, row, rows, totals);
        for (int t = 0; t < kTokens; ++t) {
            alignas(64) float numbers[kRows * kTrellisTile];
            for (int i = 0; i < rows * kTrellisTile; ++i) {
                const int64_t total = kSumUnits * totals[i * kTokens + t] + kShiftUnits * tokens[token + t].sum;
                numbers[i] = static_cast<float>(total);
            }
            const float scale = tokens[token + t].scale * (kUnit / static_cast<float>(sides.block));
            char* to = static_cast<char*>(out) + (token + t) * sides.out_features * size_of(dtype);
            finish_trellis_row<V>(numbers, row * kTrellisTile, rows * kTrellisTile, scale, sides, bias, to, dtype);
        }
    }
}

template <class V>
static void multiply_trellis_with(const int16_t* panel, const TrellisToken* tokens, int64_t count,
                                  const TrellisTiles& tiles, const TrellisSides& sides, const void* bias, void* out,
                                  Dtype dtype, int64_t begin, int64_t end) {
    for (int64_t token = 0; token < count;) {
        const int64_t left = count - token;
        const auto multiply = left >= 4   ? multiply_trellis_tokens<V, 4>
                              : left >= 2 ? multiply_trellis_tokens<V, 2>
                                          : multiply_trellis_tokens<V, 1>;
        multiply(panel, tokens, count, token, tiles, sides, bias, out, dtype, begin, end);
        token += left >= 4 ? 4 : left >= 2 ? 2 : 1;
    }
}

template <class V>
static constexpr TrellisImplementation trellis_implementation_with() {
    return {decode_trellis_with<V>, turn_trellis_with<V>, finish_trellis_with<V>, pack_trellis_with<V>,
            multiply_trellis_with<V>};
}

}  // namespace hf_kbit::cpu
