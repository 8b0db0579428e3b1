// From tiles to operand A of the tensor cores: slabs in shared memory, the table of pairs of levels. Shared by the
// fused products.
#pragma once

#include <cstdint>

#include "kernels/codes.cuh"
#include "kernels/half.cuh"
#include "kernels/plan.h"
#include "kernels/ptx.cuh"
#include "kernels/quad.cuh"

namespace hf_kbit::cuda {

// --- the table -----------------------------------------------------------------------------------

// The multiple of 64 KB below a kernel's shared memory, which the plan knows to begin at most kSharedReserved above.
__device__ __forceinline__ uint32_t shared_window(const void* smem) {
    const uint32_t window = shared_address(smem) & ~0xFFFFu;
    if (shared_address(smem) - window > kSharedReserved) __trap();
    return window;
}

// Numbers in which weights are multiplied by scales: sixteenths in float16, 2^-116 in bfloat16, as the bits of E4M4
// are then those of a scale. The largest level times the largest scale, 31, is still in range.
template <typename T>
struct Weights;
template <>
struct Weights<__half> {
    using Two = __half2;
    static constexpr int kLargest = 14, kShift = 6;
    static constexpr float kUnit = 16;
};
template <>
struct Weights<__nv_bfloat16> {
    using Two = __nv_bfloat162;
    static constexpr int kLargest = 116, kShift = 3;
    static constexpr float kUnit = 0x1p116f;
};

// Scales as numbers of 16 bits: `two` holds two bytes, each shifted left by Weights<T>::kShift in its half. What is
// then the bit above those of E4M4's lower half moves to the top of the half where it is in `signs`, which signs_of
// makes, uniform in a launch: the weights with and without signs share their instances.
template <typename T>
constexpr uint32_t signs_of(bool signed_scales) {
    return signed_scales ? kSignBit * 0x00010001u << Weights<T>::kShift : 0;
}
template <typename T>
__device__ __forceinline__ uint32_t with_signs(uint32_t two, uint32_t signs) {
    return two + (two & signs) * ((0x8000u / (kSignBit << Weights<T>::kShift)) - 1);
}

// The levels of all pairs of codes. Lies kSharedReserved above a multiple of 64 KB, so that a lane's address of an
// entry needs no addition. All warps that build it begin, with a request to memory, and finish when they need it.
template <int kBits, int kBytes>
struct LevelTable {
    static_assert(kBits <= 5, "shared memory holds an entry for every ten bits");
    static constexpr int kEntries = kBits == 5 ? 1024 : 256;
    static constexpr int kStride = kBytes / kEntries;
    static constexpr int kLaneBytes = kBits == 2 ? 8 : 4;
    static constexpr int kCopies = kBits == 5 ? kStride / kLaneBytes : kLanes;  // 16: two lanes share one
    static constexpr int kPieces = kCopies * kLaneBytes / 16;                   // of an entry

    uint32_t window;
    float level;  // of the code that is the lane's number

    __device__ __forceinline__ void begin(uint32_t its_window, const float* codebook, int lane) {
        window = its_window;
        level = lane < 1 << kBits ? __ldg(codebook + lane) : 0;
    }

    // Multiplies the levels by the power of two that puts the largest magnitude between 2^kLargest and twice that;
    // returns its inverse.
    template <int kLargest>
    __device__ __forceinline__ float normalize() {
        const uint32_t largest = largest_of_warp(__float_as_uint(fabsf(level)));
        const int exponent = min(max(static_cast<int>(largest >> 23), 1 + kLargest), 254);
        level *= __uint_as_float((254 + kLargest - exponent) << 23);
        return __uint_as_float((exponent - kLargest) << 23);
    }

    // By the first kThreads of a CTA, who then wait for each other.
    template <typename T, int kThreads>
    __device__ __forceinline__ void build() const {
        const auto at = [&](int code) { return __shfl_sync(0xFFFFFFFF, level, code); };
#pragma unroll 1
        for (int turn = 0; turn < kEntries * kPieces / kThreads; ++turn) {
            const int piece = turn * kThreads + static_cast<int>(threadIdx.x), entry = piece / kPieces;
            uint32_t first, second;
            if constexpr (kBits == 2) {
                first = pack_two<T>(at(entry & 3), at(entry >> 4 & 3));
                second = pack_two<T>(at(entry >> 2 & 3), at(entry >> 6));
            } else if constexpr (kBits == 3) {  // a byte's lowest two bits belong to another pair
                first = second = pack_two<T>(at(entry >> 2 & 7), at(entry >> 5));
            } else {
                first = second = pack_two<T>(at(entry & ((1 << kBits) - 1)), at(entry >> kBits));
            }
            store_shared_16(window + kSharedReserved + entry * kStride + piece % kPieces * 16,
                            make_uint4(first, second, first, second));
        }
    }

