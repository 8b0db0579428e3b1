// x @ W.T + bias for few tokens, the weights decoded in registers.
//
// A group is V::kWidth consecutive blocks of a row, one block in each 32-bit lane. Its weights come out of
// decode_group as 32 vectors in an order that costs the fewest instructions; gemm_pack transforms x, as the stored
// weight needs it, and puts it into the same order: panel[group][token][vector][lane], padded with zeros.
//
// - One token: each vector goes straight into a sum; the scales of the group follow once for all of its vectors.
// - More tokens: the groups of kRows rows are decoded to a buffer in the L1 cache, scales included, then multiplied
//   with the tokens in register tiles of kRows x kTokens.
#pragma once

#include "cpu/scalar.h"
#include "cpu/transform.h"

namespace hf_kbit::cpu {

constexpr int kGroupVectors = kBlockSize;
constexpr int kRows = 6;  // with kTokens: 12 sums, 2 inputs and 1 weight fit 16 registers
constexpr int kTokens = 2;
constexpr int kTokenSlab = 32;  // tokens that share one decoding; bounds the buffer of sums

// Exchanges the bits `mask << shift` of a with the bits `mask` of b.
template <class V>
static inline void swap_bits(typename V::I& a, typename V::I& b, int shift, uint32_t mask) {
    const auto changed = V::bit_and(V::bit_xor(V::shift_right(a, shift), b), V::splat(mask));
    b = V::bit_xor(b, changed);
    a = V::bit_xor(a, V::shift_left(changed, shift));
}

// Whether level 31 - n is level n with the other sign, of a codebook of 5 bits.
static inline bool is_antisymmetric(const float* codebook) {
    for (int n = 0; n < 16; ++n) {
        if (bits_of(codebook[31 - n]) != (bits_of(codebook[n]) ^ 0x80000000)) return false;
    }
    return true;
}

// Calls sink(v, part, levels) for the vectors v = 4 * j + part of a group. A vector holds the weights 8 * byte + j of
// blocks; V::block_of(part, lane) and V::byte_of(part, lane) say which.
template <class V, class Levels, class Sink>
static inline __attribute__((always_inline)) void decode_group(const int32_t* words, const Levels& levels, Sink sink) {
    static_assert(Levels::kBits <= 5, "a code is a nibble and a fifth bit, as in Levels of each instruction set");
    typename V::I planes[5] = {V::splat(0), V::splat(0), V::splat(0), V::splat(0), V::splat(0)};
    V::template load_planes<Levels::kBits>(words, planes);
    if constexpr (Levels::kAntisymmetric) {
        // Code n of the upper half has the level of 31 - n, which is ~n, with the other sign.
        for (int plane = 0; plane < 4; ++plane) planes[plane] = V::bit_xor(planes[plane], planes[4]);
    }
    // Transposes the bits of planes 0 to 3: nibble n of planes[k] becomes the low four bits of the code of weight
    // 4 n + k.
    swap_bits<V>(planes[0], planes[1], 1, 0x55555555);
    swap_bits<V>(planes[2], planes[3], 1, 0x55555555);
    swap_bits<V>(planes[0], planes[2], 2, 0x33333333);
    swap_bits<V>(planes[1], planes[3], 2, 0x33333333);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const auto codes = V::bit_and(V::shift_right(planes[j % 4], j / 4 * 4), V::splat(0x0F0F0F0F));
        auto fifth = V::splat(0);
        if constexpr (Levels::kBits == 5) {
            const int up = V::kFifthBit - j;  // from bit j of every byte to where Levels wants the fifth bit
            const auto moved = up >= 0 ? V::shift_left(planes[4], up) : V::shift_right(planes[4], -up);
            fifth = V::bit_and(moved, V::splat(0x01010101u << V::kFifthBit));
        }
        typename V::F parts[4];
        levels.of_bytes(codes, fifth, parts);
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) sink(4 * j + part, part, parts[part]);
    }
}

// Words and scales of one group of a row. The last one is copied if it lacks blocks, the missing scales being zero.
template <class V, int bits>
struct Group {
    const int32_t* words;
    const uint8_t* scales;
    alignas(64) int32_t padded_words[V::kWidth * bits];
    uint8_t padded_scales[V::kWidth];

