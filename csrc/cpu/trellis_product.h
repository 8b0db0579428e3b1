// Products by weights that have a trellis: what is around them, then those of few tokens, by exact values and in whole
// numbers.
#pragma once

#include <memory>

#include "cpu/implementation.h"
#include "cpu/trellis.h"

namespace hf_kbit::cpu {

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

// Numbers in tile order.
static inline void order_for_tiles(float* numbers, int64_t count) {
    for (float* own = numbers; own < numbers + count; own += kTrellisTile) {
        float ordered[kTrellisTile];
        for (int i = 0; i < kTrellisTile; ++i) ordered[i] = own[i / 4 * 2 + i % 2 + i % 4 / 2 * 8];
        std::memcpy(own, ordered, sizeof ordered);
    }
}

// Rows [begin, end) of x [M, in_features], turned, in float32 or rounded to bfloat16.
template <class V>
static void turn_trellis_with(const void* x, Dtype dtype, const TrellisSides& sides, bool tile_order, void* out,
                              Dtype out_dtype, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(sides.padded_in)]);
    with_dtype(dtype, [&](auto type) {
        for (int64_t token = begin; token < end; ++token) {
            const char* row = static_cast<const char*>(x) + token * sides.in_features * size_of(type());
            turn_trellis_row<V, type()>(row, sides, numbers.get());
            if (tile_order) order_for_tiles(numbers.get(), sides.padded_in);
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
        finish_trellis_row<V>(numbers.get(), 0, sides.padded_out, 1.0f / static_cast<float>(sides.block), sides, bias,
                              to, dtype);
    }
}

// --- products of few tokens ----------------------------------------------------------------------

// Tiles are read in the order of memory, those of a band of rows for a column, whose sums stay in L1: kBandSums
// vectors.
constexpr int kBandSums = 256;

// Calls f(std::integral_constant<int, tokens>, first) for four tokens at a time, then for two and for one.
template <class F>
static inline void with_few_tokens(int64_t count, F f) {
    int64_t token = 0;
    for (; token + 4 <= count; token += 4) f(std::integral_constant<int, 4>{}, token);
    for (; token + 2 <= count; token += 2) f(std::integral_constant<int, 2>{}, token);
    for (; token < count; ++token) f(std::integral_constant<int, 1>{}, token);
}

// inner [M, padded_out] of turned [M, padded_in] in tile order, both float32, by exact values: rows of tiles [begin,
// end).
template <class V, Code code, int kTokens>
static void multiply_trellis_floats(const float* turned, const TrellisTiles& tiles, float* inner, int64_t padded_in,
                                    int64_t padded_out, int64_t begin, int64_t end) {
    using F = typename V::F;
    constexpr int kRows = kBandSums / (kTrellisTile * kTokens);
    for (int64_t first = begin; first < end; first += kRows) {
        const int rows = static_cast<int>(end - first < kRows ? end - first : kRows);
        alignas(64) F sums[kBandSums];
        for (auto& sum : sums) sum = V::zero();
        for (int64_t column = 0; column < tiles.across; ++column) {
            const float* inputs = turned + column * kTrellisTile;
            F* own = sums;
            for (int row = 0; row < rows; ++row) {
                const typename V::Tile tile(tiles.at(column, first + row), tiles.bits);
                ask_for(tiles, column, first + row);
#pragma GCC unroll 8
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    F values[2][kParts<V>];
                    decode_chunk<V, code>(tile, chunk, values);
                    for (int output = 0; output < 2; ++output, own += kTokens) {
                        for (int part = 0; part < kParts<V>; ++part) {
                            const auto value = V::round_to_half(values[output][part]);
                            for (int t = 0; t < kTokens; ++t) {
                                const auto x = V::load(inputs + t * padded_in + part * V::kWidth);
                                own[t] = V::fma(value, x, own[t]);
                            }
                        }
                    }
                }
            }
        }
        for (int i = 0; i < rows * kTrellisTile * kTokens; ++i) {
            const int place = i / kTokens % kTrellisTile, output = place / 2 + place % 2 * 8;
            const int64_t row = (first + i / kTokens / kTrellisTile) * kTrellisTile + output;
            inner[i % kTokens * padded_out + row] = V::sum(sums[i]);
        }
    }
}

