// AVX2 with FMA, F16C and BMI2.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>

#include "cpu/algorithms.h"
#include "cpu/trellis_product.h"

namespace hf_kbit::cpu {

namespace {

// Of 16 weights of a tile of a trellis that follow each other, eight of each half of a vector: from which word on four
// words have the windows of a half, -1 for the last one; the bytes that make 32-bit numbers of which the windows of
// weights 2 i begin in the first byte, and those of weights 2 i + 1; and how far the former move down, the latter up.
struct WindowOrder {
    alignas(32) uint8_t even[32] = {}, odd[32] = {};
    alignas(32) uint32_t down[8] = {}, up[8] = {};
    int words[2] = {};

    constexpr WindowOrder() = default;
    constexpr WindowOrder(int bits, int part) {
        for (int half = 0; half < 2; ++half) {
            const int first = 8 * bits * (2 * part + half) + bits - kWindowBits + 32;  // the last word is before it
            const int word = first / 32 - 1 < 8 * bits - 4 ? first / 32 - 1 : 8 * bits - 4;
            words[half] = word;
            for (int i = 0; i < 4; ++i) {
                const int bit = first + 2 * i * bits, lane = 4 * half + i;
                down[lane] = static_cast<uint32_t>(16 - bit % 8), up[lane] = static_cast<uint32_t>((bit + bits) % 8);
                for (int byte = 0; byte < 4; ++byte) {
                    even[4 * lane + 3 - byte] = place(bit / 8 + byte, word);
                    odd[4 * lane + 3 - byte] = place((bit + bits) / 8 + byte, word);
                }
            }
        }
    }
    // Beyond four words there are no bits of a window.
    static constexpr uint8_t place(int byte, int word) {
        const int found = (byte / 4 - 1 - word) * 4 + 3 - byte % 4;
        return static_cast<uint8_t>(found < 16 ? found : 0x80);
    }
};

constexpr auto kWindowOrders = [] {
    std::array<std::array<WindowOrder, kTrellisSteps / 16>, kMostTrellisBits> orders{};
    for (int bits = 1; bits <= kMostTrellisBits; ++bits) {
        for (int part = 0; part < kTrellisSteps / 16; ++part) orders[bits - 1][part] = WindowOrder(bits, part);
    }
    return orders;
}();

struct Avx2 {
    static constexpr int kWidth = 8;
    static constexpr bool kFuses = true;
    using F = __m256;
    using I = __m256i;

    // --- float32 ---
    static F zero() { return _mm256_setzero_ps(); }
    static F broadcast(float value) { return _mm256_set1_ps(value); }
    static F load(const float* data) { return _mm256_loadu_ps(data); }
    static void store(float* data, F a) { _mm256_storeu_ps(data, a); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    template <int distance>
    static F butterfly(F a) {
        // The second of a pair is negated, then the other is added to it.
        constexpr int kSign = static_cast<int>(0x80000000);
        if constexpr (distance == 1) {
            const F sign = _mm256_castsi256_ps(_mm256_setr_epi32(0, kSign, 0, kSign, 0, kSign, 0, kSign));
            return add(_mm256_permute_ps(a, 0xB1), _mm256_xor_ps(a, sign));
        } else if constexpr (distance == 2) {
            const F sign = _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, kSign, kSign, 0, 0, kSign, kSign));
            return add(_mm256_permute_ps(a, 0x4E), _mm256_xor_ps(a, sign));
        } else {
            const F sign = _mm256_castsi256_ps(_mm256_setr_epi32(0, 0, 0, 0, kSign, kSign, kSign, kSign));
            return add(_mm256_permute2f128_ps(a, a, 0x01), _mm256_xor_ps(a, sign));
        }
    }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F abs(F a) { return _mm256_and_ps(a, _mm256_castsi256_ps(splat(0x7FFFFFFF))); }
    static float sum(F a) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    static float largest(F a) {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }

