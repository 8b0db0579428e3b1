// y = x @ W.T (+ bias) for up to 16 tokens, W in tiles. One launch may take several weights, for the same x; or, of
// experts, a few rows of x, each with the weight of its own expert.
//
//   x         float16 or bfloat16 [M, K], row-major, K a multiple of 8
//   words     int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16]     codebook  float32 [2**bits]
//   bias      [N] or null                          y       [M, N], row-major, both of x's dtype
//   columns   uint8 [K], as E4M4, or null
//
// GPUs from compute capability 8.0 on. A warp takes a slab (16 rows x 256 columns) at a time:
//
//   words and scales --cp.async or bulk copies--> ring in shared memory, one to three slabs ahead (ring.cuh)
//     --> registers --one byte permute--> address of a pair of codes --table--> operand A of mma.m16n8k16
//     --> sums of a block (32 columns) in float32 --times the block's scale--> sums of the slab
//     --> shared memory, where the warps' and then, in a cluster, the CTAs' sums meet in a fixed order --> y
//
// The table holds the pair of levels for every byte of codes (2 bits: two pairs, for both rows of a lane; 5 bits: for
// every ten bits), once for each lane: no bank conflicts. Tokens are operand B. Scales are applied after the product:
// four multiply-adds for 512 weights.
//
// Where weights have column scales or a rotation (transform.cuh), what is multiplied is (x * columns) @ R. For one
// token a CTA makes it from x for its slabs (activations.cuh); for more, inputs/transform.cu makes it, while this
// kernel builds its table and asks for its first slabs. These weights have kernels of their own, so that others pay
// nothing.
//
// Of experts a part is a row, or up to eight rows that an expert has (experts.cuh). All but the table waits for the
// kernel before. CTAs for which nothing is left end.
//
// What limits it and what was tried: docs/lab.
#include <numeric>
#include <type_traits>

#include "kernels/dispatch.h"
#include "kernels/few_tokens/activations.cuh"
#include "kernels/few_tokens/experts.cuh"
#include "kernels/few_tokens/ring.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

using namespace few_tokens;

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
