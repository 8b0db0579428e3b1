// Products of up to 16 tokens by a trellis of code mul1, in whole numbers (docs/internals.md, "Trellises in whole
// numbers"): the same bits as csrc/cpu/trellis.h.
//
//   words   32-bit ones [K/16, N/16, 8 * bits]      x  16-bit floats [M, K]      y  the same [M, N]
//
// Two kernels. `turn` (few_inputs.cuh) turns tokens and rounds them to 14 bits, which are two columns of int8: 128
// times the first one, and the second. `multiply` adds up products of bytes, and turns what comes out.
//
// A weight of mul1 is a sum of the four bytes of a product, but for a scale and a constant that come behind. So a
// product is four elements of operand A of int8's mma.m16n8k32 as it is, where each input stands four times in operand
// B: the tensor core adds up the bytes.
//
// A CTA owns 64 outputs, four tiles, and a part of K; its warps take 64 inputs at a time, four tiles. Lane 4 g + t
// takes of the tile t along K, and of the tile g / 2 along N, 128 weights, one piece of the stream: so a step costs
// `bits` loads of 16 bytes, and the word before comes from the lane of the tile's other half. CTAs leave
// sums in memory, and the last one of those that have some of 128 outputs adds them up and turns them: int32 is right
// in any order. Several weights of the same inputs are one, their outputs side by side; of experts each row is a
// product of its own by the weight that it has.
// Launches overlap: `multiply` asks for its first weights before it waits for its inputs.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"
#include "kernels/trellis/few_inputs.cuh"
#include "kernels/trellis/values.cuh"

namespace hf_kbit::cuda {

namespace {

// --- the product ---------------------------------------------------------------------------------

[[maybe_unused]] __device__ __forceinline__ void mma_bytes(int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                           uint32_t b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A stage of a warp's ring, in pieces of 16 bytes: weights of four tiles along K, each with those of four along N,
// then a piece for each column and tile. The tiles along K are shifted against each other, so that eight lanes of a
// load touch all banks.
template <int bits>
__device__ __forceinline__ constexpr int stage_start(int t) {
    return t * 8 * bits + (bits % 2 ? 2 * t : bits == 2 ? (t & 1) + 4 * (t >> 1) : t);
}

// A weight, whose tiles are those from `first_tile` on of all that share a launch.
struct Part {
    const uint32_t* words;
    const __half* svh;
    const void* bias;
    void* y;
    int first_tile, down, out_features;
};

// An item has columns and tokens of its own: a part, or a row of an expert.
struct Arguments {
    Part parts[kTrellisParts];
    const int8_t* columns;
    const TrellisToken* tokens;
    int32_t* sums;           // [rows of experts, split, count, 16 * down]
    uint32_t* counts;        // of each 128 outputs how many CTAs have theirs there
    const int32_t* weights;  // of rows of experts, or null
    int num_parts, num_weights, ctas_of_row, across, down, count, split, steps_of_split, block;
    bool bfloat16;
};

// What a number was before; orders what threads of this and of other CTAs write and read before and behind it.
__device__ __forceinline__ uint32_t count_up(uint32_t* number) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(number) : "memory");
    return before;
}

// --- outputs -------------------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ void store_output(const Part& part, int64_t at, int row, float value) {
    const auto* bias = static_cast<const T*>(part.bias);
    store(static_cast<T*>(part.y) + at, bias ? __fadd_rn(value, as_float(bias[row])) : value);
}

// An item's row among those of experts, or 0, and which weight of theirs it has.
__device__ __forceinline__ int row_of(const Arguments& arguments, int item) { return arguments.weights ? item : 0; }
__device__ __forceinline__ int weight_of(const Arguments& arguments, int item) {
    return arguments.weights ? min(arguments.weights[item], arguments.num_weights - 1) : 0;
}

// Four outputs from `row` on of a token; a warp has 128 of them.
__device__ __forceinline__ void finish_token(const Arguments& arguments, const Part& part, int item, int token,
                                             int row) {
    const int padded_out = part.down * kTrellisTile, pitch = arguments.down * kTrellisTile;
    int of_upper[4] = {}, of_lower[4] = {};
    const int item_row = row_of(arguments, item), weight = weight_of(arguments, item);
    const TrellisToken own = arguments.tokens[item * (arguments.count / 2) + token];
    float scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const bool there = row + i < part.out_features;
        scales[i] = there ? __half2float(part.svh[int64_t{weight} * padded_out + row + i]) : 0.0f;
    }
    const int64_t begin = int64_t{item_row} * arguments.split * arguments.count + 2 * token;
    const auto* from =
        reinterpret_cast<const int4*>(arguments.sums + begin * pitch + part.first_tile * kTrellisTile + row);
