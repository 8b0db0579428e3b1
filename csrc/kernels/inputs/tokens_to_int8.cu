// Tokens as 8-bit inputs (docs/internals.md, "8-bit inputs"): x' = (x * c) @ R in float32, and each number divided by
// what 1 stands for in its token, the largest magnitude over 127, and rounded.
//
//   x        float16 or bfloat16 [M, K], row-major, K a multiple of 8, or rows that an index picks; with swiglu
//            [M, 2 K], of which silu(first half) * second half, rounded to that dtype, is what is meant by x
//   columns  uint8 [K], as E4M4, or null      out  int8 [M, 32 * B]      scales  float32 [M + 1], the last one 0
//
// For the kernels of int8 in hopper/ and mma/: of each block of 32 columns first 0 to 3, 8 to 11, 16 to 19 and 24 to
// 27 are stored, then the others. A lane of a tile has eight columns, four for each half of operand A.
//
// A thread has a block of a token, and holds it in float32 until all know the token's largest number. CTAs have groups
// of warps, which take tokens in turns. They have the decoded column scales in common, and copy x of the next token to
// shared memory while they work on one: so memory is never idle. Of several weights each has CTAs of its own; they
// take the same tokens at about the same time, so that x comes from memory once.
//
// What does not fit there, long rows, takes a CTA for each token, which loads x as it needs it. Of a token of more
// blocks than it has threads, it makes them anew.
//
// The launch overlaps with the kernel before, and the product's kernel with it. Compute capability 8.0 and newer, with
// swiglu 9.0.
#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/inputs/int8_block.cuh"
#include "kernels/inputs/plan.h"
#include "kernels/inputs/swiglu.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

struct Arguments {
    const void* x;
    const int32_t* rows;  // or null
    int last_row, tokens, in_features, blocks;
    int count;
    Int8Tokens outputs[kGemmParts];
    uint32_t* zeros;
    int num_zeros;
    unsigned ctas, groups, group_warps;  // of an output, of a CTA, of a group: where CTAs have groups
};

// Also sets zeros.
template <int kThreads>
__device__ __forceinline__ void begin(const Arguments& arguments) {
    wait_for_kernel_before();
    let_next_kernel_start();  // not before, as in transform_kernel
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < arguments.num_zeros;
         i += gridDim.x * int64_t{kThreads}) {
        arguments.zeros[i] = 0;
    }
}

// --- several tokens at a time --------------------------------------------------------------------

