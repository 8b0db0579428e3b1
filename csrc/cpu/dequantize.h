// Dequantize: a block of 32 weights at a time, the float32 product level * scale, turned back, rounded once.
#pragma once

#include "cpu/scalar.h"
#include "cpu/transform.h"

namespace hf_kbit::cpu {

template <class V, int bits, Dtype dtype, bool transformed>
static inline void dequantize_block(const int32_t* words, uint8_t absmax, uint32_t sign,
                                    const typename V::template Levels<bits>& levels, const uint8_t* columns,
                                    bool rotated, char* out) {
    constexpr int kVectors = kBlockSize / V::kWidth;
    const auto scale = V::broadcast(decode_scale(absmax, sign));
    Block<V> values;
    levels.of_block(words, values);
    for (int v = 0; v < kVectors; ++v) values[v] = V::mul(values[v], scale);
    if (transformed && rotated) rotate_block<V>(values);
    if (transformed && columns != nullptr) scale_block<V>(values, columns);
    for (int v = 0; v < kVectors; ++v) {
        V::template store_as<dtype>(out + v * V::kWidth * size_of(dtype), values[v]);
    }
}

// A weight that is not `transformed` has code of its own: where values may go through more, it is half as fast.
template <class V, int bits, Dtype dtype, bool transformed>
static void dequantize_rows(const int32_t* planes, const uint8_t* absmax, bool signed_scales, const float* codebook,
                            int64_t in_features, const uint8_t* columns, bool rotated, void* out, int64_t begin,
                            int64_t end) {
    // Every NaN becomes the usual one: store_as may round it like a number, and 0x7FFFFFFF would carry over to zero.
    float numbers[1 << bits];
    for (int i = 0; i < 1 << bits; ++i) numbers[i] = codebook[i] == codebook[i] ? codebook[i] : float_of(0x7FC00000);
    const typename V::template Levels<bits> levels(numbers);
    const int64_t blocks = num_blocks(in_features), whole = in_features / kBlockSize;
    const uint32_t sign = signed_scales ? kSignBit : 0;
    constexpr int64_t kBlockBytes = kBlockSize * size_of(dtype);
    const int64_t held = in_features % kBlockSize;  // by the last block, if it is not whole
    uint8_t padded_columns[kBlockSize];
    const uint8_t* last_columns = columns_of_block(columns, whole * kBlockSize, held, padded_columns);
    for (int64_t row = begin; row < end; ++row) {
        const int32_t* words = planes + row * blocks * bits;
        const uint8_t* scales = absmax + row * blocks;
        char* target = static_cast<char*>(out) + row * in_features * size_of(dtype);
        for (int64_t block = 0; block < whole; ++block) {
            dequantize_block<V, bits, dtype, transformed>(words + block * bits, scales[block], sign, levels,
                                                          columns ? columns + block * kBlockSize : nullptr, rotated,
                                                          target + block * kBlockBytes);
        }
        if (whole < blocks) {
            alignas(64) char padded[kBlockBytes];
            dequantize_block<V, bits, dtype, transformed>(words + whole * bits, scales[whole], sign, levels,
                                                          last_columns, rotated, padded);
            std::memcpy(target + whole * kBlockBytes, padded, static_cast<size_t>(held * size_of(dtype)));
        }
    }
}

template <class V>
static void dequantize_with(const int32_t* planes, const uint8_t* absmax, bool signed_scales, const float* codebook,
                            int bits, int64_t in_features, const uint8_t* columns, bool rotated, void* out,
                            Dtype dtype, int64_t begin, int64_t end) {
    with_bits(bits, [&](auto width) {
        with_dtype(dtype, [&](auto type) {
            const auto rows = columns != nullptr || rotated ? dequantize_rows<V, width(), type(), true>
                                                            : dequantize_rows<V, width(), type(), false>;
            rows(planes, absmax, signed_scales, codebook, in_features, columns, rotated, out, begin, end);
        });
    });
}

}  // namespace hf_kbit::cpu
