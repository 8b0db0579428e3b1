// y = had(x' @ W) * svh of 256 and more tokens on Hopper, W of EXL3's form and code `mul1`: a second prototype, in
// which some warps decode, into shared memory, and others multiply. trellis_many_tokens.cu is the first.
//
//   words   uint32 [n / 16, k / 128, 2 K / V, 32, V], V 4, or 2 for 3 bits: `repacked_for_prompts` of the .py
//   x'      int8 or float16 [tokens, k], what `prepare` makes of x: of each 16 columns 0 1 8 9 2 3 10 11 and so on
//   y       bfloat16 or float32 [tokens, n]
//
// Limits: k a multiple of 2048 (`prepare`), n of 128, K 2, 3 or 4. Build and run as the first.
//
// A block has 128 rows (of out_features) and 256 tokens. Two warpgroups multiply, 64 rows each, both operands in shared
// memory, in stages of 128 bytes of a row: 64 columns of float16 or 128 of int8. Four warps decode. In a cluster of
// two blocks, which have the same rows and different tokens, each decodes half of the rows and copies them to the
// other, so that a weight is decoded once for 512 tokens.
//
// A tile's sums go as float16, scaled, to shared memory, and while the next tile is multiplied, those who decode turn
// them by Hadamard's matrix of 128, scale and store them. Blocks or clusters take whole tiles in turns and divide those
// of the last turn along K (Stream-K; Osama et al., 2023).
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
constexpr int ROWS = 128, TOKENS = 256, PAIR = 128, SLAB = 256, PART = 32, MOST_SHARED = 227 * 1024, STAGES = 3;
constexpr int A_BYTES = ROWS * 128, B_BYTES = TOKENS * 128, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int HELD_BYTES = ROWS * TOKENS * 2, SHARED = 1024 + STAGES * STAGE_BYTES + HELD_BYTES + 128;

struct Arguments {
    const uint32_t* words;
    const float* token_scales;
    const int32_t* token_sums;
    const __half* svh;
    void* y;
    void* partial;
    uint32_t* ready;
    int tokens, n, slabs, token_tiles, clusters, whole, turns, as_float;
    float held_scale;  // of sums in float16, a power of two
    WgmmaDivision division;
};

// --- instructions --------------------------------------------------------------------------------

#define TEN(tens)                                                                                          \
    ", %" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens \
    "7, %" #tens "8, %" #tens "9"
#define ALL_128                                                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9" TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) \
        TEN(11) ", %120, %121, %122, %123, %124, %125, %126, %127"
#define D8(is, i) \
    is(d[i]), is(d[i + 1]), is(d[i + 2]), is(d[i + 3]), is(d[i + 4]), is(d[i + 5]), is(d[i + 6]), is(d[i + 7])
#define D32(is, i) D8(is, i), D8(is, i + 8), D8(is, i + 16), D8(is, i + 24)
#define WGMMA(types, last, is)                                                                                     \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256" types       \
                 " {" ALL_128 "}, %128, %129, add" last ";\n}"                                                      \
                 : D32(is, 0), D32(is, 32), D32(is, 64), D32(is, 96)                                               \
                 : "l"(a), "l"(b), "r"(accumulate))

// Begins d [64, 256] = a @ b (+ d, if accumulate), a [64, 16] and b [16, 256] of float16, of int8 [64, 32], [32, 256].
__device__ __forceinline__ void multiply_add(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    WGMMA("k16.f32.f16.f16", ", 1, 1, 0, 0", "+f");
}
__device__ __forceinline__ void multiply_add(int32_t (&d)[128], uint64_t a, uint64_t b, int accumulate) {
    WGMMA("k32.s32.s8.s8", "", "+r");
}
#undef WGMMA
#undef D32
#undef D8
#undef ALL_128
#undef TEN

__device__ __forceinline__ void copy_to_cluster(uint32_t there, uint32_t smem, int bytes, uint32_t barrier_there) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     there),
                 "r"(smem), "r"(bytes), "r"(barrier_there)
                 : "memory");
}
__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier_there) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_there) : "memory");
}
__device__ __forceinline__ bool is_there(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
__device__ __forceinline__ void prefetch(const void* gmem) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(gmem) : "memory");
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

