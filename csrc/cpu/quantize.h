// Quantize: a block of 32 weights at a time, in registers. hf_kbit/reference.py is the specification, bit for bit.
#pragma once

#include "cpu/scalar.h"

namespace hf_kbit::cpu {

// The midpoints between levels, arranged for a binary search. The step that finds bit `plane` of a code knows the bits
// above it, `prefix`; the code has bit `plane` set if the weight is above midpoint ((2 * prefix + 1) << plane) - 1.
// Each table repeats its entries up to 16. (V only keeps the linker from sharing the constructor.)
template <class V, int bits>
struct Thresholds {
    alignas(64) float table[bits][16];

    explicit Thresholds(const float* codebook) {
        for (int plane = 0; plane < bits; ++plane) {
            for (int i = 0; i < 16; ++i) {
                const int prefix = i % (1 << (bits - 1 - plane));
                const int level = ((2 * prefix + 1) << plane) - 1;
                table[plane][i] = (codebook[level] + codebook[level + 1]) / 2;
            }
        }
    }
};

template <class V, int plane, int bits>
static inline void search(const Thresholds<V, bits>& thresholds, typename V::F value, typename V::I prefix, int shift,
                          uint32_t (&words)[bits]) {
    const auto halfway = V::template lookup<(1 << (bits - 1 - plane))>(thresholds.table[plane], prefix);
    const auto above = V::less(halfway, value);
    words[plane] |= V::bits(above) << shift;
    if constexpr (plane > 0) search<V, plane - 1>(thresholds, value, V::append(prefix, above), shift, words);
}

template <class V, int bits, Dtype dtype>
static inline void quantize_block(const void* weight, float largest_level, const Thresholds<V, bits>& thresholds,
                                  int32_t* planes, uint8_t* absmax) {
    constexpr int kVectors = kBlockSize / V::kWidth;
    const auto* bytes = static_cast<const char*>(weight);
    typename V::F values[kVectors];
    auto largest = V::zero();
    for (int v = 0; v < kVectors; ++v) {
        values[v] = V::template load_as<dtype>(bytes + v * V::kWidth * size_of(dtype));
        largest = V::max(largest, V::abs(values[v]));
    }
    *absmax = encode_e4m4(V::largest(largest) / largest_level);
    const float scale = decode_e4m4(*absmax);
    const auto inverse = V::broadcast(scale > 0 ? 1 / scale : 0);
    uint32_t words[bits] = {};
    for (int v = 0; v < kVectors; ++v) {
        search<V, bits - 1>(thresholds, V::mul(values[v], inverse), V::zero_index(), v * V::kWidth, words);
    }
    std::memcpy(planes, words, sizeof words);
}

template <class V, int bits, Dtype dtype>
static void quantize_rows(const void* weight, const float* codebook, int64_t in_features, int32_t* planes,
                          uint8_t* absmax, int64_t begin, int64_t end) {
    const Thresholds<V, bits> thresholds(codebook);
    float largest_level = 0;
    for (int i = 0; i < 1 << bits; ++i) {
        const float magnitude = float_of(bits_of(codebook[i]) & 0x7FFFFFFF);
        if (magnitude > largest_level) largest_level = magnitude;
    }
    const int64_t blocks = num_blocks(in_features), whole = in_features / kBlockSize;
    const size_t tail_bytes = static_cast<size_t>(in_features % kBlockSize * size_of(dtype));
    for (int64_t row = begin; row < end; ++row) {
        const char* source = static_cast<const char*>(weight) + row * in_features * size_of(dtype);
        int32_t* words = planes + row * blocks * bits;
        uint8_t* scales = absmax + row * blocks;
        for (int64_t block = 0; block < whole; ++block) {
            quantize_block<V, bits, dtype>(source + block * kBlockSize * size_of(dtype), largest_level, thresholds,
                                           words + block * bits, scales + block);
        }
        if (whole < blocks) {
            alignas(64) char padded[kBlockSize * sizeof(float)] = {};
            std::memcpy(padded, source + whole * kBlockSize * size_of(dtype), tail_bytes);
            quantize_block<V, bits, dtype>(padded, largest_level, thresholds, words + whole * bits, scales + whole);
        }
    }
}

template <class V>
static void quantize_with(const void* weight, Dtype dtype, const float* codebook, int bits, int64_t in_features,
                          int32_t* planes, uint8_t* absmax, int64_t begin, int64_t end) {
    with_bits(bits, [&](auto width) {
        with_dtype(dtype, [&](auto type) {
            if constexpr (type() != Dtype::float64) {
                quantize_rows<V, width(), type()>(weight, codebook, in_features, planes, absmax, begin, end);
            }
        });
    });
}

}  // namespace hf_kbit::cpu
