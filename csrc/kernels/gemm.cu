// y = x @ W.T (+ bias) for up to 16 tokens, W in tiles; the weights are decoded in registers on their way to
// the tensor cores. One launch may take several weights, for the same x; or, of experts, a few rows of x, each with
// the weight of its own expert.
//
//   x         float16 or bfloat16 [M, K], row-major, K a multiple of 8
//   words     int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16]     codebook  float32 [2**bits]
//   bias      [N] or null                          y       [M, N], row-major, both of x's dtype
//   columns   uint8 [K], as E4M4, or null
//
// A warp takes a slab (16 rows x 256 columns) at a time:
//
//   words and scales --cp.async or bulk copies--> ring in shared memory, one to three slabs ahead
//     --> registers --one byte permute--> address of a pair of codes --table--> operand A of mma.m16n8k16
//     --> sums of a block (32 columns) in float32 --times the block's scale--> sums of the slab
//     --> shared memory, where the warps' and then, in a cluster, the CTAs' sums meet in a fixed order --> y
//
// The table holds the pair of levels for every byte of codes (2 bits: two pairs, for both rows of a lane; 5 bits: for
// every ten bits), once for each lane: no bank conflicts. A permute puts a byte of codes above the lane's byte of an
// address. Tokens are operand B. Scales are applied after the product: four multiply-adds for 512 weights.
//
// What a slab costs a warp, of 128 weights a lane, without the loop around it:
//
//   bits   permutes, shifts   look-ups   mma   scales and sums   wavefronts of shared memory: table, ring in and out
//    2            32             32       16         64             64 + 24        (a look-up of 8 bytes is two)
//    3            84             64       16         64             64 + 32
//    4            64             64       16         64             64 + 40
//    5           144             64       16         64             64 + 48
//
// Where weights have column scales or a rotation (transform.cuh), what is multiplied is (x * columns) @ R. Of one
// token a CTA makes it from x for its slabs: about 110 instructions for 8 columns, while its first slabs are under
// way; for 4096 columns that is one such octet for each of 512 threads. x waits in registers until the table is there,
// and its pointers lie beside those of the weight: copied to shared memory first, with pointers in another line of
// constants, it took 0.5 to 3.5 us more. Of more tokens the kernel of transform.cu makes it, while this one
// builds its table and asks for its first slabs. Instances of their own, so that other weights pay nothing. One token
// costs 0.1 to 0.9 us more, up to 16 tokens 0.7 to 1.6, of 6 to 28 (H200, 4 bits, 2026-11-22). Scales with signs, as
// such weights have, take 16 instructions more a slab.
//
// An H200 brings in a slab for each processor in 59, 85, 111 and 137 cycles, so shared memory is the limit at 2 and 3
// bits and memory at 4 and 5. docs/performance.md has the measured times, docs/internals.md what was tried.
//
// Of experts a part is a row, or up to eight that an expert has. How many parts there are is known on the GPU alone:
// each CTA finds its own, and with it the weight, from where each expert's rows begin, so that requests for slabs come
// after one for these numbers; all but the table waits for the kernel before. CTAs for which nothing is left end.
//
// Over 350 lines: one kernel, and the ring, the activations and the launcher that nothing else uses.
#include <numeric>
#include <type_traits>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/swiglu.cuh"
#include "kernels/weights.cuh"