// Weights `first` to `first` + 3 as int8: byte 1 of 64 (s - 509) is floor((s - 509) / 4).
template <int K>
__device__ __forceinline__ uint32_t four_int8(const uint32_t (&words)[K + 1], int first) {
    uint32_t s[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = __dp4a(product<K>(words, first + i), 0x40404040u, uint32_t(-509 * 64));
    return __byte_perm(__byte_perm(s[0], s[1], 0x0051), __byte_perm(s[2], s[3], 0x0051), 0x5410);
}

// Weights `first` and `first` + 1 as float16: 0x6400 + s is 1024 + s, and one operation makes it EXL3's value.
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

// --- the kernel ----------------------------------------------------------------------------------

struct Share {
    int tile, first_slab, slabs;
};

template <int K, typename T, int kCluster>
struct Cta {
    static constexpr bool kInt8 = std::is_same_v<T, int8_t>;
    using Sum = std::conditional_t<kInt8, int32_t, float>;
    using FourSums = std::conditional_t<kInt8, int4, float4>;
    static constexpr int kBoxColumns = kInt8 ? 128 : 64, kBoxes = PAIR / kBoxColumns, kWarps = 8, kDecoders = 4;
    static constexpr int kSets = 2 / kCluster;  // of 16 rows, of a warp that decodes
    static constexpr int kPairBytes = 256 * K;  // of words of 16 rows
    static constexpr int kHalfBytes = A_BYTES / kCluster;

    const Arguments& arguments;
    const int cluster, rank;
    const uint32_t stages, held, full, empty, held_full, held_free;

    __device__ __forceinline__ Cta(const Arguments& arguments, uint32_t begin)
        : arguments(arguments),
          cluster(blockIdx.x / kCluster),
          rank(blockIdx.x % kCluster),
          stages(begin),
          held(begin + STAGES * STAGE_BYTES),
          full(held + HELD_BYTES),
          empty(full + STAGES * 8),
          held_full(empty + STAGES * 8),
          held_free(held_full + 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(full + 8 * i, kCluster == 1 ? 1 + kDecoders : 2);
            init_barrier(empty + 8 * i, kWarps * kCluster);
        }
        init_barrier(held_full, kWarps);
        init_barrier(held_free, kDecoders);
        fence_barriers();
    }

    // Number `number` of a cluster's: whole tiles, then parts of others, that which others wait for first.
    __device__ __forceinline__ Share share(int number) const {
        const int tile = cluster + number * arguments.clusters;
        if (tile < arguments.whole) return {tile, 0, arguments.slabs};
        const int begin = arguments.division.begin(cluster), end = arguments.division.begin(cluster + 1);
        if (begin == end) return {};
        const int of_divided = (end - 1) / arguments.slabs - (number - arguments.turns);
        const int tile_begin = of_divided * arguments.slabs, first = max(begin, tile_begin);
        return {arguments.whole + of_divided, first - tile_begin, min(end, tile_begin + arguments.slabs) - first};
    }
    __device__ __forceinline__ bool completes(const Share& share) const {
        return share.first_slab + share.slabs == arguments.slabs;
    }
    __device__ __forceinline__ int first_token(int tile) const {
        return (tile % arguments.token_tiles * kCluster + rank) * TOKENS;
    }
    static __device__ __forceinline__ void step(int& stage, int& phase) {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }

    // --- who decodes ---

    __device__ __forceinline__ void load_words(const char* from, uint32_t (&words)[2 * K]) const {
        const int lane = threadIdx.x % 32;
        if constexpr (K == 3) {
#pragma unroll
            for (int i = 0; i < K; ++i)
                asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                             : "=r"(words[2 * i]), "=r"(words[2 * i + 1])
                             : "l"(from + (i * 32 + lane) * 8));
        } else {
#pragma unroll
            for (int i = 0; i < K / 2; ++i) load_16_once(from + (i * 32 + lane) * 16, words + 4 * i);
        }
    }

    // A tile's sums, of which part after part is turned and stored.
    struct Held {
        int tile = -1, part, phase = 0;
    };

    __device__ __forceinline__ void decode(const CUtensorMap& map, int warp) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
        // Rows g so that eight lanes with 16 bytes each write to all banks, of int8 and of float16.
        const auto row_of = [](int lane) { return lane & 4 ? lane / 8 ^ 5 : lane / 8; };
        const auto lane_of = [](int g) { return g < 4 ? 8 * g : 8 * (g ^ 5) + 4; };
        const int g = row_of(lane), before = lane_of((g + 7) % 8) + t;
        const bool brings = lane == 0 && warp == 0;
        if (brings) wait_for_kernel_before();
        int stage = 0, phase = 0;
        Held of_held;
        Share share;
