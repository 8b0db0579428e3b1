// What many_tokens.cu multiplies with: turned inputs by a trellis, decoded in registers as operand A of wgmma.
//
//   inputs  float16 [tokens, width], their columns in the order of lanes
//   words   32-bit ones [K/16, N/16, 8 * bits]
//   sums    float16 [split, tokens, 128 * row_tiles], of each 16 rows 0, 8, 1, 9, ..., 7, 15
//
// A warp decodes 16 rows, a piece of 64 columns at a time, four tiles: lane 4 g + t takes of tile t the weights of
// rows g and g + 8, which are `bits` words of its stream, and the last of those of lane 4 (g - 1) + t for the windows
// that begin there. So in step m of wgmma lane t has columns 16 t + 2 m, + 1, + 8 and + 9 of a piece where the
// instruction wants places 2 t, + 1, + 8 and + 9: `turn` puts them there.
//
// Of code mul1 dp4a makes 1024 + s as float16 of a product's four bytes, whose sum is s, a permute packs two, and one
// HFMA2 makes them the weights, to the bit. Of int8 a product's bytes times 64 are added up; a stage has two pieces,
// and in step m of a piece lane t has columns 16 t + 4 m, + 1, + 8 and + 9, then those two further.
//
// One lane of each group brings a piece's inputs, a box of a tensor map, and its words, a strip for each tile along K:
// those of the first stages before the kernel before has ended. Beyond the last strip or row of tiles old words stay
// where they are: any words are finite weights, whose inputs are zeros, or whose sums nobody reads. The tensor cores
// work on a piece while the next one is decoded, but of 128 tokens, where registers are short, while others decode.
#pragma once

#include "kernels/dispatch.h"
#include "kernels/hopper/tensor_map.h"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"
#include "kernels/trellis/many_outputs.cuh"
#include "kernels/trellis/many_plan.h"
#include "kernels/trellis/values.cuh"

namespace hf_kbit::cuda {

// A weight, and its first row of tiles of 128 among those of all.
struct ManyTrellisPart {
    const uint32_t* words;
    int down, first_tile;
};

// Of experts there are tiles, and one part.
struct ManyTrellisArguments {
    ManyTrellisPart parts[kTrellisParts];
    __half* sums;
    int num_parts, tokens, across, steps, token_tiles, row_tiles, split, units;
    float unit;  // of sums
    const ManyTrellisTile* tiles;
};

__device__ __forceinline__ int part_of(const ManyTrellisArguments& arguments, int row_tile) {
    int part = 0;
    while (part + 1 < arguments.num_parts && row_tile >= arguments.parts[part + 1].first_tile) ++part;
    return part;
}

// What a number of a launch's units stands for: rows of a weight, and rows of inputs, of which there are so many
// before those of the part.
struct ManyTrellisUnit {
    int part, row_tile, before;
    ManyTrellisTile tile;
};
template <int kTokens>
__device__ __forceinline__ ManyTrellisUnit unit_of(const ManyTrellisArguments& arguments, int number) {
    const int tile = number / arguments.split;
    if (arguments.tiles) return {0, tile % arguments.row_tiles, 0, arguments.tiles[1 + tile / arguments.row_tiles]};
    const int row_tile = tile / arguments.token_tiles, part = part_of(arguments, row_tile);
    return {part, row_tile, part * arguments.tokens, {0, tile % arguments.token_tiles * kTokens, arguments.tokens}};
}

// What a CTA does, in its two roles: bring, and decode and multiply.
template <int bits, Code code, typename T, int kTokens>
struct ManyTrellisCta {
    static constexpr bool kInt8 = std::is_same_v<T, int8_t>;
    static_assert(!kInt8 || code == Code::mul1);
    static constexpr int kPieces = many_trellis_pieces(kInt8), kStrips = 4 * kPieces;
    using Sum = std::conditional_t<kInt8, int32_t, float>;
    static constexpr int kGroups = many_trellis_groups(kTokens), kWarps = many_trellis_warps(kTokens);
    static constexpr int kStages = many_trellis_stages(bits, kTokens, kInt8);
    static constexpr int kInputBytes = many_trellis_input_bytes(kTokens);
    static constexpr int kPieceBytes = many_trellis_word_bytes(bits), kWordBytes = kPieces * kPieceBytes;
    static constexpr int kDecoderRegisters = kGroups == 1 ? 232 : 112, kBringerRegisters = kGroups == 1 ? 40 : 32;
    static constexpr int kSums = kTokens / 2, kPending = kTokens == 128 ? 0 : 1;
    static_assert(kStages >= (kInt8 && kPending == 0 ? 2 : 3));

    const ManyTrellisArguments& arguments;
    const uint32_t inputs, exchange, words, full, empty;

