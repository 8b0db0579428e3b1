// y = x @ W.T (+ bias) on GPUs without wgmma, W in tiles; the weights are decoded in registers, as operand A of
// mma.sync. The kernels of gemm_mma.cu, and of gemm_mma_int8.cu, where x is int8 and W becomes so.
//
//   x         float16 or bfloat16 [M, K], row-major, K a multiple of 8; where the weight has column scales or a
//             rotation, what inputs/transform.cu makes of it
//   words     int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16]     codebook  float32 [2**bits]
//   bias      [N] or null                          y       [M, N], row-major, both of x's dtype
//
// Compute capability 8.0 and newer, but not 9.0; 97 KB of shared memory.
//
// A CTA of eight warps multiplies 256 rows and up to 64 tokens, of int8 96, a warp two row tiles and all of the
// tokens:
//
//   words and scales --a slab ahead--> registers --table--> pairs of levels --times scales--> operand A
//   x --cp.async, 64 columns at a time--> ring in shared memory, 64 bytes of a token after those of another
//     --16 bytes a lane--> operand B of several instructions
//
// The columns of a block go to the tensor cores in the order in which tiles hold them, which for x is 8 t .. 8 t + 7
// of lane t: nothing is exchanged, and 32 lanes read 512 bytes in a row. Weights are multiplied by their scales first,
// as in hopper/gemm_wgmma.cuh. Where there are fewer tiles than processors, several CTAs divide a tile's slabs; their
// sums go to memory, and a second kernel adds them up in a fixed order.
//
// Of int8, inputs/tokens_to_int8.cu has brought the columns of x into that order, so that an instruction takes 32
// bytes of a token as they are: ldmatrix reads all 64, whose pieces of 16 bytes are where it meets no bank twice.
// Levels times a multiplier for each block are rounded, sums are int32, and what 1 stands for in a token and in a row
// multiplies them at the end (docs/internals.md, "8-bit inputs").
#pragma once

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/operands.cuh"
#include "kernels/outputs.cuh"

namespace hf_kbit::cuda {

// Compiled for the GPUs that the plan asks for it on.
template <int kTokens>
constexpr bool kUsesMma = has_mma_path(kArch) && kTokens <= mma_int8_tokens(kArch);

struct MmaArguments {
    Output output;
    const void* x;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    void* partial;  // [tiles, split, kMmaRowTiles, kTokens / 8, 32, 4], float32 or int32, where split > 1
    int in_features, slabs, row_tiles, token_tiles, split;
    uint32_t signs;  // of scales
};

// Of x in int8, whose rows are in_features long, whole blocks.
struct MmaInt8Arguments : MmaArguments {
    const __half* inverses;     // of the weight's rows
    const float* token_scales;  // of each token, and one more
    float* unit;                // of sums in `partial`
    bool half;                  // whether y is float16, or else bfloat16
};

constexpr int kMmaThreads = kMmaWarps * kWarp;
constexpr int kMmaRowTiles = kMmaRows / kTileRows, kMmaWarpTiles = kMmaRowTiles / kMmaWarps;

// T: of operands A and B, int8_t, or as y has it.
template <typename T>
constexpr bool kIsInt8 = std::is_same_v<T, int8_t>;
template <typename T>
using MmaArgumentsOf = std::conditional_t<kIsInt8<T>, MmaInt8Arguments, MmaArguments>;
template <typename T>
using MmaSum = std::conditional_t<kIsInt8<T>, int32_t, float>;
template <typename T>
using MmaFourSums = std::conditional_t<kIsInt8<T>, int4, float4>;

// --- x -------------------------------------------------------------------------------------------

// 64 columns of all the tile's tokens from memory to shared memory, zeros where there are none: 64 bytes of each
// token, of 16-bit numbers those of one block, then those of the other.
template <typename T, int kTokens>
__device__ __forceinline__ void bring_x(const MmaArguments& arguments, uint32_t stage, int first_token, int column) {
    constexpr int kColumns = 16 / sizeof(T), kRound = kTokens * 4;  // of a piece of 16 bytes; pieces
    constexpr int kPieces = mma_stage_bytes(kTokens, sizeof(T)) / 16;
#pragma unroll
    for (int i = 0; i < (kPieces + kMmaThreads - 1) / kMmaThreads; ++i) {
        const int thread = static_cast<int>(threadIdx.x), piece = i * kMmaThreads + thread;
        if (kPieces % kMmaThreads && piece >= kPieces) break;
        const int round = kPieces > kRound ? piece / kRound : 0;
        const int token = first_token + (kPieces > kRound ? piece % kRound : piece) / 4;
        const int at = column + round * 4 * kColumns + piece % 4 * kColumns;
        const bool there = token < arguments.output.tokens && at < arguments.in_features;
        const T* from = static_cast<const T*>(arguments.x);
        if (there) from += static_cast<int64_t>(token) * arguments.in_features + at;
        const int place = kIsInt8<T> ? i * kMmaThreads + (thread ^ (thread / 8 & 3)) : piece;
        cp_async_16_or_zeros(stage + place * 16, from, there);
    }
    cp_async_commit();
}

// Where a lane reads of eight tokens, with the others 512 bytes.
template <typename T>
__device__ __forceinline__ int place_of_lane(int lane) {
    return kIsInt8<T> ? (lane % 8 * 4 + (lane / 8 ^ lane % 8 / 2)) * 16 : lane * 16;
}

// --- products ------------------------------------------------------------------------------------

// 64 columns of a warp's row tiles and all tokens, which lie from `from` on as a lane reads them.
template <typename T, int kEights>
__device__ __forceinline__ void multiply(float (&sums)[kMmaWarpTiles][kEights][4],
                                         const uint32_t (&a)[kMmaWarpTiles][2][2][4], uint32_t from) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const uint4 b = load_shared_16(from + (block * kEights + n) * 512);
#pragma unroll
            for (int r = 0; r < kMmaWarpTiles; ++r) {
                mma<T>(sums[r][n], a[r][block][0], b.x, b.y);
                mma<T>(sums[r][n], a[r][block][1], b.z, b.w);
            }
        }
    }
}
template <int kEights>
__device__ __forceinline__ void multiply(int32_t (&sums)[kMmaWarpTiles][kEights][4],
                                         const uint32_t (&a)[kMmaWarpTiles][2][4], uint32_t from) {
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
        const uint4 b = load_matrices(from + n * 512);
#pragma unroll
        for (int r = 0; r < kMmaWarpTiles; ++r) {
            mma(sums[r][n], a[r][0], b.x, b.y);
            mma(sums[r][n], a[r][1], b.z, b.w);
        }
    }
}