namespace hf_kbit::cuda {

namespace {

#ifdef __CUDA_ARCH__
constexpr int kArch = __CUDA_ARCH__;
#else
constexpr int kArch = 0;
#endif
constexpr bool kSm90 = kArch >= 900;

// One of the weights that a launch multiplies x by, where its product goes, and which CTAs see to it: the clusters
// that follow those of the parts before.
struct Part {
    const void* bias;
    void* y;
    const int32_t* words;
    const uint8_t* scales;
    const float* codebook;
    const void* x;  // its own in instances for weights with a Transform: made before, unless each CTA does so
    const uint8_t* columns;
    int rotated;
    int out_features;
    int cluster_tiles, more_tiles;  // row tiles of a cluster; this many clusters have one more
};

// In this order, so that a CTA of the first part reads few lines of constant memory.
struct Arguments {
    const void* x;
    int tokens, in_features, slabs;
    int k_warps_log2, split_log2, tokens_log2;
    int pitch, warp_floats;         // of sums
    int first_cluster[kGemmParts];  // of each part; beyond all clusters where there is none
    int transforms;                 // each CTA by itself
    uint32_t signs;                 // of scales, in float16
    Part parts[kGemmParts];
    // Of experts: the first part is that of row 0 and expert 0, of the first row of x or the first picked one.
    const int32_t* rows;
    const int32_t* offsets;
    int experts, y_rows, last_row;
    int part_rows_log2, row_tiles, processors, least_clusters, waves;  // of plan_few_experts
    int swiglu;
};

// Which rows of an expert a CTA multiplies: none, or so many. Rows from `beyond` on are no expert's.
struct Share {
    int expert, first, rows, cluster, clusters, x_row, beyond;
};

// Whatever offsets and rows say, rows are there.
__device__ __forceinline__ int first_row(const Arguments& arguments, int expert) {
    return min(max(arguments.offsets[expert], 0), arguments.y_rows);
}
__device__ __forceinline__ int row_of_x(const Arguments& arguments, int row) {
    row = min(row, arguments.y_rows - 1);
    return min(max(arguments.rows ? arguments.rows[row] : row, 0), arguments.last_row);
}

// Where each part is a row: the row is known at once, and the number of its expert is that of experts which end
// before.
__device__ __forceinline__ Share share_of_row(const Arguments& arguments, int of_all, int lane) {
    const int clusters = arguments.least_clusters, row = of_all / clusters;
    const int x_row = row_of_x(arguments, row), beyond = first_row(arguments, arguments.experts);
    int expert = 0;
    for (int i = lane; i < arguments.experts; i += kWarp) expert += arguments.offsets[i + 1] <= row;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) expert += __shfl_xor_sync(0xFFFFFFFF, expert, distance);
    return {expert, row,   expert < arguments.experts && row < arguments.y_rows, of_all - row * clusters, clusters,
            x_row,  beyond};
}

// By all lanes of a warp, each for some experts that follow each other.
__device__ __forceinline__ Share share_of_experts(const Arguments& arguments, int of_all, int lane) {
    if (arguments.part_rows_log2 == 0) return share_of_row(arguments, of_all, lane);
    const int of_lane = (arguments.experts + kWarp - 1) / kWarp, log2 = arguments.part_rows_log2;
    const int begin = min(lane * of_lane, arguments.experts), end = min(begin + of_lane, arguments.experts);
    const auto row = [&](int expert) { return first_row(arguments, expert); };
    const auto parts = [&](int expert) { return (max(row(expert + 1) - row(expert), 0) + (1 << log2) - 1) >> log2; };
    int own = 0;
#pragma unroll 4
    for (int i = begin; i < end; ++i) own += parts(i);
    const int up_to = sum_up_to_lane(own, lane);
    const int all = __shfl_sync(0xFFFFFFFF, up_to, kWarp - 1);
    const int clusters = expert_clusters(all, arguments.row_tiles, arguments.slabs, arguments.processors,
                                         arguments.least_clusters, arguments.waves);
    const int index = of_all / clusters;
    int left = index - (up_to - own);
    const bool found = left >= 0 && left < own;
    Share share{begin, 0, 0, of_all - index * clusters, clusters, 0, row(arguments.experts)};
    if (found) {
        while (left >= parts(share.expert)) left -= parts(share.expert++);
        share.first = row(share.expert) + (left << log2);
        share.rows = min(1 << log2, row(share.expert + 1) - share.first);
    }
    const unsigned finder = __ballot_sync(0xFFFFFFFF, found);
    const int from = finder ? __ffs(finder) - 1 : 0;
    share.expert = __shfl_sync(0xFFFFFFFF, share.expert, from);
    share.first = __shfl_sync(0xFFFFFFFF, share.first, from);
    share.rows = __shfl_sync(0xFFFFFFFF, share.rows, from);
    share.x_row = row_of_x(arguments, share.first);
    return share;
}

// Where the inputs and results of these rows are.
template <int kBits, typename T>
__device__ __forceinline__ Part part_of(const Arguments& arguments, const Share& share) {
    Part part = arguments.parts[0];
    const int64_t out_features = part.out_features, columns = arguments.in_features * (arguments.swiglu ? 2 : 1);
    const int64_t slab = int64_t{share.expert} * arguments.row_tiles * arguments.slabs;
    part.x = static_cast<const T*>(part.x) + share.x_row * columns;
    part.y = static_cast<T*>(part.y) + share.first * out_features;
    if (part.bias) part.bias = static_cast<const T*>(part.bias) + share.expert * out_features;
    part.words += slab * (word_bytes(kBits) / 4);
    part.scales += slab * kScaleBytes;
    part.cluster_tiles = arguments.row_tiles / share.clusters;
    part.more_tiles = arguments.row_tiles - part.cluster_tiles * share.clusters;
    return part;
}

// Zeros for rows of y from one on, by all CTAs.
template <typename T>
__device__ __forceinline__ void clear_rows(const Arguments& arguments, int first) {
    const int64_t out_features = arguments.parts[0].out_features, end = arguments.y_rows * out_features;
    T* y = static_cast<T*>(arguments.parts[0].y);
    for (int64_t i = first * out_features + blockIdx.x * blockDim.x + threadIdx.x; i < end;
         i += gridDim.x * blockDim.x) {
        y[i] = static_cast<T>(0.0f);
    }
}

// --- the ring ------------------------------------------------------------------------------------

// A warp's slabs on their way. Bulk copies take the fewest wavefronts, cp.async the fewest instructions, which count
// for more at 2 bits.
template <int kBits, int kTokenTiles, int kWarps>
struct Ring {
    static constexpr bool kBulk = kSm90 && kBits > 2;
    static constexpr int kStages = ring_stages(kBits, kWarps, 8 * kTokenTiles);
    static constexpr int kSlab = slab_bytes(kBits);
    // What is asked for before the table is there: enough to keep memory busy, little enough not to hold up others'
    // requests for codebook and activations.
    static constexpr int kEarly = kBits == 2 && kStages > 1 ? 2 : 1;