    // Both, for weights that are multiplied by their scales before the product; returns the unit of the sums.
    template <typename T, int kThreads>
    __device__ __forceinline__ float finish() {
        const float unit = Weights<T>::kUnit * normalize<Weights<T>::kLargest>();
        build<T, kThreads>();
        return unit;
    }

    static __device__ __forceinline__ uint32_t lane_address(uint32_t window, int lane) {
        return window + lane % kCopies * kLaneBytes;
    }
    // Byte `index` of codes: the second byte of the address.
    static __device__ __forceinline__ uint32_t address(uint32_t codes, int index, uint32_t lane_address) {
        return __byte_perm(codes, lane_address, 0x7604 | index << 4);
    }
};

// The A operands of the two instructions of one of a tile's two blocks.
template <int kBits, int kTableBytes>
__device__ __forceinline__ void decode_block(const uint32_t (&words)[kBits], int block, uint32_t lane_address,
                                             uint32_t (&a)[2][4]) {
    using Table = LevelTable<kBits, kTableBytes>;
    if constexpr (kBits == 2) {
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const uint2 rows = look_up_8<kSharedReserved>(Table::address(words[block], byte, lane_address));
            a[byte / 2][byte % 2 * 2] = rows.x, a[byte / 2][byte % 2 * 2 + 1] = rows.y;
        }
    } else if constexpr (kBits < 5) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t codes;
            if constexpr (kBits == 3) {  // a byte's lowest two bits belong to another pair
                codes = three_bit_pairs(words, 2 * block + i / 4);
            } else {
                codes = words[2 * block + i / 4];
            }
            a[i / 4][i % 4] = look_up_4<kSharedReserved>(Table::address(codes, i % 4, lane_address));
        }
    } else {
        using Word = TileWord<kBits>;
        constexpr int kShift = Table::kStride == 128 ? 7 : 6;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int pair = 8 * block + i;
            uint32_t address;
            if (Word::spread(pair)) {
                uint32_t index = words[kBits - 1] >> 30;
#pragma unroll
                for (int j = kBits - 2; j >= 0; --j) index = __funnelshift_l(words[j], index, 2);
                address = index * Table::kStride + lane_address;
            } else {
                address =
                    (shifted(words[Word::word(pair)], kShift - Word::shift(pair)) & 1023u << kShift) | lane_address;
            }
            a[i / 4][i % 4] = look_up_4<kSharedReserved>(address);
        }
    }
}

// --- columns in their order, for wgmma --------------------------------------------------------------

// Operand A of the two instructions of one of a tile's two blocks, as decode_block, but columns in their order: of
// lane t not columns 8 t .. 8 t + 7 of the block, whose codes it holds, but 2 t, 2 t + 1 of each eight. Both are four
// elements for four lanes, which transpose codes before they look them up. Up to 4 bits: at 5, x is brought into the
// tiles' order instead (wgmma_ordered).
template <int kBits>
__device__ __forceinline__ void decode_in_order(const uint32_t (&words)[kBits], int block, uint32_t lane_address,
                                                const Quad& quad, uint32_t (&a)[2][4]) {
    static_assert(kBits < 5);
    using Table = LevelTable<kBits, kPairTableBytes>;
    if constexpr (kBits == 2) {
        uint32_t codes[1] = {words[block]};
        quad.transpose(codes);
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const uint2 rows = look_up_8<kSharedReserved>(Table::address(codes[0], byte, lane_address));
            a[byte / 2][byte % 2 * 2] = rows.x, a[byte / 2][byte % 2 * 2 + 1] = rows.y;
        }
    } else {
        uint32_t codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (kBits == 3) {
                codes[i] = three_bit_pairs(words, 2 * block + i);
            } else {
                codes[i] = words[2 * block + i];
            }
        }
        quad.transpose(codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            a[i / 4][i % 4] = look_up_4<kSharedReserved>(Table::address(codes[i / 4], i % 4, lane_address));
        }
    }
}

