// dx = dy @ W, the gradient of the activations, for W in tiles on Hopper; back through what the weight does to its
// input.
//
//   dy        float16 or bfloat16 [M, N], row-major, N a multiple of 8
//   words     int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16]     codebook  float32 [2**bits]
//   columns   uint8 [K], as E4M4, or null          dx      [M, K], row-major, of dy's dtype
//
// Compute capability 9.0. A CTA multiplies 256 tokens by 128 columns of W, half a slab, 64 rows of W at a time; each
// of eight warps has 16 of the columns:
//
//   words and scales --asynchronous copies--> shared memory --> registers --table--> pairs of levels --times scales,
//     transposed--> operand A
//   dy --bulk copies--> shared memory, swizzled: operand B
//
// It is hopper/gemm_wgmma.cuh for W transposed: sums are over rows, so that a warp's columns of a row tile are operand
// A once their four matrices of 8 x 8 are transposed, an instruction each. Where there are few tiles, CTAs divide
// their rows and leave sums in memory, which a second kernel adds up. outputs.cuh has the way from sums to dx.
//
// What limits it and what was tried: docs/lab.
#include "kernels/dispatch.h"
#include "kernels/gradient/outputs.cuh"
#include "kernels/hopper/tensor_map.h"
#include "kernels/hopper/wgmma.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/operands.cuh"

namespace hf_kbit::cuda {

namespace {

using namespace gradient;

// Warps of a further warpgroup bring weights and dy; it gives most of its registers away.
constexpr int kThreads = kDecoders + 128, kWeightBringers = 2;
constexpr int kBringerRegisters = 40, kDecoderRegisters = 232;
static_assert(kDecoders * kDecoderRegisters + 128 * kBringerRegisters <= 65536, "registers of a processor");

// What a CTA does, in its three roles: bring dy, bring weights, and decode and multiply.
template <int kBits, typename T>
struct Cta {
    using Table = LevelTable<kBits, kPairTableBytes>;
    static constexpr int kWords = 2 * kBits;  // of a lane in half a slab
    static constexpr int kTileBytes = gradient_words_bytes(kBits), kWeightsBytes = gradient_weights_bytes(kBits);
    static constexpr int kScalesAt = kGradientPieceTiles * kTileBytes;
    static constexpr int kAtOnce = gradient_exchanged(kBits);

    const Arguments& arguments;
    uint32_t window, dy, weights, exchange, dy_full, dy_empty, weights_full, weights_empty;

    __device__ __forceinline__ Cta(const Arguments& arguments, uint32_t window)
        : arguments(arguments),
          window(window),
          dy(window + wgmma_x_address()),
          weights(dy + kGradientStages * kGradientStageBytes),
          exchange(weights + kGradientStages * kWeightsBytes),
          dy_full(exchange + gradient_exchange_bytes(kAtOnce)),
          dy_empty(dy_full + kGradientStages * 8),
          weights_full(dy_empty + kGradientStages * 8),
          weights_empty(weights_full + kGradientStages * 8) {}

    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kGradientStages; ++i) {
            init_barrier(dy_full + 8 * i, 1);
            init_barrier(dy_empty + 8 * i, kWarps);
            init_barrier(weights_full + 8 * i, kWeightBringers * kWarp);
            init_barrier(weights_empty + 8 * i, kWarps);
        }
        fence_barriers();
    }
    // To the next stage, whose barriers' phases alternate.
    static __device__ __forceinline__ void step(int& stage, int& phase) {
        if (++stage == kGradientStages) stage = 0, phase ^= 1;
    }
    // run(tile, part), for all that the CTA has.
    template <typename Run>
    __device__ __forceinline__ void for_each_part(const Run& run) const {
#pragma unroll 1
        for (int i = blockIdx.x; i < arguments.tiles * arguments.parts; i += gridDim.x) {
            run(i / arguments.parts, i % arguments.parts);
        }
    }

    // --- who brings ---

    __device__ __forceinline__ void bring_dy(const void* map) const {
        int stage = 0, phase = 0;
        for_each_part([&](int tile, int part) {
            const int token = tile % arguments.token_tiles * kTokens;
            int row = part * arguments.pieces * kWgmmaColumns;
            for (int i = 0; i < arguments.pieces; ++i, row += kWgmmaColumns) {
                wait_barrier(dy_empty + 8 * stage, phase ^ 1);
                expect_bytes(dy_full + 8 * stage, arguments.box_tokens * kWgmmaColumns * 2);
                bulk_copy_box(dy + stage * kGradientStageBytes, map, row, token, dy_full + 8 * stage);
                step(stage, phase);
            }
        });
    }

