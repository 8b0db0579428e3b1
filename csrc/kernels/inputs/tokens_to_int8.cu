// Tokens as 8-bit inputs (docs/internals.md, "8-bit inputs"): x' = (x * c) @ R in float32, and each number divided by
// what 1 stands for in its token, the largest magnitude over 127, and rounded.
//
//   x        float16 or bfloat16 [M, K], row-major, K a multiple of 8,    columns  uint8 [K], as E4M4, or null
//            or rows that an index picks
//   out      int8 [M, 32 * B]                                             scales   float32 [M + 1], the last one 0
//
// For the kernels of int8 in hopper/ and mma/: of each block of 32 columns first 0 to 3, 8 to 11, 16 to 19 and 24 to
// 27 are stored, then the others. A lane of a tile has eight columns, four for each half of operand A.
//
// A CTA has a token, a thread octets of it, which it holds in float32 until all know the largest number. Of a token of
// more octets than CTAs hold, it makes them anew. The product's kernel may overlap with the launch. Compute capability
// 8.0 and newer.
#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/inputs/swiglu.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"
#include "kernels/transform.cuh"

namespace hf_kbit::cuda {

namespace {

struct Arguments {
    const void* x;
    const int32_t* rows;  // or null
    int last_row;
    Int8Tokens outputs[kGemmParts];
    int tokens, in_features, out_columns;
    uint32_t* zeros;
    int num_zeros;
};

// An octet, transformed as in the reference, where also what is stored in units elsewhere may overflow.
template <typename T, bool kSwiglu>
__device__ __forceinline__ void load_octet(const Arguments& arguments, const uint8_t* columns, int row, int column,
                                           float (&values)[kOctet]) {
    uint4 octet = make_uint4(0, 0, 0, 0);
    uint2 bytes = make_uint2(kScalesOfOne, kScalesOfOne);
    if (column < arguments.in_features) {
        const int64_t at = int64_t{row} * arguments.in_features * (kSwiglu ? 2 : 1) + column;
        const T* x = static_cast<const T*>(arguments.x) + at;
        octet = *reinterpret_cast<const uint4*>(x);
        if constexpr (kSwiglu) {
            octet = swiglu_octet<T>(octet, *reinterpret_cast<const uint4*>(x + arguments.in_features));
        }
        if (columns) bytes = __ldg(reinterpret_cast<const uint2*>(columns + column));
    }
    float scales[kOctet];
    decode_scales(bytes, scales);
    unpack_octet<T>(octet, values);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] = __fmul_rn(values[i], scales[i] * kScaleUnit);
    add_and_subtract(values, threadIdx.x % 4);
#pragma unroll
    for (float& value : values) value = __fmul_rn(value, kRotationUnit);
}

// kOctets: that a thread holds.
template <typename T, bool kSwiglu, int kThreads, int kOctets>
__device__ __forceinline__ void run(const Arguments& arguments) {
    constexpr int kWarp = kLanes;
    constexpr float kLeastToken = 0x1p-100f;  // 127 over smaller numbers might be infinite
    __shared__ uint32_t of_warps[kWarp];
    wait_for_kernel_before();
    let_next_kernel_start();  // not before, as in transform_kernel
    const Int8Tokens& output = arguments.outputs[blockIdx.x / arguments.tokens];
    const int token = static_cast<int>(blockIdx.x % arguments.tokens), thread = static_cast<int>(threadIdx.x),
              lane = thread % kWarp;
    for (int i = token * kThreads + thread; i < arguments.num_zeros; i += arguments.tokens * kThreads) {
        arguments.zeros[i] = 0;
    }
    int row = token;
    if (arguments.rows) row = min(max(arguments.rows[token], 0), arguments.last_row);
    constexpr int kTurn = kThreads * kOctets * kOctet;  // columns
    const auto column = [&](int i) { return (i * kThreads + thread) * kOctet; };
    float values[kOctets][kOctet];
    const auto load = [&](int first) {
#pragma unroll
        for (int i = 0; i < kOctets; ++i)
            load_octet<T, kSwiglu>(arguments, output.columns, row, first + column(i), values[i]);
    };
    uint32_t most = 0;  // as bits, among which those of NaN are the largest
#pragma unroll 1
    for (int first = 0; first < arguments.out_columns; first += kTurn) {
        load(first);
#pragma unroll
        for (const auto& octet : values) {
#pragma unroll
            for (const float value : octet) most = max(most, __float_as_uint(fabsf(value)));
        }
    }
    most = largest_of_warp(most);
    if (lane == 0) of_warps[thread / kWarp] = most;
    __syncthreads();
    most = largest_of_warp(lane < kThreads / kWarp ? of_warps[lane] : 0);
    const float largest = __uint_as_float(most);
    const bool usual = largest >= kLeastToken && largest < __uint_as_float(0x7F800000);
    const float inverse = __fmul_rn(127.0f, __frcp_rn(largest));
    if (thread == 0) {
        output.scales[token] = __fmul_rn(largest, 1.0f / 127);
        if (token == arguments.tokens - 1) output.scales[token + 1] = 0;
    }
#pragma unroll 1
    for (int first = 0; first < arguments.out_columns; first += kTurn) {
        if (arguments.out_columns > kTurn) load(first);
#pragma unroll
        for (int i = 0; i < kOctets; ++i) {
            uint32_t words[2] = {};
#pragma unroll
            for (int j = 0; usual && j < kOctet; ++j) {
                const int rounded = __float2int_rn(__fmul_rn(values[i][j], inverse));
                words[j / 4] |= (static_cast<uint32_t>(rounded) & 255) << 8 * (j % 4);
            }
            // Two lanes exchange a word each, so that both have two that follow each other.
            const bool odd = lane % 2;
            const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, words[odd ? 0 : 1], 1);
            const uint2 two = odd ? make_uint2(received, words[1]) : make_uint2(words[0], received);
            const int from = first + column(i), block = from / kBlockSize * kBlockSize, t = lane % 4;
            if (from < arguments.out_columns) {
                int8_t* to = output.out + int64_t{token} * arguments.out_columns + block + t % 2 * 16 + t / 2 * 8;
                *reinterpret_cast<uint2*>(to) = two;
            }
        }
    }
}