template <typename T, bool kSwiglu, int kThreads>
__device__ __forceinline__ void run_groups(const Arguments& arguments) {
    extern __shared__ __align__(64) uint4 smem[];  // as WarpX takes it
    begin<kThreads>(arguments);
    const unsigned thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
    const unsigned group_warps = arguments.group_warps, group = warp / group_warps, warp_of_group = warp % group_warps;
    const unsigned groups = arguments.groups, ctas = arguments.ctas;
    unsigned cta = blockIdx.x, number = 0;  // of the output
    for (; cta >= ctas; cta -= ctas) ++number;
    const Int8Tokens& output = arguments.outputs[number];
    const auto row_of = [&](unsigned token) { return picked_row(arguments.rows, arguments.last_row, token); };

    auto* const largest = reinterpret_cast<uint32_t*>(smem);
    const uint32_t smem_scales = shared_address(smem) + kInt8LargestBytes;
    constexpr int kGateBytes = int8_x_bytes(false);
    const WarpX at(smem_scales + group_warps * kInt8ScalesBytes + warp * int8_x_bytes(kSwiglu), lane);
    const int first_column =
        static_cast<int>((warp_of_group * kWarp * kBlockOctets + lane) * kOctet);  // that the lane copies
    const auto each_copy = [&](const auto& run) {
#pragma unroll
        for (int i = 0; i < kBlockOctets; ++i) {
            constexpr int kApart = kWarp * kOctet;
            run(at.copied + i * kWarp * kOctetBytes, i * kApart, first_column + i * kApart < arguments.in_features);
        }
    };
    const auto start_copies = [&](int row) {
        const auto columns = static_cast<unsigned>(arguments.in_features * (kSwiglu ? 2 : 1));
        const T* const x = static_cast<const T*>(arguments.x) + first_column +
                           static_cast<uint64_t>(static_cast<unsigned>(row)) * columns;
        each_copy([&](uint32_t to, int column, bool there) {
            if (there) cp_async_16(to, x + column);
            if (kSwiglu && there) cp_async_16(to + kGateBytes, x + column + arguments.in_features);
        });
        cp_async_commit();
    };

    // Unsigned: tokens are counted beyond the last one.
    const unsigned tokens = arguments.tokens, step = ctas * groups;
    unsigned token = group < groups ? cta + ctas * group : tokens;
    int next_row = 0;
    if (token < tokens) {
        each_copy([&](uint32_t to, int, bool there) {
            if (!there) store_shared_16(to, make_uint4(0, 0, 0, 0));
            if (kSwiglu && !there) store_shared_16(to + kGateBytes, make_uint4(0, 0, 0, 0));
        });
        start_copies(row_of(token));
        if (token + step < tokens) next_row = row_of(token + step);
    }
    // Meanwhile the scales: of each octet two halves, each of all lanes.
    for (unsigned i = thread; i < group_warps * kWarp * kBlockOctets; i += kThreads) {
        const unsigned of_warp = i / (kWarp * kBlockOctets), octet = i / kWarp % kBlockOctets;
        float scales[kOctet];
        const int column = static_cast<int>(((of_warp * kWarp + lane) * kBlockOctets + octet) * kOctet);
        load_scales(output.columns, column, arguments.in_features, scales);
        const uint32_t to = smem_scales + ((of_warp * kBlockOctets + octet) * 2 * kWarp + lane) * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* const four = scales + 4 * half;
            store_shared_16(to + half * kWarp * 16, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                                               __float_as_uint(four[2]), __float_as_uint(four[3])));
        }
    }
    __syncthreads();

    const uint32_t lane_scales = smem_scales + warp_of_group * kInt8ScalesBytes + lane * 16;
    const auto load = [&](int octet, float (&scales)[kOctet]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = load_shared_16(lane_scales + (octet * 2 + half) * kWarp * 16);
            scales[4 * half] = __uint_as_float(four.x), scales[4 * half + 1] = __uint_as_float(four.y);
            scales[4 * half + 2] = __uint_as_float(four.z), scales[4 * half + 3] = __uint_as_float(four.w);
        }
    };
    const int block = static_cast<int>(warp_of_group * kWarp + lane);
#pragma unroll 1
    for (int turn = 0; token < tokens; token += step, turn ^= kMostInt8Warps) {
        cp_async_wait<0>();
        __syncwarp();
        uint4 octets[kBlockOctets];
#pragma unroll
        for (int i = 0; i < kBlockOctets; ++i) {
            octets[i] = load_shared_16(at.octet(i));
            if constexpr (kSwiglu) octets[i] = swiglu_octet<T>(octets[i], load_shared_16(at.octet(i) + kGateBytes));
        }
        __syncwarp();
        if (token + step < tokens) start_copies(next_row);
        if (token + 2 * step < tokens) next_row = row_of(token + 2 * step);
        float values[kBlock];
        uint32_t most = largest_of_warp(transform_block<T>(octets, load, values));
        if (group_warps > 1) {
            uint32_t* const of_group = largest + turn + group * group_warps;
            if (lane == 0) of_group[warp_of_group] = most;
            named_barrier(static_cast<int>(group), static_cast<int>(group_warps * kWarp));
            most = largest_of_warp(lane < group_warps ? of_group[lane] : 0);
        }
        const TokenUnit unit(most);
        if (block == 0) unit.store(output, token, arguments.tokens);
        store_blocks(output, token, block, arguments.blocks, values, unit);
    }
}

// --- long rows -----------------------------------------------------------------------------------