#pragma unroll 1
        for (int number = 0; (share = this->share(number)).slabs > 0; ++number) {
            const char* from[kSets];
            const int pairs = 2 * share.slabs;
            uint32_t next[kSets][2 * K];
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const int64_t row_tile = share.tile / arguments.token_tiles * 8 + row_group(warp, set);
                from[set] = reinterpret_cast<const char*>(arguments.words) +
                            (row_tile * arguments.slabs + share.first_slab) * 2 * kPairBytes;
                load_words(from[set], next[set]);
            }
#pragma unroll 1
            for (int pair = 0; pair < pairs; ++pair) {
                uint32_t words[kSets][2 * K];
#pragma unroll
                for (int set = 0; set < kSets; ++set) {
#pragma unroll
                    for (int j = 0; j < 2 * K; ++j) words[set][j] = next[set][j];
                    if (pair + 1 < pairs) load_words(from[set] + (pair + 1) * kPairBytes, next[set]);
                    if (pair + 6 < pairs && lane < 2 * K) prefetch(from[set] + (pair + 6) * kPairBytes + lane * 128);
                }
#pragma unroll
                for (int box = 0; box < kBoxes; ++box) {
                    const uint32_t at = stages + stage * STAGE_BYTES;
                    wait_barrier(empty + 8 * stage, phase ^ 1);
                    if (brings) {
                        expect_bytes(full + 8 * stage, B_BYTES + (kCluster == 2 ? kHalfBytes : 0));
                        bulk_copy_box(at + A_BYTES, &map, share.first_slab * SLAB + pair * PAIR + box * kBoxColumns,
                                      first_token(share.tile), full + 8 * stage);
                    }
#pragma unroll
                    for (int set = 0; set < kSets; ++set) {
                        const uint32_t to = at + (16 * row_group(warp, set) + g) * 128;
                        const auto store = [&](int half, int piece, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
                            store_shared_16(to + half * 1024 + (piece ^ g) * 16, make_uint4(a, b, c, d));
                        };
#pragma unroll
                        for (int unit = 0; unit < 2 / kBoxes; ++unit) {  // of 64 columns
                            uint32_t own[K + 1];
#pragma unroll
                            for (int j = 0; j < K; ++j) own[j + 1] = words[set][(kInt8 ? unit : box) * K + j];
                            own[0] = __shfl_sync(0xFFFFFFFF, own[K], before);
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                if constexpr (kInt8) {
                                    const int w = 4 * half;
                                    store(half, 4 * unit + t, four_int8<K>(own, w), four_int8<K>(own, w + 8),
                                          four_int8<K>(own, w + 16), four_int8<K>(own, w + 24));
                                } else {
#pragma unroll
                                    for (int j = 0; j < 2; ++j) {
                                        const int w = 16 * j + 4 * half;
                                        store(half, 2 * t + j, two_half<K>(own, w), two_half<K>(own, w + 2),
                                              two_half<K>(own, w + 8), two_half<K>(own, w + 10));
                                    }
                                }
                            }
                        }
                    }
                    release_to_bulk_copies();  // and to wgmma
                    if constexpr (kCluster == 1) {
                        __syncwarp();
                        if (lane == 0) arrive(full + 8 * stage);
                    } else {
                        named_barrier(1, 32 * kDecoders);
                        if (brings) {
                            const uint32_t half = at + rank * kHalfBytes;
                            copy_to_cluster(cluster_address(half, rank ^ 1), half, kHalfBytes,
                                            cluster_address(full + 8 * stage, rank ^ 1));
                            arrive(full + 8 * stage);
                        }
                    }
                    step(stage, phase);
                }
                __syncwarp();
                if (of_held.tile >= 0 && (of_held.part > 0 || __any_sync(0xFFFFFFFF, is_there(held_full, of_held.phase))))
                    store_part(of_held, warp);
            }
            finish(of_held, warp);
            if (completes(share)) of_held.tile = share.tile, of_held.part = 0;
        }
        finish(of_held, warp);
    }
    __device__ __forceinline__ int row_group(int warp, int set) const {
        return 4 * (kCluster == 1 ? set : rank) + warp;
    }

    __device__ __forceinline__ void finish(Held& of_held, int warp) const {
        while (of_held.tile >= 0) store_part(of_held, warp);
    }

    // 32 tokens of a tile, a warp eight: each four lanes, of which a thread has 32 rows, 16 (q + 4 r) + 8 h + g.
    __device__ __forceinline__ void store_part(Held& of_held, int warp) const {
        if (of_held.part == 0) {
            wait_barrier(held_full, of_held.phase);
            wait_for_kernel_before();
        }
        const int lane = lane_id(), q = lane % 4;
        const int of_tile = of_held.part * PART + warp * 8 + lane / 4, token = first_token(of_held.tile) + of_tile;
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
        if (++of_held.part == TOKENS / PART) {
            __syncwarp();
            if (lane == 0) arrive(held_free);
            of_held.phase ^= 1;
        }
        const int row_before = of_held.tile / arguments.token_tiles * ROWS + 16 * q;
        if (of_held.part == TOKENS / PART) of_held.tile = -1;
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
        if (token >= arguments.tokens) return;
        float scale = __ldcg(arguments.token_scales + token) * 0.08838834764831845f / arguments.held_scale;
        if constexpr (kInt8) {
            scale *= float(4 * SCALE);
            if (q == 0) v[0] += float(128 * MEAN / 4) * arguments.held_scale * __ldcg(arguments.token_sums + token);
        }
#pragma unroll
        for (int i = 0; i < 32; i += 8) {
            const int row = row_before + i / 16 * 64 + i / 8 % 2 * 8;
            const uint4 eight = __ldg(reinterpret_cast<const uint4*>(arguments.svh + row));
            const auto* of_rows = reinterpret_cast<const __half2*>(&eight);
            float2 value[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 two = __half22float2(of_rows[j]);
                value[j] = {v[i + 2 * j] * scale * two.x, v[i + 2 * j + 1] * scale * two.y};
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
    }

    // --- who multiplies ---

    __device__ __forceinline__ void release(int stage) const {
        if (threadIdx.x % 32 == 0) {
            arrive(empty + 8 * stage);
            if constexpr (kCluster == 2) arrive_in_cluster(cluster_address(empty + 8 * stage, rank ^ 1));
        }
    }

    __device__ __forceinline__ void multiply(int warp) const {
        const uint64_t a = swizzled_matrix(stages + warp / 4 * 64 * 128), b = swizzled_matrix(stages + A_BYTES);
        int stage = 0, phase = 0, held_phase = 0;
        Share share;
#pragma unroll 1
        for (int number = 0; (share = this->share(number)).slabs > 0; ++number) {
            Sum sums[128];
            int last = -1;
            const int boxes = share.slabs * (SLAB / kBoxColumns);
#pragma unroll 1
            for (int box = 0; box < boxes; ++box) {
                wait_barrier(full + 8 * stage, phase);
                const int from = stage * STAGE_BYTES >> 4;
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply_add(sums, a + from + 2 * i, b + from + 2 * i, box + i > 0);
                wgmma_commit();
                wgmma_wait<1>();
                if (last >= 0) release(last);
                last = stage;
                step(stage, phase);
            }
            wgmma_wait<0>();
            release(last);
#pragma unroll
            for (int i = 0; i < 128; ++i) {
                if constexpr (kInt8) {
                    asm volatile("" : "+r"(sums[i])::"memory");
                } else {
                    asm volatile("" : "+f"(sums[i])::"memory");
                }
            }
            if (!completes(share)) {
                wait_for_kernel_before();
                hand_over(sums, warp);
            } else {
                if (share.first_slab > 0) {
                    wait_for_kernel_before();
                    add_parts(sums, share.tile, warp);
                }
                wait_barrier(held_free, held_phase ^ 1);
                hold(sums, warp);
                __syncwarp();
                if (threadIdx.x % 32 == 0) arrive(held_full);
                held_phase ^= 1;
            }
        }
    }

    // Pairs of rows g, g + 8, their sum and difference, as float16, 256 bytes of a token.
    __device__ __forceinline__ void hold(const Sum (&sums)[128], int warp) const {
        const int lane = lane_id(), g = lane / 4, t = lane % 4;
        const uint32_t to = held + 2 * t * 256;
        const float scale = arguments.held_scale;
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

    __device__ __forceinline__ FourSums* part(int of_cluster, int warp) const {
        return static_cast<FourSums*>(arguments.partial) +
               ((of_cluster * kCluster + rank) * kWarps + warp) * (TOKENS / 8) * 32 + lane_id();
    }
    __device__ __forceinline__ uint32_t* flag(int of_cluster, int warp) const {
        return arguments.ready + (of_cluster * kCluster + rank) * kWarps + warp;
    }
    __device__ __forceinline__ void hand_over(const Sum (&sums)[128], int warp) const {
        FourSums* to = part(cluster, warp);
#pragma unroll
        for (int i = 0; i < 128; i += 4) to[i / 4 * 32] = FourSums{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
        __syncwarp();
        if (lane_id() == 0) store_release(flag(cluster, warp), 1);
    }
    __device__ __forceinline__ void add_parts(Sum (&sums)[128], int tile, int warp) const {
        const int first = arguments.division.cta_with((tile - arguments.whole) * arguments.slabs);
#pragma unroll 1
        for (int other = cluster - 1; other >= first; --other) {
            while (load_acquire(flag(other, warp)) == 0) {
            }
            const FourSums* from = part(other, warp);
#pragma unroll
            for (int i = 0; i < 128; i += 4) {
                const FourSums four = __ldcg(from + i / 4 * 32);
                sums[i] += four.x;
                sums[i + 1] += four.y;
                sums[i + 2] += four.z;
                sums[i + 3] += four.w;
            }
        }
    }
};

template <int K, typename T, int kCluster>
__global__ void __launch_bounds__(384, 1)
    prompt(const __grid_constant__ CUtensorMap map, const __grid_constant__ Arguments arguments) {
    using Of = Cta<K, T, kCluster>;
    extern __shared__ __align__(1024) char smem[];
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const Of cta(arguments, (shared_address(smem) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) cta.init_barriers();
    __syncwarp();
    if constexpr (kCluster == 1) {
        __syncthreads();
    } else {
        cluster_barrier();
    }
    if (warp >= 8) {
        cta.decode(map, warp - 8);
    } else {
        cta.multiply(warp);
    }
    if constexpr (kCluster == 2) {  // until the other block writes and arrives here no more
        __syncwarp();
        cluster_barrier();
    }
}

// --- inputs --------------------------------------------------------------------------------------

// Some tokens a block, one after another, a thread 64 columns: x * suh through Hadamard's matrix of 128, then int8 or
// float16 and what stands for 1 in it (of float16 a power of two). Of 16 columns 2 m + 8 h + e comes to 4 m + 2 h + e.
template <bool kInt8>
__global__ void prepare(const __nv_bfloat16* x, const __half* suh, void* to, float* scales, int32_t* sums, int tokens,
                        int k, uint32_t* zeros, int num_zeros) {
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
        largest = __uint_as_float(__reduce_max_sync(0xFFFFFFFF, lane < threads / 32 ? __float_as_uint(most[lane]) : 0));
        float unit;  // of the numbers as they are here, without 1 / sqrt(128)
        if constexpr (kInt8) {
            unit = largest / 127;
        } else {
            unit = largest > 0 ? exp2f(ceilf(log2f(largest)) - 9) : 0;
        }
        const float factor = unit > 0 ? 1 / unit : 0;
        if (thread == 0) scales[token] = unit * 0.08838834764831845f;
        constexpr int kPieces = kInt8 ? 4 : 8;
        uint32_t out[4 * kPieces];
        if constexpr (kInt8) {
            int32_t sum = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                uint32_t q[4];  // the low byte of a large float
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    q[j] = __float_as_uint(fmaf(v[16 * (i / 4) + 2 * (i % 4) + 8 * (j / 2) + j % 2], factor, 0x1.8p23f));
                out[i] = __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
                sum = __dp4a(int(out[i]), 0x01010101, sum);
            }
            sum = __reduce_add_sync(0xFFFFFFFF, sum);
            if (lane == 0) of_warps[warp] = sum;
        } else {
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int column = 16 * (i / 8) + 2 * (i / 2 % 4) + 8 * (i % 2);
                const __half2 two = __floats2half2_rn(v[column] * factor, v[column + 1] * factor);
                out[i] = reinterpret_cast<const uint32_t&>(two);
            }
        }
        const auto out_place = [](int piece) { return piece ^ (piece / 8 % 8); };
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
            own[out_place(thread * kPieces + i)] =
                make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
        __syncthreads();
        uint4* there = static_cast<uint4*>(to) + int64_t{token} * threads * kPieces;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) there[i * threads + thread] = own[out_place(i * threads + thread)];
        if constexpr (kInt8)
            if (warp == 0) {
                const int32_t sum = __reduce_add_sync(0xFFFFFFFF, lane < threads / 32 ? of_warps[lane] : 0);
                if (lane == 0) sums[token] = sum;
            }
    }
}

