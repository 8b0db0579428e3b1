// y = x @ W.T (+ bias) for 17 to 256 tokens on GPUs without wgmma, W in tiles; the weights are decoded in registers,
// as operand A of mma.sync.
//
//   x         float16 or bfloat16 [M, K], row-major, K a multiple of 8; where the weight has column scales or a
//             rotation, what inputs/transform.cu makes of it
//   words     int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16]     codebook  float32 [2**bits]
//   bias      [N] or null                          y       [M, N], row-major, both of x's dtype
//
// Compute capability 8.0 and newer, but not 9.0; 97 KB of shared memory.
//
// A CTA of eight warps multiplies 256 rows and 32 or 64 tokens, a warp two row tiles and all of the tokens:
//
//   words and scales --a slab ahead--> registers --table--> pairs of levels --times scales--> operand A
//   x --cp.async, 64 columns at a time--> ring in shared memory, [block of 32 columns][token][32] --16 bytes a lane-->
//     operand B of both instructions of a block
//
// The columns of a block go to the tensor cores in the order in which tiles hold them, which for x is 8 t .. 8 t + 7
// of lane t: nothing is exchanged, and 32 lanes read 512 bytes in a row. Weights are multiplied by their scales first,
// as in hopper/gemm_wgmma.cuh. Where there are fewer tiles than processors, several CTAs divide a tile's slabs; their
// sums, in float32, go to memory, and a second kernel adds them up in a fixed order.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/operands.cuh"
#include "kernels/outputs.cuh"

namespace hf_kbit::cuda {

namespace {

// Compiled for the GPUs that the plan asks for it on.
#ifdef __CUDA_ARCH__
constexpr bool kUsed = has_mma_path(__CUDA_ARCH__);
#else
constexpr bool kUsed = false;
#endif

struct Arguments {
    Output output;
    const void* x;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    float* partial;  // [tiles, split, kRowTiles, kTokens / 8, 32, 4] where split > 1
    int in_features, slabs, row_tiles, token_tiles, split;
    uint32_t signs;  // of scales
};

constexpr int kThreads = kMmaWarps * kWarp;
constexpr int kRowTiles = kMmaRows / kTileRows, kWarpTiles = kRowTiles / kMmaWarps;

// --- x -------------------------------------------------------------------------------------------

// 64 columns of all the tile's tokens from memory to shared memory, zeros where there are none.
template <typename T, int kTokens>
__device__ __forceinline__ void bring_x(const Arguments& arguments, uint32_t stage, int first_token, int column) {
    constexpr int kBlockPieces = kTokens * 4;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < 2 * kBlockPieces / kThreads; ++i) {
        const int piece = i * kThreads + static_cast<int>(threadIdx.x);
        const int token = first_token + piece % kBlockPieces / 4;
        const int at = column + piece / kBlockPieces * kBlockSize + piece % 4 * 8;
        const bool there = token < arguments.output.tokens && at < arguments.in_features;
        const T* from = static_cast<const T*>(arguments.x);
        if (there) from += static_cast<int64_t>(token) * arguments.in_features + at;
        cp_async_16_or_zeros(stage + piece * 16, from, there);
    }
    cp_async_commit();
}

// --- the kernel ----------------------------------------------------------------------------------

// The tile and the part of its slabs that a CTA has; the parts of a tile and the tiles of the same rows are
// neighbours.
template <int kTokens>
struct Place {
    int tile, part, row_tile, token;  // the first of a warp's row tiles