    // --- int32 ---
    static I splat(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
    static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
    static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
    static I bit_xor(I a, I b) { return _mm256_xor_si256(a, b); }
    static I shift_left(I a, int count) { return _mm256_slli_epi32(a, count); }
    static I shift_right(I a, int count) { return _mm256_srli_epi32(a, count); }

    // --- dtypes ---
    template <Dtype dtype>
    static F load_as(const void* data) {
        if constexpr (dtype == Dtype::float32) return load(static_cast<const float*>(data));
        const __m128i half = _mm_loadu_si128(static_cast<const __m128i*>(data));
        if constexpr (dtype == Dtype::float16) return _mm256_cvtph_ps(half);
        return _mm256_castsi256_ps(shift_left(_mm256_cvtepu16_epi32(half), 16));
    }

    template <Dtype dtype>
    static void store_as(void* data, F a) {
        if constexpr (dtype == Dtype::float32) {
            store(static_cast<float*>(data), a);
        } else if constexpr (dtype == Dtype::float64) {
            _mm256_storeu_pd(static_cast<double*>(data), _mm256_cvtps_pd(_mm256_castps256_ps128(a)));
            _mm256_storeu_pd(static_cast<double*>(data) + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1)));
        } else if constexpr (dtype == Dtype::float16) {
            _mm_storeu_si128(static_cast<__m128i*>(data), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
        } else {
            const I bits = _mm256_castps_si256(a);
            const I even = bit_and(shift_right(bits, 16), splat(1));
            const I rounded = shift_right(_mm256_add_epi32(bits, _mm256_add_epi32(even, splat(0x7FFF))), 16);
            const __m128i low = _mm256_castsi256_si128(rounded), high = _mm256_extracti128_si256(rounded, 1);
            _mm_storeu_si128(static_cast<__m128i*>(data), _mm_packus_epi32(low, high));
        }
    }

