// Products of very many tokens in int8 by a trellis of code mul1 on Hopper, whose weights are decoded first: beside
// decoding, tensor cores do not reach their speed in int8.
//
//   words    32-bit ones [K/16, N/16, 8 * bits]
//   weights  int8 [128 * row_tiles, width], columns in the order that inputs have (many_tokens.cuh)
//
// Of each 64 columns 16 t + 8 h + 2 m + e lies at 16 m + 4 t + 2 h + e. So four weights that follow each other in a
// stream, of a row and m and of all h and e, are a word.
//
// A CTA multiplies 128 rows by 256 tokens. One thread brings boxes of both sides, 128 columns at a time; each of two
// warpgroups has 64 rows. These leave sums in shared memory, in float16 and in the order of many_tokens.cuh, where
// three more warps turn and store them while the next tile is multiplied. All do so with a CTA's last tile.
#include "kernels/trellis/many_tokens.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kDecodeThreads = 128;

// A warp decodes 16 rows of 64 columns, lane 4 g + t as in many_tokens.cuh.
template <int bits>
__global__ void __launch_bounds__(kDecodeThreads)
    decode_int8_kernel(const __grid_constant__ ManyTrellisArguments arguments, int pieces, int8_t* weights) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const unsigned unit = blockIdx.x * (kDecodeThreads / 32) + threadIdx.x / 32;
    const int row = static_cast<int>(unit / static_cast<unsigned>(pieces)),
              piece = static_cast<int>(unit % static_cast<unsigned>(pieces));
    let_next_kernel_start();
    wait_for_kernel_before();
    const int part = part_of(arguments, row / kManyTrellisTiles), down = arguments.parts[part].down;
    const int own_row = row - arguments.parts[part].first_tile * kManyTrellisTiles;
    if (own_row >= down) return;  // behind a part whose last tiles are fewer
    // Beyond K inputs are zeros, and any finite weights do.
    const int strip = min(4 * piece + t, arguments.across - 1);
    const uint32_t* from = arguments.parts[part].words + (int64_t{strip} * down + own_row) * (8 * bits) + g * bits;
    uint32_t own[bits + 1];
    load_words(from, lane, own);
    // Of row g and m its words of four lanes are side by side, then those of row g + 8: lane t takes m = t of all.
    uint4* to = reinterpret_cast<uint4*>(weights + (int64_t{row} * kTrellisTile + g) * pieces * kManyTrellisPiece) +
                int64_t{piece} * (kManyTrellisPiece / 16) + t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t of_m[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) of_m[m] = four_int8(own, 4 * (2 * m + half));
        // Two exchanges turn the square of four lanes by four words.
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
            const bool upper = t & distance;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & distance) continue;
                uint32_t &low = of_m[i], &high = of_m[i + distance];
                const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? low : high, distance);
                (upper ? low : high) = other;
            }
        }
        to[half * 8 * int64_t{pieces} * (kManyTrellisPiece / 16)] = make_uint4(of_m[0], of_m[1], of_m[2], of_m[3]);
    }
}

// Shared memory of a CTA: stages of boxes of both sides, a tile's sums, and barriers.
struct Ring {
    static constexpr int kTokens = 256, kWarps = 8, kFinishers = 3, kThreads = 32 * (kWarps + 1 + kFinishers);
    static constexpr int kWeightBytes = kManyTrellisRows * 128, kStageBytes = kWeightBytes + kTokens * 128;
    // Of a token, shifted against the next one, so that a warp's stores lie in different banks.
    static constexpr int kHeldBytes = 2 * kManyTrellisRows + 16;
    static constexpr int kStages = 3,
                         kShared = kManyTrellisAlign + kStages * (kStageBytes + 16) + kTokens * kHeldBytes + 16;
    static_assert(kShared <= kManyTrellisShared);

    uint32_t stages, held, full, empty, held_full, held_empty;
    int stage = 0, phase = 0;