    // A warp brings some row tiles of each piece. In memory a lane's words lie four by four beside each other; here
    // those of all lanes do, a line for each word, so that a warp reads 32 words at a time without conflicts. To write
    // four lines at a time without conflicts, line i begins at its place 8 i. Scales follow: of the two tiles of each
    // slab those of the four row tiles side by side.
    __device__ __forceinline__ void bring_weights(int bringer) const {
        const int lane = threadIdx.x % kWarp;
        uint32_t offsets[4];  // of eight lanes' words each
#pragma unroll
        for (int i = 0; i < 4; ++i) offsets[i] = place(lane % 4, 8 * i + lane / 4);
        int stage = 0, phase = 0;
        for_each_part([&](int tile, int part) {
            const int column_tile = tile / arguments.token_tiles, half_slab = column_tile % 2;
            int row_tile = part * arguments.pieces * kGradientPieceTiles + bringer;
            for (int i = 0; i < arguments.pieces; ++i) {
                wait_barrier(weights_empty + 8 * stage, phase ^ 1);
                const uint32_t to = weights + stage * kWeightsBytes;
#pragma unroll
                for (int of_piece = 0; of_piece < kGradientPieceTiles; of_piece += kWeightBringers) {
                    // Beyond the last row tile the last one again, times zeros.
                    const int64_t slab =
                        int64_t{min(row_tile, arguments.row_tiles - 1)} * arguments.slabs + column_tile / 2;
                    const int32_t* from =
                        arguments.words + slab * TileLayout::slab_words(kBits) + half_slab * kWords / 4 * 128 + lane;
                    const uint32_t to_tile = to + (bringer + of_piece) * kTileBytes;
#pragma unroll
                    for (int j = 0; j < kTileBytes / 128; ++j) {
                        cp_async_4(to_tile + j / 4 * 512 + offsets[j % 4], from + 32 * j);
                    }
                    if (lane % 4 / 2 == half_slab) {
                        cp_async_4(to + kScalesAt + lane % 2 * 128 + lane / 4 * 16 + (bringer + of_piece) * 4,
                                   arguments.scales + slab * kScaleBytes + lane * 4);
                    }
                    row_tile += kWeightBringers;
                }
                cp_async_arrive(weights_full + 8 * stage);
                step(stage, phase);
            }
        });
    }
    static __device__ __forceinline__ uint32_t place(int word, int lane) {
        return word * 128 + (lane * 4 + word * 32) % 128;
    }

    // --- who decodes and multiplies ---

    // The codes of a warp's 16 columns, of the four groups that a tile has number `quarter`, in a row tile: a lane's
    // pairs [h][r] of columns 8 t + 4 i + 2 h on, row g + 8 r. They are in the four bytes, at 3 bits in the upper six
    // bits of each; at 2 bits those of both rows in one byte, the first for h = 0; at 5 bits four times ten bits from
    // the low end.
    using Codes = std::conditional_t<kBits == 5, uint64_t, uint32_t>;
    using TileCodes = Codes[kGradientPieceTiles];

    // Of all row tiles of a piece at a time, so that warps choose once, and loads of one do not wait for the others.
    __device__ __forceinline__ void load_codes(uint32_t piece_words, int first_word, int quarter, int lane,
                                               TileCodes& codes) const {
        const auto load = [&](int tile, int word) {
            return load_shared_4(piece_words + tile * kTileBytes + place(first_word + word, lane));
        };
        const auto of_all = [&](auto of_tile) {
#pragma unroll
            for (int tile = 0; tile < kGradientPieceTiles; ++tile) codes[tile] = of_tile(tile);
        };
        if constexpr (kBits == 2) {
            of_all([&](int tile) { return load(tile, quarter / 2) >> quarter % 2 * 16; });
        } else if constexpr (kBits == 4) {
            of_all([&](int tile) { return load(tile, quarter); });
        } else if constexpr (kBits == 3) {
            if (quarter < 3) {
                of_all([&](int tile) { return load(tile, quarter); });
            } else {
                of_all([&](int tile) {
                    const uint32_t words[3] = {load(tile, 0), load(tile, 1), load(tile, 2)};
                    return three_bit_pairs(words, 3);
                });
            }
        } else {
            // Words hold three pairs each, and together a sixteenth (TileWord).
            const auto join = [](uint32_t three, uint32_t others) {
                return (three & ((1u << 30) - 1)) | static_cast<uint64_t>(others) << 30;
            };
            if (quarter < 3) {
                of_all([&](int tile) { return join(load(tile, quarter), load(tile, quarter + 1)) >> 10 * quarter; });
            } else {
                of_all([&](int tile) {
                    const uint32_t last = load(tile, 4);
                    uint32_t pair = last >> 30;
#pragma unroll
                    for (int word = 3; word >= 0; --word) pair = __funnelshift_l(load(tile, word), pair, 2);
                    return join(last, pair);
                });
            }
        }
    }

