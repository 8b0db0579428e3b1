// y = x @ W.T (+ bias) on Hopper, W in tiles; the weights are decoded in registers, as operand A of wgmma. What a CTA
// of gemm_wgmma.cu does, where W may be several weights for all of x, each with a y of its own, one of
// experts_wgmma.cu, where W is one of many weights, each for some rows of x and y, and those of gemm_int8.cu and
// experts_int8.cu, where x is int8 and W becomes so.
//
//   x         float16 or bfloat16 [M, K], row-major, K a multiple of 8; where the weight has column scales or a
//             rotation, what inputs/transform.cu makes of it
//   words     int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16]     codebook  float32 [2**bits]
//   bias      [N] or null                          y       [M, N], row-major, both of x's dtype
//
// A CTA multiplies up to 256 rows and 256 tokens at a time, a warp 16 of the rows:
//
//   words and scales --bulk copies--> ring of the warp in shared memory --> registers --table--> pairs of levels
//     --times scales--> operand A
//   x --bulk copies, 64 or 128 columns at a time--> shared memory, swizzled: operand B
//
// x comes from inputs/transform.cu, its columns in the order in which a lane of a tile holds them
// (Transformed::ordered). Where that kernel would have nothing else to do and costs more (wgmma_ordered), x stays as
// it is, and four lanes exchange codes instead, so that each has those of the columns that operand A wants of it.
//
// The tensor cores work on 64 columns of a warpgroup while it decodes the next 64; with 128 tokens, where registers
// are short, while others decode. Weights are multiplied by their scales before the product: eight products of pairs
// for 512 weights. Where there are fewer tiles than processors, CTAs divide K as plan.h says, and add up sums in a
// fixed order. Of several weights a CTA may have tiles of one after tiles of another, and makes its table anew between
// them.
//
// Of experts, each has tiles of its own rows of x, as many as `offsets` says, which the host does not know: a warp of
// each CTA makes a table of them. Groups of warps meet in memory of its own. Of a tile of 128 tokens that has fewer
// rows only the steps of 32 that hold them are multiplied, each number of steps by a loop of its own.
//
// Of int8, sums are int32, whose order does not matter, and levels times a multiplier for each block are rounded; what
// 1 stands for in a token and in a row multiplies the sums (int8.cuh; docs/internals.md, "8-bit inputs").
//
// What limits it and what was tried: docs/lab.
#pragma once

#include "kernels/hopper/int8.cuh"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/operands.cuh"
#include "kernels/outputs.cuh"

namespace hf_kbit::cuda {

// Threads that decode and multiply. Of a further warpgroup one warp brings x, three the weights; it is whole because
// registers move from it to the others, which need more than their share.
constexpr int kBringers = 128;
constexpr int wgmma_decoders(int token_tile) { return wgmma_warps(token_tile) * kWarp; }
constexpr int wgmma_threads(int token_tile) { return wgmma_decoders(token_tile) + kBringers; }

// What a CTA does, in its two roles: bring, and decode and multiply. kOrdered: x has its columns in the order of
// tiles. kWeights: the most weights; 1 for experts, whose weights are told as one. T: of operands A and B, int8_t, or
// as y has it.
template <int kBits, typename T, int kTokens, bool kOrdered, bool kExperts, int kWeights>
struct WgmmaCta : TilesOf<kBits, T, kTokens, kExperts, kWeights> {
    static constexpr bool kInt8 = std::is_same_v<T, int8_t>;
    static_assert(!kInt8 || kOrdered);
    using Tiles = TilesOf<kBits, T, kTokens, kExperts, kWeights>;
    using Tiles::cluster, Tiles::rank, Tiles::groups, Tiles::parties, Tiles::group_warps;
    using Tiles::expert, Tiles::exchange;
    using Tiles::place_of, Tiles::weight_of, Tiles::number_of, Tiles::row_tile, Tiles::slabs_before, Tiles::share;
    using Tiles::Tiles, Tiles::kWarps, Tiles::kSlab, Tiles::kStageBytes, Tiles::arguments;
    using Tiles::window, Tiles::x, Tiles::ring, Tiles::x_full, Tiles::x_empty, Tiles::ring_full, Tiles::ring_empty;

