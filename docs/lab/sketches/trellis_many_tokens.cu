// y = had(x' @ W) * svh of 16 to many tokens on Hopper, W of EXL3's form and code `mul1`: a prototype.
//
//   words   uint32 [n / 128, k / 256, 8, K, 32, 4], what `repacked` of trellis_many_tokens.py makes of EXL3's trellis
//   x'      int8, int16 as two columns of int8, or float16 [tokens, k], what `prepare` makes of x
//   y       bfloat16 or float32 [tokens, n]
//
//   many_tokens   decodes in registers, as operand A of wgmma; perhaps two blocks of a cluster share decoding
//   decode_int8   decodes into memory for `decoded`, a product of int8 by bulk copies of both sides
//   decode_dense  the weight itself in bfloat16, for the library's product
//
// Limits: k a multiple of 2048 (`prepare`), n of 128, or 256 for clusters of `decoded`, K 2, 3 or 4. How to build and
// run it, what it takes and what failed: docs/lab/2026-11-28-trellis-many-tokens.md. As of commit 657b39d of csrc.
//
// A block of many_tokens has 128 rows (of out_features). With 256 tokens eight warps decode 16 rows each, with fewer
// there are two groups of eight, which divide K. One more warpgroup brings x and words by bulk copies. A lane holds 32
// weights of 16 rows and 64 columns: all 16 columns of a tile of EXL3's, of rows g and g + 8, K words of its stream;
// the windows at their start need the last word of the lane four before.
//
//   int8     dp4a multiplies a product's four bytes by 64 and adds them: byte 1 is floor((s - 509) / 4)
//   float16  dp4a gives 1024 + s as float16, a permute packs two, one HFMA2 makes them EXL3's value, to the bit
//
// Blocks take whole tiles in turns and may divide those of the last turn along K (Stream-K; Osama et al., 2023), as
// csrc/kernels/hopper/gemm_wgmma.cuh does, whose parts this uses. In the end rows meet in shared memory, are turned by
// Hadamard's matrix of 128 and scaled: 32 tokens at a time, or of 256 tokens all as float16, eight at a time by warps
// that are idle while the next tile is multiplied.
#include <cuda_bf16.h>

#include "kernels/hopper/tensor_map.h"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/ptx.cuh"

using namespace hf_kbit;
using namespace hf_kbit::cuda;

namespace {

constexpr uint32_t MULTIPLIER = 0x83DCD12Du;
// A value is SCALE * (1024 + s) - 1329 / 128 = SCALE * (s - 510 - REST); of int8 4 * SCALE * (q + MEAN / 4).
constexpr double SCALE = 1774.0 / 262144, REST = 1329.0 / 128 / SCALE - 1534, MEAN = 0.5 - REST;
constexpr int ROWS = 128, SLAB = 256, MOST_SHARED = 227 * 1024, BRINGERS = 128;

struct Arguments {
    const uint32_t* words;
    const float* token_scales;
    const int32_t* token_sums;
    const __half* svh;
    void* y;
    void* partial;
    uint32_t* ready;
    int tokens, n, slabs, token_tiles, ctas, whole, turns, as_float;
    int wide;          // int16: two columns of a token, its high and low bytes
    float held_scale;  // of sums in float16, a power of two
    WgmmaDivision division;
};

__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier_there) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_there) : "memory");
}

// What a block, or a cluster, has of a tile.
struct Share {
    int tile, first_slab, slabs;
};
// Number `number` of its shares, as WgmmaTiles (csrc) has them; none: no slabs, or fewer.
__device__ __forceinline__ Share share_of(const Arguments& arguments, int block, int number) {
    const int tile = block + number * arguments.ctas;
    if (tile < arguments.whole) return {tile, 0, arguments.slabs};
    const int begin = arguments.division.begin(block), end = arguments.division.begin(block + 1);
    if (begin == end) return {};
    const int of_divided = (end - 1) / arguments.slabs - (number - arguments.turns);
    const int tile_begin = of_divided * arguments.slabs, first = max(begin, tile_begin);
    return {arguments.whole + of_divided, first - tile_begin, min(end, tile_begin + arguments.slabs) - first};
}

// --- weights -------------------------------------------------------------------------------------

// The 16 bits that end with bit `end` of a stream; words[0] is the word before it. All but the words is known when
// this is compiled. A shift to the left puts the window at a byte, so one permute takes it out.
template <int count>
__device__ __forceinline__ uint32_t window(const uint32_t (&words)[count], int end) {
    const int half = (end + 15) / 16, from = 16 * half - end, word = half / 2;
    const uint32_t x = half % 2 ? __byte_perm(words[word + 1], words[word], 0x5432) : words[word];
    const int shift = (8 - from % 8) % 8;
    const uint32_t shifted = x << shift;
    return from + shift == 16  ? __byte_perm(shifted, 0, 0x4432)
           : from + shift == 8 ? __byte_perm(shifted, 0, 0x4421)
                               : __byte_perm(shifted, 0, 0x4410);
}

template <int K>
__device__ __forceinline__ uint32_t product(const uint32_t (&words)[K + 1], int weight) {
    return window(words, (weight + 1) * K) * MULTIPLIER;
}

// Weights `first` to `first` + 3 as int8.
template <int K>
__device__ __forceinline__ uint32_t four_int8(const uint32_t (&words)[K + 1], int first) {
    uint32_t s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = __dp4a(product<K>(words, first + i), 0x40404040u, uint32_t(-509 * 64));
    return __byte_perm(__byte_perm(s[0], s[1], 0x0051), __byte_perm(s[2], s[3], 0x0051), 0x5410);
}

// Weights `first` and `first` + 1 as float16.
template <int K>
__device__ __forceinline__ uint32_t two_half(const uint32_t (&words)[K + 1], int first) {
    uint32_t s[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) s[i] = __dp4a(product<K>(words, first + i), 0x01010101u, 0x6400u);
    const uint32_t two = __byte_perm(s[0], s[1], 0x5410), scale = 0x1EEE1EEE, shift = 0xC931C931;
    uint32_t value;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(two), "r"(scale), "r"(shift));
    return value;
}

// --- outputs -------------------------------------------------------------------------------------

// What a token's numbers are multiplied by, `held` times too large; of int8 row 0 of 128 gets what rounding took.
template <bool kInt8>
__device__ __forceinline__ float scale_of(const Arguments& arguments, int token, bool has_row_0, float held,
                                          float& row_0) {
    const float scale = __ldcg(arguments.token_scales + token) * 0.08838834764831845f / held;
    if (!kInt8) return scale;
    if (has_row_0) row_0 += float(128 * MEAN / 4) * held * __ldcg(arguments.token_sums + token);
    return scale * float(4 * SCALE);
}

__device__ __forceinline__ void store_eight_rows(const Arguments& arguments, int token, int row, float scale,
                                                 const float* v) {
    const uint4 eight = __ldg(reinterpret_cast<const uint4*>(arguments.svh + row));
    const auto* of_rows = reinterpret_cast<const __half2*>(&eight);
    float2 value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 two = __half22float2(of_rows[j]);
        value[j] = {v[2 * j] * scale * two.x, v[2 * j + 1] * scale * two.y};
    }
    const int64_t at = int64_t{token} * arguments.n + row;
    if (arguments.as_float) {
        auto* y = static_cast<float2*>(arguments.y) + at / 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] = value[j];
    } else {
        uint32_t two[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const __nv_bfloat162 both = __float22bfloat162_rn(value[j]);
            two[j] = reinterpret_cast<const uint32_t&>(both);
        }
        store_16(static_cast<__nv_bfloat16*>(arguments.y) + at, make_uint4(two[0], two[1], two[2], two[3]));
    }
}