    __device__ __forceinline__ Place(const Arguments& arguments, int cta, int warp) {
        tile = cta / arguments.split;
        part = cta - tile * arguments.split;
        const int rows = tile / arguments.token_tiles;
        row_tile = rows * kRowTiles + warp * kWarpTiles;
        token = (tile - rows * arguments.token_tiles) * kTokens;
    }
};

template <int kBits, typename T, int kTokens>
__global__ void __launch_bounds__(kThreads, 1) gemm_mma_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (kUsed) {
        using Table = LevelTable<kBits, kPairTableBytes>;
        constexpr int kStages = kMmaStages, kStageBytes = mma_stage_bytes(kTokens);
        static_assert(kStages == 4, "a stage for each of a slab's pieces");
        extern __shared__ __align__(1024) char smem[];
        const uint32_t window = shared_window(smem);
        const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarp, 0), lane = threadIdx.x % kWarp;
        const Place<kTokens> place(arguments, blockIdx.x, warp);
        const int first_slab = arguments.slabs * place.part / arguments.split;
        const int end_slab = arguments.slabs * (place.part + 1) / arguments.split;

        uint32_t next_words[kWarpTiles][4 * kBits], next_scales[kWarpTiles][4];
        const auto load_weights = [&](int slab) {
#pragma unroll
            for (int r = 0; r < kWarpTiles; ++r) {
                // Beyond the last row tile the last one again, whose results are not stored.
                const int64_t row_tile = min(place.row_tile + r, arguments.row_tiles - 1);
                const int64_t at = row_tile * arguments.slabs + slab;
                const auto* words =
                    reinterpret_cast<const char*>(arguments.words) + at * word_bytes(kBits) + lane * 16;
#pragma unroll
                for (int i = 0; i < kBits; ++i) load_16_once(words + i * 512, &next_words[r][4 * i]);
                load_16_once(arguments.scales + at * kScaleBytes + lane / 4 * 16, next_scales[r]);
            }
        };
        load_weights(first_slab);
        const uint32_t x = window + kSharedReserved + kPairTableBytes;
        int column = first_slab * kSlabColumns;  // of the next piece to bring
        const auto bring_next = [&](int stage) {
            bring_x<T, kTokens>(arguments, x + stage * kStageBytes, place.token, column);
            column += 2 * kBlockSize;
        };
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) bring_next(i);
        Table table;
        table.begin(window, arguments.codebook, lane);
        const float unit = table.template finish<T, kThreads>();
        __syncthreads();

        float sums[kWarpTiles][kTokens / 8][4] = {};
        uint32_t lane_table = Table::lane_address(window, lane);
#pragma unroll 1
        for (int slab = first_slab; slab < end_slab; ++slab) {
            uint32_t words[kWarpTiles][4][kBits], scales[kWarpTiles][4];
#pragma unroll
            for (int r = 0; r < kWarpTiles; ++r) {
#pragma unroll
                for (int i = 0; i < 4 * kBits; ++i) words[r][i / kBits][i % kBits] = next_words[r][i];
#pragma unroll
                for (int i = 0; i < 4; ++i) scales[r][i] = next_scales[r][i];
            }
            if (slab + 1 < end_slab) load_weights(slab + 1);
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                // No look-up moves above: not above the barrier, nor to where registers are short.
                asm volatile("" : "+r"(lane_table)::"memory");
                uint32_t a[kWarpTiles][2][2][4];
#pragma unroll
                for (int r = 0; r < kWarpTiles; ++r) {
                    decode_block<kBits, kPairTableBytes>(words[r][piece], 0, lane_table, a[r][0]);
                    decode_block<kBits, kPairTableBytes>(words[r][piece], 1, lane_table, a[r][1]);
                    multiply_by_scales<T>(a[r], scales[r][piece], arguments.signs);
                }
                cp_async_wait<kStages - 2>();
                __syncthreads();  // the piece is there for all, and all are done with the one before
                bring_next((piece + kStages - 1) % kStages);  // in the end what nobody waits for
                const uint32_t from = x + piece * kStageBytes + lane * 16;
#pragma unroll
                for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
                    for (int block = 0; block < 2; ++block) {
                        const uint4 b = load_shared_16(from + (block * kTokens + n * 8) * kBlockSize * 2);
#pragma unroll
                        for (int r = 0; r < kWarpTiles; ++r) {
                            mma<T>(sums[r][n], a[r][block][0], b.x, b.y);
                            mma<T>(sums[r][n], a[r][block][1], b.z, b.w);
                        }
                    }
                }
            }
        }
        cp_async_wait<0>();

