// Activations as weights want them that have column scales or a rotation (hf_kbit/format/transforms.py): x' = (x * c)
// @ R, computed in float32, rounded once.
//
//   x         float16 or bfloat16 [M, K], row-major, K a multiple of 8, or rows that an index picks; with swiglu
//             [M, 2 K], of which silu(first half) * second half is what is meant by x
//   columns   uint8 [K], as E4M4, or null           out  [M, 32 * B], of x's dtype, for each of up to four weights
//
// For hopper/gemm_wgmma.cuh the columns of x' change places within their blocks (Transformed::ordered), so that its
// warps need not exchange codes: four lanes exchange four words each, here once for all rows of the weight.
//
// A thread has an octet of columns in one token or two and reads it once for all weights; four neighbours have the
// block. The product's kernel overlaps with the launch; at one token the product's CTAs do the work themselves
// (few_tokens/activations.cuh).
#include "kernels/dispatch.h"
#include "kernels/inputs/swiglu.cuh"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"
#include "kernels/quad.cuh"
#include "kernels/transform.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kRegisters = 48, kProcessorCtas = 5;  // of so many registers a processor has room for five CTAs

struct Arguments {
    const void* x;
    const int32_t* rows;  // or null
    int last_row, tokens, in_features, out_columns;
    unsigned row_ctas;  // for all columns
    int count;
    Transformed outputs[kGemmParts];
    uint32_t* zeros;
    unsigned num_zeros;
};

// kTokens: of a thread.
template <typename T, int kTokens, bool kSwiglu>
__global__ void __maxnreg__(kRegisters) transform_kernel(const __grid_constant__ Arguments arguments) {
    wait_for_kernel_before();
    let_next_kernel_start();  // not before: what follows may read what earlier kernels wrote without waiting for them
    for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < arguments.num_zeros; i += gridDim.x * kThreads) {
        arguments.zeros[i] = 0;
    }
    const unsigned tokens_before = blockIdx.x / arguments.row_ctas;
    const int column =
        static_cast<int>((blockIdx.x - tokens_before * arguments.row_ctas) * kThreads + threadIdx.x) * kOctet;
    const int t = threadIdx.x % 4;
    const int first = static_cast<int>(tokens_before) * kTokens, tokens = arguments.tokens - first;
    const bool there = column < arguments.in_features, stored = column < arguments.out_columns;
    const auto load_columns = [&](int output) {
        const uint8_t* columns = arguments.outputs[output].transform.columns;
        if (!columns || !there) return make_uint2(kScalesOfOne, kScalesOfOne);
        return __ldg(reinterpret_cast<const uint2*>(columns + column));
    };
    uint2 bytes = load_columns(0);  // for the first output while x is under way, then for the next one
    uint4 octets[kTokens];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
        octets[i] = make_uint4(0, 0, 0, 0);
        if (there && i < tokens) {
            int row = first + i;
            if (arguments.rows) row = min(max(arguments.rows[row], 0), arguments.last_row);
            const int64_t at = int64_t{row} * arguments.in_features * (kSwiglu ? 2 : 1) + column;
            const T* x = static_cast<const T*>(arguments.x) + at;
            octets[i] = *reinterpret_cast<const uint4*>(x);
            if constexpr (kSwiglu) {
                const auto* up = reinterpret_cast<const uint4*>(x + arguments.in_features);
                octets[i] = swiglu_octet<T>(octets[i], *up);
            }
        }
    }
#pragma unroll 1
    for (int i = 0; i < arguments.count; ++i) {
        const Transformed& output = arguments.outputs[i];
        float scales[kOctet];
        decode_scales(bytes, scales);
        if (i + 1 < arguments.count) bytes = load_columns(i + 1);
        T* out = static_cast<T*>(output.out) + int64_t{first} * arguments.out_columns + column;
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            uint4& octet = octets[token];
            // Or all of them wait in float32 for the loop.
            asm volatile("" : "+r"(octet.x), "+r"(octet.y), "+r"(octet.z), "+r"(octet.w));
            uint4 made = transform_octet<T>(octet, scales, output.transform.rotated, t);
            if (output.ordered) {
                uint32_t pairs[4] = {made.x, made.y, made.z, made.w};
                Quad(t).transpose(pairs);
                made = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            if (stored && token < tokens) store_16(out + token * arguments.out_columns, made);
        }
    }
}

template <typename T, int kTokens, bool kSwiglu>
cudaError_t launch(const Arguments& arguments, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(transform_kernel<T, kTokens, kSwiglu>, kThreads, 0);
    const int64_t ctas = ceil_div(arguments.tokens, kTokens) * arguments.row_ctas;
    return launcher.launch_overlapping(gpu, ctas, 1, 0, stream, arguments);
}

}  // namespace

cudaError_t transform(const void* x, const Rows& rows, bool swiglu, Dtype dtype, const Transformed* outputs, int count,
                      int64_t tokens, int64_t in_features, uint32_t* zeros, int num_zeros, const Gpu& gpu,
                      cudaStream_t stream) {
    Arguments arguments{};
    arguments.x = x;
    arguments.rows = rows.index;
    arguments.last_row = static_cast<int>(rows.count - 1);
    arguments.tokens = static_cast<int>(tokens);
    arguments.in_features = static_cast<int>(in_features);
    arguments.out_columns = static_cast<int>(num_blocks(in_features) * kBlockSize);
    arguments.row_ctas = static_cast<unsigned>(ceil_div(arguments.out_columns, kThreads * kOctet));
    arguments.count = count;
    arguments.zeros = zeros;
    arguments.num_zeros = static_cast<unsigned>(num_zeros);
    std::copy_n(outputs, count, arguments.outputs);
    // Two tokens a thread where that leaves every processor the CTAs that it can have at work.
    const bool many = ceil_div(tokens, 2) * arguments.row_ctas >= int64_t{kProcessorCtas} * gpu.processors;
    return dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
        using T = decltype(value);
        const auto run = swiglu ? (many ? launch<T, 2, true> : launch<T, 1, true>)
                                : (many ? launch<T, 2, false> : launch<T, 1, false>);
        return run(arguments, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