// A warp, eight tokens of what is held: each four lanes, of which a thread has rows 16 (q + 4 r) + 8 h + g.
template <bool kInt8>
__device__ __forceinline__ void store_eight_tokens(const Arguments& arguments, uint32_t held, uint32_t held_free,
                                                   int first, int token_before, int row_before) {
    const int lane = lane_id(), q = lane % 4, of_tile = first + lane / 4, token = token_before + of_tile;
    float v[32];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int piece = (2 * (q + 4 * r) + i) ^ (2 * (of_tile / 2 % 4)) ^ (of_tile % 2);
            const uint4 four = load_shared_16(held + of_tile * 256 + piece * 16);
            const uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 two = __half22float2(reinterpret_cast<const __half2&>(word[j]));
                v[16 * r + 4 * i + j] = two.x, v[16 * r + 8 + 4 * i + j] = two.y;
            }
        }
    __syncwarp();
    if (lane == 0) arrive(held_free);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
        for (int i = 0; i < 32; ++i)
            if (distance != 8 && !(i & distance)) {
                const float a = v[i], b = v[i + distance];
                v[i] = a + b, v[i + distance] = a - b;
            }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const float sign = q & distance ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 32; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xFFFFFFFF, v[i], distance));
    }
    if (token < arguments.tokens) {
        const float scale = scale_of<kInt8>(arguments, token, q == 0, arguments.held_scale, v[0]);
#pragma unroll
        for (int i = 0; i < 32; i += 8)
            store_eight_rows(arguments, token, row_before + 16 * q + i / 16 * 64 + i / 8 % 2 * 8, scale, v + i);
    }
    __syncwarp();
}

// A warp's sums of part of a tile, to the block that completes it: [four sums][lane][4].
template <typename Sum>
using FourOf = std::conditional_t<std::is_same_v<Sum, int32_t>, int4, float4>;

template <int kWarps, typename Sum, int kSums>
__device__ __forceinline__ void hand_over_sums(const Arguments& arguments, const Sum (&sums)[kSums], int slot,
                                               int warp) {
    auto* to = static_cast<FourOf<Sum>*>(arguments.partial) + (slot * kWarps + warp) * (kSums / 4) * 32 + lane_id();
#pragma unroll
    for (int i = 0; i < kSums; i += 4) to[i / 4 * 32] = FourOf<Sum>{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    __syncwarp();
    if (lane_id() == 0) store_release(arguments.ready + slot * kWarps + warp, 1);
}
template <int kWarps, typename Sum, int kSums>
__device__ __forceinline__ void add_sums(const Arguments& arguments, Sum (&sums)[kSums], int slot, int warp) {
    while (load_acquire(arguments.ready + slot * kWarps + warp) == 0) {
    }
    const auto* from =
        static_cast<const FourOf<Sum>*>(arguments.partial) + (slot * kWarps + warp) * (kSums / 4) * 32 + lane_id();
#pragma unroll
    for (int i = 0; i < kSums; i += 4) {
        const FourOf<Sum> four = __ldcg(from + i / 4 * 32);
        sums[i] += four.x;
        sums[i + 1] += four.y;
        sums[i + 2] += four.z;
        sums[i + 3] += four.w;
    }
}

// Pairs of rows g, g + 8 of a tile of 256 tokens, their sum and difference, as float16, 256 bytes of a token.
template <typename Sum>
__device__ __forceinline__ void hold(const Sum (&sums)[128], uint32_t held, float scale, int warp) {
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    const uint32_t to = held + 2 * t * 256;
#pragma unroll
    for (int i = 0; i < 32; ++i)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const Sum a = sums[4 * i + odd], b = sums[4 * i + 2 + odd];
            const __half2 two = __floats2half2_rn(float(a + b) * scale, float(a - b) * scale);
            const int word = (8 * warp + g) ^ (8 * t) ^ (4 * odd);
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + (8 * i + odd) * 256 + word * 4),
                         "r"(reinterpret_cast<const uint32_t&>(two))
                         : "memory");
        }
}

// Any warp: as long as a block or cluster completes tiles, takes eight tokens of what is held.
template <bool kInt8>
__device__ __forceinline__ void store_tiles(const Arguments& arguments, uint32_t held, uint32_t held_full,
                                            uint32_t held_free, uint32_t next_part, int block, int row_tiles,
                                            int row_tile, int token_tiles = 1, int token_tile = 0) {
    int number = -1, completed = -1;
    Share share{};
#pragma unroll 1
    while (true) {
        int part = 0;
        if (lane_id() == 0) asm volatile("atom.shared.add.u32 %0, [%1], 1;" : "=r"(part) : "r"(next_part) : "memory");
        part = __shfl_sync(0xFFFFFFFF, part, 0);
        while (completed < part / 32) {
            share = share_of(arguments, block, ++number);
            if (share.slabs <= 0) return;
            completed += share.first_slab + share.slabs == arguments.slabs;
        }
        wait_barrier(held_full, completed & 1);
        store_eight_tokens<kInt8>(arguments, held, held_free, part % 32 * 8,
                                  (share.tile % arguments.token_tiles * token_tiles + token_tile) * 256,
                                  (share.tile / arguments.token_tiles * row_tiles + row_tile) * ROWS);
    }
}

// --- the kernel, with weights decoded in registers -----------------------------------------------

template <int K, typename T, int kTokens, bool kPair = false>
struct Cta {
    static constexpr bool kInt8 = std::is_same_v<T, int8_t>;
    using Sum = std::conditional_t<kInt8, int32_t, float>;
    static constexpr int kGroups = kTokens == 256 ? 1 : 2, kGroupThreads = 256, kWarps = 8 * kGroups;
    static constexpr int kDecoders = kGroupThreads * kGroups, kThreads = kDecoders + BRINGERS;
    static constexpr int kDecoderRegisters = kGroups == 1 ? 208 : 112, kBringerRegisters = kGroups == 1 ? 88 : 32;
    static constexpr int kBoxColumns = kInt8 ? 128 : 64;
    static constexpr int kStageBytes = kTokens * 128, kSlabBytes = 512 * K, kRingStages = 2;  // a slab of 16 rows
    // With 256 tokens a tile's sums are held as float16, else so many tokens' meet at a time.
    static constexpr bool kHolds = kGroups == 1;
    static constexpr int kCluster = kPair ? 2 : 1, kSlots = 4, kExchangeBytes = kPair ? kSlots * 8 * 1024 : 0;
    static_assert(!kPair || (kInt8 && kHolds));
    static constexpr int kChunk = 32, kPitch = ROWS + 4;
    static constexpr int kMeetBytes = kHolds ? ROWS * kTokens * 2 : kGroups * kChunk * kPitch * 4;
    static constexpr int kFixed = kWarps * kRingStages * kSlabBytes + kMeetBytes + kExchangeBytes + 1024;
    static constexpr int kFit = (MOST_SHARED - 1024 - kFixed) / (kGroups * kStageBytes);
    static constexpr int kStages = kFit < 8 ? kFit : 8;
    static constexpr int kShared = 1024 + kFixed + kGroups * kStages * kStageBytes;
    static constexpr int kPending = kTokens == 128 ? 0 : 1, kParts = kTokens == 128 ? 2 : 1;
    static_assert(kStages >= 3);

