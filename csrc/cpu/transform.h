// What hf_kbit/format/transforms.py says, of 32 neighbours at a time in float32: column scales, and the rotation of a
// block.
//
// Bit-identical to it: sums and differences of neighbours at distance 1, 2, 4, 8 and 16, then one product.
#pragma once

#include "cpu/scalar.h"

namespace hf_kbit::cpu {

constexpr float kRotationScale = 0.17677669529663688f;  // 32**-0.5

template <class V>
using Block = typename V::F[kBlockSize / V::kWidth];  // in order

template <class V, int distance = 1>
static inline __attribute__((always_inline)) void rotate_block(Block<V>& values) {
    constexpr int kVectors = kBlockSize / V::kWidth, kStep = distance / V::kWidth;
    if constexpr (kStep == 0) {
        for (int v = 0; v < kVectors; ++v) values[v] = V::template butterfly<distance>(values[v]);
    } else {
        for (int v = 0; v < kVectors; ++v) {
            if (v & kStep) continue;
            const auto first = values[v], second = values[v + kStep];
            values[v] = V::add(first, second);
            values[v + kStep] = V::sub(first, second);
        }
    }
    if constexpr (2 * distance < kBlockSize) {
        rotate_block<V, 2 * distance>(values);
    } else {
        for (int v = 0; v < kVectors; ++v) values[v] = V::mul(values[v], V::broadcast(kRotationScale));
    }
}

template <class V>
static inline void scale_block(Block<V>& values, const uint8_t* columns) {
    for (int v = 0; v < kBlockSize / V::kWidth; ++v) {
        values[v] = V::mul(values[v], V::load_scales(columns + v * V::kWidth, 0));
    }
}

// The scales of a block of which `held` columns exist: 32 of them, null if there are none.
static inline const uint8_t* columns_of_block(const uint8_t* columns, int64_t first, int64_t held,
                                              uint8_t (&padded)[kBlockSize]) {
    if (columns == nullptr || held >= kBlockSize) return columns ? columns + first : nullptr;
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, columns + first, static_cast<size_t>(held));
    return padded;
}

// One row of x from `first` on, `held` columns or 32, padded with zeros, as the stored weight meets it.
template <class V, Dtype dtype>
static inline void transform_block(const char* row, int64_t first, int64_t held, const uint8_t* columns, bool rotated,
                                   Block<V>& values) {
    constexpr int kVectors = kBlockSize / V::kWidth;
    const char* source = row + first * size_of(dtype);
    if (held >= kBlockSize) {
        for (int v = 0; v < kVectors; ++v) {
            values[v] = V::template load_as<dtype>(source + v * V::kWidth * size_of(dtype));
        }
    } else {
        alignas(64) float numbers[kBlockSize] = {};
        for (int64_t i = 0; i < held; ++i) numbers[i] = load_scalar(source, dtype, i);
        for (int v = 0; v < kVectors; ++v) values[v] = V::load(numbers + v * V::kWidth);
    }
    uint8_t padded[kBlockSize];
    if (const uint8_t* scales = columns_of_block(columns, first, held, padded)) scale_block<V>(values, scales);
    if (rotated) rotate_block<V>(values);
}

template <class V, Dtype dtype, Dtype out_dtype>
static void transform_rows(const void* x, int64_t in_features, const uint8_t* columns, bool rotated, void* out,
                           int64_t begin, int64_t end) {
    const int64_t width = rotated ? num_blocks(in_features) * kBlockSize : in_features;
    for (int64_t token = begin; token < end; ++token) {
        const char* row = static_cast<const char*>(x) + token * in_features * size_of(dtype);
        char* target = static_cast<char*>(out) + token * width * size_of(out_dtype);
        for (int64_t first = 0; first < width; first += kBlockSize) {
            Block<V> values;
            transform_block<V, dtype>(row, first, in_features - first, columns, rotated, values);
            alignas(64) char padded[kBlockSize * size_of(out_dtype)];
            const bool whole = width - first >= kBlockSize;
            char* block = whole ? target + first * size_of(out_dtype) : padded;
            for (int v = 0; v < kBlockSize / V::kWidth; ++v) {
                V::template store_as<out_dtype>(block + v * V::kWidth * size_of(out_dtype), values[v]);
            }
            if (!whole) {
                std::memcpy(target + first * size_of(out_dtype), padded,
                            static_cast<size_t>((width - first) * size_of(out_dtype)));
            }
        }
    }
}

template <class V>
static void transform_with(const void* x, Dtype dtype, int64_t in_features, const uint8_t* columns, bool rotated,
                           void* out, Dtype out_dtype, int64_t begin, int64_t end) {
    with_dtype(dtype, [&](auto type) {
        const auto rows =
            out_dtype == dtype ? transform_rows<V, type(), type()> : transform_rows<V, type(), Dtype::float32>;
        rows(x, in_features, columns, rotated, out, begin, end);
    });
}

}  // namespace hf_kbit::cpu