    const int32_t* words;
    const uint8_t* scales;
    uint32_t begin, stage, barriers, barrier;  // shared memory: the warp's first stage and the next, as their barriers
    // The slab to ask for next. The warp goes through every tile_step-th slab below rows_end, the same columns of all
    // its row tiles; a turn takes it from there to its first row tile again, k_warps slabs further along K.
    int ahead, tile_step, rows_end, turn;
    int fetched, all;  // slabs asked for, and those that there are for the warp

    __device__ __forceinline__ Ring(const Part& part, uint32_t window, int warp, int first_slab, int tile_step,
                                    int rows_end, int warp_tiles, int warp_slabs, int k_warps)
        : words(part.words),
          scales(part.scales),
          begin(window + ring_address(kBits, kWarps) + warp * kStages * kSlab),
          stage(begin),
          barriers(window + ring_address(kBits, kWarps) + (kWarps * kSlab + warp * 8) * kStages),
          barrier(barriers),
          ahead(first_slab),
          tile_step(tile_step),
          rows_end(rows_end),
          turn(k_warps - warp_tiles * tile_step),
          fetched(0),
          all(warp_tiles * warp_slabs) {
        if constexpr (kBulk) {
            if (threadIdx.x % kWarp == 0) {
#pragma unroll
                for (int i = 0; i < kStages; ++i) init_barrier(barriers + 8 * i, 1);
            }
            __syncwarp();
        }
    }

    // Asks for the next slab, or for none after the last: a call for each stage, then one for each slab taken.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % kWarp;
        const int64_t slab = ahead;
        if constexpr (kBulk) {
            if (fetched < all && lane == 0) {
                release_to_bulk_copies();  // all lanes have read the stage: take() ends with __syncwarp
                bring_slab<kBits>(stage, words, scales, slab, barrier);
            }
        } else {
            if (fetched < all) {
                const char* from = reinterpret_cast<const char*>(words) + slab * word_bytes(kBits) + lane * 16;
#pragma unroll
                for (int i = 0; i < kBits; ++i) cp_async_16(stage + i * 512 + lane * 16, from + i * 512);
                if (lane < kScaleBytes / 16) {
                    cp_async_16(stage + word_bytes(kBits) + lane * 16, scales + slab * kScaleBytes + lane * 16);
                }
            }
            cp_async_commit();
        }
        ++fetched;
        ahead += tile_step;
        if (ahead >= rows_end) ahead += turn;
        if constexpr (kStages > 1) {
            stage += kSlab;
            barrier += 8;
            if (stage == begin + kStages * kSlab) {
                stage = begin;
                barrier = barriers;
            }
        }
    }

    // Waits for the oldest slab and brings it into registers, all eight blocks' scales of rows g and g + 8 too.
    __device__ __forceinline__ void take(uint32_t (&to_words)[4][kBits], uint32_t (&to_scales)[4]) const {
        if constexpr (kBulk) {
            wait_barrier(barrier, fetched / kStages - 1 & 1);
        } else {
            cp_async_wait<kStages - 1>();
            __syncwarp();  // lanes copied scales for each other
        }
        load_slab<kBits, 1>(stage, 0, to_words, to_scales);
        __syncwarp();  // before the stage is filled again
    }
};

// --- activations that a CTA transforms -----------------------------------------------------------