    // A lane's pairs of levels.
    static __device__ __forceinline__ void look_up(Codes codes, uint32_t lane_table, uint32_t (&pairs)[4]) {
        if constexpr (kBits == 2) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint2 rows = look_up_8<kSharedReserved>(Table::address(codes, h, lane_table));
                pairs[2 * h] = rows.x, pairs[2 * h + 1] = rows.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (kBits == 5) {
                    constexpr int kShift = 6;
                    static_assert(Table::kStride == 1 << kShift);
                    const auto bits = static_cast<uint32_t>(i == 0 ? codes << kShift : codes >> (10 * i - kShift));
                    pairs[i] = look_up_4<kSharedReserved>((bits & 1023 << kShift) | lane_table);
                } else {
                    pairs[i] = look_up_4<kSharedReserved>(Table::address(codes, i, lane_table));
                }
            }
        }
    }
    // Times scales, of rows g and g + 8 in the halves of two_scales, and transposed: operand A, 16 columns by 16 rows.
    static __device__ __forceinline__ void scale_and_transpose(const uint32_t (&pairs)[4], uint32_t two_scales,
                                                               uint32_t (&a)[4]) {
        using Two = typename Weights<T>::Two;
        const Two of_rows = *reinterpret_cast<const Two*>(&two_scales);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Two scale;
            scale.x = scale.y = r == 0 ? of_rows.x : of_rows.y;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Two weights = __hmul2(*reinterpret_cast<const Two*>(&pairs[2 * h + r]), scale);
                a[2 * r + h] = transpose_8x8(*reinterpret_cast<const uint32_t*>(&weights));
            }
        }
    }

    __device__ __forceinline__ void multiply(int warp) const {
        const int lane = threadIdx.x % kWarp;
        Table table;
        table.begin(window, arguments.codebook, lane);
        const float unit = table.template finish<T, kDecoders>();
        named_barrier(1, kDecoders);

        const int quarter = warp % 4;  // of a tile's 64 columns
        const uint64_t rows = swizzled_matrix(dy);
        const uint32_t lane_table = Table::lane_address(window, lane);
        int stage = 0, phase = 0, weights_stage = 0, weights_phase = 0;
        for_each_part([&](int tile, int part) {
            const int half_slab = tile / arguments.token_tiles % 2;
            const int first_word = half_slab * kWords % 4 + warp / 4 * kBits;
            TileCodes codes;
            uint32_t bytes[kGradientPieceTiles];  // scales of both blocks, rows g and g + 8
            const auto load = [&] {
                wait_barrier(weights_full + 8 * weights_stage, weights_phase);
                const uint32_t from = weights + weights_stage * kWeightsBytes;
                load_codes(from, first_word, quarter, lane, codes);
                const uint4 four = load_shared_16(from + kScalesAt + warp / 4 * 128 + lane / 4 * 16);
                bytes[0] = four.x, bytes[1] = four.y, bytes[2] = four.z, bytes[3] = four.w;
                __syncwarp();
                if (lane == 0) arrive(weights_empty + 8 * weights_stage);
                step(weights_stage, weights_phase);
            };
            uint32_t pairs[kGradientPieceTiles][4], two_scales[kGradientPieceTiles];
            const auto look_up_all = [&] {
#pragma unroll
                for (int i = 0; i < kGradientPieceTiles; ++i) {
                    look_up(codes[i], lane_table, pairs[i]);
                    const uint32_t two = __byte_perm(bytes[i], 0, quarter < 2 ? 0x4140 : 0x4342) << Weights<T>::kShift;
                    two_scales[i] = with_signs<T>(two, arguments.signs);
                }
            };
            uint32_t a[2][kGradientPieceTiles][4];
            const auto make = [&](uint32_t (&operands)[kGradientPieceTiles][4]) {
#pragma unroll
                for (int i = 0; i < kGradientPieceTiles; ++i) {
                    scale_and_transpose(pairs[i], two_scales[i], operands[i]);
                }
            };
            load();
            look_up_all();
            make(a[0]);
            load();

            float sums[kTokens / 2];
            int last = -1;  // the stage that the tensor cores may still read
#pragma unroll 1
            for (int both = 0; both < arguments.pieces; both += 2) {
                // Two pieces: the tensor cores still read operand A of the one while that of the other is made. Only
                // where the compiler has both in sight it gives them registers of their own.
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int piece = both + half;
                    look_up_all();  // for the next piece, as a warp waits until the last of these products begins
                    wait_barrier(dy_full + 8 * stage, phase);
                    const uint64_t from = rows + (stage * kGradientStageBytes >> 4);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < kGradientPieceTiles; ++i) {
                        wgmma<T, kTokens>(sums, a[half][i], from + 2 * i, piece + i > 0);
                    }
                    wgmma_commit();
                    if (piece + 2 < arguments.pieces) load();
                    wgmma_wait<1>();
                    __syncwarp();
                    if (last >= 0 && lane == 0) arrive(dy_empty + 8 * last);
                    last = stage;
                    step(stage, phase);
                    make(a[half ^ 1]);
                }
            }
            wgmma_wait<0>();
            __syncwarp();
            if (lane == 0) arrive(dy_empty + 8 * last);
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");
            if (arguments.parts == 1) {
                store_groups<T, kAtOnce>(arguments, sums, unit, tile, 0, warp, exchange);
            } else {
                float4* to = part_of(arguments, tile, part, warp, lane_id());
#pragma unroll
                for (int i = 0; i < kGroups; ++i) {
                    to[i * kWarp] = make_float4(sums[4 * i] * unit, sums[4 * i + 1] * unit, sums[4 * i + 2] * unit,
                                                sums[4 * i + 3] * unit);
                }
            }
        });
    }
};