// --- outputs -------------------------------------------------------------------------------------

// A warp's sums of 16 rows and of some tokens, eight after eight.
template <typename T, int kEights>
__device__ __forceinline__ void store_sums(const MmaArguments& arguments, const float (&sums)[kEights][4], float unit,
                                           int row, int token, int lane) {
    float bias[2];
    load_bias<T>(arguments.output, row, lane, bias);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
        store_eight<T>(arguments.output, sums[n], unit, bias, row, token + 8 * n, lane);
    }
}

template <typename T, int kEights>
__device__ __forceinline__ void store_sums(const MmaInt8Arguments& arguments, const int32_t (&sums)[kEights][4],
                                           float unit, int row, int token, int lane) {
    const Output& output = arguments.output;
    const Int8Rows rows(output, arguments.inverses, unit, arguments.half, row, lane);
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
        // An even token and the next one, which has a scale too, also behind the last token.
        const int its = min(token + 8 * n + lane % 4 * 2, (output.tokens - 1) & ~1);
        const float2 of_tokens = __ldcg(reinterpret_cast<const float2*>(arguments.token_scales + its));
        const uint32_t upper = rows.scaled(sums[n][0], sums[n][1], of_tokens, 0);
        const uint32_t lower = rows.scaled(sums[n][2], sums[n][3], of_tokens, 1);
        store_eight(output, upper, lower, row, token + 8 * n, lane);
    }
}

// The same to memory, as a part's of row tile `index` of all CTAs.
template <typename T, int kEights>
__device__ __forceinline__ void store_part(const MmaArguments& arguments, const MmaSum<T> (&sums)[kEights][4],
                                           float unit, int64_t index, int lane) {
    auto* to = static_cast<MmaFourSums<T>*>(arguments.partial) + index * kEights * kWarp + lane;
    const MmaSum<T> by = kIsInt8<T> ? 1 : unit;
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
        const auto& four = sums[n];
        to[n * kWarp] = MmaFourSums<T>{four[0] * by, four[1] * by, four[2] * by, four[3] * by};
    }
}

// --- the kernel ----------------------------------------------------------------------------------

// The tile and the part of its slabs that a CTA has; the parts of a tile and the tiles of the same rows are
// neighbours.
template <int kTokens>
struct MmaPlace {
    int tile, part, row_tile, token;  // the first of a warp's row tiles

    __device__ __forceinline__ MmaPlace(const MmaArguments& arguments, int cta, int warp) {
        tile = cta / arguments.split;
        part = cta - tile * arguments.split;
        const int rows = tile / arguments.token_tiles;
        row_tile = rows * kMmaRowTiles + warp * kMmaWarpTiles;
        token = (tile - rows * arguments.token_tiles) * kTokens;
    }
};

// What a lane has of a slab of its warp's row tiles.
template <int kBits>
struct MmaSlab {
    uint32_t words[kMmaWarpTiles][4][kBits], scales[kMmaWarpTiles][4];

