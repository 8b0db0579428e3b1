// Products by a trellis on Hopper, in float16 or int8: of more than 16 tokens, of large weights 8, or of any by codes
// other than mul1.
//
//   words   32-bit ones [K/16, N/16, 8 * bits]      x  float16 or bfloat16 [M, K]      y  the same [M, N]
//
// Several weights of one x, parts, lie one below the other, and so do their inputs. Three kernels, which overlap.
// `turn` turns tokens and makes them float16, each with a power of two by which its largest number is 256 to 512, or
// rounds them to 127 steps. `multiply` (many_tokens.cuh) adds up products; CTAs may divide K. `finish` adds up their
// sums, turns and scales them. Of very many tokens of int8 the last two are those of decoded_int8.cu.
//
// Of experts, whose rows of x follow each other, `list_tiles` first finds which tiles there are. Where several weights
// of an expert lie one below the other, their inputs do too: row v of these is row v % M of x, for weight v / M of its
// expert.
#include "kernels/trellis/many_tokens.cuh"
#include "kernels/trellis/turn.cuh"

namespace hf_kbit::cuda {

namespace {

// --- experts -------------------------------------------------------------------------------------

// One warp. tiles: [1 + as many as the first one says], at most so many.
__global__ void __launch_bounds__(32)
    list_tiles_kernel(TrellisExperts experts, int rows, int token_tile, int most, ManyTrellisTile* tiles) {
    wait_for_kernel_before();
    let_next_kernel_start();
    const int lane = static_cast<int>(threadIdx.x);
    int before = 0;
    for (int chunk = 0; chunk < experts.count; chunk += 32) {
        const int expert = chunk + lane;
        const bool there = expert < experts.count;
        const int first = there ? min(max(experts.offsets[expert], 0), rows) : 0;
        const int end = there ? min(max(experts.offsets[expert + 1], 0), rows) : 0;
        const int own = max(0, end - first + token_tile - 1) / token_tile * experts.weights;
        int up_to = own;  // tiles of this lane's expert and of those before it
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(kAllLanes, up_to, distance);
            if (lane >= distance) up_to += other;
        }
        int tile = before + up_to - own;
        for (int weight = 0; weight < experts.weights; ++weight) {
            for (int row = first; row < end && tile < most; row += token_tile) {
                tiles[1 + tile++] = {expert * experts.weights + weight, weight * rows + row, weight * rows + end};
            }
        }
        before = min(before + __shfl_sync(kAllLanes, up_to, 31), most);
    }
    if (lane == 0) tiles->weight = before;
}

// --- inputs --------------------------------------------------------------------------------------

constexpr int kChunk = 32;
constexpr int kTurnThreads = 1024;  // of a processor

// Of the 64 columns that two lanes share a lane has half: columns 16 t + 8 h to 16 t + 8 h + 7, of lane h.
__device__ __forceinline__ int first_of_chunk(int chunk) { return chunk / 2 * 64 + chunk % 2 * 8; }

// load(t, first, to): octet t of a chunk, which begins with column `first`, times those of suh.
template <typename Load>
__device__ __forceinline__ void turn_chunk(int chunk, int block, float (&values)[4][8], const Load& load) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        load(t, first_of_chunk(chunk) + 16 * t, values[t]);
        turn_own(values[t]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        turn_two(values[0][i], values[1][i]);
        turn_two(values[2][i], values[3][i]);
        if (block > 32) {
            turn_two(values[0][i], values[2][i]);
            turn_two(values[1][i], values[3][i]);
        }
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[t][i] = turned_with_lane(values[t][i], 1);
            if (block > 64) values[t][i] = turned_with_lane(values[t][i], 2);
        }
    }
}

// Two lanes have two bytes each of four tiles for four m. They store 16 bytes of one m each, then of the next two.
// Returns the sum of what a lane stores.
__device__ __forceinline__ int store_int8(const uint32_t (&two)[4][4], int8_t* to, bool there) {
    const bool odd = threadIdx.x % 2;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t four[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? two[i][t] : two[i + 1][t], 1);
            four[t] = odd ? __byte_perm(other, two[i + 1][t], 0x5410) : __byte_perm(two[i][t], other, 0x5410);
            sum = __dp4a(static_cast<int>(four[t]), 0x01010101, sum);
        }
        if (there) store_16(to + 16 * (i + odd), make_uint4(four[0], four[1], four[2], four[3]));
    }
    return sum;
}

struct ManyTrellisScales {
    const __half* of_parts[kTrellisParts];
};

