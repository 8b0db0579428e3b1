// y = had(x' @ W) * svh of 17 to many tokens on Hopper, W of EXL3's form and code `mul1`: a prototype.
//
//   words   uint32 [n / 16, k / 256, K, 32, 4], what `repacked` of trellis_many_tokens.py makes of EXL3's trellis
//   x'      int8 or float16 [tokens, k], what `prepare` makes of x, in the order in which lanes hold weights
//   y       bfloat16 or float32 [tokens, n]
//
// Limits: k a multiple of 2048 (`prepare`), n of 128, K 2, 3 or 4 (any up to 8 would do). Build and run:
//
//   nvcc -O3 -std=c++20 -arch=sm_90a --expt-relaxed-constexpr -Icsrc --shared -Xcompiler -fPIC
//   docs/lab/sketches/trellis_many_tokens.cu -o F.so python docs/lab/sketches/trellis_many_tokens.py F.so
//
// A block has 128 rows (of out_features) and 32 to 256 tokens. With 256 eight warps decode 16 rows each, in registers,
// as operand A of wgmma. With fewer there are two groups of eight, which divide K. One more warpgroup brings x and
// words by bulk copies. A lane holds 32 weights of 16 rows and 64 columns: all 16 columns of a tile of EXL3's, of rows
// g and g + 8, K words of its stream; the windows at their start need the last word of the lane four before.
//
//   int8     dp4a multiplies a product's four bytes by 64 and adds them: byte 1 is floor((s - 509) / 4)
//   float16  dp4a gives 1024 + s as float16, a permute packs two, one HFMA2 makes them EXL3's value, to the bit
//
// Blocks take whole tiles in turns and divide those of the last turn along K (Stream-K; Osama et al., 2023), as
// csrc/kernels/hopper/gemm_wgmma.cuh does, whose parts this uses. In the end rows meet in shared memory, 32 or 64
// tokens at a time, are turned by Hadamard's matrix of 128 and scaled.
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
    WgmmaDivision division;
};

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

// --- the kernel ----------------------------------------------------------------------------------

template <int K, typename T, int kTokens>
struct Cta {
    static constexpr bool kInt8 = std::is_same_v<T, int8_t>;
    using Sum = std::conditional_t<kInt8, int32_t, float>;
    using FourSums = std::conditional_t<kInt8, int4, float4>;
    static constexpr int kGroups = kTokens == 256 ? 1 : 2, kGroupThreads = 256, kWarps = 8 * kGroups;
    static constexpr int kDecoders = kGroupThreads * kGroups, kThreads = kDecoders + BRINGERS;
    static constexpr int kDecoderRegisters = kGroups == 1 ? 232 : 112, kBringerRegisters = 32;
    static constexpr int kBoxColumns = kInt8 ? 128 : 64;
    static constexpr int kStageBytes = kTokens * 128, kSlabBytes = 512 * K, kRingStages = 2;
    static constexpr int kChunk = kGroups == 1 ? 64 : 32, kPitch = ROWS + 4;  // tokens that meet at a time
    static constexpr int kMeetBytes = kGroups * kChunk * kPitch * 4;
    static constexpr int kFixed = kWarps * kRingStages * kSlabBytes + kMeetBytes + 1024;
    static constexpr int kFit = (MOST_SHARED - 1024 - kFixed) / (kGroups * kStageBytes);
    static constexpr int kStages = kFit < 8 ? kFit : 8;
    static constexpr int kShared = 1024 + kFixed + kGroups * kStages * kStageBytes;
    static constexpr int kPending = kTokens == 128 ? 0 : 1, kParts = kTokens == 128 ? 2 : 1;
    static_assert(kStages >= 3);

    const Arguments& arguments;
    const uint32_t x, ring, meet, x_full, x_empty, ring_full, ring_empty;

