// AVX-512 F, BW, DQ and VL, with all that avx2.cpp uses.
#pragma once

// GCC 12 reports variables inside its own header as uninitialized (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "cpu/algorithms.h"

namespace hf_kbit::cpu {

namespace {

struct Avx512 {
    static constexpr int kWidth = 16;
    static constexpr bool kFuses = true;
    using F = __m512;
    using I = __m512i;

    // --- float32 ---
    static F zero() { return _mm512_setzero_ps(); }
    static F broadcast(float value) { return _mm512_set1_ps(value); }
    static F load(const float* data) { return _mm512_loadu_ps(data); }
    static void store(float* data, F a) { _mm512_storeu_ps(data, a); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    template <int distance>
    static F butterfly(F a) {
        if constexpr (distance == 1) return sum_and_difference(a, _mm512_permute_ps(a, 0xB1), 0xAAAA);
        if constexpr (distance == 2) return sum_and_difference(a, _mm512_permute_ps(a, 0x4E), 0xCCCC);
        if constexpr (distance == 4) return sum_and_difference(a, _mm512_shuffle_f32x4(a, a, 0xB1), 0xF0F0);
        return sum_and_difference(a, _mm512_shuffle_f32x4(a, a, 0x4E), 0xFF00);
    }
    static F sum_and_difference(F a, F others, __mmask16 second) {
        return _mm512_mask_sub_ps(add(a, others), second, others, a);
    }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
    static float largest(F a) { return _mm512_reduce_max_ps(a); }

    // --- int32 ---
    static I splat(uint32_t value) { return _mm512_set1_epi32(static_cast<int>(value)); }
    static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
    static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
    static I bit_xor(I a, I b) { return _mm512_xor_si512(a, b); }
    static I shift_left(I a, int count) { return _mm512_slli_epi32(a, static_cast<unsigned>(count)); }
    static I shift_right(I a, int count) { return _mm512_srli_epi32(a, static_cast<unsigned>(count)); }

    // --- dtypes ---
    template <Dtype dtype>
    static F load_as(const void* data) {
        if constexpr (dtype == Dtype::float32) return load(static_cast<const float*>(data));
        const __m256i half = _mm256_loadu_si256(static_cast<const __m256i*>(data));
        if constexpr (dtype == Dtype::float16) return _mm512_cvtph_ps(half);
        return _mm512_castsi512_ps(shift_left(_mm512_cvtepu16_epi32(half), 16));
    }

    template <Dtype dtype>
    static void store_as(void* data, F a) {
        if constexpr (dtype == Dtype::float32) {
            store(static_cast<float*>(data), a);
        } else if constexpr (dtype == Dtype::float64) {
            _mm512_storeu_pd(static_cast<double*>(data), _mm512_cvtps_pd(_mm512_castps512_ps256(a)));
            _mm512_storeu_pd(static_cast<double*>(data) + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
        } else if constexpr (dtype == Dtype::float16) {
            _mm256_storeu_si256(static_cast<__m256i*>(data), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
        } else {
            const I bits = _mm512_castps_si512(a);
            const I even = bit_and(shift_right(bits, 16), splat(1));
            const I rounded = shift_right(_mm512_add_epi32(bits, _mm512_add_epi32(even, splat(0x7FFF))), 16);
            _mm256_storeu_si256(static_cast<__m256i*>(data), _mm512_cvtepi32_epi16(rounded));
        }
    }

    // --- trellis ---
    static I load_words(const uint32_t* data) { return _mm512_loadu_si512(data); }
    static void store_words(uint32_t* data, I a) { _mm512_storeu_si512(data, a); }
    static void store_bytes(uint8_t* data, I a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(data), _mm512_cvtepi32_epi8(a));
    }
    static I add_words(I a, I b) { return _mm512_add_epi32(a, b); }
    static I multiply_words(I a, I b) { return _mm512_mullo_epi32(a, b); }
    static I least(I a, I b) { return _mm512_min_epu32(a, b); }
    static I where_equal(I a, I b, I yes, I no) {
        return _mm512_mask_mov_epi32(no, _mm512_cmpeq_epi32_mask(a, b), yes);
    }
    static I difference_squared(I a, I b) {  // the upper halves are 0
        const I difference = _mm512_sub_epi16(a, b);
        return _mm512_madd_epi16(difference, difference);
    }
    template <int count>
    static I repeat(const uint32_t* data) {
        if constexpr (count == 1) return splat(*data);
        if constexpr (count == 2) return _mm512_broadcastq_epi64(_mm_loadu_si64(data));
        if constexpr (count == 4) {
            return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
        }
        return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)));
    }
    template <int count>
    static I in_order(I a) {
        if constexpr (count == 1) return a;
        constexpr int kRun = kWidth / count;
        const auto from = [](int i) { return i % kRun * count + i / kRun; };
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7), from(8), from(9),
                              from(10), from(11), from(12), from(13), from(14), from(15)),
            a);
    }
    static F as_floats(I a) { return _mm512_castsi512_ps(a); }
    static F round_to_half(F a) { return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }

    // --- quantize ---
    static I zero_index() { return _mm512_setzero_si512(); }

    template <int entries>
    static F lookup(const float* table, I index) {
        if constexpr (entries == 1) return broadcast(*table);
        if constexpr (entries <= 16) return _mm512_permutexvar_ps(index, load(table));
        return _mm512_permutex2var_ps(load(table), index, load(table + 16));
    }

    static __mmask16 less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static uint32_t bits(__mmask16 mask) { return mask; }
    static I append(I index, __mmask16 mask) {
        const I doubled = _mm512_add_epi32(index, index);
        return _mm512_mask_add_epi32(doubled, mask, doubled, splat(1));
    }

    // --- levels ---
    static constexpr int kFifthBit = 4;
    static constexpr bool kUsesAntisymmetry = false;

    template <int bits>
    struct Levels {
        static constexpr int kBits = bits;
        static constexpr bool kAntisymmetric = false;
        F low, high;  // levels 0 to 15, 16 to 31

        explicit Levels(const float* codebook) {
            alignas(64) float table[32] = {};
            std::memcpy(table, codebook, sizeof(float) << bits);
            low = load(table);
            high = load(table + 16);
        }

        // The level of the code in the low bits of each lane; the permutations ignore the rest.
        F of_lanes(I codes) const {
            if constexpr (bits == 5) return _mm512_permutex2var_ps(low, codes, high);
            return _mm512_permutexvar_ps(codes, low);
        }

        // The levels of the codes in byte p of each lane are part p.
        void of_bytes(I codes, I fifth, F (&parts)[4]) const {
            for (int p = 0; p < 4; ++p) parts[p] = of_lanes(shift_right(bit_or(codes, fifth), 8 * p));
        }

        // The 32 levels of one block in order.
        void of_block(const int32_t* words, F (&parts)[2]) const {
            for (int half = 0; half < 2; ++half) {
                I codes = zero_index();
                for (int plane = 0; plane < bits; ++plane) {
                    const auto set = static_cast<__mmask16>(static_cast<uint32_t>(words[plane]) >> (16 * half));
                    codes = _mm512_mask_or_epi32(codes, set, codes, splat(1u << plane));
                }
                parts[half] = of_lanes(codes);
            }
        }
    };

    // --- gemm ---
    static int block_of(int, int lane) { return lane; }
    static int byte_of(int part, int) { return part; }
    static F spread(F scales, int) { return scales; }

    static F load_scales(const uint8_t* absmax, uint32_t sign) {
        const I all = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(absmax)));
        const I bytes = bit_and(all, splat(~sign)), signs = shift_left(bit_and(all, splat(sign)), 24);
        const F normal = _mm512_castsi512_ps(_mm512_add_epi32(shift_left(bytes, 19), splat(kE4M4Offset << 23)));
        const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(bytes, splat(16));
        const F subnormal = broadcast(kE4M4Subnormal);
        const F magnitudes = _mm512_mask_mul_ps(normal, is_subnormal, _mm512_cvtepi32_ps(bytes), subnormal);
        return _mm512_or_ps(magnitudes, _mm512_castsi512_ps(signs));
    }

    // Four words from those of `block`, its planes first. Nothing past the group is read.
    template <int bits>
    static __m128i block_words(const int32_t* words, int block) {
        const auto* source = reinterpret_cast<const __m128i*>(words + block * bits);
        if constexpr (bits == 2) return _mm_loadl_epi64(source);
        if (bits == 3 && block == kWidth - 1) {
            return _mm_srli_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + block * bits - 1)), 4);
        }
        return _mm_loadu_si128(source);
    }

    // Plane p of the group's blocks, one block in each lane.
    template <int bits>
    static void load_planes(const int32_t* words, I (&planes)[5]) {
        I rows[4];
        for (int i = 0; i < 4; ++i) {
            rows[i] = _mm512_castsi128_si512(block_words<bits>(words, i));
            rows[i] = _mm512_inserti32x4(rows[i], block_words<bits>(words, i + 4), 1);
            rows[i] = _mm512_inserti32x4(rows[i], block_words<bits>(words, i + 8), 2);
            rows[i] = _mm512_inserti32x4(rows[i], block_words<bits>(words, i + 12), 3);
        }
        const I low_01 = _mm512_unpacklo_epi32(rows[0], rows[1]), low_23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
        planes[0] = _mm512_unpacklo_epi64(low_01, low_23);
        planes[1] = _mm512_unpackhi_epi64(low_01, low_23);
        if constexpr (bits == 2) return;
        const I high_01 = _mm512_unpackhi_epi32(rows[0], rows[1]), high_23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
        planes[2] = _mm512_unpacklo_epi64(high_01, high_23);
        if constexpr (bits == 3) return;
        planes[3] = _mm512_unpackhi_epi64(high_01, high_23);
        if constexpr (bits == 5) {
            // Words 4, 9, .. 79: no two of them are in the same lane of the group's five registers.
            constexpr __mmask16 kHeld[5] = {0x4210, 0x2108, 0x1084, 0x0842, 0x8421};
            I found = zero_index();
            for (int i = 0; i < 5; ++i) found = _mm512_mask_loadu_epi32(found, kHeld[i], words + i * kWidth);
            planes[4] = _mm512_permutexvar_epi32(
                _mm512_setr_epi32(4, 9, 14, 3, 8, 13, 2, 7, 12, 1, 6, 11, 0, 5, 10, 15), found);
        }
    }
};

}  // namespace

}  // namespace hf_kbit::cpu