// CTAs take rows of inputs in turns, float16 or int8 [rows, width], the columns of each 64 as many_tokens.cuh wants
// them. units [rows]; of int8 the sums of rows; of experts which weight the row has, or one beyond the last. Of plain
// rows, whole octets that one turn has all of, of no experts, a thread asks for its part of the next one early; these
// have a kernel of their own, whose instructions follow each other.
template <typename T, typename Input, int kThreads, bool kPlain>
__global__ void __launch_bounds__(kThreads, kTurnThreads / kThreads)
    turn_many_kernel(const T* gmem_x, const __grid_constant__ ManyTrellisScales scales, TrellisExperts experts,
                     int rows, int tokens, int in_features, int padded_in, int width, int block, Input* inputs,
                     float* units, int* row_sums, int* weights) {
    if constexpr (!kHopper) return;
    __shared__ uint32_t largest_of[2][kThreads / 32];  // of two rows in turns, as warps do not wait for each other
    __shared__ uint4 early[kPlain ? 4 : 1][kThreads];
    let_next_kernel_start();  // which waits for this one before it reads anything but weights
    wait_for_kernel_before();
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const int chunks = width / kChunk, turns = kPlain ? 1 : (chunks + kThreads - 1) / kThreads;
    const auto ask = [&](int number) {
        if constexpr (kPlain) {
            if (number >= rows) return;
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                const int first = first_of_chunk(thread) + 16 * t;
                const T* from = gmem_x + int64_t{number % tokens} * in_features + first;
                cp_async_16_or_zeros(shared_address(&early[t][thread]), from, first < in_features);
            }
            cp_async_commit();
        }
    };
    ask(blockIdx.x);
    for (int number = blockIdx.x, parity = 0; number < rows; number += gridDim.x, parity ^= 1) {
        const T* x = gmem_x;
        const __half* suh = scales.of_parts[experts.offsets ? 0 : number / tokens];
        if constexpr (!kPlain) {
            const int row = number % tokens;
            x += int64_t{picked(experts, row)} * (in_features * (experts.swiglu ? 2 : 1));
            if (experts.offsets) {
                const int owner = owner_of(experts, row), weight = owner * experts.weights + number / tokens;
                if (thread == 0) weights[number] = owner < experts.count ? weight : experts.count * experts.weights;
                suh += int64_t{owner < experts.count ? weight : 0} * padded_in;
            }
        }
        const auto load = [&](int t, int first, float (&to)[8]) {
            if constexpr (kPlain) {
                float scales[8];
                unpack_octet<T>(early[t][thread], to);
                eight_floats(suh + min(first, padded_in - 8), scales);
#pragma unroll
                for (int i = 0; i < 8; ++i) to[i] = __fmul_rn(to[i], scales[i]);
            } else {
                eight_scaled(x, suh, first, in_features, experts.swiglu, to);
            }
        };
        uint32_t largest = 0;  // as integers magnitudes have the same order, and NaN is the largest
        float values[4][8];
        if constexpr (kPlain) cp_async_wait<0>();
        for (int turn = 0; turn < turns; ++turn) {
            const int chunk = turn * kThreads + thread;
            turn_chunk(chunk, block, values, load);
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
                largest = max(largest, __float_as_uint(values[i / 8][i % 8]) & 0x7FFFFFFF);
        }
        ask(number + static_cast<int>(gridDim.x));
        largest = largest_of_warp(largest);
        if (lane == 0) largest_of[parity][warp] = largest;
        __syncthreads();
        largest = largest_of_warp(lane < kThreads / 32 ? largest_of[parity][lane] : 0);
        // Tokens without a usual number are zeros, or NaN where that is not finite.
        const bool usual = largest >= __float_as_uint(0x1p-100f) && largest < 0x7F800000;
        const uint32_t exponent = largest >> 23;
        constexpr bool kInt8 = std::is_same_v<Input, int8_t>;
        const float factor = !usual  ? 0.0f
                             : kInt8 ? 127 / __uint_as_float(largest)
                                     : __uint_as_float((127 + 127 + 8 - exponent) << 23);
        int sum = 0;
        for (int turn = 0; turn < turns; ++turn) {
            const int chunk = turn * kThreads + thread;
            if (turns > 1) turn_chunk(chunk, block, values, load);
            Input* const to = inputs + int64_t{number} * width + chunk / 2 * 64;
            if constexpr (kInt8) {
                uint32_t two[4][4];
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    // Behind 1.5 * 2**23 a float's lowest byte is that of the whole number that was added.
                    const float* own = values[i % 4] + i / 4 * 2;
                    const float first = __fmaf_rn(own[0], factor, 0x1.8p23f),
                                second = __fmaf_rn(own[1], factor, 0x1.8p23f);
                    two[i / 4][i % 4] = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x0040);
                }
                sum += store_int8(two, to, chunk < chunks);
            } else if (chunk < chunks) {
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    uint32_t two[4];
#pragma unroll
                    for (int t = 0; t < 4; ++t) {
                        two[t] = pack_two<__half>(values[t][2 * m] * factor, values[t][2 * m + 1] * factor);
                    }
                    store_16(to + chunk % 2 * 8 + 16 * m, make_uint4(two[0], two[1], two[2], two[3]));
                }
            }
        }
        float unit = usual ? __uint_as_float((exponent - 8) << 23) : 0.0f;
        if constexpr (kInt8) {
            unit = usual || largest >= 0x7F800000 ? __uint_as_float(largest) / 127 : 0.0f;
            __shared__ int sum_of[kThreads / 32];
            sum = __reduce_add_sync(kAllLanes, sum);
            if (lane == 0) sum_of[warp] = sum;
            __syncthreads();
            sum = __reduce_add_sync(kAllLanes, lane < kThreads / 32 ? sum_of[lane] : 0);
            if (thread == 0) row_sums[number] = sum;
        }
        if (thread == 0) units[number] = unit;
    }
}

