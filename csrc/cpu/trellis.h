// What weights that have a trellis decode to. common/trellis.h has what it rests on, trellis_product.h products.
//
// A chunk is what 32 weights of a tile own that follow each other: all 16 inputs of two outputs, `chunk` and 8 more.
// Of eight weights that follow each other the first four are one output's, of inputs 2 i, 2 i + 1, 2 i + 8 and 2 i +
// 9, the others the other output's. In *tile order* inputs are as one output has them.
//
// V offers besides what algorithms.h says: add_words, multiply_words, as_floats (bits as float32), round_to_half, and
// of vectors H of 2 * kWidth 16-bit numbers
//   Tile(words, bits).windows(part)  those of 2 * kWidth weights of a tile that follow each other
//   mul1_sums(windows)               of each the sum of the four bytes of its product with code mul1's factor
//   load_halves
//   add_products(sums, a, b)         to lane i the products of lanes 2 i and 2 i + 1
//   spread(a, upper, outputs)        those of each output as 32-bit numbers, with the same upper half
//   natural(values)                  16 inputs from tile order to their own
//   kFuses                           whether fma rounds once
#pragma once

#include "common/trellis.h"
#include "cpu/kernels.h"
#include "cpu/scalar.h"

namespace hf_kbit::cpu {

constexpr int kChunk = 32, kChunks = kTrellisSteps / kChunk;

template <class V>
constexpr int kParts = kTrellisTile / V::kWidth;  // vectors of windows of a chunk, and of inputs

// Asks for the tile some columns further on: next to each other in memory are tiles of a column.
static inline void ask_for(const TrellisTiles& tiles, int64_t column, int64_t row) {
    const auto* ahead = reinterpret_cast<const char*>(tiles.at(column + 6, row));
    for (int byte = 0; byte < 32 * tiles.bits; byte += 64) __builtin_prefetch(ahead + byte);
}

// --- values --------------------------------------------------------------------------------------

// The values of a chunk's outputs, exactly, in tile order.
template <class V, Code code>
static inline __attribute__((always_inline)) void decode_chunk(const typename V::Tile& tile, int chunk,
                                                               typename V::F (&values)[2][kParts<V>]) {
    for (int part = 0; part < kParts<V>; ++part) {
        const auto windows = tile.windows(chunk * kParts<V> + part);
        typename V::I outputs[2];
        if constexpr (code == Code::mul1) {
            // The upper half makes a sum the last bits of a float32, of 2**23 more.
            V::spread(V::mul1_sums(windows), 0x4B00, outputs);
            for (int output = 0; output < 2; ++output) {
                const auto sum = V::as_floats(outputs[output]), scale = V::broadcast(kSumScale);
                if constexpr (V::kFuses) {
                    values[output][part] = V::fma(sum, scale, V::broadcast(kSumZero - kSumScale * 0x1p23f));
                } else {
                    values[output][part] = V::fma(V::sub(sum, V::broadcast(0x1p23f)), scale, V::broadcast(kSumZero));
                }
            }
        } else {
            V::spread(windows, 0, outputs);
            for (int output = 0; output < 2; ++output) {
                // Both halves are normal numbers, for their exponents are 12 to 15: the flipped bits of it are kept.
                const auto x = V::add_words(V::multiply_words(outputs[output], V::splat(code_factor(code))),
                                            V::splat(code_added(code)));
                const auto halves = V::bit_xor(V::bit_and(x, V::splat(kHalvesMask)), V::splat(kHalvesFlipped));
                const auto as_float = [](typename V::I half) {
                    const auto sign = V::shift_left(V::bit_and(half, V::splat(0x8000)), 16);
                    const auto magnitude = V::shift_left(V::bit_and(half, V::splat(0x7FFF)), 13);
                    return V::as_floats(V::bit_or(sign, V::add_words(magnitude, V::splat(112u << 23))));
                };
                values[output][part] = V::add(as_float(halves), as_float(V::shift_right(halves, 16)));
            }
        }
    }
}

// Rows of tiles [begin, end): out [16 * end, 16 * across], row-major.
template <class V, Code code, Dtype dtype>
static void decode_trellis_rows(const TrellisTiles& tiles, void* out, int64_t begin, int64_t end) {
    const int64_t row_bytes = tiles.across * kTrellisTile * size_of(dtype);
    for (int64_t row = begin; row < end; ++row) {
        char* to = static_cast<char*>(out) + row * kTrellisTile * row_bytes;
        for (int64_t column = 0; column < tiles.across; ++column, to += kTrellisTile * size_of(dtype)) {
            const typename V::Tile tile(tiles.at(column, row), tiles.bits);
            ask_for(tiles, column, row);
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                typename V::F values[2][kParts<V>];
                decode_chunk<V, code>(tile, chunk, values);
                for (int output = 0; output < 2; ++output) {
                    char* own = to + (chunk + 8 * output) * row_bytes;
                    V::natural(values[output]);
                    for (auto value : values[output]) {
                        V::template store_as<dtype>(own, dtype == Dtype::float16 ? value : V::round_to_half(value));
                        own += V::kWidth * size_of(dtype);
                    }
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

}  // namespace hf_kbit::cpu
