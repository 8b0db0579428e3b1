// Plain C++ for any little-endian machine. Loops over four lanes are what compilers turn into SSE2 or NEON.
#include <array>

#include "cpu/algorithms.h"
#include "cpu/trellis_product.h"

namespace hf_kbit::cpu {

namespace {

struct Portable {
    static constexpr int kWidth = 4;
    static constexpr bool kFuses = false;
    struct F {
        float lane[kWidth];
    };
    struct I {
        uint32_t lane[kWidth];
    };

    template <class Result, class Function>
    static Result each(Function function) {
        Result result;
        for (int i = 0; i < kWidth; ++i) result.lane[i] = function(i);
        return result;
    }

    // --- float32 ---
    static F zero() { return broadcast(0); }
    static F broadcast(float value) {
        return each<F>([&](int) { return value; });
    }
    static F load(const float* data) {
        return each<F>([&](int i) { return data[i]; });
    }
    static void store(float* data, F a) { std::memcpy(data, a.lane, sizeof a); }
    static F mul(F a, F b) {
        return each<F>([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static F add(F a, F b) {
        return each<F>([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static F sub(F a, F b) {
        return each<F>([&](int i) { return a.lane[i] - b.lane[i]; });
    }
    template <int distance>
    static F butterfly(F a) {
        return each<F>([&](int i) {
            const float other = a.lane[i ^ distance];
            return i & distance ? other - a.lane[i] : a.lane[i] + other;
        });
    }
    static F fma(F a, F b, F c) {
        return each<F>([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
    }
    static F max(F a, F b) {
        return each<F>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static F abs(F a) {
        return each<F>([&](int i) { return float_of(bits_of(a.lane[i]) & 0x7FFFFFFF); });
    }
    static float sum(F a) { return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]); }
    static float largest(F a) {
        float found = a.lane[0];
        for (int i = 1; i < kWidth; ++i) found = a.lane[i] > found ? a.lane[i] : found;
        return found;
    }

    // --- int32 ---
    static I splat(uint32_t value) {
        return each<I>([&](int) { return value; });
    }
    static I bit_and(I a, I b) {
        return each<I>([&](int i) { return a.lane[i] & b.lane[i]; });
    }
    static I bit_or(I a, I b) {
        return each<I>([&](int i) { return a.lane[i] | b.lane[i]; });
    }
    static I bit_xor(I a, I b) {
        return each<I>([&](int i) { return a.lane[i] ^ b.lane[i]; });
    }
    static I shift_left(I a, int count) {
        return each<I>([&](int i) { return a.lane[i] << count; });
    }
    static I shift_right(I a, int count) {
        return each<I>([&](int i) { return a.lane[i] >> count; });
    }

    // --- dtypes ---
    template <Dtype dtype>
    static F load_as(const void* data) {
        return each<F>([&](int i) { return load_scalar(data, dtype, i); });
    }

    template <Dtype dtype>
    static void store_as(void* data, F a) {
        for (int i = 0; i < kWidth; ++i) store_scalar(data, dtype, i, a.lane[i]);
    }

    // --- trellis ---
    static I load_words(const uint32_t* data) {
        return each<I>([&](int i) { return data[i]; });
    }
    static void store_words(uint32_t* data, I a) { std::memcpy(data, a.lane, sizeof a); }
    static void store_bytes(uint8_t* data, I a) {
        for (int i = 0; i < kWidth; ++i) data[i] = static_cast<uint8_t>(a.lane[i]);
    }
    static I add_words(I a, I b) {
        return each<I>([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static I multiply_words(I a, I b) {
        return each<I>([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static I least(I a, I b) {
        return each<I>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static I where_equal(I a, I b, I yes, I no) {
        return each<I>([&](int i) { return a.lane[i] == b.lane[i] ? yes.lane[i] : no.lane[i]; });
    }
    static I difference_squared(I a, I b) {
        return each<I>([&](int i) { return (a.lane[i] - b.lane[i]) * (a.lane[i] - b.lane[i]); });
    }
    template <int count>
    static I repeat(const uint32_t* data) {
        return each<I>([&](int i) { return data[i % count]; });
    }
    template <int count>
    static I in_order(I a) {
        constexpr int kRun = kWidth / count;
        return each<I>([&](int i) { return a.lane[i % kRun * count + i / kRun]; });
    }
    static F as_floats(I a) {
        return each<F>([&](int i) { return float_of(a.lane[i]); });
    }

    struct H {
        uint16_t lane[2 * kWidth];
    };

    template <class Function>
    static H each_half(Function function) {
        H result;
        for (int i = 0; i < 2 * kWidth; ++i) result.lane[i] = static_cast<uint16_t>(function(i));
        return result;
    }

    struct Tile {
        const uint32_t* words;
        int bits;

        Tile(const uint32_t* words, int bits) : words(words), bits(bits) {}
        H windows(int part) const {
            H found;
            for (int i = 0; i < 2 * kWidth; i += 2) {
                const int end = (part * 2 * kWidth + i + 2) * bits, last = (end - 1) / 32,
                          after = 32 * (last + 1) - end;
                const uint64_t before = words[last == 0 ? 8 * bits - 1 : last - 1], pair = before << 32 | words[last];
                found.lane[i] = static_cast<uint16_t>(pair >> (after + bits));
                found.lane[i + 1] = static_cast<uint16_t>(pair >> after);
            }
            return found;
        }
    };

    static H mul1_sums(H windows) {
        return each_half([&](int i) {
            const uint32_t x = windows.lane[i] * code_factor(Code::mul1);
            const uint32_t pairs = (x & 0xFF00FF) + (x >> 8 & 0xFF00FF);
            return pairs + (pairs >> 16);
        });
    }
    static H load_halves(const int16_t* data) {
        H result;
        std::memcpy(result.lane, data, sizeof result.lane);
        return result;
    }
    static I add_products(I sums, H a, H b) {
        const auto product = [&](int i) { return a.lane[i] * static_cast<int16_t>(b.lane[i]); };
        return each<I>([&](int i) {
            return sums.lane[i] + static_cast<uint32_t>(product(2 * i)) + static_cast<uint32_t>(product(2 * i + 1));
        });
    }
    static void spread(H a, uint16_t upper, I (&outputs)[2]) {
        for (int output = 0; output < 2; ++output) {
            outputs[output] =
                each<I>([&](int i) { return a.lane[4 * output + i] | static_cast<uint32_t>(upper) << 16; });
        }
    }
    static void natural(F (&values)[4]) {
        float row[16];
        for (int i = 0; i < 16; ++i) row[i / 4 * 2 + i % 2 + i % 4 / 2 * 8] = values[i / kWidth].lane[i % kWidth];
        std::memcpy(values, row, sizeof row);
    }

    // --- quantize ---
    static I zero_index() { return splat(0); }

    template <int entries>
    static F lookup(const float* table, I index) {
        return each<F>([&](int i) { return table[index.lane[i]]; });
    }

    static I less(F a, F b) {
        return each<I>([&](int i) { return a.lane[i] < b.lane[i] ? 1u : 0u; });
    }
    static uint32_t bits(I mask) { return mask.lane[0] | mask.lane[1] << 1 | mask.lane[2] << 2 | mask.lane[3] << 3; }
    static I append(I index, I mask) {
        return each<I>([&](int i) { return 2 * index.lane[i] + mask.lane[i]; });
    }

    // --- levels ---
    static constexpr int kFifthBit = 4;
    static constexpr bool kUsesAntisymmetry = false;

    template <int bits>
    struct Levels {
        static constexpr int kBits = bits;
        static constexpr bool kAntisymmetric = false;
        float table[1 << bits];

        explicit Levels(const float* codebook) { std::memcpy(table, codebook, sizeof table); }

        // The levels of the codes in byte p of each lane are part p.
        void of_bytes(I codes, I fifth, F (&parts)[4]) const {
            codes = bit_or(codes, fifth);
            for (int p = 0; p < 4; ++p) {
                parts[p] = each<F>([&](int i) { return table[codes.lane[i] >> (8 * p) & 0xFF]; });
            }
        }

        // The 32 levels of one block in order.
        void of_block(const int32_t* words, F (&parts)[kBlockSize / kWidth]) const {
            for (int j = 0; j < kBlockSize; ++j) {
                uint32_t code = 0;
                for (int plane = 0; plane < bits; ++plane) {
                    code |= (static_cast<uint32_t>(words[plane]) >> j & 1) << plane;
                }
                parts[j / kWidth].lane[j % kWidth] = table[code];
            }
        }
    };

    // --- gemm ---
    static int block_of(int, int lane) { return lane; }
    static int byte_of(int part, int) { return part; }
    static F spread(F scales, int) { return scales; }

    static F load_scales(const uint8_t* absmax, uint32_t sign) {
        return each<F>([&](int i) { return decode_scale(absmax[i], sign); });
    }

    template <int bits>
    static void load_planes(const int32_t* words, I (&planes)[5]) {
        for (int plane = 0; plane < bits; ++plane) {
            planes[plane] = each<I>([&](int i) { return static_cast<uint32_t>(words[i * bits + plane]); });
        }
    }

    // --- gemm of 8-bit inputs ---
    using Bytes = std::array<int8_t, kBlockSize>;
    using Sums = int32_t;
    static constexpr int kVectorBytes = kBlockSize, kOffset = 0;
    static constexpr int kTileRows = 4, kTileTokens = 4, kRun = kBlockSize;
    static int block_of_byte(int v, int) { return v; }
    static int index_of_byte(int, int byte) { return byte; }
    static Bytes load_bytes(const int8_t* source) {
        Bytes bytes;
        std::memcpy(&bytes, source, sizeof bytes);
        return bytes;
    }
    static void store_bytes(int8_t* target, const Bytes& bytes) { std::memcpy(target, &bytes, sizeof bytes); }
    static Sums no_sums() { return 0; }
    static Sums add_sums(Sums a, Sums b) { return a + b; }
    static int32_t total(Sums sums) { return sums; }
    static Sums dot(Sums sums, const Bytes& weights, const Bytes& inputs) {
        for (int i = 0; i < kBlockSize; ++i) sums += weights[i] * inputs[i];
        return sums;
    }
    static F round_to_half(F a) {
        return each<F>([&](int i) { return float_of_float16(float16_of_float(a.lane[i])); });
    }

    template <int bits>
    struct Int8Levels {
        float levels[1 << bits];
        explicit Int8Levels(const float* numbers) { std::memcpy(levels, numbers, sizeof levels); }
    };

    template <int bits, class Sink>
    static void decode_int8(const int32_t* words, F multipliers, const Int8Levels<bits>& levels, Sink sink) {
        for (int block = 0; block < kWidth; ++block, words += bits) {
            int8_t table[1 << bits];
            for (int n = 0; n < 1 << bits; ++n) {
                const float product = levels.levels[n] * multipliers.lane[block];
                table[n] = static_cast<int8_t>(bits_of(product + kToInteger) & 0xFF);
            }
            Bytes weights;
            for (int j = 0; j < kBlockSize; ++j) {
                uint32_t code = 0;
                for (int plane = 0; plane < bits; ++plane) {
                    code |= (static_cast<uint32_t>(words[plane]) >> j & 1) << plane;
                }
                weights[j] = table[code];
            }
            sink(block, weights);
        }
    }
};

}  // namespace

const Implementation portable_implementation = implementation_with<Portable>("portable");
const Int8Implementation portable_int8 = int8_implementation_with<Portable>();
const TrellisImplementation portable_trellis = trellis_implementation_with<Portable>();

}  // namespace hf_kbit::cpu