    // The words of pieces from `begin` on, before `end`; with those of the last one all scales.
    __device__ __forceinline__ void load(const MmaArguments& arguments, int first_row_tile, int slab, int begin,
                                         int end, int lane) {
#pragma unroll
        for (int r = 0; r < kMmaWarpTiles; ++r) {
            // Beyond the last row tile the last one again, whose results are not stored.
            const int64_t row_tile = min(first_row_tile + r, arguments.row_tiles - 1);
            const int64_t at = row_tile * arguments.slabs + slab;
            const auto* from = reinterpret_cast<const char*>(arguments.words) + at * word_bytes(kBits) + lane * 16;
#pragma unroll
            for (int i = begin * kBits / 4; i < end * kBits / 4; ++i) {
                load_16_once(from + i * 512, &words[r][0][0] + 4 * i);
            }
            if (end == 4) load_16_once(arguments.scales + at * kScaleBytes + lane / 4 * 16, scales[r]);
        }
    }
};

template <int kBits, typename T, int kTokens>
__global__ void __launch_bounds__(kMmaThreads, 1)
    gemm_mma_kernel(const __grid_constant__ MmaArgumentsOf<T> arguments) {
    if constexpr (kUsesMma<kTokens>) {
        constexpr bool kInt8 = kIsInt8<T>;
        using Level = std::conditional_t<kInt8, __half, T>;
        using Table = LevelTable<kBits, kPairTableBytes>;
        constexpr int kStages = kMmaStages, kStageBytes = mma_stage_bytes(kTokens, sizeof(T));
        static_assert(kStages == 4, "a stage for each of a slab's pieces");
        extern __shared__ __align__(1024) char smem[];
        const uint32_t window = shared_window(smem);
        const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
        const MmaPlace<kTokens> place(arguments, blockIdx.x, warp);
        const int first_slab = arguments.slabs * place.part / arguments.split;
        const int end_slab = arguments.slabs * (place.part + 1) / arguments.split;

        MmaSlab<kBits> next;
        const auto load_next = [&](int slab, int begin, int end) {
            next.load(arguments, place.row_tile, slab, begin, end, lane);
        };
        load_next(first_slab, 0, 4);
        const uint32_t x = window + kSharedReserved + kPairTableBytes;
        if constexpr (kInt8) wait_for_kernel_before();  // which makes x
        int column = first_slab * kSlabColumns;         // of the next piece to bring
        const auto bring_next = [&](int stage) {
            bring_x<T, kTokens>(arguments, x + stage * kStageBytes, place.token, column);
            column += 2 * kBlockSize;
        };
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) bring_next(i);
        Table table;
        table.begin(window, arguments.codebook, lane);
        const float unit = table.template finish<Level, kMmaThreads>();
        __syncthreads();
        [[maybe_unused]] __half2 inverses[kMmaWarpTiles][2];  // of rows g and g + 8
        if constexpr (kInt8) {
#pragma unroll
            for (int i = 0; i < 2 * kMmaWarpTiles; ++i) {
                const int row = min(place.row_tile * kTileRows + 8 * i + lane / 4, arguments.output.out_features - 1);
                inverses[i / 2][i % 2] = __half2half2(__ldg(arguments.inverses + row));
            }
        }

        MmaSum<T> sums[kMmaWarpTiles][kTokens / 8][4] = {};
        uint32_t lane_table = Table::lane_address(window, lane);
#pragma unroll 1
        for (int slab = first_slab; slab < end_slab; ++slab) {
            // Of int8, whose registers are short, words are replaced one by one, when they are done with.
            [[maybe_unused]] MmaSlab<kBits> copied;
            auto& [words, scales] = kInt8 ? next : copied;
            if constexpr (!kInt8) {
                copied = next;
                if (slab + 1 < end_slab) load_next(slab + 1, 0, 4);
            }
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                // No look-up moves above: not above the barrier, nor to where registers are short.
                asm volatile("" : "+r"(lane_table)::"memory");
                uint32_t a[kMmaWarpTiles][2][2][4];
                [[maybe_unused]] uint32_t bytes[kMmaWarpTiles][2][4];
#pragma unroll
                for (int r = 0; r < kMmaWarpTiles; ++r) {
                    decode_block<kBits, kPairTableBytes>(words[r][piece], 0, lane_table, a[r][0]);
                    decode_block<kBits, kPairTableBytes>(words[r][piece], 1, lane_table, a[r][1]);
                    if constexpr (kInt8) {
                        to_int8(a[r], scales[r][piece], arguments.signs, inverses[r], bytes[r]);
                    } else {
                        multiply_by_scales<T>(a[r], scales[r][piece], arguments.signs);
                    }
                }
                if (kInt8 && slab + 1 < end_slab) load_next(slab + 1, piece, piece + 1);
                cp_async_wait<kStages - 2>();
                __syncthreads();  // the piece is there for all, and all are done with the one before
                bring_next((piece + kStages - 1) % kStages);  // in the end what nobody waits for
                const uint32_t from = x + piece * kStageBytes + place_of_lane<T>(lane);
                if constexpr (kInt8) {
                    multiply(sums, bytes, from);
                } else {
                    multiply<T>(sums, a, from);
                }
            }
        }
        cp_async_wait<0>();
        const int its_lane = kInt8 ? lane_id() : lane;  // so that the loop has its register