    __device__ __forceinline__ explicit Ring(uint32_t begin)
        : stages(begin),
          held(begin + kStages * kStageBytes),
          full(held + kTokens * kHeldBytes),
          empty(full + 8 * kStages),
          held_full(empty + 8 * kStages),
          held_empty(held_full + 8) {}
    __device__ __forceinline__ uint32_t here() const { return stages + stage * kStageBytes; }
    __device__ __forceinline__ int stage_before() const { return (stage == 0 ? kStages : stage) - 1; }
    __device__ __forceinline__ void advance() {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

__device__ __forceinline__ void bring(const CUtensorMap& weights, const CUtensorMap& inputs,
                                      const ManyTrellisArguments& arguments, Ring ring) {
    wait_for_kernel_before();
    for (int number = blockIdx.x; number < arguments.units; number += gridDim.x) {
        const ManyTrellisUnit unit = unit_of<Ring::kTokens>(arguments, number);
        for (int i = 0; i < 2 * arguments.steps; ++i, ring.advance()) {
            const uint32_t barrier = ring.full + 8 * ring.stage;
            wait_barrier(ring.empty + 8 * ring.stage, ring.phase ^ 1);
            expect_bytes(barrier, Ring::kStageBytes);
            bulk_copy_box(ring.here(), &weights, 128 * i, unit.row_tile * kManyTrellisRows, barrier);
            bulk_copy_box(ring.here() + Ring::kWeightBytes, &inputs, 128 * i, unit.before + unit.tile.first, barrier);
        }
    }
}

// The outputs of a tile by one of several warps.
template <bool kOctets, typename T>
__device__ __forceinline__ void finish_tile(const ManyTrellisArguments& arguments,
                                            const ManyTrellisOutputs<T>& outputs, const Ring& ring, int number,
                                            int finisher, int finishers) {
    constexpr int kAtOnce = 32 / kOutputLanes;  // tokens
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const ManyTrellisUnit unit = unit_of<Ring::kTokens>(arguments, number);
#pragma unroll 1
    for (int first = kAtOnce * finisher; first < Ring::kTokens; first += kAtOnce * finishers) {
        const int token = first + lane / kOutputLanes, row = unit.tile.first + token;
        const uint32_t from = ring.held + token * Ring::kHeldBytes + 16 * (lane % kOutputLanes);
        float values[4][8] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) add_piece(load_shared_16(from + 64 * j), values[j]);
        store_outputs<kOctets>(outputs, unit.part, values, unit.before + row, unit.row_tile, row < unit.tile.end, 0);
    }
}

template <bool kOctets, typename T>
__device__ __forceinline__ void multiply(const ManyTrellisArguments& arguments, const ManyTrellisOutputs<T>& outputs,
                                         Ring ring, int warp) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    const bool tells = lane == 0;
    int number = blockIdx.x, held_phase = 0;
#pragma unroll 1
    for (; number < arguments.units; number += gridDim.x, held_phase ^= 1) {
        int32_t sums[Ring::kTokens / 2];
#pragma unroll 1
        for (int i = 0; i < 2 * arguments.steps; ++i, ring.advance()) {
            wait_barrier(ring.full + 8 * ring.stage, ring.phase);
            const uint64_t rows = swizzled_matrix(ring.here() + warp / 4 * 64 * 128);
            const uint64_t columns = swizzled_matrix(ring.here() + Ring::kWeightBytes);
            wgmma_fence();
            // In units of 16 bytes; an instruction has 32 bytes of a row and of a token.
#pragma unroll
            for (int m = 0; m < 4; ++m) wgmma_of_shared(sums, rows + 2 * m, columns + 2 * m, i + m > 0);
            wgmma_commit();
            wgmma_wait<1>();
            // Of the stage before this one the tensor cores have read all.
            if (i > 0 && tells) arrive(ring.empty + 8 * ring.stage_before());
        }
        wgmma_wait<0>();
        if (tells) arrive(ring.empty + 8 * ring.stage_before());
#pragma unroll
        for (int& sum : sums) asm volatile("" : "+r"(sum)::"memory");
        wait_barrier(ring.held_empty, held_phase ^ 1);
        const uint32_t to = ring.held + 2 * t * Ring::kHeldBytes + (8 * warp + g) * 4;
#pragma unroll
        for (int i = 0; i < Ring::kTokens / 2; i += 4) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const __half2 two = __floats2half2_rn(static_cast<float>(sums[i + odd]) * arguments.unit,
                                                      static_cast<float>(sums[i + 2 + odd]) * arguments.unit);
                store_shared_4(to + (2 * i + odd) * Ring::kHeldBytes, reinterpret_cast<const uint32_t&>(two));
            }
        }
        __syncwarp();
        if (tells) arrive(ring.held_full);
    }
    wait_for_kernel_before();
    wait_barrier(ring.held_full, held_phase ^ 1);
    finish_tile<kOctets>(arguments, outputs, ring, number - static_cast<int>(gridDim.x), Ring::kFinishers + warp,
                         Ring::kFinishers + Ring::kWarps);
}