    const Arguments& arguments;
    const int block, rank;  // of a cluster, which has one tile of rows
    const uint32_t x, ring, meet, x_full, x_empty, ring_full, ring_empty, held_full, held_free, next_part;
    const uint32_t exchange, exchange_full, exchange_empty;

    __device__ __forceinline__ Cta(const Arguments& arguments, uint32_t begin)
        : arguments(arguments),
          block(blockIdx.x / kCluster),
          rank(blockIdx.x % kCluster),
          x(begin),
          ring(x + kGroups * kStages * kStageBytes),
          meet(ring + kWarps * kRingStages * kSlabBytes),
          x_full(meet + kMeetBytes + kExchangeBytes),
          x_empty(x_full + kGroups * kStages * 8),
          ring_full(x_empty + kGroups * kStages * 8),
          ring_empty(ring_full + kGroups * kRingStages * 8),
          held_full(ring_empty + kGroups * kRingStages * 8),
          held_free(held_full + 8),
          next_part(held_free + 8),
          exchange(meet + kMeetBytes),
          exchange_full(next_part + 8),
          exchange_empty(exchange_full + kSlots * 8 * 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < (kPair ? kSlots * 8 : 0); ++i) {
            init_barrier(exchange_full + 8 * i, 1);
            init_barrier(exchange_empty + 8 * i, 1);
            expect_bytes(exchange_full + 8 * i, 1024);
        }
        for (int i = 0; i < kGroups * kStages; ++i) {
            init_barrier(x_full + 8 * i, 1);
            init_barrier(x_empty + 8 * i, 8);
        }
        for (int i = 0; i < kGroups * kRingStages; ++i) {
            init_barrier(ring_full + 8 * i, 1);
            init_barrier(ring_empty + 8 * i, 8);
        }
        init_barrier(held_full, kWarps);
        init_barrier(held_free, kTokens / 8);
        asm volatile("st.shared.u32 [%0], 0;" ::"r"(next_part) : "memory");
        fence_barriers();
    }

    __device__ __forceinline__ Share share(int number) const { return share_of(arguments, block, number); }
    __device__ __forceinline__ int first_token(int tile) const {
        return (tile % arguments.token_tiles * kCluster + rank) * kTokens;
    }
    // Of these a group's.
    static __device__ __forceinline__ int first_of(const Share& share, int group) {
        return share.first_slab + (group == 0 ? 0 : (share.slabs + 1) / 2);
    }
    static __device__ __forceinline__ int count_of(const Share& share, int group) {
        return kGroups == 1 ? share.slabs : (share.slabs + 1 - group) / 2;
    }
    static __device__ __forceinline__ void step(int& stage, int& phase, int stages) {
        if (++stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // A lane for each group, and one of another warp: else one of them would wait for the other.
    __device__ __forceinline__ void bring_x(const CUtensorMap& map, int group) const {
        wait_for_kernel_before();
        int stage = 0, phase = 0;
        Share share;
        for (int number = 0; (share = this->share(number)).slabs > 0; ++number) {
            int column = first_of(share, group) * SLAB;
            for (int i = 0; i < count_of(share, group) * (SLAB / kBoxColumns); ++i, column += kBoxColumns) {
                const int at = group * kStages + stage;
                wait_barrier(x_empty + 8 * at, phase ^ 1);
                expect_bytes(x_full + 8 * at, kStageBytes);
                bulk_copy_box(x + at * kStageBytes, &map, column, first_token(share.tile), x_full + 8 * at);
                step(stage, phase, kStages);
            }
        }
    }
    __device__ __forceinline__ void bring_words(int group) const {
        int stage = 0, phase = 0;
        Share share;
        for (int number = 0; (share = this->share(number)).slabs > 0; ++number) {
            const int row_tile = share.tile / arguments.token_tiles;
            const char* from = reinterpret_cast<const char*>(arguments.words) +
                               (int64_t{row_tile} * arguments.slabs + first_of(share, group)) * (8 * kSlabBytes);
            for (int i = 0; i < count_of(share, group); ++i, from += 8 * kSlabBytes) {
                const int at = group * kRingStages + stage;
                wait_barrier(ring_empty + 8 * at, phase ^ 1);
                expect_bytes(ring_full + 8 * at, 8 * kSlabBytes);
                bulk_copy(ring + at * 8 * kSlabBytes, from, 8 * kSlabBytes, ring_full + 8 * at);
                step(stage, phase, kRingStages);
            }
        }
    }

    // --- who decodes and multiplies ---

    // Of part `part` of a slab's four tiles the words, from the one before them on.
    static __device__ __forceinline__ void load_words(uint32_t from, int part, uint32_t (&words)[4 / kParts][K + 1]) {
        const int lane = threadIdx.x % 32, before = (lane + 28) % 32;
        const auto load = [&](int word, uint32_t at) {
            if constexpr (kParts == 1) {
                const uint4 four = load_shared_16(from + at * 16);
                words[0][word] = four.x, words[1][word] = four.y, words[2][word] = four.z, words[3][word] = four.w;
            } else {
                const uint2 two = load_shared_8(from + at * 16 + part * 8);
                words[0][word] = two.x, words[1][word] = two.y;
            }
        };
        load(0, (K - 1) * 32 + before);
#pragma unroll
        for (int i = 0; i < K; ++i) load(i + 1, i * 32 + lane);
    }

    // Decodes one of two 64 columns, which one the rank says, sends it to the same warp of the other block, and takes
    // what that one decoded.
    __device__ __forceinline__ void exchange_pieces(const uint32_t (&first)[K + 1], const uint32_t (&second)[K + 1],
                                                    uint32_t (&bytes)[2][2][4], int turn, int warp,
                                                    uint32_t further) const {
        const int lane = threadIdx.x % 32, slot = turn % kSlots * 8 + warp, parity = turn / kSlots % 2;
        uint32_t own[K + 1];
#pragma unroll
        for (int i = 0; i <= K; ++i) own[i] = rank ? second[i] : first[i];
#pragma unroll
        for (int i = 0; i < 8; ++i) bytes[0][i / 4][i % 4] = four_int8<K>(own, 4 * i);
        wait_barrier(exchange_empty + 8 * slot, parity ^ 1);
        // Another block's shared memory lies a constant further.
        const uint32_t barrier = exchange_full + 8 * slot, buffer = exchange + slot * 1024 + lane * 16;
        const uint32_t barrier_there = barrier + further, there = buffer + further;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            asm volatile(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::
                    "r"(there + i * 512),
                "r"(bytes[0][i][0]), "r"(bytes[0][i][1]), "r"(bytes[0][i][2]), "r"(bytes[0][i][3]), "r"(barrier_there)
                : "memory");
        wait_barrier(barrier, parity);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 four = load_shared_16(buffer + i * 512);
            bytes[1][i][0] = four.x, bytes[1][i][1] = four.y, bytes[1][i][2] = four.z, bytes[1][i][3] = four.w;
        }
        __syncwarp();
        if (lane == 0) {
            expect_bytes(barrier, 1024);
            arrive_in_cluster(exchange_empty + 8 * slot + further);
        }
    }

    __device__ __forceinline__ void multiply(int warp) const {
        const int lane = threadIdx.x % 32, group = warp / 8;
        const uint64_t columns = swizzled_matrix(x + group * kStages * kStageBytes);
        const uint32_t full = x_full + group * kStages * 8, empty = x_empty + group * kStages * 8;
        int stage = 0, phase = 0, slab_stage = 0, slab_phase = 0, held_phase = 0;
        [[maybe_unused]] int turn = 0;
        [[maybe_unused]] const uint32_t further = kPair ? cluster_address(exchange, rank ^ 1) - exchange : 0;
        Share share;
#pragma unroll 1
        for (int number = 0; (share = this->share(number)).slabs > 0; ++number) {
            Sum sums[kTokens / 2];
            int last = -1;
            const int slabs = count_of(share, group);
            if (slabs == 0)
#pragma unroll
                for (int i = 0; i < kTokens / 2; ++i) sums[i] = 0;
#pragma unroll 1
            for (int slab = 0; slab < slabs; ++slab) {
                uint32_t words[4 / kParts][K + 1];
                const int at = group * kRingStages + slab_stage;
                const uint32_t of_warp = ring + (at * 8 + warp % 8) * kSlabBytes;
                wait_barrier(ring_full + 8 * at, slab_phase);
                [[maybe_unused]] uint32_t bytes[2][2][4];
#pragma unroll
                for (int piece = 0; piece < 4; ++piece) {
                    if (piece % (4 / kParts) == 0) load_words(of_warp, piece * kParts / 4, words);
                    if (piece == 4 - 4 / kParts) {
                        release_to_bulk_copies();
                        __syncwarp();
                        if (lane == 0) arrive(ring_empty + 8 * at);
                        step(slab_stage, slab_phase, kRingStages);
                    }
                    const auto& own = words[piece % (4 / kParts)];
                    uint32_t a[kInt8 ? 1 : 4][4];
                    if constexpr (kPair) {
                        if (piece % 2 == 0) continue;
                        exchange_pieces(words[piece - 1], words[piece], bytes, turn++, warp, further);
                    } else if constexpr (kInt8) {
#pragma unroll
                        for (int i = 0; i < 8; ++i) bytes[piece % 2][i / 4][i % 4] = four_int8<K>(own, 4 * i);
                        if (piece % 2 == 0) continue;
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            a[i][0] = two_half<K>(own, 8 * i);
                            a[i][1] = two_half<K>(own, 8 * i + 4);
                            a[i][2] = two_half<K>(own, 8 * i + 2);
                            a[i][3] = two_half<K>(own, 8 * i + 6);
                        }
                    }
                    wait_barrier(full + 8 * stage, phase);
                    const uint64_t from = columns + (stage * kStageBytes >> 4);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        if constexpr (kInt8) {
                            // Of a pair first the own 64 columns, then those that the other block decoded.
                            const int at = kPair ? 4 * (i / 2 ^ rank) + 2 * (i % 2) : 2 * i;
                            wgmma<T, kTokens>(sums, bytes[i / 2][i % 2], from + at, slab + piece / 2 + i > 0);
                        } else {
                            wgmma<T, kTokens>(sums, a[i], from + 2 * i, slab + piece + i > 0);
                        }
                    }
                    wgmma_commit();
                    wgmma_wait<kPending>();
                    const int done = kPending == 0 ? stage : last;
                    if (done >= 0 && lane == 0) arrive(empty + 8 * done);
                    last = stage;
                    step(stage, phase, kStages);
                }
            }
            if constexpr (kPending > 0) {
                wgmma_wait<0>();
                if (last >= 0 && lane == 0) arrive(empty + 8 * last);
            }
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) {
                if constexpr (kInt8) {
                    asm volatile("" : "+r"(sums[i])::"memory");
                } else {
                    asm volatile("" : "+f"(sums[i])::"memory");
                }
            }
            wait_for_kernel_before();
            if (share.first_slab + share.slabs < arguments.slabs) {
                hand_over_sums<kWarps>(arguments, sums, blockIdx.x, warp);
            } else {
                if (share.first_slab > 0) add_parts(sums, share.tile, warp);
                if constexpr (kHolds) {
                    wait_barrier(held_free, held_phase ^ 1);
                    hold(sums, meet, arguments.held_scale, warp);
                    __syncwarp();
                    if (lane == 0) arrive(held_full);
                    held_phase ^= 1;
                } else {
                    meet_and_store(sums, share.tile, warp);
                }
            }
        }
    }

    __device__ __forceinline__ void add_parts(Sum (&sums)[kTokens / 2], int tile, int warp) const {
        const int first = arguments.division.cta_with((tile - arguments.whole) * arguments.slabs);
#pragma unroll 1
        for (int other = block - 1; other >= first; --other)
            add_sums<kWarps>(arguments, sums, other * kCluster + rank, warp);
    }

    __device__ __forceinline__ void store_held() const {
        store_tiles<kInt8>(arguments, meet, held_full, held_free, next_part, block, 1, 0, kCluster, rank);
    }

    // Rows meet in shared memory, are turned and stored. Bit 3 of a row is the two rows of a lane of `multiply`.
    __device__ __forceinline__ void meet_and_store(const Sum (&sums)[kTokens / 2], int tile, int warp) const {
        constexpr int kLanes = kDecoders / kChunk;  // of a token, 16 of eight rows each
        static_assert(kGroups == 1 || kLanes == 16);
        const int lane = lane_id(), g = lane / 4, t = lane % 4, group = warp / 8;
        const int token_before = first_token(tile);
        const int thread = warp * 32 + lane, its_token = thread / kLanes, of_token = thread % kLanes;
        const int row = tile / arguments.token_tiles * ROWS + 8 * of_token;
#pragma unroll
        for (int chunk = 0; chunk < (kTokens + kChunk - 1) / kChunk; ++chunk) {
            named_barrier(1, kDecoders);
#pragma unroll
            for (int i = 0; i < std::min(kChunk, kTokens) / 8; ++i) {
                const Sum* four = sums + 4 * (chunk * (kChunk / 8) + i);
                const uint32_t to = meet + ((group * kChunk + 8 * i + 2 * t) * kPitch + warp % 8 * 16 + g) * 4;
                const auto store = [&](uint32_t at, Sum value) {
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(as_bits(value)) : "memory");
                };
                store(to, four[0] + four[2]);
                store(to + 32, four[0] - four[2]);
                store(to + kPitch * 4, four[1] + four[3]);
                store(to + kPitch * 4 + 32, four[1] - four[3]);
            }
            named_barrier(1, kDecoders);
            float v[8] = {};
#pragma unroll
            for (int of_group = 0; of_group < kGroups; ++of_group)
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    const uint4 four =
                        load_shared_16(meet + ((of_group * kChunk + its_token) * kPitch + 8 * of_token + i) * 4);
                    v[i] += as_float(four.x), v[i + 1] += as_float(four.y);
                    v[i + 2] += as_float(four.z), v[i + 3] += as_float(four.w);
                }
            int token = its_token < kTokens ? token_before + chunk * kChunk + its_token : arguments.tokens;
            if (kInt8 && arguments.wide) {
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = 256 * v[i] + __shfl_down_sync(0xFFFFFFFF, v[i], 16);
                token = token % 2 || its_token >= kTokens ? arguments.tokens : token / 2;
            }
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    if (!(i & distance)) {
                        const float a = v[i], b = v[i + distance];
                        v[i] = a + b, v[i + distance] = a - b;
                    }
