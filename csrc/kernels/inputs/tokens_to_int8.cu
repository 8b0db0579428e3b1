// Tokens as 8-bit inputs (docs/internals.md, "8-bit inputs"): x' = (x * c) @ R in float32, and each number divided by
// what 1 stands for in its token, the largest magnitude over 127, and rounded.
//
//   x        float16 or bfloat16 [M, K], row-major, K a multiple of 8, or rows that an index picks; with swiglu [M, 2
//   K],
//            of which silu(first half) * second half, rounded to that dtype, is what is meant by x
//   columns  uint8 [K], as E4M4, or null      out  int8 [M, 32 * B]      scales  float32 [M + 1], the last one 0
//
// For the kernels of int8 in hopper/ and mma/: of each block of 32 columns first 0 to 3, 8 to 11, 16 to 19 and 24 to
// 27 are stored, then the others. A lane of a tile has eight columns, four for each half of operand A.
//
// A thread has a block of a token, and holds it in float32 until all know the token's largest number. The CTA of a
// processor has groups of warps, which take tokens in turns. They have the decoded column scales in common, and copy x
// of the next token to shared memory while they work on one: so memory is never idle. Of several weights each has CTAs
// of its own; they take the same tokens at about the same time, so that x comes from memory once.
//
// What does not fit there, long rows, takes a CTA for each token, which loads x as it needs it. Of a token of more
// blocks than it has threads, it makes them anew.
//
// The product's kernel may overlap with the launch. Compute capability 8.0 and newer.
#include <algorithm>

#include "kernels/dispatch.h"
#include "kernels/inputs/int8_block.cuh"
#include "kernels/inputs/swiglu.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kWarp = 32, kThreads = 1024, kWarps = kThreads / kWarp;
constexpr int kOctetBytes = kOctet * 2;
// Shared memory: the largest numbers of warps, two tokens in turns; the scales of a token's columns; x of all warps.
constexpr int kLargestBytes = 2 * kWarps * 4;
constexpr int kScalesBytes = kWarp * kBlock * 4;                                      // of a warp's columns
constexpr int x_bytes(bool swiglu) { return kWarp * kBlock * 2 * (swiglu ? 2 : 1); }  // of a warp's columns

struct Arguments {
    const void* x;
    const int32_t* rows;  // or null
    int last_row, tokens, in_features, blocks;
    int count;
    Int8Tokens outputs[kGemmParts];
    uint32_t* zeros;
    int num_zeros;
    int groups, group_warps;  // of a CTA, where it has several tokens

    __device__ __forceinline__ int row(int token) const { return rows ? min(max(rows[token], 0), last_row) : token; }
};

// Also sets zeros.
__device__ __forceinline__ void begin(const Arguments& arguments) {
    wait_for_kernel_before();
    let_next_kernel_start();  // not before, as in transform_kernel
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < arguments.num_zeros;
         i += gridDim.x * int64_t{kThreads}) {
        arguments.zeros[i] = 0;
    }
}

__device__ __forceinline__ void load_scales(const uint8_t* columns, int column, int in_features,
                                            float (&scales)[kOctet]) {
    uint2 bytes = make_uint2(kScalesOfOne, kScalesOfOne);
    if (columns && column < in_features) bytes = __ldg(reinterpret_cast<const uint2*>(columns + column));
    decode_scales(bytes, scales);
#pragma unroll
    for (float& scale : scales) scale *= kScaleUnit;
}

__device__ __forceinline__ void store_scale(const Arguments& arguments, const Int8Tokens& output, int token,
                                            float scale) {
    output.scales[token] = scale;
    if (token == arguments.tokens - 1) output.scales[token + 1] = 0;
}