template <int K, typename T, int kCluster>
int launch(Arguments arguments, const void* x, int k, cudaStream_t stream) {
    using Of = Cta<K, T, kCluster>;
    arguments.slabs = k / SLAB;
    arguments.token_tiles = (arguments.tokens + TOKENS * kCluster - 1) / (TOKENS * kCluster);
    const int tiles = arguments.n / ROWS * arguments.token_tiles;
    int processors;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    arguments.clusters = std::min(processors / kCluster, tiles * arguments.slabs);
    const int divided = tiles % arguments.clusters;
    arguments.whole = tiles - divided, arguments.turns = arguments.whole / arguments.clusters;
    arguments.division = {arguments.slabs * divided / arguments.clusters,
                          arguments.slabs * divided % arguments.clusters};
    const double most = 2.0 * k * (Of::kInt8 ? 128 * 127 : 3.5 * 512);
    arguments.held_scale = 1;
    while (most * arguments.held_scale > 65504) arguments.held_scale /= 2;
    CUtensorMap map;
    cudaError_t error = map_of_rows(x, Of::kInt8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                    Of::kInt8 ? 1 : 2, arguments.tokens, k, TOKENS, map);
    if (error != cudaSuccess) return error;
    static const cudaError_t set =
        cudaFuncSetAttribute(prompt<K, T, kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
    if (set != cudaSuccess) return set;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = arguments.clusters * kCluster, config.blockDim = 384, config.dynamicSmemBytes = SHARED;
    config.stream = stream, config.attrs = attributes, config.numAttrs = kCluster == 1 ? 1 : 2;
    error = cudaLaunchKernelEx(&config, prompt<K, T, kCluster>, map, arguments);
    return error != cudaSuccess ? error : cudaGetLastError();
}

}  // namespace