#pragma unroll
        for (int r = 0; r < kMmaWarpTiles; ++r) {
            if (arguments.split == 1) {
                store_sums<T>(arguments, sums[r], unit, (place.row_tile + r) * kTileRows, place.token, its_lane);
            } else {
                const int64_t of_cta = static_cast<int64_t>(blockIdx.x) * kMmaRowTiles + warp * kMmaWarpTiles + r;
                store_part<T>(arguments, sums[r], unit, of_cta, its_lane);
            }
        }
        if constexpr (kInt8) {
            if (arguments.split > 1 && blockIdx.x == 0 && threadIdx.x == 0) *arguments.unit = unit;
        }
    } else {
        __trap();
    }
}

// The parts of a tile's sums to y; a warp has 16 rows and eight tokens.
template <typename T, int kTokens>
__global__ void __launch_bounds__(kMmaThreads) add_parts_kernel(const __grid_constant__ MmaArgumentsOf<T> arguments) {
    constexpr int kEights = kTokens / 8;  // of a tile
    const int warp = (blockIdx.x * kMmaThreads + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
    const int eight = warp % kEights, row_tile = warp / kEights % kMmaRowTiles, tile = warp / kEights / kMmaRowTiles;
    const int64_t first = static_cast<int64_t>(tile) * arguments.split * kMmaRowTiles + row_tile;
    const auto* from =
        static_cast<const MmaFourSums<T>*>(arguments.partial) + (first * kEights + eight) * kWarp + lane;
    MmaSum<T> sums[1][4] = {};
#pragma unroll 4
    for (int part = 0; part < arguments.split; ++part, from += kMmaRowTiles * kEights * kWarp) {
        const MmaFourSums<T> four = *from;
        sums[0][0] += four.x;
        sums[0][1] += four.y;
        sums[0][2] += four.z;
        sums[0][3] += four.w;
    }
    const MmaPlace<kTokens> place(arguments, tile * arguments.split, 0);
    float unit = 1;
    if constexpr (kIsInt8<T>) unit = *arguments.unit;
    store_sums<T>(arguments, sums, unit, (place.row_tile + row_tile) * kTileRows, place.token + 8 * eight, lane);
}

// --- launcher ------------------------------------------------------------------------------------

inline MmaArguments mma_arguments(const Product& product, int64_t tokens, int64_t in_features, const MmaPlan& plan,
                                  void* partial) {
    const TileLayout layout(product.out_features, in_features);
    MmaArguments arguments{};
    arguments.output = {product.bias, product.y, static_cast<int>(tokens), static_cast<int>(product.out_features)};
    arguments.x = product.x;
    arguments.words = product.words;
    arguments.scales = product.scales;
    arguments.codebook = product.codebook;
    arguments.partial = partial;
    arguments.in_features = static_cast<int>(in_features);
    arguments.slabs = static_cast<int>(layout.slabs);
    arguments.row_tiles = static_cast<int>(layout.row_tiles);
    arguments.token_tiles = static_cast<int>(ceil_div(tokens, plan.token_tile));
    arguments.split = plan.split;
    return arguments;
}

template <int kBits, typename T, int kTokens>
cudaError_t launch_mma(const MmaArgumentsOf<T>& arguments, const MmaPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    constexpr int kSharedBytes = mma_shared_bytes(kTokens, sizeof(T));
    static Launcher launcher(gemm_mma_kernel<kBits, T, kTokens>, kMmaThreads, kSharedBytes);
    const int64_t ctas = int64_t{plan.tiles} * plan.split;
    const cudaError_t error = kIsInt8<T> ? launcher.launch_overlapping(gpu, ctas, 1, kSharedBytes, stream, arguments)
                                         : launcher.launch(gpu, ctas, 1, kSharedBytes, stream, arguments);
    if (error != cudaSuccess || plan.split == 1) return error;
    static Launcher add(add_parts_kernel<T, kTokens>, kMmaThreads, 0);
    return add.launch(gpu, int64_t{plan.tiles} * kMmaWarpTiles * (kTokens / 8), 1, 0, stream, arguments);
}

}  // namespace hf_kbit::cuda