#pragma unroll 4
    for (int i = 0; i < (row < padded_out ? arguments.split : 0); ++i) {
        const int4 upper = __ldcg(from), lower = __ldcg(from + pitch / 4);
        of_upper[0] += upper.x, of_upper[1] += upper.y, of_upper[2] += upper.z, of_upper[3] += upper.w;
        of_lower[0] += lower.x, of_lower[1] += lower.y, of_lower[2] += lower.z, of_lower[3] += lower.w;
        from += int64_t{arguments.count} * pitch / 4;
    }
    constexpr auto kScale = static_cast<int64_t>(kSumScale / kSumUnit),
                   kZero = static_cast<int64_t>(kSumZero / kSumUnit);
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = __ll2float_rn(kScale * (int64_t{of_upper[i]} * 128 + of_lower[i]) + kZero * own.sum);
    }
    turn_own(values);
    for (int distance = 1; distance < arguments.block / 4; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = turned_with_lane(values[i], distance);
    }
    const float scale = __fmul_rn(own.scale, kSumUnit / static_cast<float>(arguments.block));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (row + i >= part.out_features) return;
        const float value = __fmul_rn(__fmul_rn(values[i], scale), scales[i]);
        const int64_t at = int64_t{item_row + token} * part.out_features + row + i;
        if (arguments.bfloat16) {
            store_output<__nv_bfloat16>(part, at, row + i, value);
        } else {
            store_output<__half>(part, at, row + i, value);
        }
    }
}

// --- the kernel ----------------------------------------------------------------------------------