#pragma unroll
            for (int distance = 2; distance < 16; distance *= 2) {
                const float sign = of_token & distance ? -1.f : 1.f;
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xFFFFFFFF, v[i], distance));
            }
            if (token >= arguments.tokens) continue;
            const float scale = scale_of<kInt8>(arguments, token, of_token == 0, 1, v[0]);
            store_eight_rows(arguments, token, row, scale, v);
        }
    }
    static __device__ __forceinline__ uint32_t as_bits(Sum sum) {
        if constexpr (kInt8) {
            return uint32_t(sum);
        } else {
            return __float_as_uint(sum);
        }
    }
    static __device__ __forceinline__ float as_float(uint32_t bits) {
        if constexpr (kInt8) {
            return float(int32_t(bits));
        } else {
            return __uint_as_float(bits);
        }
    }
};

template <int K, typename T, int kTokens, bool kPair>
__global__ void __launch_bounds__(Cta<K, T, kTokens, kPair>::kThreads, 1)
    many_tokens(const __grid_constant__ CUtensorMap map, const __grid_constant__ Arguments arguments) {
    using Of = Cta<K, T, kTokens, kPair>;
    extern __shared__ __align__(1024) char smem[];
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Of cta(arguments, (shared_address(smem) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) cta.init_barriers();
    __syncwarp();
    if constexpr (kPair) {
        cluster_barrier();
    } else {
        __syncthreads();
    }
    if (warp >= Of::kWarps) {
        give_registers<Of::kBringerRegisters>();
        if (warp == Of::kWarps && lane < Of::kGroups) cta.bring_x(map, lane);
        if (warp == Of::kWarps + 1 && lane < Of::kGroups) cta.bring_words(lane);
        __syncwarp();
        if constexpr (Of::kHolds) {
            wait_for_kernel_before();
            cta.store_held();
        }
    } else {
        take_registers<Of::kDecoderRegisters>();
        cta.multiply(warp);
        if constexpr (Of::kHolds) cta.store_held();
    }
    if constexpr (kPair) {  // until the other block writes and arrives here no more
        __syncwarp();
        cluster_barrier();
    }
}

// --- decoding first ------------------------------------------------------------------------------

// int8 [n, k], of each 64 columns 16 t + 2 m + 8 h + e at 16 t + 4 m + 2 h + e. A warp has a slab of 16 rows.
template <int K>
__global__ void __launch_bounds__(256)
    decode_int8(const uint32_t* words, int8_t* weights, int units, int k, int waits) {
    const int unit = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    let_next_kernel_start();
    if (waits) wait_for_kernel_before();  // a product of what `weights` held
    if (unit >= units) return;
    const int slabs = k / SLAB, row_tile = unit / (8 * slabs) * 8 + unit % 8, slab = unit / 8 % slabs;
    uint32_t all[K][4];
#pragma unroll
    for (int i = 0; i < K; ++i) load_16_once(words + (int64_t{unit} * K + i) * 128 + lane * 4, all[i]);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
        uint32_t own[K + 1];
#pragma unroll
        for (int i = 0; i < K; ++i) own[i + 1] = all[i][tile];
        own[0] = __shfl_sync(0xFFFFFFFF, own[K], (lane + 28) % 32);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int8_t* to = weights + int64_t{row_tile * 16 + g + 8 * half} * k + slab * SLAB + tile * 64 + t * 16;
            store_16(to, make_uint4(four_int8<K>(own, 4 * half), four_int8<K>(own, 8 + 4 * half),
                                    four_int8<K>(own, 16 + 4 * half), four_int8<K>(own, 24 + 4 * half)));
        }
    }
    if (!waits) wait_for_kernel_before();  // which makes x meanwhile, and which the next kernel does not see
}