    // --- trellis ---
    static I load_words(const uint32_t* data) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)); }
    static void store_words(uint32_t* data, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(data), a); }
    static void store_bytes(uint8_t* data, I a) {
        const I last = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                        -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
        const I bytes = _mm256_shuffle_epi8(a, last);
        const __m128i low = _mm256_castsi256_si128(bytes), high = _mm256_extracti128_si256(bytes, 1);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(data), _mm_or_si128(low, high));
    }
    static I add_words(I a, I b) { return _mm256_add_epi32(a, b); }
    static I multiply_words(I a, I b) { return _mm256_mullo_epi32(a, b); }
    static I least(I a, I b) { return _mm256_min_epu32(a, b); }
    static I where_equal(I a, I b, I yes, I no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpeq_epi32(a, b)); }
    static I difference_squared(I a, I b) {  // the upper halves are 0
        const I difference = _mm256_sub_epi16(a, b);
        return _mm256_madd_epi16(difference, difference);
    }
    template <int count>
    static I repeat(const uint32_t* data) {
        if constexpr (count == 1) return splat(*data);
        if constexpr (count == 2) return _mm256_broadcastq_epi64(_mm_loadu_si64(data));
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data)));
    }
    template <int count>
    static I in_order(I a) {
        if constexpr (count == 1) return a;
        constexpr int kRun = kWidth / count;
        const auto from = [](int i) { return i % kRun * count + i / kRun; };
        return _mm256_permutevar8x32_epi32(
            a, _mm256_setr_epi32(from(0), from(1), from(2), from(3), from(4), from(5), from(6), from(7)));
    }
    static F as_floats(I a) { return _mm256_castsi256_ps(a); }

    using H = __m256i;

    struct Tile {
        const uint32_t* words;
        const WindowOrder* orders;
        __m128i first;  // the last word, then the first ones

        Tile(const uint32_t* words, int bits) : words(words), orders(kWindowOrders[bits - 1].data()) {
            const auto* last = reinterpret_cast<const __m128i*>(words + 8 * bits - 4);
            first = _mm_alignr_epi8(load(words), _mm_loadu_si128(last), 12);
        }
        static __m128i load(const uint32_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

        H windows(int part) const {
            const WindowOrder& order = orders[part];
            const auto of = [&](int word) { return word < 0 ? first : load(words + word); };
            const H found = _mm256_set_m128i(of(order.words[1]), of(order.words[0]));
            const H even = _mm256_srlv_epi32(_mm256_shuffle_epi8(found, all(order.even)), all(order.down));
            const H odd = _mm256_sllv_epi32(_mm256_shuffle_epi8(found, all(order.odd)), all(order.up));
            return _mm256_blend_epi16(even, odd, 0xAA);
        }
        template <class Numbers>
        static H all(const Numbers& numbers) {
            return _mm256_load_si256(reinterpret_cast<const H*>(numbers));
        }
    };

    static H mul1_sums(H windows) {
        constexpr uint32_t kFactor = code_factor(Code::mul1);
        const H low = _mm256_set1_epi16(static_cast<short>(kFactor & 0xFFFF)), ones = _mm256_set1_epi8(1);
        const H high = _mm256_set1_epi16(static_cast<short>(kFactor >> 16));
        const H first = _mm256_mullo_epi16(windows, low);
        const H second = _mm256_add_epi16(_mm256_mulhi_epu16(windows, low), _mm256_mullo_epi16(windows, high));
        return _mm256_add_epi16(_mm256_maddubs_epi16(first, ones), _mm256_maddubs_epi16(second, ones));
    }
    static H load_halves(const int16_t* data) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data)); }
    static I add_products(I sums, H a, H b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
    static void spread(H a, uint16_t upper, I (&outputs)[2]) {
        const H uppers = _mm256_set1_epi16(static_cast<short>(upper));
        outputs[0] = _mm256_unpacklo_epi16(a, uppers);
        outputs[1] = _mm256_unpackhi_epi16(a, uppers);
    }
    static void natural(F (&values)[2]) {
        const __m256d low = _mm256_castps_pd(values[0]), high = _mm256_castps_pd(values[1]);
        values[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_unpacklo_pd(low, high), 0xD8));
        values[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_unpackhi_pd(low, high), 0xD8));
    }

    // --- quantize ---
    static I zero_index() { return _mm256_setzero_si256(); }

    template <int entries>
    static F lookup(const float* table, I index) {
        if constexpr (entries == 1) return broadcast(*table);
        if constexpr (entries <= 4) return _mm256_permutevar_ps(load(table), index);
        const F low = _mm256_permutevar8x32_ps(load(table), index);
        if constexpr (entries <= 8) return low;
        const F high = _mm256_permutevar8x32_ps(load(table + 8), index);
        const F sixteen = _mm256_blendv_ps(low, high, _mm256_castsi256_ps(shift_left(index, 28)));
        if constexpr (entries <= 16) return sixteen;
        return _mm256_blendv_ps(sixteen, lookup<16>(table + 16, index), _mm256_castsi256_ps(shift_left(index, 27)));
    }

    static F less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static uint32_t bits(F mask) { return static_cast<uint32_t>(_mm256_movemask_ps(mask)); }
    static I append(I index, F mask) {
        return _mm256_sub_epi32(_mm256_add_epi32(index, index), _mm256_castps_si256(mask));
    }

    // --- levels ---
    static constexpr int kFifthBit = 7;
    static constexpr bool kUsesAntisymmetry = true;

    // Levels are looked up byte by byte: tables[n / 16][i][n % 16] is byte i of level n, in both halves of the
    // register. One VPSHUFB serves 32 codes; a VPERMPS, for twice the price, 8 codes of a table of 8. Shuffles are the
    // greater part of gemm's work with one token: 3 for 8 weights, and 4 at 5 bits, unless the levels are
    // antisymmetric: then the fifth bit is the sign.
    template <int bits, bool antisymmetric = false>
    struct Levels {
        static constexpr int kBits = bits;
        static constexpr bool kAntisymmetric = antisymmetric;
        static constexpr int kTables = bits == 5 && !antisymmetric ? 2 : 1;
        I tables[kTables][4];

        explicit Levels(const float* codebook) {
            alignas(32) uint8_t bytes[kTables][4][32] = {};
            for (int n = 0; n < std::min(16 * kTables, 1 << bits); ++n) {
                for (int i = 0; i < 4; ++i) {
                    const auto byte = static_cast<uint8_t>(bits_of(codebook[n]) >> (8 * i));
                    bytes[n / 16][i][n % 16] = bytes[n / 16][i][n % 16 + 16] = byte;
                }
            }
            std::memcpy(tables, bytes, sizeof tables);
        }

        // The levels of 32 codes: bits 0 to 3 in the bytes of `codes`, the fifth as bit 7 of those of `fifth`. Part p
        // holds bytes 4 p .. 4 p + 3 of the low half, then those of the high half.
        void of_bytes(I codes, I fifth, F (&parts)[4]) const {
            const I first = kTables == 2 ? bit_or(codes, fifth) : codes;
            I bytes[4];
            for (int i = 0; i < 4; ++i) bytes[i] = _mm256_shuffle_epi8(tables[0][i], first);
            if constexpr (kTables == 2) {
                // VPSHUFB gives 0 where bit 7 is set, so the two halves of the codebook can be or-ed.
                const I others = bit_xor(first, splat(0x80808080));
                for (int i = 0; i < 4; ++i) bytes[i] = bit_or(bytes[i], _mm256_shuffle_epi8(tables[1][i], others));
            }
            if constexpr (antisymmetric) bytes[3] = bit_xor(bytes[3], fifth);
            const I low_01 = _mm256_unpacklo_epi8(bytes[0], bytes[1]);
            const I low_23 = _mm256_unpacklo_epi8(bytes[2], bytes[3]);
            const I high_01 = _mm256_unpackhi_epi8(bytes[0], bytes[1]);
            const I high_23 = _mm256_unpackhi_epi8(bytes[2], bytes[3]);
            parts[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(low_01, low_23));
            parts[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(low_01, low_23));
            parts[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(high_01, high_23));
            parts[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(high_01, high_23));
        }

        // The 32 levels of one block in order.
        void of_block(const int32_t* words, F (&parts)[4]) const {
            // Byte 4 p + i of the low half is for weight 8 p + i, of the high half for weight 8 p + 4 + i, so that
            // of_bytes makes part p of eight neighbours.
            const I octet = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3));
            const I bit = _mm256_setr_m128i(_mm_set1_epi32(0x08040201), _mm_set1_epi32(static_cast<int>(0x80402010)));
            const auto spread = [&](int plane, uint32_t place) {
                const I found = bit_and(_mm256_shuffle_epi8(_mm256_set1_epi32(words[plane]), octet), bit);
                return bit_and(_mm256_cmpeq_epi8(found, bit), splat(0x01010101u * place));
            };
            I codes = zero_index();
            for (int plane = 0; plane < std::min(bits, 4); ++plane) codes = bit_or(codes, spread(plane, 1u << plane));
            of_bytes(codes, bits == 5 ? spread(4, 1u << kFifthBit) : zero_index(), parts);
        }
    };

    // --- gemm ---
    static int block_of(int part, int lane) { return lane / 4 * 4 + part; }
    static int byte_of(int, int lane) { return lane % 4; }

    // The scales of a group, one for each lane of `part`.
    static F spread(F scales, int part) {
        switch (part) {
            case 0:
                return _mm256_permute_ps(scales, 0x00);
            case 1:
                return _mm256_permute_ps(scales, 0x55);
            case 2:
                return _mm256_permute_ps(scales, 0xAA);
            default:
                return _mm256_permute_ps(scales, 0xFF);
        }
    }

    static F load_scales(const uint8_t* absmax, uint32_t sign) {
        const I all = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(absmax)));
        const I bytes = bit_and(all, splat(~sign)), signs = shift_left(bit_and(all, splat(sign)), 24);
        const F normal = _mm256_castsi256_ps(_mm256_add_epi32(shift_left(bytes, 19), splat(kE4M4Offset << 23)));
        const F subnormal = mul(_mm256_cvtepi32_ps(bytes), broadcast(kE4M4Subnormal));
        const F is_subnormal = _mm256_castsi256_ps(_mm256_sub_epi32(bytes, splat(16)));
        return _mm256_or_ps(_mm256_blendv_ps(normal, subnormal, is_subnormal), _mm256_castsi256_ps(signs));
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
            rows[i] = _mm256_setr_m128i(block_words<bits>(words, i), block_words<bits>(words, i + 4));
        }
        const I low_01 = _mm256_unpacklo_epi32(rows[0], rows[1]), low_23 = _mm256_unpacklo_epi32(rows[2], rows[3]);
        planes[0] = _mm256_unpacklo_epi64(low_01, low_23);
        planes[1] = _mm256_unpackhi_epi64(low_01, low_23);
        if constexpr (bits == 2) return;
        const I high_01 = _mm256_unpackhi_epi32(rows[0], rows[1]), high_23 = _mm256_unpackhi_epi32(rows[2], rows[3]);
        planes[2] = _mm256_unpacklo_epi64(high_01, high_23);
        if constexpr (bits == 3) return;
        planes[3] = _mm256_unpackhi_epi64(high_01, high_23);
        if constexpr (bits == 5) {
            // Words 4, 9, .. 39: no two of them are in the same lane of the group's five registers.
            const auto* source = reinterpret_cast<const __m256i*>(words);
            I found = _mm256_blend_epi32(_mm256_loadu_si256(source), _mm256_loadu_si256(source + 1), 0x42);
            found = _mm256_blend_epi32(found, _mm256_loadu_si256(source + 2), 0x08);
            found = _mm256_blend_epi32(found, _mm256_loadu_si256(source + 3), 0x21);
            found = _mm256_blend_epi32(found, _mm256_loadu_si256(source + 4), 0x84);
            planes[4] = _mm256_permutevar8x32_epi32(found, _mm256_setr_epi32(4, 1, 6, 3, 0, 5, 2, 7));
        }
    }

    // --- gemm of 8-bit inputs ---
    // VPMADDUBSW takes magnitudes of inputs, and weights with the inputs' signs: 2 * 127 * 127 fits 16 bits.
    using Bytes = __m256i;
    using Sums = __m256i;
    static constexpr int kVectorBytes = 32, kOffset = 0;
    static constexpr int kTileRows = 4, kTileTokens = 2, kRun = 1;
    // Vectors 2 i and 2 i + 1 are of blocks 2 i and 2 i + 1, one in each half: the weights 8 * byte + k of dword k,
    // then 8 * byte + 4 + k, where dwords are in the order 0, 2, 1, 3.
    static int block_of_byte(int v, int byte) { return v / 2 * 2 + byte / 16; }
    static int index_of_byte(int v, int byte) {
        constexpr int kDwords[4] = {0, 2, 1, 3};
        return 8 * (byte % 4) + 4 * (v % 2) + kDwords[byte % 16 / 4];
    }
    static Bytes load_bytes(const int8_t* source) {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(source));
    }
    static void store_bytes(int8_t* target, Bytes bytes) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(target), bytes);
    }
    static Sums no_sums() { return zero_index(); }
    static Sums add_sums(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
    static int32_t total(Sums sums) {
        __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
        return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
    }
    static Sums dot(Sums sums, Bytes weights, Bytes inputs) {
        const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(inputs), _mm256_sign_epi8(weights, inputs));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static F round_to_half(F a) { return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }

    template <int bits>
    using Int8Levels = TableLevels<Avx2, bits>;

    static I as_words(F a) { return _mm256_castps_si256(a); }
    static I pack(I a, I b) { return _mm256_packs_epi16(a, b); }
    static I interleave(I even, I odd) {
        return _mm256_blendv_epi8(_mm256_slli_epi16(odd, 8), even, splat(0x00FF00FF));
    }

    // Four blocks' planes, as the top of what is a nibble: planes 0 and 1 of blocks 0 and 2, then 1 and 3, and planes
    // 2 and 3.
    template <int bits>
    static void load_four(const int32_t* words, int four, I& low, I& high) {
        if constexpr (bits == 2) {
            const I all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words) + four);
            high = _mm256_permute4x64_epi64(all, 0xD8);
            low = shift_left(bit_and(high, splat(0x33333333)), 2);
            high = bit_and(high, splat(0xCCCCCCCC));
        } else {
            I rows[2];
            for (int i = 0; i < 2; ++i) {
                const int block = 4 * four + 2 * i;
                rows[i] = _mm256_setr_m128i(block_words<bits>(words, block), block_words<bits>(words, block + 1));
                if constexpr (bits == 3) rows[i] = _mm256_slli_si256(rows[i], 4);
            }
            low = _mm256_unpacklo_epi64(rows[0], rows[1]);
            high = _mm256_unpackhi_epi64(rows[0], rows[1]);
            swap_bits<Avx2>(low, high, 2, 0x33333333);
        }
    }

    // Every second dword of both.
    template <int order>
    static I dwords(I a, I b) {
        return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), order));
    }

    template <int bits, class Sink>
    static inline __attribute__((always_inline)) void decode_int8(const int32_t* words, F multipliers,
                                                                  const Int8Levels<bits>& levels, Sink sink) {
        const F paired = _mm256_permutevar8x32_ps(multipliers, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        I planes[5] = {}, fifth = zero_index();
        if constexpr (bits == 5) {
            load_planes<5>(words, planes);
            fifth = _mm256_permutevar8x32_epi32(planes[4], _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        }
#pragma GCC unroll 2
        for (int four = 0; four < 2; ++four) {
            I first, last;  // planes
            load_four<bits>(words, four, first, last);
            I even = dwords<0x88>(first, last), odd = dwords<0xDD>(first, last);
            swap_bits<Avx2>(even, odd, 1, 0x55555555);
            const I codes[2] = {dwords<0x88>(even, odd), dwords<0xDD>(even, odd)};
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int pair = 2 * four + half;
                const F own = spread(paired, pair);
                const I low_table = int8_table<Avx2, bits>(levels, 0, own);
                I fifths = zero_index(), high_table = zero_index();
                if constexpr (bits == 5) {
                    fifths = _mm256_castps_si256(spread(_mm256_castsi256_ps(fifth), pair));
                    high_table = int8_table<Avx2, bits>(levels, 1, own);
                }
#pragma GCC unroll 2
                for (int side = 0; side < 2; ++side) {
                    const I nibbles = bit_and(shift_right(codes[half], 4 * side), splat(0x0F0F0F0F));
                    const I low = _mm256_shuffle_epi8(low_table, nibbles);
                    if constexpr (bits == 5) {
                        const int up = side ? 3 : 7;  // from bit k of dword k to the top; dwords are 0, 2, 1, 3
                        const I shifts = _mm256_setr_epi32(up, up - 2, up - 1, up - 3, up, up - 2, up - 1, up - 3);
                        const I high = _mm256_shuffle_epi8(high_table, nibbles);
                        sink(2 * pair + side, _mm256_blendv_epi8(low, high, _mm256_sllv_epi32(fifths, shifts)));
                    } else {
                        sink(2 * pair + side, low);
                    }
                }
            }
        }
    }
};

}  // namespace

const Implementation avx2_implementation = implementation_with<Avx2>("avx2");
const Int8Implementation avx2_int8 = int8_implementation_with<Avx2>();
const TrellisImplementation avx2_trellis = trellis_implementation_with<Avx2>();

}  // namespace hf_kbit::cpu

#endif