// Those of one token, of the CTA's slabs. Octet number `lane` of every kWarps-th slab waits in registers of one lane,
// with its columns' scales, until the table is there; then all of them go through shared memory to those who multiply.
// With kSwiglu there may be two numbers for each column, of which they are swiglu_octet.
template <typename T, int kWarps, bool kSwiglu>
struct Activations {
    uint4 octets[kTransformOctets], ups[kSwiglu ? kTransformOctets : 1];
    uint2 scales[kTransformOctets];

    // Asks for x and columns; zeros beyond K.
    __device__ __forceinline__ void bring(const Part& part, int in_features, bool swiglu, int first_slab, int slabs,
                                          int warp, int lane) {
#pragma unroll
        for (int i = 0; i < kTransformOctets; ++i) {
            const int slab = warp + i * kWarps, column = (first_slab + slab) * kSlabColumns + lane * kOctet;
            const bool there = slab < slabs && column < in_features;
            octets[i] = make_uint4(0, 0, 0, 0);
            scales[i] = make_uint2(kScalesOfOne, kScalesOfOne);
            const T* x = static_cast<const T*>(part.x) + column;
            if constexpr (kSwiglu) {  // the kernel before may have just written it
                ups[i] = octets[i];
                if (there) octets[i] = *reinterpret_cast<const uint4*>(x);
                if (there && swiglu) ups[i] = *reinterpret_cast<const uint4*>(x + in_features);
            } else {
                if (there) octets[i] = __ldg(reinterpret_cast<const uint4*>(x));
            }
            if (there && part.columns) scales[i] = __ldg(reinterpret_cast<const uint2*>(part.columns + column));
        }
    }

    __device__ __forceinline__ void transform(uint32_t to, const Part& part, bool swiglu, int slabs, int k_warps_log2,
                                              int warp, int lane) const {
        const bool rotated = part.rotated;
#pragma unroll
        for (int i = 0; i < kTransformOctets; ++i) {
            const int slab = warp + i * kWarps;
            if (slab >= slabs) return;
            float columns[kOctet];
            decode_scales(scales[i], columns);
            uint4 octet = octets[i];
            if constexpr (kSwiglu) {
                if (swiglu) octet = swiglu_octet<T>(octet, ups[i]);
            }
            const uint4 made = transform_octet<T>(octet, columns, rotated, lane % 4);
            store_shared_16(address(to, slab, k_warps_log2, lane * 16), made);
        }
    }

    // In the loop 8 lanes read 64 bytes each of two of the warp's slabs, in one turn of shared memory if these lie in
    // different halves of 128 bytes: so every other one has its blocks' places swapped in pairs.
    static __device__ __forceinline__ uint32_t address(uint32_t begin, int slab, int k_warps_log2, int byte) {
        return begin + slab * kSlabActivations + (byte ^ 64 * (slab >> k_warps_log2 & 1));
    }

    // The octets of a lane of four in all blocks of a slab: zeros where there is none.
    static __device__ __forceinline__ void load(uint32_t from, int slab, bool there, int k_warps_log2, int t,
                                                uint32_t (&to)[kSlabBlocks][4]) {
#pragma unroll
        for (int block = 0; block < kSlabBlocks; ++block) {
            uint4 octet = make_uint4(0, 0, 0, 0);
            if (there) octet = load_shared_16(address(from, slab, k_warps_log2, block * 64 + t * 16));
            to[block][0] = octet.x, to[block][1] = octet.y, to[block][2] = octet.z, to[block][3] = octet.w;
        }
    }
};

// --- outputs -------------------------------------------------------------------------------------