template <typename T, bool kSwiglu, int kThreads, int kOctets>
__global__ void __launch_bounds__(kThreads) tokens_to_int8_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (has_gemm(kArch)) {
        run<T, kSwiglu, kThreads, kOctets>(arguments);
    } else {
        __trap();
    }
}

template <typename T, bool kSwiglu, int kThreads, int kOctets>
cudaError_t launch(const Arguments& arguments, int count, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(tokens_to_int8_kernel<T, kSwiglu, kThreads, kOctets>, kThreads, 0);
    return launcher.launch(gpu, int64_t{arguments.tokens} * count, 1, 0, stream, arguments);
}

}  // namespace

cudaError_t tokens_to_int8(const void* x, const Rows& rows, bool swiglu, Dtype dtype, const Int8Tokens* outputs,
                           int count, int64_t tokens, int64_t in_features, uint32_t* zeros, int num_zeros,
                           const Gpu& gpu, cudaStream_t stream) {
    Arguments arguments{};
    arguments.x = x;
    arguments.rows = rows.index;
    arguments.last_row = static_cast<int>(rows.count - 1);
    arguments.tokens = static_cast<int>(tokens);
    arguments.in_features = static_cast<int>(in_features);
    arguments.out_columns = static_cast<int>(num_blocks(in_features) * kBlockSize);
    arguments.zeros = zeros;
    arguments.num_zeros = num_zeros;
    std::copy_n(outputs, count, arguments.outputs);
    return dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
        using T = decltype(value);
        const auto of = [&](auto gate) {
            constexpr bool kGate = gate();
            const int octets = arguments.out_columns / kOctet;
            const auto start = octets <= 512    ? launch<T, kGate, 256, 2>
                               : octets <= 1024 ? launch<T, kGate, 256, 4>
                               : octets <= 2048 ? launch<T, kGate, 512, 4>
                                                : launch<T, kGate, 1024, 4>;
            return start(arguments, count, gpu, stream);
        };
        return swiglu ? of(std::true_type{}) : of(std::false_type{});
    });
}

}  // namespace hf_kbit::cuda