template <typename T, bool kSwiglu>
__device__ __forceinline__ void run_long(const Arguments& arguments) {
    __shared__ uint32_t largest[kMostInt8Warps];
    begin<kMostInt8Threads>(arguments);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
    const int token = static_cast<int>(blockIdx.x) / arguments.count;
    const Int8Tokens& output = arguments.outputs[blockIdx.x % arguments.count];
    const T* const x =
        static_cast<const T*>(arguments.x) +
        int64_t{picked_row(arguments.rows, arguments.last_row, token)} * arguments.in_features * (kSwiglu ? 2 : 1);
    float values[kBlock];
    const auto load = [&](int block) {
        uint4 octets[kBlockOctets];
        const auto column = [&](int octet) { return block * kBlock + octet * kOctet; };
#pragma unroll
        for (int i = 0; i < kBlockOctets; ++i) {
            octets[i] = make_uint4(0, 0, 0, 0);
            if (column(i) >= arguments.in_features) continue;
            octets[i] = *reinterpret_cast<const uint4*>(x + column(i));
            if constexpr (kSwiglu) {
                const auto* up = reinterpret_cast<const uint4*>(x + arguments.in_features + column(i));
                octets[i] = swiglu_octet<T>(octets[i], *up);
            }
        }
        return transform_block<T>(
            octets,
            [&](int octet, float (&scales)[kOctet]) {
                load_scales(output.columns, column(octet), arguments.in_features, scales);
            },
            values);
    };
    uint32_t most = 0;
#pragma unroll 1
    for (int first = 0; first < arguments.blocks; first += kMostInt8Threads) most = max(most, load(first + thread));
    most = largest_of_warp(most);
    if (lane == 0) largest[thread / kWarp] = most;
    __syncthreads();
    const TokenUnit unit(largest_of_warp(largest[lane]));
    if (thread == 0) unit.store(output, token, arguments.tokens);
#pragma unroll 1
    for (int first = 0; first < arguments.blocks; first += kMostInt8Threads) {
        if (arguments.blocks > kMostInt8Threads) load(first + thread);
        store_blocks(output, token, first + thread, arguments.blocks, values, unit);
    }
}

// Experts of 8-bit inputs, and so their gate, are for Hopper alone.
constexpr bool has_tokens_to_int8(bool swiglu) { return swiglu ? kArch == 900 : has_gemm(kArch); }

template <typename T, bool kSwiglu, int kThreads>
__global__ void __launch_bounds__(kThreads, kMostInt8Threads / kThreads)
    tokens_to_int8_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (has_tokens_to_int8(kSwiglu)) {
        run_groups<T, kSwiglu, kThreads>(arguments);
    } else {
        __trap();
    }
}
template <typename T, bool kSwiglu>
__global__ void __launch_bounds__(kMostInt8Threads, 1)
    long_tokens_to_int8_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (has_tokens_to_int8(kSwiglu)) {
        run_long<T, kSwiglu>(arguments);
    } else {
        __trap();
    }
}

template <typename T, bool kSwiglu, int kThreads>
cudaError_t launch_groups(const Arguments& arguments, const Int8TokensPlan& plan, const Gpu& gpu,
                          cudaStream_t stream) {
    static Launcher launcher(tokens_to_int8_kernel<T, kSwiglu, kThreads>, kThreads, kAllShared);
    return launcher.launch_overlapping(gpu, int64_t{arguments.ctas} * arguments.count, 1, plan.shared_bytes, stream,
                                       arguments);
}

template <typename T, bool kSwiglu>
cudaError_t launch(Arguments& arguments, const Gpu& gpu, cudaStream_t stream) {
    const Int8TokensPlan plan =
        plan_int8_tokens(arguments.tokens, arguments.in_features, kSwiglu, arguments.count, gpu);
    arguments.ctas = plan.ctas;
    arguments.groups = plan.groups;
    arguments.group_warps = plan.group_warps;
    switch (plan.threads) {
        case 256:
            return launch_groups<T, kSwiglu, 256>(arguments, plan, gpu, stream);
        case 512:
            return launch_groups<T, kSwiglu, 512>(arguments, plan, gpu, stream);
        case kMostInt8Threads:
            return launch_groups<T, kSwiglu, kMostInt8Threads>(arguments, plan, gpu, stream);
    }
    static Launcher launcher(long_tokens_to_int8_kernel<T, kSwiglu>, kMostInt8Threads, 0);
    return launcher.launch_overlapping(gpu, int64_t{arguments.tokens} * arguments.count, 1, 0, stream, arguments);
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
    arguments.blocks = static_cast<int>(num_blocks(in_features));
    arguments.count = count;
    arguments.zeros = zeros;
    arguments.num_zeros = num_zeros;
    std::copy_n(outputs, count, arguments.outputs);
    return dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
        using T = decltype(value);
        return (swiglu ? launch<T, true> : launch<T, false>)(arguments, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