__device__ __forceinline__ void store_block(const Arguments& arguments, const Int8Tokens& output, int token, int block,
                                            const float (&values)[kBlock], const TokenUnit& unit) {
    uint4 halves[2];
    block_to_int8(values, unit, halves);
    if (block >= arguments.blocks) return;
    int8_t* const to =
        output.out + block * kBlock +
        static_cast<uint64_t>(static_cast<unsigned>(token)) * static_cast<unsigned>(arguments.blocks * kBlock);
    store_16(to, halves[0]);
    store_16(to + kBlock / 2, halves[1]);
}

// --- several tokens at a time --------------------------------------------------------------------

// A warp's x in shared memory: octets of neighbouring lanes lie side by side when they are copied, and a lane reads
// four that follow each other. Either way eight lanes reach all banks.
struct WarpX {
    uint32_t copied, read;  // addresses of the lane

    __device__ __forceinline__ WarpX(uint32_t smem, int lane)
        : copied(smem + (lane ^ lane / 8) * kOctetBytes),
          read(smem + (lane * kBlockOctets + lane / 2 % 4) * kOctetBytes) {}
    __device__ __forceinline__ uint32_t octet(int i) const { return read ^ i * kOctetBytes; }
};

template <typename T, bool kSwiglu>
__device__ __forceinline__ void run_groups(const Arguments& arguments) {
    extern __shared__ uint4 smem[];
    begin(arguments);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
    const int group_warps = arguments.group_warps, group = warp / group_warps, warp_of_group = warp % group_warps;
    const int cta = static_cast<int>(blockIdx.x) / arguments.count,
              ctas = static_cast<int>(gridDim.x) / arguments.count;
    const Int8Tokens& output = arguments.outputs[blockIdx.x % arguments.count];

    auto* const largest = reinterpret_cast<uint32_t*>(smem);
    const uint32_t smem_scales = shared_address(smem) + kLargestBytes;
    constexpr int kGateBytes = x_bytes(false);
    const WarpX at(smem_scales + group_warps * kScalesBytes + warp * x_bytes(kSwiglu), lane);
    const int first_column = (warp_of_group * kWarp * kBlockOctets + lane) * kOctet;  // that the lane copies
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

    const int step = ctas * arguments.groups;
    const int followed = arguments.tokens - step, followed_twice = followed - step;  // tokens before these
    int token = group < arguments.groups ? cta + ctas * group : arguments.tokens, next_row = 0;
    if (token < arguments.tokens) {
        each_copy([&](uint32_t to, int, bool there) {
            if (!there) store_shared_16(to, make_uint4(0, 0, 0, 0));
            if (kSwiglu && !there) store_shared_16(to + kGateBytes, make_uint4(0, 0, 0, 0));
        });
        start_copies(arguments.row(token));
        if (token < followed) next_row = arguments.row(token + step);
    }
    // Meanwhile the scales: of each octet two halves, each of all lanes.
    for (int i = thread; i < group_warps * kWarp * kBlockOctets; i += kThreads) {
        const int of_warp = i / (kWarp * kBlockOctets), octet = i / kWarp % kBlockOctets;
        float scales[kOctet];
        load_scales(output.columns, ((of_warp * kWarp + lane) * kBlockOctets + octet) * kOctet, arguments.in_features,
                    scales);
        const uint32_t to = smem_scales + ((of_warp * kBlockOctets + octet) * 2 * kWarp + lane) * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* const four = scales + 4 * half;
            store_shared_16(to + half * kWarp * 16, make_uint4(__float_as_uint(four[0]), __float_as_uint(four[1]),
                                                               __float_as_uint(four[2]), __float_as_uint(four[3])));
        }
    }
    __syncthreads();

    const uint32_t lane_scales = smem_scales + warp_of_group * kScalesBytes + lane * 16;
    const auto load = [&](int octet, float (&scales)[kOctet]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = load_shared_16(lane_scales + (octet * 2 + half) * kWarp * 16);
            scales[4 * half] = __uint_as_float(four.x), scales[4 * half + 1] = __uint_as_float(four.y);
            scales[4 * half + 2] = __uint_as_float(four.z), scales[4 * half + 3] = __uint_as_float(four.w);
        }
    };
    const int block = warp_of_group * kWarp + lane;