#pragma unroll
        for (int r = 0; r < kWarpTiles; ++r) {
            if (arguments.split == 1) {
                const int row = (place.row_tile + r) * kTileRows;
                float bias[2];
                load_bias<T>(arguments.output, row, lane, bias);
#pragma unroll
                for (int n = 0; n < kTokens / 8; ++n) {
                    store_eight<T>(arguments.output, sums[r][n], unit, bias, row, place.token + 8 * n, lane);
                }
            } else {
                const int64_t of_cta = static_cast<int64_t>(blockIdx.x) * kRowTiles + warp * kWarpTiles + r;
                auto* to = reinterpret_cast<float4*>(arguments.partial) + of_cta * (kTokens / 8) * kWarp + lane;
#pragma unroll
                for (int n = 0; n < kTokens / 8; ++n) {
                    const float (&four)[4] = sums[r][n];
                    to[n * kWarp] = make_float4(four[0] * unit, four[1] * unit, four[2] * unit, four[3] * unit);
                }
            }
        }
    } else {
        __trap();
    }
}

// The parts of a tile's sums to y; a warp has 16 rows and eight tokens.
template <typename T, int kTokens>
__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ Arguments arguments) {
    constexpr int kEights = kTokens / 8;  // of a tile
    const int warp = (blockIdx.x * kThreads + threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
    const int eight = warp % kEights, row_tile = warp / kEights % kRowTiles, tile = warp / kEights / kRowTiles;
    const int64_t first = static_cast<int64_t>(tile) * arguments.split * kRowTiles + row_tile;
    const auto* from = reinterpret_cast<const float4*>(arguments.partial) + (first * kEights + eight) * kWarp + lane;
    float sums[4] = {};
#pragma unroll 4
    for (int part = 0; part < arguments.split; ++part, from += kRowTiles * kEights * kWarp) {
        const float4 four = *from;
        sums[0] += four.x;
        sums[1] += four.y;
        sums[2] += four.z;
        sums[3] += four.w;
    }
    const Place<kTokens> place(arguments, tile * arguments.split, 0);
    const int row = (place.row_tile + row_tile) * kTileRows;
    float bias[2];
    load_bias<T>(arguments.output, row, lane, bias);
    store_eight<T>(arguments.output, sums, 1, bias, row, place.token + 8 * eight, lane);
}

// --- launcher ------------------------------------------------------------------------------------

template <int kBits, typename T, int kTokens>
cudaError_t launch(const Arguments& arguments, const MmaPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    constexpr int kSharedBytes = mma_shared_bytes(kTokens);
    static Launcher launcher(gemm_mma_kernel<kBits, T, kTokens>, kThreads, kSharedBytes);
    const int64_t ctas = int64_t{plan.tiles} * plan.split;
    const cudaError_t error = launcher.launch(gpu, ctas, 1, kSharedBytes, stream, arguments);
    if (error != cudaSuccess || plan.split == 1) return error;
    static Launcher add(add_parts_kernel<T, kTokens>, kThreads, 0);
    return add.launch(gpu, int64_t{plan.tiles} * kWarpTiles * (kTokens / 8), 1, 0, stream, arguments);
}

}  // namespace

cudaError_t gemm_mma(const Product& product, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                     const MmaPlan& plan, float* partial, const Gpu& gpu, cudaStream_t stream) {
    const TileLayout layout(product.out_features, in_features);
    Arguments arguments{};
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
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        using T = decltype(value);
        arguments.signs = signs_of<T>(product.signed_scales);
        const auto run = plan.token_tile == 32 ? launch<width(), T, 32> : launch<width(), T, 64>;
        return run(arguments, plan, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
