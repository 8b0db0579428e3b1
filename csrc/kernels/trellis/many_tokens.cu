// Products of more than 16 tokens by a trellis of code mul1 on Hopper, in float16.
//
//   words   32-bit ones [K/16, N/16, 8 * bits]      x  float16 or bfloat16 [M, K]      y  the same [M, N]
//
// Three kernels, which overlap. `turn` turns tokens and makes them float16, each with a power of two by which its
// largest number is 256 to 512. `multiply` (many_tokens.cuh) adds up products; CTAs may divide K. `finish` adds up
// their sums, turns and scales them.
#include "kernels/trellis/many_tokens.cuh"
#include "kernels/trellis/turn.cuh"

namespace hf_kbit::cuda {

namespace {

// --- inputs --------------------------------------------------------------------------------------

constexpr int kTurnThreads = 256, kChunk = 32;

// Of the 64 columns that two lanes share, half: columns 16 t + 8 h to 16 t + 8 h + 7, of lane h.
template <typename T>
__device__ __forceinline__ void turn_chunk(const T* x, const __half* suh, int chunk, int in_features, int block,
                                           float (&values)[4][8]) {
    const int first = chunk / 2 * 64 + chunk % 2 * 8;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        eight_scaled(x, suh, first + 16 * t, in_features, values[t]);
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

// A CTA for each token. inputs: float16 [M, width], the columns of each 64 as many_tokens.cuh wants them. units [M].
template <typename T>
__global__ void __launch_bounds__(kTurnThreads) turn_many_kernel(const T* gmem_x, const __half* suh, int in_features,
                                                                 int width, int block, __half* inputs, float* units) {
    if constexpr (!kHopper) return;
    __shared__ uint32_t largest_of[kTurnThreads / 32];
    wait_for_kernel_before();
    let_next_kernel_start();
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const T* x = gmem_x + int64_t{blockIdx.x} * in_features;
    const int chunks = width / kChunk, turns = (chunks + kTurnThreads - 1) / kTurnThreads;
    uint32_t largest = 0;  // as integers magnitudes have the same order, and NaN is the largest
    float values[4][8];
    for (int turn = 0; turn < turns; ++turn) {
        turn_chunk(x, suh, turn * kTurnThreads + static_cast<int>(threadIdx.x), in_features, block, values);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) largest = max(largest, __float_as_uint(values[i / 8][i % 8]) & 0x7FFFFFFF);
    }
    largest = largest_of_warp(largest);
    if (lane == 0) largest_of[warp] = largest;
    __syncthreads();
    largest = largest_of_warp(lane < kTurnThreads / 32 ? largest_of[lane] : 0);
    // Tokens without a usual number are zeros, or NaN where that is not finite.
    const bool usual = largest >= __float_as_uint(0x1p-100f) && largest < 0x7F800000;
    const uint32_t exponent = largest >> 23;
    const float factor = usual ? __uint_as_float((127 + 127 + 8 - exponent) << 23) : 0.0f;
    for (int turn = 0; turn < turns; ++turn) {
        const int chunk = turn * kTurnThreads + static_cast<int>(threadIdx.x);
        if (turns > 1) turn_chunk(x, suh, chunk, in_features, block, values);
        if (chunk >= chunks) continue;
        __half* to = inputs + int64_t{blockIdx.x} * width + chunk / 2 * 64 + chunk % 2 * 8;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            uint32_t two[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                two[t] = pack_two<__half>(values[t][2 * m] * factor, values[t][2 * m + 1] * factor);
            }
            store_16(to + 16 * m, make_uint4(two[0], two[1], two[2], two[3]));
        }
    }
    if (threadIdx.x == 0) units[blockIdx.x] = usual ? __uint_as_float((exponent - 8) << 23) : 0.0f;
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
    finish_many_kernel(const Sum* sums, const float* units, const __half* svh, const T* bias, T* y, int tokens,
                       int out_features, int row_tiles, int split, int block, float scale) {
    if constexpr (!kHopper) return;
    const unsigned number = blockIdx.x * kFinishTiles + threadIdx.x / 4;
    const bool there = number < static_cast<unsigned>(tokens * row_tiles);
    const int token = there ? static_cast<int>(number / row_tiles) : 0;
    const int row_tile = there ? static_cast<int>(number % row_tiles) : 0;
    const int q = static_cast<int>(threadIdx.x) % 4;
    float values[4][8] = {};
    wait_for_kernel_before();
    let_next_kernel_start();
    const Sum* from = sums + (int64_t{token} * row_tiles + row_tile) * kManyTrellisRows + 8 * q;
    for (int part = 0; part < split; ++part, from += int64_t{tokens} * row_tiles * kManyTrellisRows) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add_piece(from + 32 * j, values[j]);
    }
    const float unit = units[token] * scale;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float (&own)[8] = values[j];
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
    T* const of_token = y + int64_t{token} * out_features;
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

// A power of two by which sums of weights below 3.5 times inputs below 512 are float16 whatever they are.
float unit_of_halves(int64_t padded_in) {
    double largest = 3.5 * 512 * static_cast<double>(padded_in);
    float unit = 1;
    for (; largest > 65504; largest /= 2) unit /= 2;
    return unit;
}

}  // namespace

cudaError_t many_trellis_tokens(const TrellisProduct& product, Dtype dtype, int64_t tokens,
                                const ManyTrellisPlan& plan, uint16_t* inputs, float* units, void* sums,
                                const Gpu& gpu, cudaStream_t stream) {
    const auto& sides = product.sides;
    const int64_t width = many_trellis_width(sides.padded_in);
    const bool halves = many_trellis_halves(plan.token_tile);
    const float unit = halves ? unit_of_halves(sides.padded_in) : 1;
    CUtensorMap map;
    cudaError_t error = map_of_rows(inputs, Dtype::float16, tokens, width, plan.token_tile, map);
    if (error != cudaSuccess) return error;
    return dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
        using T = decltype(value);
        static Launcher turn(turn_many_kernel<T>, kTurnThreads, 0);
        error =
            turn.launch_overlapping(gpu, tokens, 1, 0, stream, static_cast<const T*>(product.x),
                                    reinterpret_cast<const __half*>(sides.suh), static_cast<int>(sides.in_features),
                                    static_cast<int>(width), sides.block, reinterpret_cast<__half*>(inputs), units);
        if (error != cudaSuccess) return error;
        const ManyTrellisArguments arguments{product.words,
                                             sums,
                                             static_cast<int>(tokens),
                                             static_cast<int>(product.across),
                                             static_cast<int>(product.down),
                                             many_trellis_steps(product.across),
                                             plan.token_tiles,
                                             plan.row_tiles,
                                             plan.split,
                                             plan.row_tiles * plan.token_tiles * plan.split,
                                             unit};
        error = dispatch_trellis(product.bits, [&](auto width) {
            return multiply_many_trellis<width()>(map, arguments, plan, gpu, stream);
        });
        if (error != cudaSuccess) return error;
        const auto finish = [&](const auto* of_type) {
            using Sum = std::remove_const_t<std::remove_pointer_t<decltype(of_type)>>;
            static Launcher launcher(finish_many_kernel<T, Sum>, kFinishThreads, 0);
            return launcher.launch_overlapping(
                gpu, ceil_div(tokens * plan.row_tiles, kFinishTiles), 1, 0, stream, of_type,
                static_cast<const float*>(units), reinterpret_cast<const __half*>(sides.svh),
                static_cast<const T*>(product.bias), static_cast<T*>(product.y), static_cast<int>(tokens),
                static_cast<int>(sides.out_features), plan.row_tiles, plan.split, sides.block,
                1 / (static_cast<float>(sides.block) * unit));
        };
        return halves ? finish(static_cast<const __half*>(sums)) : finish(static_cast<const float*>(sums));
    });
}

}  // namespace hf_kbit::cuda