__device__ __forceinline__ __half2 as_half2(uint32_t bits) { return reinterpret_cast<const __half2&>(bits); }

// The weight itself as bfloat16 [n, k], turned on both sides and scaled, for the library's product. A block has 128
// rows and columns, a warp two row tiles, so that a thread's registers hold numbers whose columns differ in bits 0 to
// 3 and 6 and whose rows in bits 3 and 6; bits 4 and 5 of columns are in other lanes, other bits of rows in other
// warps. Arithmetic is float16, whose sums stay below 56,600.
template <int K>
__global__ void __launch_bounds__(128)
    decode_dense(const uint32_t* words, const __half* suh, const __half* svh, __nv_bfloat16* weights, int k) {
    __shared__ __half2 room[ROWS * 64];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int blocks = k / 128, row_tile = blockIdx.x / blocks, block = blockIdx.x % blocks;
    __half2 v[2][2][2][2][4];  // bits 6 and 3 of rows, 6, 3 and then 1 and 2 of columns
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const int64_t unit = (int64_t{row_tile} * (k / SLAB) + block / 2) * 8 + warp + 4 * w;
        uint32_t own[2][K + 1];
#pragma unroll
        for (int i = 0; i < K; ++i) {
            const uint2 two =
                __ldg(reinterpret_cast<const uint2*>(words + (unit * K + i) * 128 + lane * 4 + block % 2 * 2));
            own[0][i + 1] = two.x, own[1][i + 1] = two.y;
        }
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            own[u][0] = __shfl_sync(0xFFFFFFFF, own[u][K], (lane + 28) % 32);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int e = 0; e < 2; ++e)
#pragma unroll
                    for (int m = 0; m < 4; ++m)
                        v[w][h][u][e][m] = as_half2(two_half<K>(own[u], 8 * m + 4 * h + 2 * e));
        }
    }
    auto* all = &v[0][0][0][0][0];
    const __half2 first = __floats2half2_rn(1, -1);
#pragma unroll
    for (int i = 0; i < 64; ++i) all[i] = __hfma2(all[i], first, __lowhigh2highlow(all[i]));
#pragma unroll
    for (int distance = 1; distance < 64; distance *= 2)
#pragma unroll
        for (int i = 0; i < 64; ++i)
            if (!(i & distance)) {
                const __half2 a = all[i], b = all[i + distance];
                all[i] = __hadd2(a, b), all[i + distance] = __hsub2(a, b);
            }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const __half2 sign = __float2half2_rn(t & distance ? -1 : 1);
#pragma unroll
        for (int i = 0; i < 64; ++i) all[i] = __hfma2(sign, all[i], __shfl_xor_sync(0xFFFFFFFF, all[i], distance));
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int m = i % 4, e = i / 4 % 2, u = i / 8 % 2, h = i / 16 % 2, w = i / 32;
        room[(16 * (warp + 4 * w) + 8 * h + g) * 64 + ((32 * u + 8 * t + 4 * e + m) ^ g)] = all[i];
    }
    __syncthreads();
    const int pair = threadIdx.x % 64, h = threadIdx.x / 64, column = block * 128 + 2 * pair;
    float2 scale = __half22float2(__ldg(reinterpret_cast<const __half2*>(suh + column)));
    scale.x /= 128, scale.y /= 128;