    __device__ __forceinline__ Cta(const Arguments& arguments, uint32_t begin)
        : arguments(arguments),
          x(begin),
          ring(x + kGroups * kStages * kStageBytes),
          meet(ring + kWarps * kRingStages * kSlabBytes),
          x_full(meet + kMeetBytes),
          x_empty(x_full + kGroups * kStages * 8),
          ring_full(x_empty + kGroups * kStages * 8),
          ring_empty(ring_full + kWarps * kRingStages * 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kGroups * kStages; ++i) {
            init_barrier(x_full + 8 * i, 1);
            init_barrier(x_empty + 8 * i, 8);
        }
        for (int i = 0; i < kWarps * kRingStages; ++i) {
            init_barrier(ring_full + 8 * i, 1);
            init_barrier(ring_empty + 8 * i, 1);
        }
        fence_barriers();
    }

    struct Share {
        int tile, first_slab, slabs;
    };
    // Number `number` of a CTA's, as WgmmaTiles has them.
    __device__ __forceinline__ Share share(int number) const {
        const int cta = blockIdx.x, tile = cta + number * arguments.ctas;
        if (tile < arguments.whole) return {tile, 0, arguments.slabs};
        const int begin = arguments.division.begin(cta), end = arguments.division.begin(cta + 1);
        if (begin == end) return {};
        const int of_divided = (end - 1) / arguments.slabs - (number - arguments.turns);
        const int tile_begin = of_divided * arguments.slabs, first = max(begin, tile_begin);
        return {arguments.whole + of_divided, first - tile_begin, min(end, tile_begin + arguments.slabs) - first};
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
                bulk_copy_box(x + at * kStageBytes, &map, column, share.tile % arguments.token_tiles * kTokens,
                              x_full + 8 * at);
                step(stage, phase, kStages);
            }
        }
    }
    __device__ __forceinline__ void bring_words(int warp) const {
        int stage = 0, phase = 0;
        const int group = warp / 8;
        Share share;
        for (int number = 0; (share = this->share(number)).slabs > 0; ++number) {
            const int row_tile = share.tile / arguments.token_tiles * 8 + warp % 8;
            const char* from = reinterpret_cast<const char*>(arguments.words) +
                               (int64_t{row_tile} * arguments.slabs + first_of(share, group)) * kSlabBytes;
            for (int i = 0; i < count_of(share, group); ++i, from += kSlabBytes) {
                const int at = warp * kRingStages + stage;
                wait_barrier(ring_empty + 8 * at, phase ^ 1);
                expect_bytes(ring_full + 8 * at, kSlabBytes);
                bulk_copy(ring + at * kSlabBytes, from, kSlabBytes, ring_full + 8 * at);
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

    __device__ __forceinline__ void multiply(int warp) const {
        const int lane = threadIdx.x % 32, group = warp / 8;
        const uint64_t columns = swizzled_matrix(x + group * kStages * kStageBytes);
        const uint32_t full = x_full + group * kStages * 8, empty = x_empty + group * kStages * 8;
        int stage = 0, phase = 0, slab_stage = 0, slab_phase = 0;
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
                const int at = warp * kRingStages + slab_stage;
                wait_barrier(ring_full + 8 * at, slab_phase);
                [[maybe_unused]] uint32_t bytes[2][2][4];
#pragma unroll
                for (int piece = 0; piece < 4; ++piece) {
                    if (piece % (4 / kParts) == 0) load_words(ring + at * kSlabBytes, piece * kParts / 4, words);
                    if (piece == 4 - 4 / kParts) {
                        release_to_bulk_copies();
                        __syncwarp();
                        if (lane == 0) arrive(ring_empty + 8 * at);
                        step(slab_stage, slab_phase, kRingStages);
                    }
                    const auto& own = words[piece % (4 / kParts)];
                    uint32_t a[kInt8 ? 1 : 4][4];
                    if constexpr (kInt8) {
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
                            wgmma<T, kTokens>(sums, bytes[i / 2][i % 2], from + 2 * i, slab + piece / 2 + i > 0);
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
                hand_over(sums, warp);
            } else {
                if (share.first_slab > 0) add_parts(sums, share.tile, warp);
                finish(sums, share.tile, warp);
            }
        }
    }

    __device__ __forceinline__ FourSums* part(int cta, int warp) const {
        return static_cast<FourSums*>(arguments.partial) + (cta * kWarps + warp) * (kTokens / 8) * 32 + lane_id();
    }
    __device__ __forceinline__ void hand_over(const Sum (&sums)[kTokens / 2], int warp) const {
        FourSums* to = part(blockIdx.x, warp);
#pragma unroll
        for (int i = 0; i < kTokens / 2; i += 4)
            to[i / 4 * 32] = FourSums{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
        __syncwarp();
        if (lane_id() == 0) store_release(arguments.ready + blockIdx.x * kWarps + warp, 1);
    }
    __device__ __forceinline__ void add_parts(Sum (&sums)[kTokens / 2], int tile, int warp) const {
        const int first = arguments.division.cta_with((tile - arguments.whole) * arguments.slabs);
#pragma unroll 1
        for (int cta = int(blockIdx.x) - 1; cta >= first; --cta) {
            while (load_acquire(arguments.ready + cta * kWarps + warp) == 0) {
            }
            const FourSums* from = part(cta, warp);
#pragma unroll
            for (int i = 0; i < kTokens / 2; i += 4) {
                const FourSums four = __ldcg(from + i / 4 * 32);
                sums[i] += four.x;
                sums[i + 1] += four.y;
                sums[i + 2] += four.z;
                sums[i + 3] += four.w;
            }
        }
    }

    // Rows meet in shared memory, are turned and stored. Bit 3 of a row is the two rows of a lane of `multiply`.
    __device__ __forceinline__ void finish(const Sum (&sums)[kTokens / 2], int tile, int warp) const {
        constexpr int kLanes = kDecoders / kChunk, kOwn = ROWS / kLanes;  // lanes of a token, rows of a thread
        const int lane = lane_id(), g = lane / 4, t = lane % 4, group = warp / 8;
        const int token_before = tile % arguments.token_tiles * kTokens;
        const int row_before = tile / arguments.token_tiles * ROWS;
        const int thread = warp * 32 + lane, its_token = thread / kLanes, of_token = thread % kLanes;
        // Of a thread: rows 0 to 7 and, of 32, those 32, 64 and 96 further; lanes: bits 3 and 4, or 3 to 6.
        const int first_row = 8 * of_token;
#pragma unroll
        for (int chunk = 0; chunk < kTokens / kChunk; ++chunk) {
            named_barrier(1, kDecoders);
#pragma unroll
            for (int i = 0; i < kChunk / 8; ++i) {
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
            float v[kOwn];
            const uint32_t from = meet + (its_token * kPitch + first_row) * 4;
#pragma unroll
            for (int i = 0; i < kOwn; i += 4) {
                uint4 four = load_shared_16(from + (i % 8 + i / 8 * 32) * 4);
                v[i] = as_float(four.x), v[i + 1] = as_float(four.y);
                v[i + 2] = as_float(four.z), v[i + 3] = as_float(four.w);
                if constexpr (kGroups == 2) {
                    four = load_shared_16(from + (kChunk * kPitch + i % 8 + i / 8 * 32) * 4);
                    v[i] += as_float(four.x), v[i + 1] += as_float(four.y);
                    v[i + 2] += as_float(four.z), v[i + 3] += as_float(four.w);
                }
            }
#pragma unroll
            for (int distance = 1; distance < kOwn; distance *= 2)
#pragma unroll
                for (int i = 0; i < kOwn; ++i)
                    if (!(i & distance)) {
                        const float a = v[i], b = v[i + distance];
                        v[i] = a + b, v[i + distance] = a - b;
                    }
#pragma unroll
            for (int distance = 2; distance < kLanes; distance *= 2) {
                const float sign = of_token & distance ? -1.f : 1.f;
#pragma unroll
                for (int i = 0; i < kOwn; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xFFFFFFFF, v[i], distance));
            }
            const int token = token_before + chunk * kChunk + its_token;
            if (token >= arguments.tokens) continue;
            float scale = __ldcg(arguments.token_scales + token) * 0.08838834764831845f;
            if constexpr (kInt8) {
                scale *= float(4 * SCALE);
                if (of_token == 0) v[0] += float(128 * MEAN / 4) * __ldcg(arguments.token_sums + token);
            }
#pragma unroll
            for (int i = 0; i < kOwn; i += 8) {
                const int row = row_before + first_row + i / 8 * 32;
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
                    for (int j = 0; j < 4; ++j) y[j] = value[j];
                } else {
                    uint32_t two[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const __nv_bfloat162 both = __float22bfloat162_rn(value[j]);
                        two[j] = reinterpret_cast<const uint32_t&>(both);
                    }
                    store_16(static_cast<__nv_bfloat16*>(arguments.y) + at,
                             make_uint4(two[0], two[1], two[2], two[3]));
                }
            }
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

template <int K, typename T, int kTokens>
__global__ void __launch_bounds__(Cta<K, T, kTokens>::kThreads, 1)
    many_tokens(const __grid_constant__ CUtensorMap map, const __grid_constant__ Arguments arguments) {
    using Of = Cta<K, T, kTokens>;
    extern __shared__ __align__(1024) char smem[];
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Of cta(arguments, (shared_address(smem) + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) cta.init_barriers();
    __syncwarp();
    __syncthreads();
    if (warp >= Of::kWarps) {
        give_registers<Of::kBringerRegisters>();
        if (warp == Of::kWarps && lane < Of::kGroups) cta.bring_x(map, lane);
        const int of_warp = lane * 3 + warp - Of::kWarps - 1;
        if (warp > Of::kWarps && of_warp < Of::kWarps) cta.bring_words(of_warp);
        __syncwarp();
    } else {
        take_registers<Of::kDecoderRegisters>();
        cta.multiply(warp);
    }
}

// --- inputs --------------------------------------------------------------------------------------

// A block a token, a thread 64 columns: x * suh through Hadamard's matrix of 128, then int8 or float16 and what stands
// for 1 in it (of float16 a power of two), in the order of operand B: of 64 columns, 16 t + c of them being in tile t,
// column c = 2 m + 8 h + e comes to 16 m + 8 h + 2 t + e in float16, and to 16 m + 4 t + 2 h + e in int8.
template <bool kInt8>
__global__ void prepare(const __nv_bfloat16* x, const __half* suh, void* to, float* scales, int32_t* sums, int k,
                        uint32_t* zeros, int num_zeros) {
    extern __shared__ uint4 room[];
    __shared__ float most[32];
    __shared__ int32_t of_warps[32];
    let_next_kernel_start();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < num_zeros; i += gridDim.x * blockDim.x) zeros[i] = 0;
    const int thread = threadIdx.x, threads = blockDim.x, warp = thread / 32, lane = thread % 32;
    const uint4* from = reinterpret_cast<const uint4*>(x + int64_t{blockIdx.x} * k);
    const auto place = [](int piece) { return piece ^ (piece / 8 % 8); };
#pragma unroll
    for (int i = 0; i < 8; ++i) cp_async_16(room + place(i * threads + thread), from + i * threads + thread);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float v[64];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 a = room[place(8 * thread + i)], b = __ldg(reinterpret_cast<const uint4*>(suh) + 8 * thread + i);
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
    if (thread == 0) scales[blockIdx.x] = unit * 0.08838834764831845f;
    constexpr int kPieces = kInt8 ? 4 : 8;
    uint32_t out[4 * kPieces];
    if constexpr (kInt8) {
        int32_t sum = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) {  // 16 m + 4 t
            const int m = i / 4, t = i % 4;
            uint32_t four = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int q = __float2int_rn(v[16 * t + 2 * m + 8 * (j / 2) + j % 2] * factor);
                four |= (q & 255) << 8 * j;
            }
            out[i] = four;
            sum = __dp4a(int(four), 0x01010101, sum);
        }
        sum = __reduce_add_sync(0xFFFFFFFF, sum);
        if (lane == 0) of_warps[warp] = sum;
    } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) {  // 16 m + 8 h + 2 t
            const int m = i / 8, h = i / 4 % 2, t = i % 4, column = 16 * t + 2 * m + 8 * h;
            const __half2 two = __floats2half2_rn(v[column] * factor, v[column + 1] * factor);
            out[i] = reinterpret_cast<const uint32_t&>(two);
        }
    }
    const auto out_place = [](int piece) { return piece ^ (piece / kPieces % kPieces); };
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
        room[out_place(thread * kPieces + i)] = make_uint4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    __syncthreads();
    uint4* own = static_cast<uint4*>(to) + int64_t{blockIdx.x} * threads * kPieces;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) own[i * threads + thread] = room[out_place(i * threads + thread)];
    if constexpr (kInt8)
        if (warp == 0) {
            const int32_t sum = __reduce_add_sync(0xFFFFFFFF, lane < threads / 32 ? of_warps[lane] : 0);
            if (lane == 0) sums[blockIdx.x] = sum;
        }
}