    using Sum = std::conditional_t<kInt8, int32_t, float>;
    using FourSums = std::conditional_t<kInt8, int4, float4>;
    using Level = std::conditional_t<kInt8, __half, T>;
    using Table = LevelTable<kBits, kPairTableBytes>;
    // In all at most 65536, of which each thread has an equal part, in eights, before they move.
    static constexpr int kBringerRegisters = 32, kDecoderRegisters = wgmma_warps(kTokens) == 8 ? 232 : 112;
    static constexpr int kDecoders = wgmma_decoders(kTokens), kBoxes = wgmma_stage_boxes(kTokens);
    static constexpr int kBoxBytes = kStageBytes / kBoxes, kBoxColumns = kWgmmaBoxBytes / static_cast<int>(sizeof(T));
    static constexpr int kBoxPieces = kInt8 ? 2 : 1;  // of 64 columns
    // Products that a warpgroup leaves to the tensor cores while it decodes, and parts in which a slab comes to
    // registers: as many, as few, as registers allow.
    static constexpr int kPending = kTokens == 128 ? 0 : 1, kParts = kTokens == 128 ? 2 : 1;
    static constexpr int kSteps = kExperts ? expert_steps(kTokens) : 1;

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < groups * arguments.x_stages; ++i) {
            init_barrier(x_full + 8 * i, 1);
            init_barrier(x_empty + 8 * i, group_warps);
        }
        for (int i = 0; i < kWarps * arguments.ring_stages; ++i) {
            init_barrier(ring_full + 8 * i, 1);
            init_barrier(ring_empty + 8 * i, 1);
        }
        fence_barriers();
    }

    // All who decode; in a cluster, of all its CTAs. Those who bring have ended.
    __device__ __forceinline__ void sync_decoders() const {
        if (arguments.split_log2 > 0) {
            cluster_barrier();
        } else {
            named_barrier(1, kDecoders);
        }
    }

    // To the next stage of a ring, whose barriers' phases alternate.
    static __device__ __forceinline__ void step(int& stage, int& phase, int stages) {
        ++stage;
        if (stage == stages) {
            stage = 0;
            phase ^= 1;
        }
    }

    // --- who brings x, a lane for each group, and weights, a lane for each warp ---

    __device__ __forceinline__ void bring_x(const WgmmaMaps<kWeights>& maps, int group) const {
        wait_for_kernel_before();  // which may transform x
        const int party = rank * groups + group;
        const uint32_t full = x_full + group * arguments.x_stages * 8,
                       empty = x_empty + group * arguments.x_stages * 8;
        const uint32_t stages = x + group * arguments.x_stages * kStageBytes;
        int stage = 0, phase = 0;
        Share share;
        for (int number = 0; (share = this->share(party, number)).slabs > 0; ++number) {
            const Place place = place_of(share.tile);
            int column = share.first_slab * kSlabColumns;
            for (int i = 0; i < share.slabs * (kSlabColumns / kBoxColumns) / kBoxes; ++i) {
                wait_barrier(empty + 8 * stage, phase ^ 1);
                expect_bytes(full + 8 * stage, kStageBytes);
#pragma unroll
                for (int box = 0; box < kBoxes; ++box, column += kBoxColumns) {
                    const uint32_t to = stages + stage * kStageBytes + box * kBoxBytes;
                    bulk_copy_box(to, &maps.of[number_of(place)], column, place.token, full + 8 * stage);
                }
                step(stage, phase, arguments.x_stages);
            }
        }
    }

    __device__ __forceinline__ void bring_weights(int warp) const {
        const int group = warp / group_warps, party = rank * groups + group;
        int stage = 0, phase = 0;
        Share share;
        for (int number = 0; (share = this->share(party, number)).slabs > 0; ++number) {
            const Place place = place_of(share.tile);
            const WgmmaWeight& weight = arguments.weights[number_of(place)];
            const int row_tiles = arguments.row_tiles[number_of(place)];
            // Beyond the last row tile the last one again, whose results are not stored.
            int64_t slab = min(row_tile(place, warp), row_tiles - 1);
            if constexpr (kExperts) slab += int64_t{place.weight} * row_tiles;
            slab = slab * arguments.slabs + share.first_slab;
            for (int i = 0; i < share.slabs; ++i, ++slab) {
                const int at = warp * arguments.ring_stages + stage;
                wait_barrier(ring_empty + 8 * at, phase ^ 1);
                bring_slab<kBits>(ring + at * kSlab, weight.words, weight.scales, slab, ring_full + 8 * at);
                step(stage, phase, arguments.ring_stages);
            }
        }
    }

    // --- who decodes and multiplies ---

    __device__ __forceinline__ void multiply(int warp) const {
        const int lane = threadIdx.x % kWarp;
        int weight = kWeights > 1 ? weight_of(share(0, 0).tile) : 0;  // whose levels the table has
        const auto make_table = [&] {
            Table table;
            table.begin(window, arguments.weights[weight].codebook, lane);
            const float unit = table.template finish<Level, kDecoders>();
            named_barrier(1, kExperts ? wgmma_threads(kTokens) : kDecoders);
            return unit;
        };
        float unit = make_table();

        const int group = warp / group_warps, party = rank * groups + group;
        const uint32_t full = x_full + group * arguments.x_stages * 8,
                       empty = x_empty + group * arguments.x_stages * 8;
        const uint64_t columns = swizzled_matrix(x + group * arguments.x_stages * kStageBytes);
        [[maybe_unused]] const Quad quad(lane);
        const uint32_t lane_table = Table::lane_address(window, lane);
        int stage = 0, phase = 0, slab_stage = 0, slab_phase = 0;
        Share share;
#pragma unroll 1
        for (int number = 0; (share = this->share(party, number)).slabs > 0; ++number) {
            if constexpr (kWeights > 1) {
                const int its = weight_of(share.tile);
                if (its != weight) {
                    weight = its;
                    named_barrier(1, kDecoders);  // until nobody reads the table; all have the same tiles
                    unit = make_table();
                }
            }
            Sum sums[kTokens / 2];
            [[maybe_unused]] __half2 inverse[2];
            if constexpr (kInt8) this->load_inverses(share.tile, warp, inverse);
            int last = -1;  // the stage that the tensor cores may still read
            // By the first so many tokens of the tile.
            const auto multiply_slabs_by = [&](auto columns_of_x) {
#pragma unroll 1
                for (int slab = 0; slab < share.slabs; ++slab) {
                    uint32_t words[4 / kParts][kBits], scales[4 / kParts];
                    const int at = warp * arguments.ring_stages + slab_stage;
                    wait_barrier(ring_full + 8 * at, slab_phase);
                    [[maybe_unused]] uint32_t bytes[2][2][4];  // of two pieces
#pragma unroll
                    for (int piece = 0; piece < 4; ++piece) {
                        const int tile_of_part = piece % (4 / kParts);
                        if (tile_of_part == 0)
                            load_slab<kBits, kParts>(ring + at * kSlab, piece * kParts / 4, words, scales);
                        if (piece == 4 - 4 / kParts) {
                            release_to_bulk_copies();  // each lane for its own reads, as another warp copies
                            __syncwarp();
                            if (lane == 0) arrive(ring_empty + 8 * at);
                            step(slab_stage, slab_phase, arguments.ring_stages);
                        }
                        uint32_t a[2][2][4];
#pragma unroll
                        for (int block = 0; block < 2; ++block) {
                            if constexpr (kOrdered) {
                                decode_block<kBits, kPairTableBytes>(words[tile_of_part], block, lane_table, a[block]);
                            } else {
                                decode_in_order<kBits>(words[tile_of_part], block, lane_table, quad, a[block]);
                            }
                        }
                        if constexpr (kInt8) {
                            to_int8(a, scales[tile_of_part], arguments.signs, inverse, bytes[piece % 2]);
                            if (piece % 2 == 0) continue;
                        } else {
                            multiply_by_scales<T>(a, scales[tile_of_part], arguments.signs);
                        }
                        const int box = piece / kBoxPieces;
                        if (box % kBoxes == 0) wait_barrier(full + 8 * stage, phase);
                        // In units of 16 bytes; an instruction has 32 bytes of a token.
                        const uint64_t from = columns + (stage * kStageBytes + box % kBoxes * kBoxBytes >> 4);
                        wgmma_fence();
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            const auto& operand = kInt8 ? bytes[i / 2][i % 2] : a[i / 2][i % 2];
                            wgmma<T, columns_of_x()>(sums, operand, from + 2 * i, slab + box + i > 0);
                        }
                        wgmma_commit();
                        wgmma_wait<kPending>();
                        if (box % kBoxes == kBoxes - 1) {
                            const int done = kPending == 0 ? stage : last;
                            if (done >= 0 && lane == 0) arrive(empty + 8 * done);
                            last = stage;
                            step(stage, phase, arguments.x_stages);
                        }
                    }
                }
            };
            if constexpr (kSteps == 1) {
                multiply_slabs_by(std::integral_constant<int, kTokens>{});
            } else {
                static_assert(kSteps == 4 && kTokens == 4 * kExpertStep);
                const Place place = place_of(share.tile);
                const int tokens = place.end - place.token;
                if (tokens <= kExpertStep) {
                    multiply_slabs_by(std::integral_constant<int, kExpertStep>{});
                } else if (tokens <= 2 * kExpertStep) {
                    multiply_slabs_by(std::integral_constant<int, 2 * kExpertStep>{});
                } else if (tokens <= 3 * kExpertStep) {
                    multiply_slabs_by(std::integral_constant<int, 3 * kExpertStep>{});
                } else {
                    multiply_slabs_by(std::integral_constant<int, kTokens>{});
                }
            }
            if constexpr (kPending > 0) {
                wgmma_wait<0>();
                if (lane == 0) arrive(empty + 8 * last);
            }
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) {
                if constexpr (kInt8) {
                    asm volatile("" : "+r"(sums[i])::"memory");
                } else {
                    asm volatile("" : "+f"(sums[i])::"memory");
                }
            }
            finish(sums, unit, share, warp);
        }
        if constexpr (kExperts) clear_rest();
    }

    // --- outputs ---

    __device__ __forceinline__ void finish(Sum (&sums)[kTokens / 2], float unit, const Share& share, int warp) const {
        const int tile = share.tile;
        if (parties == 1) {
            if constexpr (!kExperts) {
                if (share.first_slab + share.slabs < arguments.slabs) return hand_over(sums, warp);
                if (share.first_slab > 0) add_parts(sums, tile, warp);
            }
            if constexpr (!kInt8) store(sums, 0, kTokens / 8, unit, tile, warp);
        } else if (parties == 2) {
            meet<2>(sums, unit, tile, warp);
        } else if constexpr (wgmma_most_groups(kTokens) > 1) {
            if (kExperts || parties == 4) {
                meet<wgmma_owners(4, kTokens)>(sums, unit, tile, warp);
            } else {
                meet<wgmma_owners(8, kTokens)>(sums, unit, tile, warp);
            }
        }
        if constexpr (kInt8) {
            if (arguments.half) {
                this->template store_scaled<__half>(sums, unit, tile, warp);
            } else {
                this->template store_scaled<__nv_bfloat16>(sums, unit, tile, warp);
            }
        }
    }

    static __device__ __forceinline__ Sum as_sum(uint32_t bits) {
        if constexpr (kInt8) {
            return static_cast<Sum>(bits);
        } else {
            return __uint_as_float(bits);
        }
    }

    // Sends the sums of others' tokens, adds up its own. Without experts only after its only tile, as the sums of
    // others lie where x and weights were.
    template <int kOwners>
    __device__ __forceinline__ void meet(Sum (&sums)[kTokens / 2], float unit, int tile, int warp) const {
        constexpr int kEights = kTokens / 8 / kOwners;  // of tokens; a thread has four sums of each
        const int group = warp / group_warps, party = rank * groups + group;
        const int group_threads = group_warps * kWarp, thread = warp % group_warps * kWarp + lane_id();
        const auto place = [&](int of_group, int sender, int eight) {
            return exchange() +
                   (((of_group * (parties - 1) + sender) * kEights + eight) * group_threads + thread) * 16;
        };
        sync_decoders();
#pragma unroll
        for (int owner = 0; owner < kOwners; ++owner) {
            if (owner != party) {
                const Sum* of_owner = sums + owner * kEights * 4;
                const int sender = party - (party > owner);
#pragma unroll
                for (int i = 0; i < kEights; ++i) {
                    store_cluster_16(cluster_address(place(owner % groups, sender, i), owner >> arguments.groups_log2),
                                     of_owner[4 * i], of_owner[4 * i + 1], of_owner[4 * i + 2], of_owner[4 * i + 3]);
                }
            }
        }
        sync_decoders();
#pragma unroll
        for (int owner = 0; owner < kOwners; ++owner) {
            if (owner == party) {
                Sum* own = sums + owner * kEights * 4;
#pragma unroll 1
                for (int sender = 0; sender < parties - 1; ++sender) {
#pragma unroll
                    for (int i = 0; i < kEights; ++i) {
                        const uint4 four = load_shared_16(place(group, sender, i));
                        own[4 * i] += as_sum(four.x);
                        own[4 * i + 1] += as_sum(four.y);
                        own[4 * i + 2] += as_sum(four.z);
                        own[4 * i + 3] += as_sum(four.w);
                    }
                }
                if constexpr (!kInt8) store(sums, owner * kEights, kEights, unit, tile, warp);
            }
        }
    }

    // A warp's sums of part of a tile, to the CTA that has the tile's last slab: [eight tokens][lane][4].
    __device__ __forceinline__ FourSums* part(int cta, int warp) const {
        return reinterpret_cast<FourSums*>(arguments.partial) + (cta * kWarps + warp) * (kTokens / 8) * kWarp +
               lane_id();
    }
    __device__ __forceinline__ void hand_over(const Sum (&sums)[kTokens / 2], int warp) const {
        FourSums* to = part(cluster, warp);
#pragma unroll
        for (int i = 0; i < kTokens / 2; i += 4) {
            to[i / 4 * kWarp] = FourSums{sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
        }
        __syncwarp();
        if (lane_id() == 0) store_release(arguments.ready + cluster * kWarps + warp, 1);
    }
    // Those of the CTAs before, the nearest one first. They begin earlier, and wait for nobody before they hand over.
    __device__ __forceinline__ void add_parts(Sum (&sums)[kTokens / 2], int tile, int warp) const {
        const int first = arguments.division.cta_with((tile - arguments.whole) * arguments.slabs);
#pragma unroll 1
        for (int cta = cluster - 1; cta >= first; --cta) {
            while (load_acquire(arguments.ready + cta * kWarps + warp) == 0) {
            }
        }
        constexpr int kAtOnce = kTokens <= 64 ? 64 / kTokens * 2 : 1;  // so many loads under way as registers hold
#pragma unroll kAtOnce
        for (int cta = cluster - 1; cta >= first; --cta) {
            const FourSums* from = part(cta, warp);
#pragma unroll
            for (int i = 0; i < kTokens / 2; i += 4) {
                const FourSums four = __ldcg(from + i / 4 * kWarp);
                sums[i] += four.x;
                sums[i + 1] += four.y;
                sums[i + 2] += four.z;
                sums[i + 3] += four.w;
            }
        }
    }

    // Groups of eight tokens; first and count are known when compiling.
    __device__ __forceinline__ void store(const float (&sums)[kTokens / 2], int first, int count, float unit, int tile,
                                          int warp) const {
        const int lane = lane_id();  // while tiles are multiplied, every register is in use
        const Place place = place_of(tile);
        const int row = row_tile(place, warp) * kTileRows;
        const auto store_to = [&](const Output& output) {
            float bias[2];
            load_bias<T>(output, row, lane, bias);
#pragma unroll
            for (int i = first; i < first + count; ++i) {
                store_eight<T>(output, sums + 4 * i, unit, bias, row, place.token + 8 * i, lane);
            }
        };
        if constexpr (kExperts) {
            const Output& output = arguments.weights[0].output;
            const T* bias = static_cast<const T*>(output.bias);
            const int64_t before = int64_t{place.weight} * output.out_features;
            store_to({bias ? bias + before : nullptr, output.y, place.end, output.out_features});
        } else {
            store_to(arguments.weights[number_of(place)].output);
        }
    }

    // Zeros for rows of y behind those of all experts, 16 bytes at a time, by all CTAs.
    __device__ __forceinline__ void clear_rest() const {
        constexpr int kPiece = 8;
        const Output& output = arguments.weights[0].output;
        const int64_t out_features = output.out_features;
        const int64_t first = load_shared_4(expert(arguments.experts)) * out_features;
        const int64_t end = output.tokens * out_features;
        auto* y = static_cast<uint16_t*>(output.y);
        int64_t piece = first / kPiece + blockIdx.x * kDecoders + threadIdx.x;
        for (; piece * kPiece < end; piece += gridDim.x * kDecoders) {
            const int64_t from = max(piece * kPiece, first), to = min((piece + 1) * kPiece, end);
            if (to - from == kPiece) {
                store_16(y + from, make_uint4(0, 0, 0, 0));
            } else {
                for (int64_t i = from; i < to; ++i) y[i] = 0;
            }
        }
    }
};