// Four rows of y, as many as there are, with the bias.
template <typename T>
__device__ __forceinline__ void store_rows(const Part& part, int token, int row, const float (&sums)[4], float unit) {
    const auto* bias = static_cast<const T*>(part.bias) + row;
    T* y = static_cast<T*>(part.y) + static_cast<int64_t>(token) * part.out_features + row;
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool biased = part.bias && row + i < part.out_features;
        values[i] = sums[i] * unit + (biased ? static_cast<float>(bias[i]) : 0);
    }
    if (part.out_features % 4 == 0) {  // then rows are all there or none
        if (row < part.out_features) {
            *reinterpret_cast<uint2*>(y) =
                make_uint2(pack_two<T>(values[0], values[1]), pack_two<T>(values[2], values[3]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (row + i < part.out_features) y[i] = static_cast<T>(values[i]);
        }
    }
}

// --- the kernel ----------------------------------------------------------------------------------

// kTokenTiles: groups of eight tokens. kTransformed: weights have a Transform. kExperts: parts are rows of experts.
template <int kBits, typename T, int kTokenTiles, int kWarps, bool kTransformed, bool kExperts>
__global__ void __launch_bounds__(kWarps* kWarp, 1) gemm_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (!has_gemm(kArch) || kWarps != gemm_warps(kArch)) {
        __trap();  // the plan asks for the other, or for none
        return;
    }
    using Table = LevelTable<kBits, table_bytes(kBits, kWarps)>;
    using Ring = Ring<kBits, kTokenTiles, kWarps>;
    extern __shared__ __align__(1024) char smem[];
    const uint32_t window = shared_window(smem);
    // The shuffle tells the compiler that all lanes have the same value.
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarp, 0);
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;

    const int split_log2 = kSm90 ? arguments.split_log2 : 0;
    const int of_all = blockIdx.x >> split_log2, rank = blockIdx.x - (of_all << split_log2);
    int index = 0;
    if constexpr (!kExperts) {
#pragma unroll
        for (int i = 1; i < kGemmParts; ++i) index += of_all >= arguments.first_cluster[i];
    }

    // The order of the requests to memory matters: codebook and activations are waited for first.
    Table table;
    table.begin(window, arguments.parts[index].codebook, lane);
    // float16 levels fill its range; the power of two is taken out of the sums.
    float unit = 16;  // of the sums: scales are in sixteenths
    const auto normalize = [&] {
        if constexpr (std::is_same_v<T, __half>) unit *= table.template normalize<Weights<T>::kLargest>();
    };
    [[maybe_unused]] Part of_rows;
    [[maybe_unused]] Share share{};
    if constexpr (kExperts) {
        normalize();
        if (of_all < arguments.processors) table.template build<T, kWarps * kWarp>();
        wait_for_kernel_before();
        let_next_kernel_start();
        share = share_of_experts(arguments, of_all, lane);
        of_rows = part_of<kBits, T>(arguments, share);
        clear_rows<T>(arguments, share.beyond);
        if (share.rows == 0) return;  // as all CTAs of the cluster do
        if (of_all >= arguments.processors) table.template build<T, kWarps * kWarp>();
    }
    const Part& part = kExperts ? of_rows : arguments.parts[index];
    const int cluster = kExperts ? share.cluster : of_all - arguments.first_cluster[index];
    const int tokens = kExperts ? share.rows : arguments.tokens;

    const int k_warps_log2 = arguments.k_warps_log2, k_warps = 1 << k_warps_log2;
    const int row_warps_log2 = (kWarps == 16 ? 4 : 3) - k_warps_log2, row_warps = 1 << row_warps_log2;
    const int k_warp = warp & (k_warps - 1), row_warp = warp >> k_warps_log2;
    const auto slabs_before = [&](int a_rank) { return arguments.slabs * a_rank >> split_log2; };
    const int first_slab = slabs_before(rank), slabs = slabs_before(rank + 1) - first_slab;
    const int first_tile = cluster * part.cluster_tiles + min(cluster, part.more_tiles);
    const int tiles = part.cluster_tiles + (cluster < part.more_tiles);

    const uint32_t unit_at = window + unit_address(kBits, kWarps, 8 * kTokenTiles), sums = unit_at + kUnitBytes;
    [[maybe_unused]] const uint32_t activations_at = sums + (arguments.warp_floats * 4 << k_warps_log2);

    // B operands. A lane has of each block columns 8 t .. 8 t + 7, as the lanes of A, and of the eight columns of B
    // column g: `tokens` rounded up to a power of two leave room for the activations of several of the warp's slabs,
    // of which an instruction's results are good for one.
    const int few_log2 = kExperts ? 32 - __clz(tokens - 1) : arguments.tokens_log2;
    const int tokens_log2 = kTokenTiles == 1 ? few_log2 : 3, held_slabs = 8 >> tokens_log2;
    uint32_t b[kTokenTiles][kSlabBlocks][4];
    constexpr bool kCanTransform = kTransformed && kTokenTiles == 1;
    const bool transforms = kCanTransform && arguments.transforms;
    const auto load_activations = [&](int pass) {
        const int token = g & ((1 << tokens_log2) - 1);
        const int slab = k_warp + ((pass + (g >> tokens_log2)) << k_warps_log2);
        if constexpr (kCanTransform) {
            if (transforms) {
                return Activations<T, kWarps, kExperts>::load(activations_at, slab, slab < slabs, k_warps_log2, t,
                                                              b[0]);
            }
        }
        const int column = (first_slab + slab) * kSlabColumns + 8 * t;
        const void* from = kTransformed ? part.x : arguments.x;
        const T* x = static_cast<const T*>(from) + token * arguments.in_features + column;
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
            const int columns = token + 8 * n < tokens ? arguments.in_features - column : 0;
#pragma unroll
            for (int block = 0; block < kSlabBlocks; ++block) {
                uint4 eight = make_uint4(0, 0, 0, 0);
                if (block * kBlockSize < columns) {
                    const auto* at =
                        reinterpret_cast<const uint4*>(x + 8 * n * arguments.in_features + block * kBlockSize);
                    eight = kTransformed ? *at : __ldg(at);  // the kernel before may have just written it
                }
                b[n][block][0] = eight.x;
                b[n][block][1] = eight.y;
                b[n][block][2] = eight.z;
                b[n][block][3] = eight.w;
            }
        }
    };
    const bool swiglu = kExperts && arguments.swiglu;
    [[maybe_unused]] Activations<T, kWarps, kExperts> activations;
    if constexpr (!kTransformed) {
        load_activations(0);
    } else if constexpr (kCanTransform) {
        if (transforms) activations.bring(part, arguments.in_features, swiglu, first_slab, slabs, warp, lane);
    }

    const int warp_tiles = (tiles - row_warp + row_warps - 1) >> row_warps_log2;
    const int warp_slabs = (slabs - k_warp + k_warps - 1) >> k_warps_log2;
    Ring ring(part, window, warp, (first_tile + row_warp) * arguments.slabs + first_slab + k_warp,
              row_warps * arguments.slabs, (first_tile + tiles) * arguments.slabs, warp_tiles, warp_slabs, k_warps);
    if constexpr (!kExperts) normalize();
    if (threadIdx.x == 0) store_shared_float(unit_at, unit);