// scales: the bytes of both blocks of a tile, of row g and g + 8 each; signs: of signs_of.
template <typename T>
__device__ __forceinline__ void multiply_by_scales(uint32_t (&a)[2][2][4], uint32_t scales, uint32_t signs) {
    using Two = typename Weights<T>::Two;
    constexpr int kShift = Weights<T>::kShift;
    constexpr uint32_t kMask = 0x00FF00FFu << kShift;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const uint32_t both = with_signs<T>(shifted(scales, kShift - 8 * row) & kMask, signs);  // of blocks 0 and 1
        const Two of_row = *reinterpret_cast<const Two*>(&both);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            Two scale;
            scale.x = scale.y = block == 0 ? of_row.x : of_row.y;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32_t& levels = a[block][i / 2][i % 2 * 2 + row];
                const Two weights = __hmul2(*reinterpret_cast<const Two*>(&levels), scale);
                levels = *reinterpret_cast<const uint32_t*>(&weights);
            }
        }
    }
}

// Levels of float16, both blocks of a tile, to int8: float16(scale * inverse) is the multiplier, and 1536, added by
// the same instruction, leaves the rounded product in the low byte. Makes operand A of an instruction of 32 columns
// for each block: four bytes of columns 8 t .. 8 t + 3 of row g and of g + 8, then the same of the four columns that
// follow. scales and signs as for multiply_by_scales<__half>; inverse: twice that of row g, and of g + 8.
__device__ __forceinline__ void to_int8(const uint32_t (&levels)[2][2][4], uint32_t scales, uint32_t signs,
                                        const __half2 (&inverse)[2], uint32_t (&a)[2][4]) {
    constexpr uint32_t kMask = 0x00FF00FFu << Weights<__half>::kShift;
    const __half2 magic = __float2half2_rn(1536);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const uint32_t both = with_signs<__half>(shifted(scales, Weights<__half>::kShift - 8 * row) & kMask, signs);
        const __half2 of_row = __hmul2(*reinterpret_cast<const __half2*>(&both), inverse[row]);
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const __half2 multiplier = block == 0 ? __low2half2(of_row) : __high2half2(of_row);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t rounded[2];
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const uint32_t two = levels[block][i][2 * pair + row];
                    const __half2 sum = __hfma2(*reinterpret_cast<const __half2*>(&two), multiplier, magic);
                    rounded[pair] = *reinterpret_cast<const uint32_t*>(&sum);
                }
                a[block][2 * i + row] = __byte_perm(rounded[0], rounded[1], 0x6420);
            }
        }
    }
}

// --- a slab --------------------------------------------------------------------------------------

// Part number `part` of kParts of a slab in shared memory (words, then scales) to registers: the lane's tiles, and all
// their blocks' scales of rows g and g + 8.
template <int kBits, int kParts>
__device__ __forceinline__ void load_slab(uint32_t slab, int part, uint32_t (&to_words)[4 / kParts][kBits],
                                          uint32_t (&to_scales)[4 / kParts]) {
    const int lane = threadIdx.x % kWarp;
    constexpr int kWords = 4 * kBits / kParts;
    const int first = part * kWords;
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
        const int word = first + i;
        uint32_t* to = &to_words[0][0] + i;
        const uint32_t from = slab + word / 4 * 512 + lane * 16 + word % 4 * 4;
        if (word % 4 == 0 && i + 4 <= kWords) {
            const uint4 four = load_shared_16(from);
            to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        } else if (word % 4 == 0 || i == 0) {
            const uint2 two = load_shared_8(from);
            to[0] = two.x, to[1] = two.y;
        }
    }
    const uint32_t from = slab + word_bytes(kBits) + lane / 4 * 16 + part * (16 / kParts);
    if constexpr (kParts == 1) {
        const uint4 four = load_shared_16(from);
        to_scales[0] = four.x, to_scales[1] = four.y, to_scales[2] = four.z, to_scales[3] = four.w;
    } else {
        const uint2 two = load_shared_8(from);
        to_scales[0] = two.x, to_scales[1] = two.y;
    }
}

// Begins to bring one in, by bulk copies that count at the barrier.
template <int kBits>
__device__ __forceinline__ void bring_slab(uint32_t to, const int32_t* words, const uint8_t* scales, int64_t slab,
                                           uint32_t barrier) {
    constexpr int kWords = word_bytes(kBits);
    expect_bytes(barrier, slab_bytes(kBits));
    bulk_copy(to, reinterpret_cast<const char*>(words) + slab * kWords, kWords, barrier);
    bulk_copy(to + kWords, scales + slab * kScaleBytes, kScaleBytes, barrier);
}

}  // namespace hf_kbit::cuda