template <class V>
static void multiply_few_with(const float* turned, int64_t count, const TrellisTiles& tiles, float* inner,
                              int64_t padded_in, int64_t padded_out, int64_t begin, int64_t end) {
    with_few_tokens(count, [&](auto tokens, int64_t first) {
        const auto run = tiles.code == Code::mul1  ? multiply_trellis_floats<V, Code::mul1, tokens()>
                         : tiles.code == Code::mcg ? multiply_trellis_floats<V, Code::mcg, tokens()>
                                                   : multiply_trellis_floats<V, Code::three_inst, tokens()>;
        run(turned + first * padded_in, tiles, inner + first * padded_out, padded_in, padded_out, begin, end);
    });
}

// --- products of few tokens in whole numbers -----------------------------------------------------

// Inputs are rounded to 14 bits of a token's largest, and a weight of mul1 is the sum of four bytes, which its float16
// value is the nearest one of a multiple of: so a product is a sum of whole numbers, the same in any order, of which
// nothing is lost. Lanes of 32 bits are added to totals of 64 before they could overflow.
constexpr auto kScaleUnits = static_cast<int64_t>(kSumScale / kSumUnit),
               kZeroUnits = static_cast<int64_t>(kSumZero / kSumUnit);
constexpr int64_t kFlushedTiles = (int64_t{1} << 31) / (int64_t{kMostSum} * kMostTrellisInput * 2);  // of one part

// Rows [begin, end) of x, turned and rounded, in the order of a chunk's windows, of which both outputs have the same
// inputs: panel [padded_in / 16, M, 32].
template <class V>
static void pack_trellis_with(const void* x, Dtype dtype, int64_t count, const TrellisSides& sides, int16_t* panel,
                              TrellisToken* tokens, int64_t begin, int64_t end) {
    constexpr float kFewest = 0x1p-100f;
    const std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(sides.padded_in)]);
    const std::unique_ptr<int16_t[]> rounded(new int16_t[static_cast<size_t>(sides.padded_in)]);
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
            const float inverse = usual ? kMostTrellisInput / largest : 0;
            int32_t sum = 0;
            for (int64_t i = 0; i < sides.padded_in; ++i) {
                const uint32_t found = bits_of(numbers[i] * inverse + kToInteger);
                rounded[i] = usual ? static_cast<int16_t>(found & 0xFFFF) : int16_t{0};
                sum += rounded[i];
            }
            const int16_t* from = rounded.get();
            for (int64_t tile = 0; tile < sides.padded_in / kTrellisTile; ++tile, from += kTrellisTile) {
                int16_t* to = panel + (tile * count + token) * kChunk;
                for (int i = 0; i < 8; i += 2, to += 8) {
                    for (int output = 0; output < 2; ++output) {
                        std::memcpy(to + 4 * output, from + i, 4);
                        std::memcpy(to + 4 * output + 2, from + i + 8, 4);
                    }
                }
            }
            tokens[token] = {largest * (1.0f / kMostTrellisInput), sum};
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
                ask_for(tiles, column, first + row);
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
                const int64_t total = kScaleUnits * totals[i * kTokens + t] + kZeroUnits * tokens[token + t].sum;
                numbers[i] = static_cast<float>(total);
            }
            const float scale = tokens[token + t].scale * (kSumUnit / static_cast<float>(sides.block));
            char* to = static_cast<char*>(out) + (token + t) * sides.out_features * size_of(dtype);
            finish_trellis_row<V>(numbers, row * kTrellisTile, rows * kTrellisTile, scale, sides, bias, to, dtype);
        }
    }
}

template <class V>
static void multiply_trellis_with(const int16_t* panel, const TrellisToken* tokens, int64_t count,
                                  const TrellisTiles& tiles, const TrellisSides& sides, const void* bias, void* out,
                                  Dtype dtype, int64_t begin, int64_t end) {
    with_few_tokens(count, [&](auto number, int64_t token) {
        multiply_trellis_tokens<V, number()>(panel, tokens, count, token, tiles, sides, bias, out, dtype, begin, end);
    });
}

template <class V>
static constexpr TrellisImplementation trellis_implementation_with() {
    return {decode_trellis_with<V>, turn_trellis_with<V>, finish_trellis_with<V>,
            multiply_few_with<V>,   pack_trellis_with<V>, multiply_trellis_with<V>};
}

}  // namespace hf_kbit::cpu