#pragma unroll 1
    for (int i = 0; i < Ring::kEarly; ++i) ring.fetch();
    if constexpr (!kExperts) table.template build<T, kWarps * kWarp>();
    if constexpr (!kTransformed) __syncthreads();
#pragma unroll 1
    for (int i = Ring::kEarly; i < Ring::kStages; ++i) ring.fetch();
    if constexpr (kTransformed) {
        if constexpr (kCanTransform) {
            if (transforms) activations.transform(activations_at, part, swiglu, slabs, k_warps_log2, warp, lane);
        }
        if (!transforms && !kExperts) wait_for_kernel_before();
        __syncthreads();
        load_activations(0);
    }

    int token = 2 * t;  // and token + 1, and 8 more for each token tile
    uint32_t tile_sums =
        sums + 4 * (k_warp * arguments.warp_floats + token * arguments.pitch + row_warp * kTileRows + g);
    int held = 0;  // of the slabs whose activations b holds side by side, the one that the pass multiplies
#pragma unroll 1
    for (int pass = 0; pass < warp_slabs; ++pass) {  // along K
        const bool first = pass == 0;
        if (!first) {
            // Steps, not new sums of everything: beyond eight tokens every register is taken.
            tile_sums -= warp_tiles * row_warps * kTileRows * 4;
            token -= 1 << tokens_log2;
            tile_sums -= arguments.pitch * 4 << tokens_log2;
            ++held;
            if (held == held_slabs) {
                held = 0;
                token += 8;
                tile_sums += arguments.pitch * 4 * 8;
                load_activations(pass);
            }
        }
#pragma unroll 1
        for (int left = warp_tiles; left > 0; --left, tile_sums += row_warps * kTileRows * 4) {
            uint32_t words[4][kBits], scales[4];
            ring.take(words, scales);
            // Through the asm, so that no look-up moves above the barrier; here, to keep no register in use for it.
            uint32_t lane_table = Table::lane_address(window, lane);
            asm volatile("" : "+r"(lane_table)::"memory");
            ring.fetch();
            float slab_sums[kTokenTiles][4] = {};
#pragma unroll
            for (int block = 0; block < kSlabBlocks; ++block) {
                uint32_t a[2][4];
                decode_block<kBits, table_bytes(kBits, kWarps)>(words[block / 2], block % 2, lane_table, a);
                // E4M4 bytes shifted by six are sixteenths of the scales in float16.
                uint32_t two = __byte_perm(scales[block / 2], 0, block % 2 ? 0x4342 : 0x4140) << 6;
                if constexpr (kTransformed) two = with_signs<__half>(two, arguments.signs);
                const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&two));
#pragma unroll
                for (int n = 0; n < kTokenTiles; ++n) {
                    float d[4] = {};
                    mma<T>(d, a[0], b[n][block][0], b[n][block][1]);
                    mma<T>(d, a[1], b[n][block][2], b[n][block][3]);
                    slab_sums[n][0] += d[0] * scale.x;
                    slab_sums[n][1] += d[1] * scale.x;
                    slab_sums[n][2] += d[2] * scale.y;
                    slab_sums[n][3] += d[3] * scale.y;
                }
            }