    __device__ __forceinline__ ManyTrellisCta(const ManyTrellisArguments& arguments, uint32_t begin)
        : arguments(arguments),
          inputs(begin),
          exchange(inputs + kGroups * kStages * kInputBytes),
          words(exchange + many_trellis_exchange_bytes(kTokens)),
          full(words + kGroups * kStages * kWordBytes),
          empty(full + kGroups * kStages * 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kGroups * kStages; ++i) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, kWarps / kGroups);
        }
        fence_barriers();
    }

    // Units, where those of experts are known.
    __device__ __forceinline__ int units() const {
        if (!arguments.tiles) return arguments.units;
        wait_for_kernel_before();
        return arguments.tiles->weight * arguments.row_tiles;
    }
    // Of a unit the stages that a group has.
    struct Stages {
        int first, count;
    };
    __device__ __forceinline__ Stages stages_of(int number, int group) const {
        const int part = number % arguments.split;
        const int first = arguments.steps * part / arguments.split;
        const int steps = arguments.steps * (part + 1) / arguments.split - first;
        // Of a single step the second group has the next one, beyond K, whose inputs are zeros.
        const int of_first = (steps + kGroups - 1) / kGroups, own = group == 0 ? of_first : max(1, steps - of_first);
        return {2 * (first + group * of_first), 2 * own};
    }
    static __device__ __forceinline__ void advance(int& stage, int& phase) {
        if (++stage == kStages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // --- who brings ---

    __device__ __forceinline__ void bring_words(const ManyTrellisUnit& unit, int number, int at) const {
        constexpr int kTileBytes = 32 * bits;
        const ManyTrellisPart& part = arguments.parts[unit.part];
        const int first_tile = (unit.row_tile - part.first_tile) * kManyTrellisTiles;
        const int bytes = min(kManyTrellisTiles, part.down - first_tile) * kTileBytes;
        const int strip = kStrips * number, strips = max(0, min(kStrips, arguments.across - strip));
        expect_bytes(full + 8 * at, kInputBytes + strips * bytes);
        const int64_t strips_before = int64_t{unit.tile.weight} * arguments.across + strip;
        const char* from =
            reinterpret_cast<const char*>(part.words) + (strips_before * part.down + first_tile) * kTileBytes;
#pragma unroll
        for (int i = 0; i < kStrips; ++i, from += int64_t{part.down} * kTileBytes) {
            if (i < strips) {
                const uint32_t to =
                    words + at * kWordBytes + i / 4 * kPieceBytes + many_trellis_strip_start(bits, i % 4);
                bulk_copy(to, from, bytes, full + 8 * at);
            }
        }
    }
    __device__ __forceinline__ void bring_inputs(const CUtensorMap& map, const ManyTrellisUnit& unit, int number,
                                                 int at) const {
        const int column = number * kPieces * kManyTrellisPiece;
        bulk_copy_box(inputs + at * kInputBytes, &map, column, unit.before + unit.tile.first, full + 8 * at);
    }

    __device__ __forceinline__ void bring(const CUtensorMap& map, int group) const {
        const int first_stage = group * kStages, units = this->units();
        if (static_cast<int>(blockIdx.x) >= units) return;
        ManyTrellisUnit unit = unit_of<kTokens>(arguments, blockIdx.x);
        Stages stages = stages_of(blockIdx.x, group);
        const int early = min(kStages, stages.count);
        for (int i = 0; i < early; ++i) bring_words(unit, stages.first + i, first_stage + i);
        wait_for_kernel_before();
        for (int i = 0; i < early; ++i) bring_inputs(map, unit, stages.first + i, first_stage + i);
        int stage = early % kStages, phase = early / kStages, done = early;
        for (int number = blockIdx.x; number < units; number += gridDim.x, done = 0) {
            unit = unit_of<kTokens>(arguments, number), stages = stages_of(number, group);
            for (int i = done; i < stages.count; ++i) {
                const int at = first_stage + stage;
                wait_barrier(empty + 8 * at, phase ^ 1);
                bring_words(unit, stages.first + i, at);
                bring_inputs(map, unit, stages.first + i, at);
                advance(stage, phase);
            }
        }
    }

    // --- who decodes and multiplies ---

    // A lane's words from the one before them on.
    static __device__ __forceinline__ void load_words(uint32_t from, int lane, uint32_t (&to)[bits + 1]) {
        if constexpr (bits % 4 == 0) {
#pragma unroll
            for (int i = 0; i < bits; i += 4) {
                const uint4 four = load_shared_16(from + 4 * i);
                to[i + 1] = four.x, to[i + 2] = four.y, to[i + 3] = four.z, to[i + 4] = four.w;
            }
        } else if constexpr (bits % 2 == 0) {
#pragma unroll
            for (int i = 0; i < bits; i += 2) {
                const uint2 two = load_shared_8(from + 4 * i);
                to[i + 1] = two.x, to[i + 2] = two.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < bits; ++i) to[i + 1] = load_shared_4(from + 4 * i);
        }
        to[0] = __shfl_sync(0xFFFFFFFF, to[bits], (lane + 28) % 32);
    }

    // Operand A of the four instructions of a stage.
    static __device__ __forceinline__ void decode(uint32_t from, int lane, uint32_t (&a)[4][4]) {
        uint32_t own[bits + 1];
        if constexpr (kInt8) {
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                load_words(from + piece * kPieceBytes, lane, own);
#pragma unroll
                for (int i = 0; i < 8; ++i) a[2 * piece + i / 4][i % 4] = four_int8(own, 4 * i);
            }
        } else {
            load_words(from, lane, own);
            const auto two_of = [&](int first) {
                const __half2 two = two_weights<code>(own, first);
                return reinterpret_cast<const uint32_t&>(two);
            };
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                a[m][0] = two_of(8 * m);
                a[m][1] = two_of(8 * m + 4);
                a[m][2] = two_of(8 * m + 2);
                a[m][3] = two_of(8 * m + 6);
            }
        }
    }

    __device__ __forceinline__ void multiply(int warp) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
        const int group = warp / 8, of_group = warp % 8;
        const uint64_t columns = swizzled_matrix(inputs + group * kStages * kInputBytes);
        const uint32_t group_full = full + group * kStages * 8, group_empty = empty + group * kStages * 8;
        const uint32_t of_lane =
            words + group * kStages * kWordBytes + many_trellis_strip_start(bits, t) + (of_group * 8 + g) * bits * 4;
        int stage = 0, phase = 0;
        // Asked for again each time, as registers are short.