template <int K, typename T, int kTokens>
int launch(Arguments arguments, const void* x, int k, cudaStream_t stream) {
    using Of = Cta<K, T, kTokens>;
    const int tiles = arguments.n / ROWS * ((arguments.tokens + kTokens - 1) / kTokens);
    arguments.slabs = k / SLAB;
    arguments.token_tiles = (arguments.tokens + kTokens - 1) / kTokens;
    int processors;
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0);
    arguments.ctas = std::min(processors, tiles * arguments.slabs);
    const int divided = tiles % arguments.ctas;
    arguments.whole = tiles - divided, arguments.turns = arguments.whole / arguments.ctas;
    arguments.division = {arguments.slabs * divided / arguments.ctas, arguments.slabs * divided % arguments.ctas};
    CUtensorMap map;
    cudaError_t error = map_of_rows(x, Of::kInt8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                    Of::kInt8 ? 1 : 2, arguments.tokens, k, kTokens, map);
    if (error != cudaSuccess) return error;
    static const cudaError_t set =
        cudaFuncSetAttribute(many_tokens<K, T, kTokens>, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED);
    if (set != cudaSuccess) return set;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = arguments.ctas, config.blockDim = Of::kThreads, config.dynamicSmemBytes = Of::kShared;
    config.stream = stream, config.attrs = &overlap, config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, many_tokens<K, T, kTokens>, map, arguments);
    return error != cudaSuccess ? error : cudaGetLastError();
}