#pragma unroll 1
    for (int turn = 0; token < arguments.tokens; token += step, turn ^= kWarps) {
        cp_async_wait<0>();
        __syncwarp();
        uint4 octets[kBlockOctets];
#pragma unroll
        for (int i = 0; i < kBlockOctets; ++i) {
            octets[i] = load_shared_16(at.octet(i));
            if constexpr (kSwiglu) octets[i] = swiglu_octet<T>(octets[i], load_shared_16(at.octet(i) + kGateBytes));
        }
        __syncwarp();
        if (token < followed) start_copies(next_row);
        if (token < followed_twice) next_row = arguments.row(token + 2 * step);
        float values[kBlock];
        uint32_t most = largest_of_warp(transform_block<T>(octets, load, values));
        if (group_warps > 1) {
            uint32_t* const of_group = largest + turn + group * group_warps;
            if (lane == 0) of_group[warp_of_group] = most;
            named_barrier(group, group_warps * kWarp);
            most = largest_of_warp(lane < group_warps ? of_group[lane] : 0);
        }
        const TokenUnit unit(most);
        if (block == 0) store_scale(arguments, output, token, unit.scale);
        store_block(arguments, output, token, block, values, unit);
    }
}

// --- long rows -----------------------------------------------------------------------------------

template <typename T, bool kSwiglu>
__device__ __forceinline__ void run_long(const Arguments& arguments) {
    __shared__ uint32_t largest[kWarps];
    begin(arguments);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
    const int token = static_cast<int>(blockIdx.x) / arguments.count;
    const Int8Tokens& output = arguments.outputs[blockIdx.x % arguments.count];
    const T* const x =
        static_cast<const T*>(arguments.x) + int64_t{arguments.row(token)} * arguments.in_features * (kSwiglu ? 2 : 1);
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
    for (int block = thread; block < arguments.blocks; block += kThreads) most = max(most, load(block));
    most = largest_of_warp(most);
    if (lane == 0) largest[thread / kWarp] = most;
    __syncthreads();
    const TokenUnit unit(largest_of_warp(largest[lane]));
    if (thread == 0) store_scale(arguments, output, token, unit.scale);
#pragma unroll 1
    for (int block = thread; block < arguments.blocks; block += kThreads) {
        if (arguments.blocks > kThreads) load(block);
        store_block(arguments, output, token, block, values, unit);
    }
}

template <typename T, bool kSwiglu, bool kLong>
__global__ void __launch_bounds__(kThreads, 1) tokens_to_int8_kernel(const __grid_constant__ Arguments arguments) {
    if constexpr (has_gemm(kArch)) {
        (kLong ? run_long<T, kSwiglu> : run_groups<T, kSwiglu>)(arguments);
    } else {
        __trap();
    }
}

template <typename T, bool kSwiglu>
cudaError_t launch(Arguments& arguments, const Gpu& gpu, cudaStream_t stream) {
    static Launcher of_groups(tokens_to_int8_kernel<T, kSwiglu, false>, kThreads, kAllShared);
    static Launcher of_long(tokens_to_int8_kernel<T, kSwiglu, true>, kThreads, 0);
    arguments.group_warps = static_cast<int>(ceil_div(arguments.blocks, kWarp));
    const int own = kLargestBytes + arguments.group_warps * kScalesBytes;
    const int group_bytes = arguments.group_warps * x_bytes(kSwiglu);
    arguments.groups = std::min(kWarps / arguments.group_warps, (gpu.shared_limit - own) / group_bytes);
    if (arguments.groups < 1) {
        return of_long.launch(gpu, int64_t{arguments.tokens} * arguments.count, 1, 0, stream, arguments);
    }
    const int ctas = std::min(arguments.tokens, std::max(1, gpu.processors / arguments.count));
    return of_groups.launch(gpu, ctas * arguments.count, 1, own + arguments.groups * group_bytes, stream, arguments);
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