template <int kBits, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    gradient_wgmma_kernel(const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ Arguments arguments) {
    if constexpr (kHopper) {
        extern __shared__ __align__(1024) char smem[];
        const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / kWarp, 0);
        const Cta<kBits, T> cta(arguments, shared_window(smem));
        if (threadIdx.x == 0) cta.init_barriers();
        __syncthreads();
        if (warp >= kWarps) {
            give_registers<kBringerRegisters>();
            const int bringer = warp - kWarps;
            if (bringer < kWeightBringers) {
                cta.bring_weights(bringer);
            } else if (bringer == kWeightBringers && threadIdx.x % kWarp == 0) {
                cta.bring_dy(&dy_map);
            }
            __syncwarp();
        } else {
            take_registers<kDecoderRegisters>();
            cta.multiply(warp);
        }
    } else {
        __trap();
    }
}

}  // namespace

cudaError_t gradient_wgmma(const Gradient& gradient, Dtype dtype, int bits, int64_t tokens, const GradientPlan& plan,
                           float* partial, const Gpu& gpu, cudaStream_t stream) {
    CUtensorMap map;
    // With fewer tokens than a tile has, boxes end with them: writing zeros is slower than copying. The other rows of
    // shared memory hold anything, which reaches no sum that is stored.
    const int box_tokens = static_cast<int>(std::min<int64_t>(ceil_div(tokens, 8) * 8, kTokens));
    const cudaError_t error = map_of_rows(gradient.dy, dtype, tokens, gradient.dy_columns, box_tokens, map);
    if (error != cudaSuccess) return error;
    const TileLayout layout(gradient.out_features, gradient.in_features);
    Arguments arguments{};
    arguments.words = gradient.words;
    arguments.scales = gradient.scales;
    arguments.codebook = gradient.codebook;
    arguments.transform = gradient.transform;
    arguments.dx = gradient.dx;
    arguments.partial = partial;
    arguments.tokens = static_cast<int>(tokens);
    arguments.in_features = static_cast<int>(gradient.in_features);
    arguments.box_tokens = box_tokens;
    arguments.row_tiles = static_cast<int>(layout.row_tiles);
    arguments.slabs = static_cast<int>(layout.slabs);
    arguments.tiles = plan.tiles;
    arguments.token_tiles = static_cast<int>(ceil_div(tokens, kTokens));
    arguments.parts = plan.parts;
    arguments.pieces = plan.pieces;
    return dispatch<__half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        using T = decltype(value);
        arguments.signs = signs_of<T>(gradient.signed_scales);
        static Launcher launcher(gradient_wgmma_kernel<width(), T>, kThreads, kAllShared);
        const cudaError_t failed = launcher.launch(gpu, std::min(plan.tiles * plan.parts, gpu.processors), 1,
                                                   gradient_shared_bytes(bits), stream, map, arguments);
        if (failed != cudaSuccess || plan.parts == 1) return failed;
        static Launcher adding(add_gradient_parts_kernel<T>, kDecoders, 0);
        return adding.launch(gpu, plan.tiles * (kGroups / kAddedGroups), 1, 0, stream, arguments);
    });
}

}  // namespace hf_kbit::cuda
