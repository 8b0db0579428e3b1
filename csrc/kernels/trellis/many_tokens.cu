// Products by a trellis on Hopper, in float16 or int8: of more than 16 tokens, or of any by codes other than mul1.
//
//   words   32-bit ones [K/16, N/16, 8 * bits]      x  float16 or bfloat16 [M, K]      y  the same [M, N]
//
// Three kernels, which overlap. `turn` turns tokens and makes them float16, each with a power of two by which its
// largest number is 256 to 512, or rounds them to 127 steps. `multiply` (many_tokens.cuh) adds up products; CTAs may
// divide K. `finish` adds up their sums, turns and scales them.
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

// Of the 64 columns that two lanes share, half: columns 16 t + 8 h to 16 t + 8 h + 7, of lane h.
template <typename T>
__device__ __forceinline__ void turn_chunk(const T* x, const __half* suh, int chunk, int in_features, bool swiglu,
                                           int block, float (&values)[4][8]) {
    const int first = chunk / 2 * 64 + chunk % 2 * 8;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        eight_scaled(x, suh, first + 16 * t, in_features, swiglu, values[t]);
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
__device__ __forceinline__ void store_int8(const uint32_t (&two)[4][4], int8_t* to, bool there) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        uint32_t four[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const uint32_t other = __shfl_xor_sync(kAllLanes, odd ? two[i][t] : two[i + 1][t], 1);
            four[t] = odd ? __byte_perm(other, two[i + 1][t], 0x5410) : __byte_perm(two[i][t], other, 0x5410);
        }
        if (there) store_16(to + 16 * (i + odd), make_uint4(four[0], four[1], four[2], four[3]));
    }
}

// A CTA for each row of inputs, float16 or int8 [rows, width], the columns of each 64 as many_tokens.cuh wants them.
// units [rows]; of int8 the sums of rows; of experts which weight the row has, or one beyond the last.
template <typename T, typename Input, int kThreads>
__global__ void __launch_bounds__(kThreads)
    turn_many_kernel(const T* gmem_x, const __half* suh, TrellisExperts experts, int tokens, int in_features,
                     int padded_in, int width, int block, Input* inputs, float* units, int* row_sums, int* weights) {
    if constexpr (!kHopper) return;
    __shared__ uint32_t largest_of[kThreads / 32];
    let_next_kernel_start();  // which waits for this one before it reads anything but weights
    wait_for_kernel_before();
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int row = static_cast<int>(blockIdx.x) % tokens;
    if (experts.offsets) {
        const int owner = owner_of(experts, row);
        const int weight = owner * experts.weights + static_cast<int>(blockIdx.x) / tokens;
        if (threadIdx.x == 0) weights[blockIdx.x] = owner < experts.count ? weight : experts.count * experts.weights;
        suh += int64_t{owner < experts.count ? weight : 0} * padded_in;
        row = picked(experts, row);
    }
    const bool swiglu = experts.swiglu;
    const T* x = gmem_x + int64_t{row} * (in_features * (swiglu ? 2 : 1));
    const int chunks = width / kChunk, turns = (chunks + kThreads - 1) / kThreads;
    uint32_t largest = 0;  // as integers magnitudes have the same order, and NaN is the largest
    float values[4][8];
    for (int turn = 0; turn < turns; ++turn) {
        turn_chunk(x, suh, turn * kThreads + static_cast<int>(threadIdx.x), in_features, swiglu, block, values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) largest = max(largest, __float_as_uint(values[i / 8][i % 8]) & 0x7FFFFFFF);
    }
    largest = largest_of_warp(largest);
    if (lane == 0) largest_of[warp] = largest;
    __syncthreads();
    largest = largest_of_warp(lane < kThreads / 32 ? largest_of[lane] : 0);
    // Tokens without a usual number are zeros, or NaN where that is not finite.
    const bool usual = largest >= __float_as_uint(0x1p-100f) && largest < 0x7F800000;
    const uint32_t exponent = largest >> 23;
    constexpr bool kInt8 = std::is_same_v<Input, int8_t>;
    const float factor = !usual  ? 0.0f
                         : kInt8 ? 127 / __uint_as_float(largest)
                                 : __uint_as_float((127 + 127 + 8 - exponent) << 23);
    int sum = 0;
    for (int turn = 0; turn < turns; ++turn) {
        const int chunk = turn * kThreads + static_cast<int>(threadIdx.x);
        if (turns > 1) turn_chunk(x, suh, chunk, in_features, swiglu, block, values);
        Input* const to = inputs + int64_t{blockIdx.x} * width + chunk / 2 * 64;
        if constexpr (kInt8) {
            uint32_t two[4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float* own = values[i % 4] + i / 4 * 2;
                const int first = __float2int_rn(own[0] * factor), second = __float2int_rn(own[1] * factor);
                two[i / 4][i % 4] = __byte_perm(first, second, 0x0040);
                sum += first + second;
            }
            store_int8(two, to, chunk < chunks);
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
        if (threadIdx.x == 0) row_sums[blockIdx.x] = sum;
    }
    if (threadIdx.x == 0) units[blockIdx.x] = unit;
}

// --- outputs -------------------------------------------------------------------------------------

constexpr int kFinishThreads = 128;
constexpr int kFinishTiles = kFinishThreads / 4;  // four lanes have the 128 rows of a token and unit

__device__ __forceinline__ void add_piece(const __half* from, float (&sums)[8]) {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = unpack_two<__half>(words[i]);
        sums[i] += two.x, sums[i + 4] += two.y;
    }
}
__device__ __forceinline__ void add_piece(const float* from, float (&sums)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const float4 four = *reinterpret_cast<const float4*>(from + 2 * i);
        sums[i] += four.x, sums[i + 4] += four.y, sums[i + 1] += four.z, sums[i + 5] += four.w;
    }
}