// --- outputs -------------------------------------------------------------------------------------

constexpr int kFinishThreads = 128;

template <typename T, bool kOctets>
__global__ void __launch_bounds__(kFinishThreads)
    finish_many_kernel(const __grid_constant__ ManyTrellisArguments arguments,
                       const __grid_constant__ ManyTrellisOutputs<T> outputs) {
    if constexpr (!kHopper) return;
    const unsigned number = (blockIdx.x * kFinishThreads + threadIdx.x) / kOutputLanes;
    const auto row_tiles = static_cast<unsigned>(arguments.row_tiles);
    const bool there = number < arguments.tokens * row_tiles;
    const int token = there ? static_cast<int>(number / row_tiles) : 0;
    const int row_tile = there ? static_cast<int>(number % row_tiles) : 0;
    const int64_t width = int64_t{arguments.row_tiles} * kManyTrellisRows;
    let_next_kernel_start();
    wait_for_kernel_before();
    const int weight = outputs.weights ? outputs.weights[token] : 0;
    const __half* from =
        arguments.sums + token * width + row_tile * kManyTrellisRows + 8 * (threadIdx.x % kOutputLanes);
    // Of rows that no expert has sums are not there.
    const int parts = weight < outputs.num_weights ? arguments.split : 0;
    float values[4][8] = {};
    for (int part = 0; part < parts; ++part, from += arguments.tokens * width) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add_piece(*reinterpret_cast<const uint4*>(from + 32 * j), values[j]);
    }
    const int own_part = part_of(arguments, row_tile);
    store_outputs<kOctets>(outputs, own_part, values, own_part * arguments.tokens + token, row_tile, there, weight);
}

// A power of two by which sums are float16 whatever they are: of weights below 3.5, or 4 but of mul1, times inputs
// below 512, or of int8.
float unit_of_halves(int64_t padded_in, Code code, bool int8) {
    const double of_one = int8 ? 128 * 127 : (code == Code::mul1 ? 3.5 : 4) * 512;
    double largest = of_one * static_cast<double>(padded_in);
    float unit = 1;
    for (; largest > 65504; largest /= 2) unit /= 2;
    return unit;
}

}  // namespace