template <int K, typename T>
int with_tile(const Arguments& arguments, const void* x, int k, int tile, cudaStream_t stream) {
    return tile == 32    ? launch<K, T, 32>(arguments, x, k, stream)
           : tile == 64  ? launch<K, T, 64>(arguments, x, k, stream)
           : tile == 128 ? launch<K, T, 128>(arguments, x, k, stream)
           : tile == 256 ? launch<K, T, 256>(arguments, x, k, stream)
                         : -2;
}

}  // namespace

// partial: 132 * 256 * tile * 4 bytes; ready: 132 * 16 zeros.
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

extern "C" int many_tokens_prepare(const void* x, const void* suh, void* to, void* scales, void* sums, int tokens,
                                   int k, int int8, void* zeros, int num_zeros, void* stream) {
    if (k % 2048 || k > 65536) return -3;
    const auto run = [&](auto* kernel) {
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MOST_SHARED - 1024);
        kernel<<<tokens, k / 64, 2 * k, static_cast<cudaStream_t>(stream)>>>(
            static_cast<const __nv_bfloat16*>(x), static_cast<const __half*>(suh), to, static_cast<float*>(scales),
            static_cast<int32_t*>(sums), k, static_cast<uint32_t*>(zeros), num_zeros);
        return int(cudaGetLastError());
    };
    return int8 ? run(prepare<true>) : run(prepare<false>);
}