// Lane q of four has the pieces q + 4 j of 16, of each rows 32 j + 16 (q / 2) + 4 (q % 2) + i % 4 + 8 (i / 4).
template <typename T, typename Sum>
__global__ void __launch_bounds__(kFinishThreads)
    finish_many_kernel(const Sum* sums, const float* units, const int* row_sums, float row_zero, const int* weights,
                       int num_weights, const __half* svh, const T* bias, T* y, int rows, int tokens, int padded_out,
                       int out_features, int row_tiles, int split, int block, float scale) {
    if constexpr (!kHopper) return;
    const unsigned number = blockIdx.x * kFinishTiles + threadIdx.x / 4;
    const bool there = number < static_cast<unsigned>(rows * row_tiles);
    const int token = there ? static_cast<int>(number / row_tiles) : 0;
    const int row_tile = there ? static_cast<int>(number % row_tiles) : 0;
    const int q = static_cast<int>(threadIdx.x) % 4;
    float values[4][8] = {};
    let_next_kernel_start();
    wait_for_kernel_before();
    const int weight = weights ? weights[token] : 0;
    const Sum* from = sums + (int64_t{token} * row_tiles + row_tile) * kManyTrellisRows + 8 * q;
    // Of rows that no expert has sums are not there.
    const int parts = weight < num_weights ? split : 0;
    for (int part = 0; part < parts; ++part, from += int64_t{rows} * row_tiles * kManyTrellisRows) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add_piece(from + 32 * j, values[j]);
    }
    const float unit = parts > 0 ? units[token] * scale : 0.0f,
                zero = row_sums && parts > 0 ? row_zero * static_cast<float>(row_sums[token]) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float (&own)[8] = values[j];
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] += zero;
        turn_own(own);
        // Two lanes exchange halves: then each has eight rows that follow each other, from 32 j + 8 q on.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(kAllLanes, q % 2 ? own[i] : own[i + 4], 1);
            const float first = q % 2 ? other : own[i], second = q % 2 ? own[i + 4] : other;
            own[i] = first + second, own[i + 4] = first - second;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = turned_with_lane(own[i], 2);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (block > 32) turn_two(values[0][i], values[1][i]), turn_two(values[2][i], values[3][i]);
        if (block > 64) turn_two(values[0][i], values[2][i]), turn_two(values[1][i], values[3][i]);
    }
    if (!there) return;
    const int first = row_tile * kManyTrellisRows + 8 * q;
    T* of_token = y + int64_t{token} * out_features;
    if (weights) of_token = y + (int64_t{token % tokens} * (rows / tokens) + token / tokens) * out_features;
    svh += int64_t{parts > 0 ? weight : 0} * padded_out;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int row = first + 32 * j;
        if (out_features % 8 == 0 && row < out_features) {
            float scales[8], addend[8] = {};
            eight_floats(svh + row, scales);
            if (bias) eight_floats(bias + row, addend);
            uint32_t two[4];
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                two[i / 2] = pack_two<T>(values[j][i] * unit * scales[i] + addend[i],
                                         values[j][i + 1] * unit * scales[i + 1] + addend[i + 1]);
            }
            store_16(of_token + row, make_uint4(two[0], two[1], two[2], two[3]));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (row + i >= out_features) continue;
                const float value = values[j][i] * unit * __half2float(svh[row + i]);
                store(of_token + row + i, bias ? value + as_float(bias[row + i]) : value);
            }
        }
    }
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

