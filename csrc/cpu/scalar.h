// One number at a time: 16-bit floats, E4M4 scales, and the step from run-time bits and dtypes to template arguments.
// Integer arithmetic wherever a denormal could occur, so that flushing denormals to zero changes nothing.
//
// Everything is static: each instruction set compiles a copy of its own, and the linker never picks one for another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/format.h"

namespace hf_kbit::cpu {

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Added to a number it rounds it to an integer, ties to even, whose low 16 bits are those of the sum.
constexpr float kToInteger = 0x1.8p23f;

// --- 16-bit floats ---

static inline float float_of_float16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000 | magnitude << 13);  // infinity, NaN
    if (magnitude >= 0x0400) return float_of(sign | ((magnitude << 13) + (112u << 23)));
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
}

// Divides by 2**shift, shift 1 to 31: to nearest, ties to even.
static inline uint32_t shift_right_rounded(uint32_t value, int shift) {
    return (value + ((1u << (shift - 1)) - 1) + ((value >> shift) & 1)) >> shift;
}

static inline uint16_t float16_of_float(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);   // NaN
    if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more round to infinity
    if (magnitude >= 113u << 23) {
        return static_cast<uint16_t>(sign | shift_right_rounded(magnitude - (112u << 23), 13));
    }
    if (magnitude < 102u << 23) return static_cast<uint16_t>(sign);  // under 2**-25, half the smallest subnormal
    const int exponent = static_cast<int>(magnitude >> 23);
    return static_cast<uint16_t>(sign | shift_right_rounded((magnitude & 0x7FFFFF) | 0x800000, 126 - exponent));
}

static inline float float_of_bfloat16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

static inline uint16_t bfloat16_of_float(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return static_cast<uint16_t>(shift_right_rounded(bits, 16));
}

static constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::float64 ? 8 : dtype == Dtype::float32 ? 4 : 2; }

static inline float load_scalar(const void* data, Dtype dtype, int64_t i) {
    switch (dtype) {
        case Dtype::float16:
            return float_of_float16(static_cast<const uint16_t*>(data)[i]);
        case Dtype::bfloat16:
            return float_of_bfloat16(static_cast<const uint16_t*>(data)[i]);
        case Dtype::float64:
            return static_cast<float>(static_cast<const double*>(data)[i]);
        default:
            return static_cast<const float*>(data)[i];
    }
}

static inline void store_scalar(void* data, Dtype dtype, int64_t i, float value) {
    switch (dtype) {
        case Dtype::float16:
            static_cast<uint16_t*>(data)[i] = float16_of_float(value);
            break;
        case Dtype::bfloat16:
            static_cast<uint16_t*>(data)[i] = bfloat16_of_float(value);
            break;
        case Dtype::float64:
            static_cast<double*>(data)[i] = value;
            break;
        default:
            static_cast<float*>(data)[i] = value;
    }
}

// --- E4M4 scales, see hf_kbit/format/spec.py ---

constexpr uint32_t kE4M4Offset = 116;       // what its exponent field lacks to be float32's
constexpr float kE4M4Subnormal = 0x1p-14f;  // one sixteenth of 2**-10
constexpr float kE4M4SmallestNormal = 0x1p-10f;

static inline float decode_e4m4(uint8_t byte) {
    if (byte < 16) return static_cast<float>(byte) * kE4M4Subnormal;
    return float_of((static_cast<uint32_t>(byte) << 19) + (kE4M4Offset << 23));
}

// Of a scale; `sign` is kSignBit, or 0 where scales have no signs.
static inline float decode_scale(uint8_t byte, uint32_t sign) {
    return float_of(bits_of(decode_e4m4(static_cast<uint8_t>(byte & ~sign))) | (byte & sign) << 24);
}

// The nearest byte of value >= 0, up to 255.
static inline uint8_t encode_e4m4(float value) {
    if (value < kE4M4SmallestNormal) {
        // Adding 2**23 leaves no fraction bits: the sum is rounded to an integer, ties to even.
        return static_cast<uint8_t>(bits_of(value / kE4M4Subnormal + 0x1p23f) & 0xFF);
    }
    const uint32_t rounded = shift_right_rounded(bits_of(value), 19) - (kE4M4Offset << 4);
    return static_cast<uint8_t>(rounded < 255 ? rounded : 255);
}

// --- template arguments ---

// Calls f(std::integral_constant<int, bits>).
template <class F>
static inline void with_bits(int bits, F f) {
    static_assert(kMinBits == 2 && kMaxBits == 5, "a case for each width");
    switch (bits) {
        case 2:
            return f(std::integral_constant<int, 2>{});
        case 3:
            return f(std::integral_constant<int, 3>{});
        case 4:
            return f(std::integral_constant<int, 4>{});
        default:
            return f(std::integral_constant<int, 5>{});
    }
}

// Calls f(std::integral_constant<Dtype, dtype>).
template <class F>
static inline void with_dtype(Dtype dtype, F f) {
    switch (dtype) {
        case Dtype::float16:
            return f(std::integral_constant<Dtype, Dtype::float16>{});
        case Dtype::bfloat16:
            return f(std::integral_constant<Dtype, Dtype::bfloat16>{});
        case Dtype::float64:
            return f(std::integral_constant<Dtype, Dtype::float64>{});
        default:
            return f(std::integral_constant<Dtype, Dtype::float32>{});
    }
}

}  // namespace hf_kbit::cpu