// partial: 132 * 128 * 256 * 4 bytes; ready: 132 * 8 zeros.
extern "C" int prompt_run(const void* words, const void* x, const void* scales, const void* sums, const void* svh,
                          void* y, void* partial, void* ready, int tokens, int k, int n, int bits, int int8,
                          int cluster, int as_float, void* stream) {
    Arguments arguments{};
    arguments.words = static_cast<const uint32_t*>(words);
    arguments.token_scales = static_cast<const float*>(scales);
    arguments.token_sums = static_cast<const int32_t*>(sums);
    arguments.svh = static_cast<const __half*>(svh);
    arguments.y = y, arguments.partial = partial, arguments.ready = static_cast<uint32_t*>(ready);
    arguments.tokens = tokens, arguments.n = n, arguments.as_float = as_float;
    const auto s = static_cast<cudaStream_t>(stream);
    const auto run = [&](auto of_bits) {
        constexpr int K = of_bits();
        if (cluster == 1) {
            return int8 ? launch<K, int8_t, 1>(arguments, x, k, s) : launch<K, __half, 1>(arguments, x, k, s);
        }
        return int8 ? launch<K, int8_t, 2>(arguments, x, k, s) : launch<K, __half, 2>(arguments, x, k, s);
    };
    return bits == 2   ? run(std::integral_constant<int, 2>{})
           : bits == 3 ? run(std::integral_constant<int, 3>{})
           : bits == 4 ? run(std::integral_constant<int, 4>{})
                       : -1;
}

extern "C" int prompt_prepare(const void* x, const void* suh, void* to, void* scales, void* sums, int tokens, int k,
                              int int8, void* zeros, int num_zeros, void* stream) {
    if (k % 2048 || 6 * k > MOST_SHARED - 1024) return -3;
    const auto run = [&](auto* kernel) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED - 1024);
        const int resident = std::max(1, std::min(MOST_SHARED / (6 * k + 1536), 65536 / (96 * k / 64)));
        kernel<<<std::min(tokens, 132 * resident), k / 64, 6 * k, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const __nv_bfloat16*>(x), static_cast<const __half*>(suh), to, static_cast<float*>(scales),
            static_cast<int32_t*>(sums), tokens, k, static_cast<uint32_t*>(zeros), num_zeros);
        return int(cudaGetLastError());
    };
    return int8 ? run(prepare<true>) : run(prepare<false>);
}