// A kernel, of wgmma_threads(kTokens) threads.
template <int kBits, typename T, int kTokens, bool kOrdered, bool kExperts, int kWeights>
__device__ __forceinline__ void run_wgmma(const WgmmaMaps<kWeights>& maps, const ArgumentsOf<T, kWeights>& arguments) {
    if constexpr (kHopper) {
        extern __shared__ __align__(1024) char smem[];
        const uint32_t window = shared_window(smem);
        const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarp, 0);
        const WgmmaCta<kBits, T, kTokens, kOrdered, kExperts, kWeights> cta(arguments, window);
        constexpr int kWarps = wgmma_warps(kTokens);
        if constexpr (!kExperts) {
            if (threadIdx.x == 0) cta.init_barriers();
            __syncwarp();
            if (arguments.split_log2 > 0) {
                cluster_barrier();
            } else {
                __syncthreads();
            }
        }
        if (warp >= kWarps) {
            give_registers<cta.kBringerRegisters>();
            const int lane = threadIdx.x % kWarp;
            if constexpr (kExperts) {  // whose decoders go on to the table of levels meanwhile
                let_next_kernel_start();
                if (warp == kWarps) cta.list_experts();
                if (warp == kWarps + 1 && lane == 0) cta.init_barriers();
                __syncwarp();
                named_barrier(2, kBringers);
                arrive_named_barrier(1, wgmma_threads(kTokens));
            }
            if (warp == kWarps && lane < cta.groups) cta.bring_x(maps, lane);
            const int of_warp = lane * 3 + warp - kWarps - 1;
            if (warp > kWarps && of_warp < kWarps) cta.bring_weights(of_warp);
            __syncwarp();
        } else {
            take_registers<cta.kDecoderRegisters>();
            cta.multiply(warp);
        }
    } else {
        __trap();
    }
}

}  // namespace hf_kbit::cuda