template <int bits, int kGroups>
__global__ void __launch_bounds__(kFewTrellisThreads, few_trellis_ctas(bits, kGroups))
    multiply_trellis_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (kArch >= 800) {
        extern __shared__ __align__(128) char smem[];
        constexpr int kDepth = few_trellis_depth(bits, kGroups, kArch);
        constexpr int kPieces = few_trellis_stage_bytes(bits, kGroups) / 16;
        const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        const int g = lane / 4, t = lane % 4, count = arguments.count;
        int item = 0, cta = static_cast<int>(blockIdx.x);
        if (kGroups == 1 && arguments.weights) {
            wait_for_kernel_before();
            item = cta / arguments.ctas_of_row, cta %= arguments.ctas_of_row;
        }
        const int all_tile = cta / arguments.split * kFewTrellisTiles, share = cta % arguments.split;
        int own_part = 0;
        while (own_part + 1 < arguments.num_parts && all_tile >= arguments.parts[own_part + 1].first_tile) ++own_part;
        if (!arguments.weights) item = own_part;
        const Part& part = arguments.parts[own_part];
        const int row_tile = all_tile - part.first_tile, down = part.down;
        if (row_tile >= down) return;  // behind a part whose last 128 outputs are half of them
        const char* const all_words = reinterpret_cast<const char*>(part.words) +
                                      int64_t{weight_of(arguments, item)} * arguments.across * down * (32 * bits);
        const int steps = (arguments.across + 3) / 4;
        const int last = min(steps, (share + 1) * arguments.steps_of_split);
        const int first = share * arguments.steps_of_split + warp;
        char* const ring = smem + warp * kDepth * kPieces * 16;
        const int padded_in = arguments.across * kTrellisTile;
        const auto fetch_weights = [&](int step, char* stage) {
#pragma unroll
            for (int i = 0; i < bits; ++i) {
                const int piece = i * 32 + lane, tile = piece / (8 * bits), unit = piece % (8 * bits);
                // Beyond the last tile, along K or N, another one is read: its inputs are zeros, or nobody adds its
                // sums.
                const int column = min(4 * step + tile, arguments.across - 1);
                const int row = min(row_tile + unit / (2 * bits), down - 1);
                const char* from = all_words + (int64_t{column} * down + row) * (32 * bits) + unit % (2 * bits) * 16;
                cp_async_16(stage + (stage_start<bits>(tile) + unit) * 16, from);
            }
        };
        const auto fetch_inputs = [&](int step, char* stage) {
#pragma unroll
            for (int i = 0; i < kGroups; ++i) {
                const int column = g + 8 * i, tile = 4 * step + t;
                const bool there = column < count && tile < arguments.across;
                const int at = (item * count + (there ? column : 0)) * padded_in + (there ? tile : 0) * kTrellisTile;
                cp_async_16_or_zeros(shared_address(stage + (kPieces - 32 * (kGroups - i) + lane) * 16),
                                     arguments.columns + at, there);
            }
        };
        // Weights are there already while the kernel before makes inputs.
#pragma unroll 1
        for (int i = 0; i < kDepth; ++i) {
            const int step = first + i * kFewTrellisWarps;
            if (step < last) fetch_weights(step, ring + i * kPieces * 16);
        }
        wait_for_kernel_before();
        let_next_kernel_start();
#pragma unroll 1
        for (int i = 0; i < kDepth; ++i) {
            const int step = first + i * kFewTrellisWarps;
            if (step < last) fetch_inputs(step, ring + i * kPieces * 16);
            cp_async_commit();
        }
        int32_t sums[4][kGroups][4] = {};
        int stage_index = 0;
#pragma unroll 1
        for (int step = first; step < last; step += kFewTrellisWarps) {
            cp_async_wait<kDepth - 1>();
            __syncwarp();
            char* const stage = ring + stage_index * kPieces * 16;
            uint32_t words[4 * bits + 1];
#pragma unroll
            for (int i = 0; i < bits; ++i) {
                const uint4 four = load_shared_16(shared_address(stage + (stage_start<bits>(t) + g * bits + i) * 16));
                uint32_t* to = words + 1 + 4 * i;
                to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
            }
            // Two neighbouring groups of lanes have a tile, whose ends meet.
            words[0] = __shfl_xor_sync(kAllLanes, words[4 * bits], 4);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint2 inputs[kGroups];
#pragma unroll
                for (int group = 0; group < kGroups; ++group) {
                    const int piece = kPieces - 32 * (kGroups - group) + lane;
                    inputs[group] = load_shared_8(shared_address(stage + piece * 16 + half * 8));
                }
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {  // inputs 2 i, 2 i + 1, 2 i + 8, 2 i + 9
                    uint32_t x[kGroups][4];
#pragma unroll
                    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            x[group][j] = __byte_perm(i % 2 ? inputs[group].y : inputs[group].x, 0, 0x1111 * j);
                        }
                    }
#pragma unroll
                    for (int row = 0; row < 4; ++row) {
                        uint32_t p[8];
#pragma unroll
                        for (int j = 0; j < 8; ++j) {
                            p[j] = window(words, (row * 32 + i * 8 + j + 1) * bits) * code_factor(Code::mul1);
                        }
                        const uint32_t a[4] = {p[0], p[4], p[1], p[5]}, b[4] = {p[2], p[6], p[3], p[7]};
#pragma unroll
                        for (int group = 0; group < kGroups; ++group) {
                            mma_bytes(sums[row][group], a, x[group][0], x[group][1]);
                            mma_bytes(sums[row][group], b, x[group][2], x[group][3]);
                        }
                    }
                }
            }
            __syncwarp();  // before the stage is filled again
            const int next = step + kDepth * kFewTrellisWarps;
            if (next < last) fetch_weights(next, stage), fetch_inputs(next, stage);
            cp_async_commit();
            stage_index = stage_index + 1 == kDepth ? 0 : stage_index + 1;
        }
        cp_async_wait<0>();
        __syncthreads();
        // The warps' sums meet in shared memory.
        auto* const all = reinterpret_cast<int32_t*>(smem);
        const int first_row = 16 * (g / 2) + 4 * (g % 2);
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int column = 8 * group + 2 * t + c % 2;
                int32_t* at = all + (warp * 8 * kGroups + column) * kFewTrellisPitch + first_row + 8 * (c / 2);
                *reinterpret_cast<int4*>(at) =
                    make_int4(sums[0][group][c], sums[1][group][c], sums[2][group][c], sums[3][group][c]);
            }
        }
        __syncthreads();
        const int rows = min(kFewTrellisTiles, down - row_tile) * kTrellisTile;
        const int pitch = arguments.down * kTrellisTile;
        for (int i = threadIdx.x; i < 16 * kFewTrellisTiles * count; i += kFewTrellisThreads) {
            const int row = i % (16 * kFewTrellisTiles), column = i / (16 * kFewTrellisTiles);
            int32_t sum = 0;
#pragma unroll
            for (int w = 0; w < kFewTrellisWarps; ++w) {
                sum += all[(w * 8 * kGroups + column) * kFewTrellisPitch + row];
            }
            const int64_t at = ((int64_t{row_of(arguments, item)} * arguments.split + share) * count + column) * pitch;
            if (row < rows) arguments.sums[at + all_tile * kTrellisTile + row] = sum;
        }
        // Whoever is the last of those that have some of 128 outputs turns them.
        auto& last_one = *reinterpret_cast<bool*>(smem);
        __syncthreads();
        if (threadIdx.x == 0) {
            const int first_of_octet = row_tile / 8 * 8, octets = (arguments.down + 7) / 8;
            const int ctas = min(2, (down - first_of_octet + 3) / 4) * arguments.split;
            const uint32_t before = count_up(arguments.counts + row_of(arguments, item) * octets + all_tile / 8);
            last_one = before + 1 == static_cast<uint32_t>(ctas);
        }
        __syncthreads();
        if (!last_one) return;
        for (int token = warp; token < count / 2; token += kFewTrellisWarps) {
            finish_token(arguments, part, item, token, row_tile / 8 * 128 + 4 * lane);
        }
    }
}