#pragma unroll
            for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (kTokenTiles > 1 || static_cast<unsigned>(token + i) < static_cast<unsigned>(tokens)) {
                        const uint32_t upper = tile_sums + (8 * n + i) * arguments.pitch * 4, lower = upper + 8 * 4;
                        if (!first) {
                            slab_sums[n][i] += load_shared_float(upper);
                            slab_sums[n][i + 2] += load_shared_float(lower);
                        }
                        store_shared_float(upper, slab_sums[n][i]);
                        store_shared_float(lower, slab_sums[n][i + 2]);
                    }
                }
            }
        }
    }

    // A thread adds up the sums of four rows: of the warps of its CTA; then, where the CTAs of a cluster share rows,
    // each sees to an equal share of them, and adds up what it finds in all.
    constexpr int kRows = 4;
    static_assert(kTileRows / kRows % kGemmMostSplit == 0, "the CTAs of a cluster have equally many rows to finish");
    const auto add = [](float (&to)[kRows], uint4 four) {
        to[0] += __uint_as_float(four.x);
        to[1] += __uint_as_float(four.y);
        to[2] += __uint_as_float(four.z);
        to[3] += __uint_as_float(four.w);
    };
    const bool split = kSm90 && split_log2 > 0;
    __syncthreads();
    unit = load_shared_float(unit_at);
    const int fours = tiles * kTileRows / kRows, partial = min(k_warps, slabs);  // fours: of a token
    const float per_four = __fdividef(1.0f, static_cast<float>(fours));
#pragma unroll 1
    for (int i = threadIdx.x; i < fours * tokens; i += kWarps * kWarp) {
        const int out_token = static_cast<int>((i + 0.5f) * per_four), row = (i - out_token * fours) * kRows;
        const uint32_t first = sums + 4 * (out_token * arguments.pitch + row);
        float total[kRows] = {};
        uint32_t address = first;
#pragma unroll 4
        for (int from = 0; from < partial; ++from, address += arguments.warp_floats * 4) {
            add(total, load_shared_16(address));
        }
        if (split) {
            store_shared_16(first, make_uint4(__float_as_uint(total[0]), __float_as_uint(total[1]),
                                              __float_as_uint(total[2]), __float_as_uint(total[3])));
        } else {
            store_rows<T>(part, out_token, first_tile * kTileRows + row, total, unit);
        }
    }
    if (!split) return;
    cluster_barrier();
    const int own = fours >> split_log2;
    const float per_own = __fdividef(1.0f, static_cast<float>(own));
#pragma unroll 1
    for (int i = threadIdx.x; i < own * tokens; i += kWarps * kWarp) {
        const int out_token = static_cast<int>((i + 0.5f) * per_own), row = (i - out_token * own + rank * own) * kRows;
        const uint32_t address = sums + 4 * (out_token * arguments.pitch + row);
        float total[kRows] = {};
#pragma unroll
        for (int from = 0; from < kGemmMostSplit; ++from) {
            add(total, load_cluster_16(cluster_address(address, from)));
        }
        store_rows<T>(part, out_token, first_tile * kTileRows + row, total, unit);
    }
    cluster_barrier();  // others may still read this CTA's sums
}

// --- launcher ------------------------------------------------------------------------------------

struct Launch {
    const Arguments& arguments;
    const GemmPlan& plan;
    bool transformed, awaits;
    const Gpu& gpu;
    cudaStream_t stream;

    template <int kBits, typename T, int kTokenTiles, int kWarps, bool kTransformed>
    cudaError_t run() const {
        static Launcher launcher(gemm_kernel<kBits, T, kTokenTiles, kWarps, kTransformed, false>, kWarps * kWarp,
                                 kAllShared);
        const int ctas = std::accumulate(plan.clusters, plan.clusters + kGemmParts, 0) * plan.split;
        return awaits ? launcher.launch_overlapping(gpu, ctas, plan.split, plan.shared_bytes, stream, arguments)
                      : launcher.launch(gpu, ctas, plan.split, plan.shared_bytes, stream, arguments);
    }
    template <int kBits, typename T, int kTokenTiles, int kWarps>
    cudaError_t run() const {
        return transformed ? run<kBits, T, kTokenTiles, kWarps, true>() : run<kBits, T, kTokenTiles, kWarps, false>();
    }
    template <int kBits, typename T>
    cudaError_t run() const {
        const bool one_tile = arguments.tokens <= 8;
        if (plan.warps == 16) return one_tile ? run<kBits, T, 1, 16>() : run<kBits, T, 2, 16>();
        return one_tile ? run<kBits, T, 1, 8>() : run<kBits, T, 2, 8>();
    }
};