template <bool kOctets, typename T>
__device__ __forceinline__ void finish(const ManyTrellisArguments& arguments, const ManyTrellisOutputs<T>& outputs,
                                       const Ring& ring, int finisher) {
    wait_for_kernel_before();
    int phase = 0;
    for (int number = blockIdx.x; number < arguments.units; number += gridDim.x, phase ^= 1) {
        const bool last = number + static_cast<int>(gridDim.x) >= arguments.units;
        wait_barrier(ring.held_full, phase);
        finish_tile<kOctets>(arguments, outputs, ring, number, finisher, Ring::kFinishers + (last ? Ring::kWarps : 0));
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(ring.held_empty);
    }
}

template <typename T, bool kOctets>
__global__ void __launch_bounds__(Ring::kThreads, 1)
    multiply_int8_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap inputs,
                         const __grid_constant__ ManyTrellisArguments arguments,
                         const __grid_constant__ ManyTrellisOutputs<T> outputs) {
    if constexpr (kHopper) {
        extern __shared__ __align__(1024) char smem[];
        constexpr uint32_t kAlign = kManyTrellisAlign;
        const Ring ring((shared_address(smem) + kAlign - 1) / kAlign * kAlign);
        const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
        if (threadIdx.x == 0) {
            for (int i = 0; i < Ring::kStages; ++i) {
                init_barrier(ring.full + 8 * i, 1);
                init_barrier(ring.empty + 8 * i, Ring::kWarps);
            }
            init_barrier(ring.held_full, Ring::kWarps);
            init_barrier(ring.held_empty, Ring::kFinishers);
            fence_barriers();
        }
        __syncthreads();
        let_next_kernel_start();
        if (warp < Ring::kWarps) {
            multiply<kOctets>(arguments, outputs, ring, warp);
        } else if (warp < Ring::kWarps + Ring::kFinishers) {
            finish<kOctets>(arguments, outputs, ring, warp - Ring::kWarps);
        } else if (threadIdx.x % 32 == 0) {
            bring(weights, inputs, arguments, ring);
        }
    } else {
        __trap();
    }
}

}  // namespace

template <typename T>
cudaError_t multiply_decoded_int8(const CUtensorMap& inputs, const ManyTrellisArguments& arguments,
                                  const ManyTrellisOutputs<T>& outputs, int bits, int8_t* weights,
                                  const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    const int pieces = static_cast<int>(ceil_div(arguments.across * kTrellisTile, kManyTrellisPiece));
    const int rows = arguments.row_tiles * kManyTrellisRows;
    CUtensorMap map;
    cudaError_t error = map_of_rows(weights, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, pieces * kManyTrellisPiece,
                                    kManyTrellisRows, map);
    if (error != cudaSuccess) return error;
    error = dispatch_trellis(bits, [&](auto width) {
        static Launcher launcher(decode_int8_kernel<width()>, kDecodeThreads, 0);
        const int64_t warps = int64_t{arguments.row_tiles} * kManyTrellisTiles * pieces;
        return launcher.launch_overlapping(gpu, ceil_div(warps, kDecodeThreads / 32), 1, 0, stream, arguments, pieces,
                                           weights);
    });
    if (error != cudaSuccess) return error;
    const auto multiply = [&](auto octets) {
        static Launcher launcher(multiply_int8_kernel<T, octets()>, Ring::kThreads, kAllShared);
        return launcher.launch_overlapping(gpu, plan.ctas, 1, Ring::kShared, stream, map, inputs, arguments, outputs);
    };
    return outputs.octets() ? multiply(std::true_type{}) : multiply(std::false_type{});
}
template cudaError_t multiply_decoded_int8(const CUtensorMap&, const ManyTrellisArguments&,
                                           const ManyTrellisOutputs<__half>&, int, int8_t*, const ManyTrellisPlan&,
                                           const Gpu&, cudaStream_t);
template cudaError_t multiply_decoded_int8(const CUtensorMap&, const ManyTrellisArguments&,
                                           const ManyTrellisOutputs<__nv_bfloat16>&, int, int8_t*,
                                           const ManyTrellisPlan&, const Gpu&, cudaStream_t);

}  // namespace hf_kbit::cuda