#pragma unroll 1
        for (int number = blockIdx.x; number < units(); number += gridDim.x) {
            const int stages = stages_of(number, group).count;
            Sum sums[kSums];
            int last = -1;  // the stage that the tensor cores may still read
#pragma unroll 1
            for (int done_before = 0; done_before < stages; done_before += 2) {
                // Two at a time have registers of their own for what the tensor cores read meanwhile.
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    wait_barrier(group_full + 8 * stage, phase);
                    uint32_t a[4][4];
                    decode(of_lane + stage * kWordBytes, lane, a);
                    // In units of 16 bytes; an instruction has 32 bytes of a token.
                    const uint64_t from = columns + (stage * kInputBytes >> 4);
                    wgmma_fence();
#pragma unroll
                    for (int m = 0; m < 4; ++m) {
                        wgmma<T, kTokens>(sums, a[m], from + 2 * m, done_before + half + m > 0);
                    }
                    wgmma_commit();
                    wgmma_wait<kPending>();
                    // Its words are in no queue either: what was made of them has been multiplied.
                    const int done = kPending == 0 ? stage : last;
                    if (done >= 0 && lane == 0) arrive(group_empty + 8 * done);
                    last = stage;
                    advance(stage, phase);
                }
            }
            if constexpr (kPending > 0) {
                wgmma_wait<0>();
                if (lane == 0) arrive(group_empty + 8 * last);
            }
#pragma unroll
            for (int i = 0; i < kSums; ++i) {
                if constexpr (kInt8) {
                    asm volatile("" : "+r"(sums[i])::"memory");
                } else {
                    asm volatile("" : "+f"(sums[i])::"memory");
                }
            }
            if constexpr (kGroups == 1) {
                store(sums, number, of_group, 0);
            } else {
                float own[kSums / 2];
                exchange_halves(sums, own, group, of_group);
                store(own, number, of_group, group * (kTokens / 2));
            }
        }
    }

    // Each of two groups completes half of the tokens.
    __device__ __forceinline__ void exchange_halves(const Sum (&sums)[kSums], float (&own)[kSums / 2], int group,
                                                    int of_group) const {
        const auto place = [&](int owner, int i) {
            return exchange + (((owner * (kSums / 8) + i / 4) * 8 + of_group) * 32 + lane_id()) * 16;
        };
        named_barrier(1, kWarps * 32);  // until nobody reads what was exchanged before
#pragma unroll
        for (int i = 0; i < kSums / 2; i += 4) {
            uint32_t given[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto lower = static_cast<float>(sums[i + j]),
                           upper = static_cast<float>(sums[kSums / 2 + i + j]);
                own[i + j] = group == 0 ? lower : upper;
                given[j] = __float_as_uint(group == 0 ? upper : lower);
            }
            store_shared_16(place(1 - group, i), make_uint4(given[0], given[1], given[2], given[3]));
        }
        named_barrier(1, kWarps * 32);
#pragma unroll
        for (int i = 0; i < kSums / 2; i += 4) {
            const uint4 four = load_shared_16(place(group, i));
            own[i] += __uint_as_float(four.x), own[i + 1] += __uint_as_float(four.y);
            own[i + 2] += __uint_as_float(four.z), own[i + 3] += __uint_as_float(four.w);
        }
    }

    // Rows g and g + 8 lie side by side: whole sectors of a token.
    template <typename Number, int count>
    __device__ __forceinline__ void store(const Number (&sums)[count], int number, int of_group, int first) const {
        const ManyTrellisUnit unit = unit_of<kTokens>(arguments, number);
        const int part = number % arguments.split;
        const int lane = lane_id(), g = lane / 4, t = lane % 4;
        const int pairs = arguments.row_tiles * (kManyTrellisRows / 2);  // of a token
        auto* to = reinterpret_cast<__half2*>(arguments.sums) + int64_t{part} * arguments.tokens * pairs;
        int token = unit.tile.first + first + 2 * t;
        int at = token * pairs + unit.row_tile * (kManyTrellisRows / 2) + of_group * 8 + g;
#pragma unroll
        for (int i = 0; i < count; i += 4, token += 8, at += 8 * pairs) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                if (token + odd >= unit.tile.end) continue;
                const auto a = static_cast<float>(sums[i + odd]), b = static_cast<float>(sums[i + 2 + odd]);
                to[at + odd * pairs] = __floats2half2_rn(a * arguments.unit, b * arguments.unit);
            }
        }
    }
};