#pragma unroll 1
    for (int w = 0; w < 2; ++w) {
        __half2 own[32];
        const auto row = [&](int i) { return 64 * w + i / 8 * 16 + 8 * h + i % 8; };
#pragma unroll
        for (int i = 0; i < 32; ++i) own[i] = room[row(i) * 64 + (pair ^ i % 8)];
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2)
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (!(i & distance)) {
                    const __half2 a = own[i], b = own[i + distance];
                    own[i] = __hadd2(a, b), own[i + distance] = __hsub2(a, b);
                }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int of_all = row_tile * ROWS + row(i);
            const float by = __half2float(__ldg(svh + of_all));
            const float2 two = __half22float2(own[i]);
            *reinterpret_cast<__nv_bfloat162*>(weights + int64_t{of_all} * k + column) =
                __floats2bfloat162_rn(two.x * scale.x * by, two.y * scale.y * by);
        }
    }
}

#define TEN(tens)                                                                                          \
    ", %" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
    "7, %" #tens "8, %" #tens "9"
#define D8(i)                                                                                                   \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
        "+r"(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
// Begins d [64, 256] = a [64, 32] @ b [32, 256] (+ d, if accumulate), both in shared memory.
__device__ __forceinline__ void multiply_shared(int32_t (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9" TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9)
            TEN(10) TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, add;\n}"
        : D32(0), D32(32), D32(64), D32(96)
        : "l"(a), "l"(b), "r"(accumulate));
}
#undef D32
#undef D8
#undef TEN

__device__ __forceinline__ void bulk_copy_box_to_two(uint32_t smem, const void* map, int column, int row,
                                                     uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(smem),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(uint16_t{3})
        : "memory");
}

// A tile of 128 rows and 256 tokens of int8, two warpgroups of 64 rows each. In a cluster two blocks have the same
// tokens, of which each brings half to both.
template <int kCluster>
struct DecodedCta {
    static constexpr int kStages = 3, kABytes = ROWS * 128, kBBytes = 256 * 128, kStageBytes = kABytes + kBBytes;
    static constexpr int kHeldBytes = ROWS * 256 * 2, kShared = 1024 + kStages * kStageBytes + kHeldBytes + 256;

    const Arguments& arguments;
    const int cluster, rank;
    const uint32_t stages, held, full, empty, held_full, held_free, next_part;

    __device__ __forceinline__ DecodedCta(const Arguments& arguments, uint32_t begin)
        : arguments(arguments),
          cluster(blockIdx.x / kCluster),
          rank(blockIdx.x % kCluster),
          stages(begin),
          held(begin + kStages * kStageBytes),
          full(held + kHeldBytes),
          empty(full + kStages * 8),
          held_full(empty + kStages * 8),
          held_free(held_full + 8),
          next_part(held_free + 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 8 * kCluster);
        }
        init_barrier(held_full, 8);
        init_barrier(held_free, 32);
        asm volatile("st.shared.u32 [%0], 0;" ::"r"(next_part) : "memory");
        fence_barriers();
    }
    static __device__ __forceinline__ void step(int& stage, int& phase) {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }

    __device__ __forceinline__ void bring(const CUtensorMap& x, const CUtensorMap& weights) const {
        wait_for_kernel_before();
        int stage = 0, phase = 0;
        Share share;
        for (int number = 0; (share = share_of(arguments, cluster, number)).slabs > 0; ++number) {
            const int token = share.tile % arguments.token_tiles * 256;
            const int row = (share.tile / arguments.token_tiles * kCluster + rank) * ROWS;
            for (int i = 0; i < 2 * share.slabs; ++i) {
                const uint32_t at = stages + stage * kStageBytes, barrier = full + 8 * stage;
                const int column = share.first_slab * SLAB + i * 128;
                wait_barrier(empty + 8 * stage, phase ^ 1);
                expect_bytes(barrier, kStageBytes);
                bulk_copy_box(at, &weights, column, row, barrier);
                if constexpr (kCluster == 1) {
                    bulk_copy_box(at + kABytes, &x, column, token, barrier);
                } else {
                    bulk_copy_box_to_two(at + kABytes + rank * kBBytes / 2, &x, column, token + rank * 128, barrier);
                }
                step(stage, phase);
            }
        }
    }

    __device__ __forceinline__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) {
            arrive(empty + 8 * stage);
            if constexpr (kCluster == 2) arrive_in_cluster(cluster_address(empty + 8 * stage, rank ^ 1));
        }
    }

    __device__ __forceinline__ void multiply(int warp) const {
        const uint64_t a = swizzled_matrix(stages + warp / 4 * 64 * 128), b = swizzled_matrix(stages + kABytes);
        int stage = 0, phase = 0, held_phase = 0;
        Share share;
#pragma unroll 1
        for (int number = 0; (share = share_of(arguments, cluster, number)).slabs > 0; ++number) {
            int32_t sums[128];
            int last = -1;
#pragma unroll 1
            for (int box = 0; box < 2 * share.slabs; ++box) {
                wait_barrier(full + 8 * stage, phase);
                const int from = stage * kStageBytes >> 4;
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply_shared(sums, a + from + 2 * i, b + from + 2 * i, box + i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (last >= 0) release(last);
                last = stage;
                step(stage, phase);
            }
            wgmma_wait<0>();
            release(last);
#pragma unroll
            for (int i = 0; i < 128; ++i) asm volatile("" : "+r"(sums[i])::"memory");
            wait_for_kernel_before();
            const int slot = cluster * kCluster + rank;
            if (share.first_slab + share.slabs < arguments.slabs) {
                hand_over_sums<8>(arguments, sums, slot, warp);
            } else {
                if (share.first_slab > 0) {
                    const int first = arguments.division.cta_with((share.tile - arguments.whole) * arguments.slabs);
#pragma unroll 1
                    for (int other = cluster - 1; other >= first; --other)
                        add_sums<8>(arguments, sums, other * kCluster + rank, warp);
                }
                wait_barrier(held_free, held_phase ^ 1);
                hold(sums, held, arguments.held_scale, warp);
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(held_full);
                held_phase ^= 1;
            }
        }
    }
};

template <int kCluster>
__global__ void __launch_bounds__(384, 1)
    decoded(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weights,
            const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) char smem[];
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const DecodedCta<kCluster> cta(arguments, (shared_address(smem) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) cta.init_barriers();
    __syncwarp();
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else {
        cluster_barrier();
    }
    let_next_kernel_start();
    if (warp >= 8) {
        if (threadIdx.x == 256) cta.bring(x, weights);
        __syncwarp();
        wait_for_kernel_before();
    } else {
        cta.multiply(warp);
    }
    store_tiles<true>(arguments, cta.held, cta.held_full, cta.held_free, cta.next_part, cta.cluster, kCluster,
                      cta.rank);
    if constexpr (kCluster == 2) {  // until the other block writes and arrives here no more
        __syncwarp();
        cluster_barrier();
    }
}

// --- inputs --------------------------------------------------------------------------------------

// Some tokens a block, one after another, a thread 64 columns: x * suh through Hadamard's matrix of 128, then int8 or
// float16 and what stands for 1 in it (of float16 a power of two). Of 64 columns 16 t + 2 m + 8 h + e comes to 16 m +
// 8 h + 2 t + e in float16, to 16 m + 4 t + 2 h + e in int8, and for decoded weights to 16 t + 4 m + 2 h + e.
template <bool kInt8, bool kDecoded>
__global__ void prepare(const __nv_bfloat16* x, const __half* suh, void* to, float* scales, int32_t* sums, int tokens,
                        int k, int wide, uint32_t* zeros, int num_zeros) {
    extern __shared__ uint4 room[];
    __shared__ float most[32];
    __shared__ int32_t of_warps[32];
    let_next_kernel_start();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_zeros; i += gridDim.x * blockDim.x) zeros[i] = 0;
    const int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, lane = thread % 32;
    uint4* const of_suh = room + 16 * threads;
    const auto place = [](int piece) { return piece ^ (piece / 8 % 8); };
    const auto bring = [&](int token, int buffer) {
        const uint4* from = reinterpret_cast<const uint4*>(x + int64_t{token} * k);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            cp_async_16(room + buffer * 8 * threads + place(i * threads + thread), from + i * threads + thread);
    };