template <int kBits, typename T, int kWarps>
cudaError_t launch_experts(const Arguments& arguments, const FewExpertsPlan& plan, const Gpu& gpu,
                           cudaStream_t stream) {
    static Launcher launcher(gemm_kernel<kBits, T, 1, kWarps, true, true>, kWarps * kWarp, kAllShared);
    return launcher.launch_overlapping(gpu, plan.clusters * plan.gemm.split, plan.gemm.split, plan.gemm.shared_bytes,
                                       stream, arguments);
}

// Of a plan for some products, or for a part of some rows of experts.
void set(Arguments& arguments, const GemmPlan& plan, int64_t tokens, int64_t in_features, bool signed_scales) {
    arguments.tokens = static_cast<int>(tokens);
    arguments.in_features = static_cast<int>(in_features);
    arguments.slabs = static_cast<int>(num_slabs(in_features));
    arguments.k_warps_log2 = log2_ceil(plan.k_warps);
    arguments.split_log2 = log2_ceil(plan.split);
    arguments.tokens_log2 = log2_ceil(tokens);
    arguments.pitch = sums_pitch(plan.tiles);
    arguments.warp_floats = sums_floats(arguments.tokens, plan.tiles);
    arguments.transforms = plan.transforms;
    arguments.signs = signs_of<__half>(signed_scales);
}

// Whose row tiles so many clusters divide evenly.
void set(Part& part, const Product& product, int clusters, int64_t in_features) {
    const int64_t row_tiles = TileLayout(product.out_features, in_features).row_tiles;
    part.bias = product.bias;
    part.y = product.y;
    part.words = product.words;
    part.scales = product.scales;
    part.codebook = product.codebook;
    part.x = product.x;
    part.columns = product.transform.columns;
    part.rotated = product.transform.rotated;
    part.out_features = static_cast<int>(product.out_features);
    part.cluster_tiles = static_cast<int>(row_tiles / clusters);
    part.more_tiles = static_cast<int>(row_tiles % clusters);
}

}  // namespace

cudaError_t gemm(const Product* products, int count, Dtype dtype, int bits, int64_t tokens, int64_t in_features,
                 const GemmPlan& plan, bool awaits, const Gpu& gpu, cudaStream_t stream) {
    if (plan.warps == 0) return cudaErrorInvalidConfiguration;
    Arguments arguments{};
    int clusters = 0;
    bool transformed = awaits;
    for (int i = 0; i < kGemmParts; ++i) {
        arguments.first_cluster[i] = clusters;
        if (i >= count) continue;
        set(arguments.parts[i], products[i], plan.clusters[i], in_features);
        clusters += plan.clusters[i];
        transformed |= products[i].transform.any();
    }
    arguments.x = products[0].x;
    set(arguments, plan, tokens, in_features, products[0].signed_scales);
    const Launch launch{arguments, plan, transformed, awaits, gpu, stream};
    return dispatch<__half, __nv_bfloat16>(
        bits, dtype, [&](auto width, auto value) { return launch.run<width(), decltype(value)>(); });
}

cudaError_t gemm_few_experts(const Product& product, const FewExperts& few, Dtype dtype, int bits, int64_t in_features,
                             const FewExpertsPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    if (plan.gemm.warps == 0) return cudaErrorInvalidConfiguration;
    Arguments arguments{};
    set(arguments.parts[0], product, 1, in_features);
    set(arguments, plan.gemm, plan.rows, in_features, product.signed_scales);
    arguments.rows = few.rows.index;
    arguments.offsets = few.offsets;
    arguments.experts = static_cast<int>(few.experts);
    arguments.y_rows = static_cast<int>(few.count);
    arguments.last_row = static_cast<int>(few.rows.count - 1);
    arguments.part_rows_log2 = log2_ceil(plan.rows);
    arguments.row_tiles = static_cast<int>(TileLayout(product.out_features, in_features).row_tiles);
    arguments.processors = gpu.processors / plan.gemm.split;
    arguments.least_clusters = plan.least_clusters;
    arguments.waves = plan.waves;
    arguments.swiglu = few.swiglu;
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        const auto run = plan.gemm.warps == 16 ? launch_experts<width(), decltype(value), 16>
                                               : launch_experts<width(), decltype(value), 8>;
        return run(arguments, plan, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
