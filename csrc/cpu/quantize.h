// Quantize: a block of 32 weights at a time, in registers. hf_kbit/format/reference.py is the specification, bit for
// bit.
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

// The codes of values, and their bits in the words of the block's planes.
template <class V, int plane, int bits>
static inline typename V::I search(const Thresholds<V, bits>& thresholds, typename V::F value, typename V::I prefix,
                                   int shift, uint32_t (&words)[bits]) {
    const auto halfway = V::template lookup<(1 << (bits - 1 - plane))>(thresholds.table[plane], prefix);
    const auto above = V::less(halfway, value);
    words[plane] |= V::bits(above) << shift;
    const auto code = V::append(prefix, above);
    if constexpr (plane > 0) {
        return search<V, plane - 1>(thresholds, value, code, shift, words);
    } else {
        return code;
    }
}

// A codebook, and what is made of it for all blocks.
template <class V, int bits>
struct Target {
    alignas(64) float levels[1 << bits < 16 ? 16 : 1 << bits];  // each table repeats its entries up to 16
    float largest = 0, unit = 1;
    Thresholds<V, bits> thresholds;
    bool searched, signed_scales;
    bool below;  // whether the level of largest magnitude is negative, and no other as large

    Target(const float* codebook, bool searched, bool signed_scales)
        : thresholds((normalize(codebook, searched), levels)),
          searched(searched),
          signed_scales(signed_scales),
          below(codebook[(1 << bits) - 1] < -codebook[0]) {}

    // Where scales are searched, weights and levels are in units of a power of two, so that no square leaves the range
    // of float32.
    void normalize(const float* codebook, bool units) {
        for (int i = 0; i < 1 << bits; ++i) {
            const float magnitude = float_of(bits_of(codebook[i]) & 0x7FFFFFFF);
            if (magnitude > largest) largest = magnitude;
        }
        if (units) {
            const uint32_t exponent = bits_of(largest) >> 23;
            unit = float_of((254 - (exponent < 1 ? 1 : exponent > 253 ? 253 : exponent)) << 23);
        }
        largest *= unit;
        for (int i = 0; i < static_cast<int>(sizeof levels / sizeof *levels); ++i) {
            levels[i] = codebook[i % (1 << bits)] * unit;
        }
    }
};

// The squared error of a block with this scale; `kept` is 1 for weights, 0 for padding. The sum has the order of
// hf_kbit/format/reference.py: halves are added to each other until one number is left.
template <class V, int bits, int kVectors>
static inline float squared_error(const typename V::F (&values)[kVectors], const typename V::F (&kept)[kVectors],
                                  uint8_t byte, const Target<V, bits>& target) {
    const float scale = decode_e4m4(byte);
    const auto inverse = V::broadcast(scale > 0 ? 1 / scale : 0);
    typename V::F squares[kVectors];
    // As a loop, GCC 12 vectorizes it to wrong errors for some widths of V = Portable.
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
        uint32_t unused[bits] = {};
        const auto ratio = V::mul(values[v], inverse);
        const auto code = search<V, bits - 1>(target.thresholds, ratio, V::zero_index(), 0, unused);
        const auto difference = V::mul(V::sub(ratio, V::template lookup<(1 << bits)>(target.levels, code)), kept[v]);
        squares[v] = V::mul(difference, difference);
    }
    for (int half = kVectors / 2; half > 0; half /= 2) {
        for (int v = 0; v < half; ++v) squares[v] = V::add(squares[v], squares[v + half]);
    }
    return V::sum(squares[0]) * scale * scale;
}