    Group(const int32_t* row_words, const uint8_t* row_scales, int64_t group, int64_t blocks)
        : words(row_words + group * V::kWidth * bits), scales(row_scales + group * V::kWidth) {
        const int64_t held = blocks - group * V::kWidth;
        if (held >= V::kWidth) return;
        std::memset(padded_words, 0, sizeof padded_words);
        std::memset(padded_scales, 0, sizeof padded_scales);
        std::memcpy(padded_words, words, static_cast<size_t>(held * bits) * sizeof *words);
        std::memcpy(padded_scales, scales, static_cast<size_t>(held));
        words = padded_words;
        scales = padded_scales;
    }
};

// One row times the only token.
template <class V, class Levels>
static inline float multiply_row(const float* panel, const int32_t* row_words, const uint8_t* row_scales,
                                 uint32_t sign, int64_t blocks, const Levels& levels) {
    const int64_t groups = ceil_div(blocks, V::kWidth);
    auto total = V::zero();
    for (int64_t g = 0; g < groups; ++g, panel += kGroupVectors * V::kWidth) {
        const Group<V, Levels::kBits> group(row_words, row_scales, g, blocks);
        typename V::F sums[4] = {V::zero(), V::zero(), V::zero(), V::zero()};
        decode_group<V>(group.words, levels, [&](int v, int part, typename V::F values) {
            sums[part] = V::fma(values, V::load(panel + v * V::kWidth), sums[part]);
        });
        const auto scales = V::load_scales(group.scales, sign);
        for (int part = 0; part < 4; ++part) total = V::fma(V::spread(scales, part), sums[part], total);
    }
    return V::sum(total);
}

// totals[row][token] += weights[row] * x[token] for a tile of kRows x `tokens`, over one group.
template <class V, int tokens>
static inline void multiply_tile(const float* weights, const float* x, float* totals) {
    constexpr int kGroup = kGroupVectors * V::kWidth, kRowStep = kTokenSlab * V::kWidth;
    typename V::F sums[kRows][tokens];
    for (int row = 0; row < kRows; ++row) {
        for (int t = 0; t < tokens; ++t) sums[row][t] = V::load(totals + row * kRowStep + t * V::kWidth);
    }
    for (int v = 0; v < kGroupVectors; ++v) {
        typename V::F inputs[tokens];
        for (int t = 0; t < tokens; ++t) inputs[t] = V::load(x + t * kGroup + v * V::kWidth);
        for (int row = 0; row < kRows; ++row) {
            const auto weight = V::load(weights + row * kGroup + v * V::kWidth);
            for (int t = 0; t < tokens; ++t) sums[row][t] = V::fma(weight, inputs[t], sums[row][t]);
        }
    }
    for (int row = 0; row < kRows; ++row) {
        for (int t = 0; t < tokens; ++t) V::store(totals + row * kRowStep + t * V::kWidth, sums[row][t]);
    }
}

// Up to kRows rows times up to kTokenSlab of all the tokens that the panel holds: totals[row][token][lane].
template <class V, class Levels>
static inline void multiply_rows(const float* panel, int64_t panel_tokens, int tokens, const int32_t* words,
                                 const uint8_t* scales, uint32_t sign, int rows, int64_t blocks, const Levels& levels,
                                 float* totals) {
    constexpr int kGroup = kGroupVectors * V::kWidth;
    alignas(64) float weights[kRows * kGroup];
    std::memset(weights, 0, sizeof weights);  // rows past the last one
    const int64_t groups = ceil_div(blocks, V::kWidth);
    for (int64_t g = 0; g < groups; ++g, panel += panel_tokens * kGroup) {
        for (int row = 0; row < rows; ++row) {
            const int64_t block = row * blocks;
            const Group<V, Levels::kBits> group(words + block * Levels::kBits, scales + block, g, blocks);
            const auto all = V::load_scales(group.scales, sign);
            const typename V::F spread[4] = {V::spread(all, 0), V::spread(all, 1), V::spread(all, 2),
                                             V::spread(all, 3)};
            float* target = weights + row * kGroup;
            decode_group<V>(group.words, levels, [&](int v, int part, typename V::F values) {
                V::store(target + v * V::kWidth, V::mul(values, spread[part]));
            });
        }
        int t = 0;
        for (; t + kTokens <= tokens; t += kTokens) {
            multiply_tile<V, kTokens>(weights, panel + t * kGroup, totals + t * V::kWidth);
        }
        for (; t < tokens; ++t) multiply_tile<V, 1>(weights, panel + t * kGroup, totals + t * V::kWidth);
    }
}