#pragma unroll
    for (int i = 0; i < 8; ++i)
        cp_async_16(of_suh + place(i * threads + thread), reinterpret_cast<const uint4*>(suh) + i * threads + thread);
    bring(blockIdx.x, 0);
    cp_async_commit();
    int buffer = 0;
#pragma unroll 1
    for (int token = blockIdx.x; token < tokens; token += gridDim.x, buffer ^= 1) {
        __syncthreads();
        if (token + int(gridDim.x) < tokens) bring(token + gridDim.x, buffer ^ 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        uint4* const own = room + buffer * 8 * threads;
        float v[64];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint4 a = own[place(8 * thread + i)], b = of_suh[place(8 * thread + i)];
            const auto* two = reinterpret_cast<const __nv_bfloat162*>(&a);
            const auto* by = reinterpret_cast<const __half2*>(&b);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 one = __bfloat1622float2(two[j]), other = __half22float2(by[j]);
                v[8 * i + 2 * j] = one.x * other.x, v[8 * i + 2 * j + 1] = one.y * other.y;
            }
        }
#pragma unroll
        for (int distance = 1; distance < 64; distance *= 2)
#pragma unroll
            for (int i = 0; i < 64; ++i)
                if (!(i & distance)) {
                    const float a = v[i], b = v[i + distance];
                    v[i] = a + b, v[i + distance] = a - b;
                }
        float largest = 0;
        const float sign = lane & 1 ? -1.f : 1.f;
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xFFFFFFFF, v[i], 1));
            largest = fmaxf(largest, fabsf(v[i]));
        }
        largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(largest)));
        if (lane == 0) most[warp] = largest;
        __syncthreads();
        largest =
            __uint_as_float(__reduce_max_sync(0xFFFFFFFF, lane < threads / 32 ? __float_as_uint(most[lane]) : 0));
        float unit;  // of the numbers as they are here, without 1 / sqrt(128)
        if constexpr (kInt8) {
            unit = largest / (wide ? 127 * 256 : 127);
        } else {
            unit = largest > 0 ? exp2f(ceilf(log2f(largest)) - 9) : 0;
        }
        const float factor = unit > 0 ? 1 / unit : 0;
        if (thread == 0) scales[token] = unit * 0.08838834764831845f;
        constexpr int kPieces = kInt8 ? 4 : 8;
        uint32_t out[4 * kPieces];
        int32_t sum = 0;
        uint4* there = static_cast<uint4*>(to) + int64_t{token} * (kInt8 && wide ? 2 : 1) * threads * kPieces;
        const auto store = [&] {
#pragma unroll
            for (int i = 0; i < kPieces; ++i)
                own[place(thread * kPieces + i)] =
                    make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < kPieces; ++i) there[i * threads + thread] = own[place(i * threads + thread)];
            there += threads * kPieces;
        };
        if constexpr (kInt8) {
            // The lowest bytes of a large float are the number.
            const auto number = [&](int i, int j) {
                const int t = kDecoded ? i / 4 : i % 4, m = kDecoded ? i % 4 : i / 4;
                return __float_as_uint(fmaf(v[16 * t + 2 * m + 8 * (j / 2) + j % 2], factor, 0x1.8p23f));
            };
            const auto four = [](const uint32_t (&q)[4], int byte) {
                return __byte_perm(__byte_perm(q[0], q[1], byte | (byte + 4) << 4),
                                   __byte_perm(q[2], q[3], byte | (byte + 4) << 4), 0x5410);
            };
            if (wide) {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    uint32_t q[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) q[j] = number(i, j) + 128;
                    out[i] = four(q, 1);
                    sum = __dp4a(int(out[i]), 0x01010101, sum);
                }
                sum *= 256;
                store();
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                uint32_t q[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) q[j] = number(i, j);
                out[i] = four(q, 0);
                sum = __dp4a(int(out[i]), 0x01010101, sum);
            }
            sum = __reduce_add_sync(0xFFFFFFFF, sum);
            if (lane == 0) of_warps[warp] = sum;
        } else {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int column = 16 * (i % 4) + 2 * (i / 8) + 8 * (i / 4 % 2);
                const __half2 two = __floats2half2_rn(v[column] * factor, v[column + 1] * factor);
                out[i] = reinterpret_cast<const uint32_t&>(two);
            }
        }
        store();
        if constexpr (kInt8)
            if (warp == 0) {
                sum = __reduce_add_sync(0xFFFFFFFF, lane < threads / 32 ? of_warps[lane] : 0);
                if (lane == 0) sums[token] = sum;
            }
    }
}

// The power of two by which sums, and those of two of them, are float16 whatever the numbers are.
float held_scale(int k, bool int8) {
    float scale = 1;
    while (2.0 * k * (int8 ? 128 * 127 : 3.5 * 512) * scale > 65504) scale /= 2;
    return scale;
}

// Whole tiles in turns where nine tenths of all turns have one; the same number of blocks for each tile where these
// are nine tenths of all; else tiles in turns, those of the last one divided evenly.
void divide(Arguments& arguments, int k, int tiles, int most) {
    arguments.slabs = k / SLAB;
    const int turns = (tiles + most - 1) / most, parts = most / tiles;
    int divided = 0;
    if (10 * tiles >= 9 * turns * most) {
        arguments.ctas = std::min(tiles, most);
    } else {
        arguments.ctas = parts > 1 && 10 * parts * tiles >= 9 * most ? parts * tiles : most;
        arguments.ctas = std::min(arguments.ctas, tiles * arguments.slabs);
        divided = tiles % arguments.ctas;
    }
    arguments.whole = tiles - divided, arguments.turns = arguments.whole / arguments.ctas;
    arguments.division = {arguments.slabs * divided / arguments.ctas, arguments.slabs * divided % arguments.ctas};
}

int processors() {
    int count;
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0);
    return count;
}

template <typename... Arguments>
int start(void (*kernel)(Arguments...), int blocks, int cluster, int threads, int shared, cudaStream_t stream,
          const Arguments&... arguments) {
    cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared;
    config.stream = stream, config.attrs = attributes, config.numAttrs = cluster == 1 ? 1 : 2;
    error = cudaLaunchKernelEx(&config, kernel, arguments...);
    return error != cudaSuccess ? error : cudaGetLastError();
}

template <int K, typename T, int kTokens, bool kPair = false>
int launch(Arguments arguments, const void* x, int k, cudaStream_t stream) {
    using Of = Cta<K, T, kTokens, kPair>;
    const int columns = arguments.tokens * (arguments.wide ? 2 : 1), tile = kTokens * Of::kCluster;
    arguments.token_tiles = (columns + tile - 1) / tile;
    arguments.held_scale = held_scale(k, Of::kInt8);
    divide(arguments, k, arguments.n / ROWS * arguments.token_tiles, processors() / Of::kCluster);
    CUtensorMap map;
    const cudaError_t error =
        map_of_rows(x, Of::kInt8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, Of::kInt8 ? 1 : 2,
                    columns, k, kTokens, map);
    if (error != cudaSuccess) return error;
    return start(many_tokens<K, T, kTokens, kPair>, arguments.ctas * Of::kCluster, Of::kCluster, Of::kThreads,
                 Of::kShared, stream, map, arguments);
}