template <class V, int bits, Dtype dtype>
static inline void quantize_block(const void* weight, int columns, const Target<V, bits>& target, int32_t* planes,
                                  uint8_t* absmax) {
    constexpr int kVectors = kBlockSize / V::kWidth;
    const auto* bytes = static_cast<const char*>(weight);
    typename V::F values[kVectors];
    auto largest = V::zero(), most = V::zero(), least = V::zero();
    const auto unit = V::broadcast(target.unit);
    for (int v = 0; v < kVectors; ++v) {
        values[v] = V::mul(V::template load_as<dtype>(bytes + v * V::kWidth * size_of(dtype)), unit);
        largest = V::max(largest, V::abs(values[v]));
        if (target.signed_scales) {
            most = V::max(most, values[v]);
            least = V::max(least, V::sub(V::zero(), values[v]));
        }
    }
    // With a sign that is negative the block is quantized as its negative.
    bool negative = false;
    if (target.signed_scales) {
        negative = target.below ? V::largest(most) > V::largest(least) : V::largest(least) > V::largest(most);
        const auto sign = V::broadcast(negative ? -1.0f : 1.0f);
        for (int v = 0; v < kVectors; ++v) values[v] = V::mul(values[v], sign);
    }
    const int highest = most_scale(target.signed_scales);
    *absmax = encode_e4m4(V::largest(largest) / target.largest);
    if (*absmax > highest) *absmax = static_cast<uint8_t>(highest);
    if (target.searched && *absmax > 0) {
        static constexpr auto kKept = [] {
            struct {
                float first[2 * kBlockSize];
            } ones_and_zeros{};
            for (int i = 0; i < kBlockSize; ++i) ones_and_zeros.first[i] = 1;
            return ones_and_zeros;
        }();
        typename V::F kept[kVectors];
        for (int v = 0; v < kVectors; ++v) kept[v] = V::load(kKept.first + kBlockSize - columns + v * V::kWidth);
        const int around = *absmax;
        float least = squared_error<V, bits>(values, kept, *absmax, target);
        const int below = search_below(target.signed_scales), above = search_above(target.signed_scales);
        for (int step = -below; step <= above; ++step) {
            const int found = around + step;
            const auto byte = static_cast<uint8_t>(found < 1 ? 1 : found > highest ? highest : found);
            const float error = squared_error<V, bits>(values, kept, byte, target);
            if (error < least) least = error, *absmax = byte;
        }
    }
    const float scale = decode_e4m4(*absmax);
    const auto inverse = V::broadcast(scale > 0 ? 1 / scale : 0);
    uint32_t words[bits] = {};
    for (int v = 0; v < kVectors; ++v) {
        search<V, bits - 1>(target.thresholds, V::mul(values[v], inverse), V::zero_index(), v * V::kWidth, words);
    }
    std::memcpy(planes, words, sizeof words);
    if (negative && *absmax > 0) *absmax |= kSignBit;
}

template <class V, int bits, Dtype dtype>
static void quantize_rows(const void* weight, const float* codebook, bool searched, bool signed_scales,
                          int64_t in_features, int32_t* planes, uint8_t* absmax, int64_t begin, int64_t end) {
    const Target<V, bits> target(codebook, searched, signed_scales);
    const int64_t blocks = num_blocks(in_features), whole = in_features / kBlockSize;
    const int tail = static_cast<int>(in_features % kBlockSize);
    for (int64_t row = begin; row < end; ++row) {
        const char* source = static_cast<const char*>(weight) + row * in_features * size_of(dtype);
        int32_t* words = planes + row * blocks * bits;
        uint8_t* scales = absmax + row * blocks;
        for (int64_t block = 0; block < whole; ++block) {
            quantize_block<V, bits, dtype>(source + block * kBlockSize * size_of(dtype), kBlockSize, target,
                                           words + block * bits, scales + block);
        }
        if (whole < blocks) {
            alignas(64) char padded[kBlockSize * sizeof(float)] = {};
            std::memcpy(padded, source + whole * kBlockSize * size_of(dtype),
                        static_cast<size_t>(tail * size_of(dtype)));
            quantize_block<V, bits, dtype>(padded, tail, target, words + whole * bits, scales + whole);
        }
    }
}

template <class V>
static void quantize_with(const void* weight, Dtype dtype, const float* codebook, int bits, bool searched,
                          bool signed_scales, int64_t in_features, int32_t* planes, uint8_t* absmax, int64_t begin,
                          int64_t end) {
    with_bits(bits, [&](auto width) {
        with_dtype(dtype, [&](auto type) {
            if constexpr (type() != Dtype::float64) {
                quantize_rows<V, width(), type()>(weight, codebook, searched, signed_scales, in_features, planes,
                                                  absmax, begin, end);
            }
        });
    });
}

}  // namespace hf_kbit::cpu