cudaError_t many_trellis_tokens(const TrellisProduct& product, const TrellisExperts& experts, Dtype dtype,
                                int64_t tokens, const ManyTrellisPlan& plan, const ManyTrellisRoom& room,
                                const Gpu& gpu, cudaStream_t stream) {
    const auto& sides = product.sides;
    const auto rows = static_cast<int>(tokens * experts.weights);
    const int64_t width = many_trellis_width(sides.padded_in);
    const bool halves = many_trellis_halves(plan.token_tile);
    const float unit = halves ? unit_of_halves(sides.padded_in, product.code, plan.int8) : 1;
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
        const auto turn = [&](auto input, auto threads) {
            using Input = decltype(input);
            static Launcher launcher(turn_many_kernel<T, Input, threads()>, threads(), 0);
            return launcher.launch_overlapping(
                gpu, rows, 1, 0, stream, static_cast<const T*>(product.x), reinterpret_cast<const __half*>(sides.suh),
                experts, static_cast<int>(tokens), static_cast<int>(sides.in_features),
                static_cast<int>(sides.padded_in), static_cast<int>(width), sides.block,
                static_cast<Input*>(room.inputs), room.units, room.row_sums, room.weights);
        };
        const auto turn_to = [&](auto input) {
            return width <= 64 * kChunk ? turn(input, std::integral_constant<int, 64>{})
                                        : turn(input, std::integral_constant<int, 256>{});
        };
        error = plan.int8 ? turn_to(int8_t{}) : turn_to(__half{});
        if (error != cudaSuccess) return error;
        const ManyTrellisArguments arguments{product.words,
                                             room.sums,
                                             rows,
                                             static_cast<int>(product.across),
                                             static_cast<int>(product.down),
                                             many_trellis_steps(product.across, plan.int8),
                                             plan.token_tiles,
                                             plan.row_tiles,
                                             plan.split,
                                             plan.row_tiles * plan.token_tiles * plan.split,
                                             unit,
                                             experts.offsets ? room.tiles : nullptr};
        const auto multiply = plan.int8                          ? multiply_many_trellis_int8
                              : product.code == Code::mcg        ? multiply_many_trellis_mcg
                              : product.code == Code::three_inst ? multiply_many_trellis_3inst
                                                                 : multiply_many_trellis<Code::mul1, __half>;
        error = multiply(map, arguments, product.bits, plan, gpu, stream);
        if (error != cudaSuccess) return error;
        const auto finish = [&](const auto* of_type) {
            using Sum = std::remove_const_t<std::remove_pointer_t<decltype(of_type)>>;
            static Launcher launcher(finish_many_kernel<T, Sum>, kFinishThreads, 0);
            return launcher.launch_overlapping(
                gpu, ceil_div(int64_t{rows} * plan.row_tiles, kFinishTiles), 1, 0, stream, of_type,
                static_cast<const float*>(room.units), plan.int8 ? static_cast<const int*>(room.row_sums) : nullptr,
                kInt8Zero * unit, experts.offsets ? static_cast<const int*>(room.weights) : nullptr,
                experts.count * experts.weights, reinterpret_cast<const __half*>(sides.svh),
                static_cast<const T*>(product.bias), static_cast<T*>(product.y), rows, static_cast<int>(tokens),
                static_cast<int>(sides.padded_out), static_cast<int>(sides.out_features), plan.row_tiles, plan.split,
                sides.block, (plan.int8 ? 4 * kSumScale : 1) / (static_cast<float>(sides.block) * unit));
        };
        return halves ? finish(static_cast<const __half*>(room.sums)) : finish(static_cast<const float*>(room.sums));
    });
}

}  // namespace hf_kbit::cuda