template <int bits, Code code, typename T, int kTokens>
__global__ void __launch_bounds__(many_trellis_threads(kTokens), 1)
    multiply_many_kernel(const __grid_constant__ CUtensorMap map,
                         const __grid_constant__ ManyTrellisArguments arguments) {
    if constexpr (kHopper) {
        using Cta = ManyTrellisCta<bits, code, T, kTokens>;
        extern __shared__ __align__(1024) char smem[];
        constexpr uint32_t kAlign = kManyTrellisAlign;
        const Cta cta(arguments, (shared_address(smem) + kAlign - 1) / kAlign * kAlign);
        const int warp = __shfl_sync(0xFFFFFFFF, static_cast<int>(threadIdx.x) / 32, 0);
        if (threadIdx.x == 0) cta.init_barriers();
        __syncthreads();
        if (warp >= Cta::kWarps) {
            give_registers<Cta::kBringerRegisters>();
            const int group = warp - Cta::kWarps;
            if (group < Cta::kGroups && threadIdx.x % 32 == 0) cta.bring(map, group);
        } else {
            take_registers<Cta::kDecoderRegisters>();
            let_next_kernel_start();
            cta.multiply(warp);
        }
    } else {
        __trap();
    }
}

// run(std::integral_constant<int, token_tile>)
template <int kTokens = 32, typename Run>
cudaError_t dispatch_many_tile(int token_tile, const Run& run) {
    if (token_tile == kTokens) return run(std::integral_constant<int, kTokens>{});
    if constexpr (kTokens < 256) return dispatch_many_tile<2 * kTokens>(token_tile, run);
    return cudaErrorInvalidValue;
}

// Overlaps with the kernel before it, which makes the inputs.
template <Code code, typename T>
cudaError_t multiply_many_trellis(const CUtensorMap& map, const ManyTrellisArguments& arguments, int bits,
                                  const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream) {
    return dispatch_trellis(bits, [&](auto width) {
        return dispatch_many_tile(plan.token_tile, [&](auto tile) {
            constexpr int kTokens = tile(), kShared = many_trellis_shared_bytes(width(), kTokens, sizeof(T) == 1);
            static Launcher launcher(multiply_many_kernel<width(), code, T, kTokens>, many_trellis_threads(kTokens),
                                     kAllShared);
            return launcher.launch_overlapping(gpu, plan.ctas, 1, kShared, stream, map, arguments);
        });
    });
}
// The same, each compiled by itself (many_tokens_int8.cu, many_tokens_mcg.cu, many_tokens_3inst.cu).
cudaError_t multiply_many_trellis_int8(const CUtensorMap& map, const ManyTrellisArguments& arguments, int bits,
                                       const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t multiply_many_trellis_mcg(const CUtensorMap& map, const ManyTrellisArguments& arguments, int bits,
                                      const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream);
cudaError_t multiply_many_trellis_3inst(const CUtensorMap& map, const ManyTrellisArguments& arguments, int bits,
                                        const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream);

// By a weight that is decoded into memory first, int8 [128 * row_tiles, many_trellis_width] (decoded_int8.cu).
template <typename T>
cudaError_t multiply_decoded_int8(const CUtensorMap& map, const ManyTrellisArguments& arguments,
                                  const ManyTrellisOutputs<T>& outputs, int bits, int8_t* weights,
                                  const ManyTrellisPlan& plan, const Gpu& gpu, cudaStream_t stream);

}  // namespace hf_kbit::cuda