template <int kCluster>
int launch_decoded(Arguments arguments, const void* weights, const void* x, int rows, int k, cudaStream_t stream) {
    arguments.token_tiles = (arguments.tokens + 255) / 256;
    arguments.held_scale = held_scale(k, true);
    divide(arguments, k, rows / ROWS / kCluster * arguments.token_tiles, processors() / kCluster);
    CUtensorMap of_x, of_weights;
    cudaError_t error = map_of_rows(x, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, arguments.tokens, k, 256 / kCluster, of_x);
    if (error == cudaSuccess)
        error = map_of_rows(weights, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, k, ROWS, of_weights);
    if (error != cudaSuccess) return error;
    return start(decoded<kCluster>, arguments.ctas * kCluster, kCluster, 384, DecodedCta<kCluster>::kShared, stream,
                 of_x, of_weights, arguments);
}

template <int K, typename T>
int with_tile(const Arguments& arguments, const void* x, int k, int tile, cudaStream_t stream) {
    if constexpr (std::is_same_v<T, int8_t>)
        if (tile == 512) return launch<K, T, 256, true>(arguments, x, k, stream);
    return tile == 16    ? launch<K, T, 16>(arguments, x, k, stream)
           : tile == 32  ? launch<K, T, 32>(arguments, x, k, stream)
           : tile == 64  ? launch<K, T, 64>(arguments, x, k, stream)
           : tile == 128 ? launch<K, T, 128>(arguments, x, k, stream)
           : tile == 256 ? launch<K, T, 256>(arguments, x, k, stream)
                         : -2;
}

}  // namespace

// tile: 16 to 256 tokens, or 512, two blocks of 256 that share decoding, int8 alone.
// partial: 132 * 256 * tile * 4 bytes; ready: 132 * 16 zeros. int8: 0 for float16, 1, or 2 for int16 of two columns.
extern "C" int many_tokens_run(const void* words, const void* x, const void* scales, const void* sums, const void* svh,
                               void* y, void* partial, void* ready, int tokens, int k, int n, int bits, int int8,
                               int tile, int as_float, void* stream) {
    Arguments arguments{};
    arguments.words = static_cast<const uint32_t*>(words);
    arguments.token_scales = static_cast<const float*>(scales);
    arguments.token_sums = static_cast<const int32_t*>(sums);
    arguments.svh = static_cast<const __half*>(svh);
    arguments.y = y, arguments.partial = partial, arguments.ready = static_cast<uint32_t*>(ready);
    arguments.tokens = tokens, arguments.n = n, arguments.as_float = as_float;
    arguments.wide = int8 == 2;
    if (arguments.wide && tile >= 256) return -3;
    const auto s = static_cast<cudaStream_t>(stream);
    const auto run = [&](auto of_bits) {
        return int8 ? with_tile<of_bits(), int8_t>(arguments, x, k, tile, s)
                    : with_tile<of_bits(), __half>(arguments, x, k, tile, s);
    };
    return bits == 2   ? run(std::integral_constant<int, 2>{})
           : bits == 3 ? run(std::integral_constant<int, 3>{})
           : bits == 4 ? run(std::integral_constant<int, 4>{})
                       : -1;
}

// int8: 0 for float16, 1, or 2 for int16. order: 0 as many_tokens_run wants it, 1 as many_tokens_decoded does.
extern "C" int many_tokens_prepare(const void* x, const void* suh, void* to, void* scales, void* sums, int tokens,
                                   int k, int int8, int order, void* zeros, int num_zeros, void* stream) {
    if (k % 2048 || 6 * k > MOST_SHARED - 1024) return -3;
    const auto run = [&](auto* kernel) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED - 1024);
        const int resident = std::max(1, std::min(MOST_SHARED / (6 * k + 1536), 65536 / (128 * k / 64)));
        kernel<<<std::min(tokens, 132 * resident), k / 64, 6 * k, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const __nv_bfloat16*>(x), static_cast<const __half*>(suh), to, static_cast<float*>(scales),
            static_cast<int32_t*>(sums), tokens, k, int8 == 2, static_cast<uint32_t*>(zeros), num_zeros);
        return int(cudaGetLastError());
    };
    return !int8 ? run(prepare<false, false>) : order ? run(prepare<true, true>) : run(prepare<true, false>);
}

// weights: int8 [n / slices, k], room for what is decoded; slices: 1 or 2. ready: 2 * 132 * 8 zeros.
extern "C" int many_tokens_decoded(const void* words, void* weights, const void* x, const void* scales,
                                   const void* sums, const void* svh, void* y, void* partial, void* ready, int tokens,
                                   int k, int n, int bits, int slices, int cluster, int as_float, void* stream) {
    Arguments arguments{};
    arguments.token_scales = static_cast<const float*>(scales);
    arguments.token_sums = static_cast<const int32_t*>(sums);
    arguments.partial = partial;
    arguments.tokens = tokens, arguments.n = n, arguments.as_float = as_float;
    const auto s = static_cast<cudaStream_t>(stream);
    const int rows = n / slices, units = rows / 16 * (k / SLAB);
    if (rows % (ROWS * cluster)) return -3;
    for (int slice = 0; slice < slices; ++slice) {
        if (words) {
            const auto decode = [&](auto* kernel) {
                return start(kernel, (units + 7) / 8, 1, 256, 0, s,
                             static_cast<const uint32_t*>(words) + int64_t{slice} * units * bits * 128,
                             static_cast<int8_t*>(weights), units, k, slice);
            };
            const int error = bits == 2   ? decode(decode_int8<2>)
                              : bits == 3 ? decode(decode_int8<3>)
                              : bits == 4 ? decode(decode_int8<4>)
                                          : -1;
            if (error) return error;
        }
        arguments.svh = static_cast<const __half*>(svh) + slice * rows;
        arguments.y = static_cast<char*>(y) + int64_t{slice} * rows * (as_float ? 4 : 2);
        arguments.ready = static_cast<uint32_t*>(ready) + slice * 132 * 8;
        const int error = cluster == 1 ? launch_decoded<1>(arguments, weights, x, rows, k, s)
                                       : launch_decoded<2>(arguments, weights, x, rows, k, s);
        if (error) return error;
    }
    return 0;
}

// weights: bfloat16 [n, k], for a product by the library.
extern "C" int many_tokens_dense(const void* words, const void* suh, const void* svh, void* weights, int k, int n,
                                 int bits, void* stream) {
    const auto run = [&](auto* kernel) {
        kernel<<<n / ROWS*(k / 128), 128, 0, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const uint32_t*>(words), static_cast<const __half*>(suh), static_cast<const __half*>(svh),
            static_cast<__nv_bfloat16*>(weights), k);
        return int(cudaGetLastError());
    };
    return bits == 2 ? run(decode_dense<2>) : bits == 3 ? run(decode_dense<3>) : bits == 4 ? run(decode_dense<4>) : -1;
}