cudaError_t many_trellis_tokens(const std::vector<TrellisProduct>& products, const TrellisExperts& experts,
                                Dtype dtype, int64_t tokens, const ManyTrellisPlan& plan, const ManyTrellisRoom& room,
                                const Gpu& gpu, cudaStream_t stream) {
    const TrellisProduct& one = products[0];
    const auto& sides = one.sides;
    const auto num_parts = static_cast<int>(products.size());
    // Rows of inputs: of each part, or of each weight of an expert.
    const auto rows = static_cast<int>(tokens * experts.weights * num_parts);
    const int64_t width = many_trellis_width(sides.padded_in);
    const float unit = unit_of_halves(sides.padded_in, one.code, plan.int8);
    ManyTrellisArguments arguments{{},
                                   reinterpret_cast<__half*>(room.sums),
                                   num_parts,
                                   rows / num_parts,
                                   static_cast<int>(one.across),
                                   many_trellis_steps(one.across, plan.int8),
                                   plan.token_tiles,
                                   plan.row_tiles,
                                   plan.split,
                                   plan.row_tiles * plan.token_tiles * plan.split,
                                   unit,
                                   experts.offsets ? room.tiles : nullptr};
    ManyTrellisScales scales{};
    int first_tile = 0;
    for (int i = 0; i < num_parts; ++i) {
        arguments.parts[i] = {products[i].words, static_cast<int>(products[i].down), first_tile};
        scales.of_parts[i] = reinterpret_cast<const __half*>(products[i].sides.suh);
        first_tile += static_cast<int>(ceil_div(products[i].down, kManyTrellisTiles));
    }
    CUtensorMap map;
    cudaError_t error =
        plan.int8 ? map_of_rows(room.inputs, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, rows, width, plan.token_tile, map)
                  : map_of_rows(room.inputs, Dtype::float16, rows, width, plan.token_tile, map);
    if (error != cudaSuccess) return error;
    if (experts.offsets) {
        static Launcher list(list_tiles_kernel, 32, 0);
        error = list.launch_overlapping(
            gpu, 1, 1, 0, stream, experts, static_cast<int>(tokens), plan.token_tile,
            static_cast<int>(most_many_trellis_tiles(plan, experts.count, tokens, experts.weights)), room.tiles);
        if (error != cudaSuccess) return error;
    }
    return dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
        using T = decltype(value);
        const auto turn = [&](auto input, auto threads, auto plain) {
            using Input = decltype(input);
            static Launcher launcher(turn_many_kernel<T, Input, threads(), plain()>, threads(), 0);
            return launcher.launch_overlapping(
                gpu, std::min(rows, gpu.processors * (kTurnThreads / threads())), 1, 0, stream,
                static_cast<const T*>(one.x), scales, experts, rows, static_cast<int>(tokens),
                static_cast<int>(sides.in_features), static_cast<int>(sides.padded_in), static_cast<int>(width),
                sides.block, static_cast<Input*>(room.inputs), room.units, room.row_sums, room.weights);
        };
        const bool plain = !experts.offsets && sides.in_features % 8 == 0 && width <= 512 * kChunk;
        const auto turn_to = [&](auto input) {
            using std::integral_constant;
            if (!plain) {
                return width <= 64 * kChunk ? turn(input, integral_constant<int, 64>{}, std::false_type{})
                                            : turn(input, integral_constant<int, 256>{}, std::false_type{});
            }
            return width <= 64 * kChunk    ? turn(input, integral_constant<int, 64>{}, std::true_type{})
                   : width <= 128 * kChunk ? turn(input, integral_constant<int, 128>{}, std::true_type{})
                   : width <= 256 * kChunk ? turn(input, integral_constant<int, 256>{}, std::true_type{})
                                           : turn(input, integral_constant<int, 512>{}, std::true_type{});
        };
        error = plan.int8 ? turn_to(int8_t{}) : turn_to(__half{});
        if (error != cudaSuccess) return error;
        const auto multiply = plan.int8                      ? multiply_many_trellis_int8
                              : one.code == Code::mcg        ? multiply_many_trellis_mcg
                              : one.code == Code::three_inst ? multiply_many_trellis_3inst
                                                             : multiply_many_trellis<Code::mul1, __half>;
        ManyTrellisOutputs<T> outputs{{},
                                      room.units,
                                      plan.int8 ? room.row_sums : nullptr,
                                      kInt8Zero * unit,
                                      experts.offsets ? room.weights : nullptr,
                                      num_parts,
                                      experts.count * experts.weights,
                                      rows,
                                      static_cast<int>(tokens),
                                      static_cast<int>(sides.padded_out),
                                      sides.block,
                                      (plan.int8 ? 4 * kSumScale : 1) / (static_cast<float>(sides.block) * unit)};
        for (int i = 0; i < num_parts; ++i) {
            const TrellisProduct& its = products[i];
            outputs.parts[i] = {reinterpret_cast<const __half*>(its.sides.svh), static_cast<const T*>(its.bias),
                                static_cast<T*>(its.y), static_cast<int>(its.sides.out_features),
                                arguments.parts[i].first_tile};
        }
        if (plan.decodes) {
            return multiply_decoded_int8(map, arguments, outputs, one.bits, room.decoded, plan, gpu, stream);
        }
        error = multiply(map, arguments, one.bits, plan, gpu, stream);
        if (error != cudaSuccess) return error;
        const auto finish = [&](auto octets) {
            static Launcher launcher(finish_many_kernel<T, octets()>, kFinishThreads, 0);
            const int64_t threads = int64_t{arguments.tokens} * plan.row_tiles * kOutputLanes;
            return launcher.launch_overlapping(gpu, ceil_div(threads, kFinishThreads), 1, 0, stream, arguments,
                                               outputs);
        };
        return outputs.octets() ? finish(std::true_type{}) : finish(std::false_type{});
    });
}

}  // namespace hf_kbit::cuda