// run(std::integral_constant<int, groups>)
template <typename Run>
cudaError_t dispatch_groups(int groups, const Run& run) {
    return groups == 1   ? run(std::integral_constant<int, 1>{})
           : groups == 2 ? run(std::integral_constant<int, 2>{})
                         : run(std::integral_constant<int, 4>{});
}

}  // namespace

cudaError_t few_trellis_tokens(const std::vector<TrellisProduct>& products, const TrellisExperts& experts, Dtype dtype,
                               int64_t tokens, const FewTrellisPlan& plan, const FewTrellisRoom& room, const Gpu& gpu,
                               cudaStream_t stream) {
    const TrellisProduct& one = products[0];
    const auto num_parts = static_cast<int>(products.size());
    const int64_t rows = experts.offsets ? tokens * experts.weights : 1, items = tokens * num_parts * experts.weights;
    Arguments arguments{{},
                        room.columns,
                        room.tokens,
                        room.sums,
                        room.counts,
                        experts.offsets ? room.weights : nullptr,
                        num_parts,
                        experts.count * experts.weights,
                        plan.ctas,
                        static_cast<int>(one.across),
                        plan.down,
                        static_cast<int>(experts.offsets ? 2 : 2 * tokens),
                        plan.split,
                        plan.steps_of_split,
                        one.sides.block,
                        dtype == Dtype::bfloat16};
    FewTrellisScales scales{};
    int64_t first_tile = 0;
    for (int i = 0; i < num_parts; ++i) {
        const TrellisProduct& its = products[i];
        scales.of_parts[i] = reinterpret_cast<const __half*>(its.sides.suh);
        arguments.parts[i] = {its.words,
                              reinterpret_cast<const __half*>(its.sides.svh),
                              its.bias,
                              its.y,
                              static_cast<int>(first_tile),
                              static_cast<int>(its.down),
                              static_cast<int>(its.sides.out_features)};
        first_tile += few_trellis_tiles(its.down);
    }
    const int cluster = few_trellis_turn_cluster(one.sides.padded_in, gpu);
    const cudaError_t error = dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
        using T = decltype(value);
        static Launcher alone(turn_kernel<T, kTurnThreads>, kTurnThreads, 0);
        static Launcher clusters(turn_kernel<T, kTurnClusterThreads>, kTurnClusterThreads, 0);
        return (gpu.arch >= 900 ? clusters : alone)
            .launch_overlapping(gpu, items * cluster, cluster, 0, stream, static_cast<const T*>(one.x), scales,
                                cluster, static_cast<int>(tokens), experts, static_cast<int>(one.sides.in_features),
                                static_cast<int>(one.sides.padded_in), one.sides.block, room,
                                static_cast<int>(rows * few_trellis_counts(plan)));
    });
    if (error != cudaSuccess) return error;
    return dispatch_trellis(one.bits, [&](auto width) {
        return dispatch_groups(few_trellis_groups(arguments.count), [&](auto groups) {
            static Launcher launcher(multiply_trellis_kernel<width(), groups()>, kFewTrellisThreads, kAllShared);
            return launcher.launch_overlapping(gpu, rows * plan.ctas, 1, plan.shared_bytes, stream, arguments);
        });
    });
}

}  // namespace hf_kbit::cuda