template <class V, class Levels>
static void gemm_rows(const float* panel, int64_t tokens, bool batch_invariant, const int32_t* planes,
                      const uint8_t* absmax, bool signed_scales, const float* codebook, const void* bias, void* out,
                      Dtype dtype, int64_t out_features, int64_t in_features, int64_t begin, int64_t end) {
    const Levels levels(codebook);
    const int64_t blocks = num_blocks(in_features);
    const uint32_t sign = signed_scales ? kSignBit : 0;
    const auto store = [&](int64_t token, int64_t row, float sum) {
        store_scalar(out, dtype, token * out_features + row, bias ? sum + load_scalar(bias, dtype, row) : sum);
    };
    if (tokens == 1 && !batch_invariant) {
        for (int64_t row = begin; row < end; ++row) {
            const int32_t* words = planes + row * blocks * Levels::kBits;
            store(0, row, multiply_row<V>(panel, words, absmax + row * blocks, sign, blocks, levels));
        }
        return;
    }
    alignas(64) float totals[kRows * kTokenSlab * V::kWidth];
    for (int64_t first = 0; first < tokens; first += kTokenSlab) {
        const int count = static_cast<int>(tokens - first < kTokenSlab ? tokens - first : kTokenSlab);
        for (int64_t row = begin; row < end; row += kRows) {
            const int rows = static_cast<int>(end - row < kRows ? end - row : kRows);
            std::memset(totals, 0, sizeof totals);
            multiply_rows<V>(panel + first * kGroupVectors * V::kWidth, tokens, count,
                             planes + row * blocks * Levels::kBits, absmax + row * blocks, sign, rows, blocks, levels,
                             totals);
            for (int r = 0; r < rows; ++r) {
                for (int t = 0; t < count; ++t) {
                    store(first + t, row + r, V::sum(V::load(totals + (r * kTokenSlab + t) * V::kWidth)));
                }
            }
        }
    }
}

template <class V>
static void gemm_with(const float* panel, int64_t tokens, bool batch_invariant, const int32_t* planes,
                      const uint8_t* absmax, bool signed_scales, const float* codebook, int bits, const void* bias,
                      void* out, Dtype dtype, int64_t out_features, int64_t in_features, int64_t begin, int64_t end) {
    with_bits(bits, [&](auto width) {
        auto rows = gemm_rows<V, typename V::template Levels<width()>>;
        if constexpr (width() == 5 && V::kUsesAntisymmetry) {
            if (is_antisymmetric(codebook)) rows = gemm_rows<V, typename V::template Levels<5, true>>;
        }
        rows(panel, tokens, batch_invariant, planes, absmax, signed_scales, codebook, bias, out, dtype, out_features,
             in_features, begin, end);
    });
}

template <class V>
static int64_t gemm_panel_size_with(Dtype, int64_t tokens, bool, int64_t in_features) {
    return ceil_div(num_blocks(in_features), V::kWidth) * tokens * kGroupVectors * V::kWidth;
}

template <class V>
static void gemm_pack_with(const void* x, Dtype dtype, int64_t tokens, bool, int64_t in_features,
                           const uint8_t* columns, bool rotated, float* panel, int64_t begin, int64_t end) {
    constexpr int kGroup = kGroupVectors * V::kWidth;
    int source[kGroup];  // for each place in a group, its column
    for (int i = 0; i < kGroup; ++i) {
        const int j = i / V::kWidth / 4, part = i / V::kWidth % 4, lane = i % V::kWidth;
        source[i] = kBlockSize * V::block_of(part, lane) + 8 * V::byte_of(part, lane) + j;
    }
    with_dtype(dtype, [&](auto type) {
        for (int64_t first = 0; first < in_features; first += kGroup) {
            const int64_t held = in_features - first < kGroup ? in_features - first : kGroup;
            float* target = panel + (first / kGroup * tokens + begin) * kGroup;
            for (int64_t token = begin; token < end; ++token, target += kGroup) {
                const char* row = static_cast<const char*>(x) + token * in_features * size_of(type());
                alignas(64) float group[kGroup] = {};
                for (int64_t i = 0; i < held; i += kBlockSize) {
                    Block<V> values;
                    transform_block<V, type()>(row, first + i, held - i, columns, rotated, values);
                    for (int v = 0; v < kBlockSize / V::kWidth; ++v) V::store(group + i + v * V::kWidth, values[v]);
                }
                for (int i = 0; i < kGroup; ++i) target[i] = group[source[i]];
            }
        }
    });
}

}  // namespace hf_kbit::cpu
