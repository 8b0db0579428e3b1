// Decodes trellises of all codes (hf_kbit/format/trellis.py).
//
//   words  32-bit ones [count, K/16, N/16, 8 * bits]: a tile's stream, each word's highest bit first
//   out    float16, float32 or bfloat16 [count, N, K], row-major
//
// A warp takes eight tiles along K, or what is left of them, of one of 16 rows of tiles that lie side by side in
// memory: a CTA reads 16 tiles in one piece, eight times. A lane makes octets: eight neighbouring inputs of an output,
// which are two neighbours in each of four runs of eight weights, so that a shift of two words gives two windows.
// Lanes side by side have the octets of an output one after another: a warp writes 256 bytes of a row at a time.
// Writing is the limit: 2 bytes a weight out for bits / 8 in.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/trellis/values.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kAcross = 8, kDown = 16;  // tiles of a CTA
constexpr int kThreads = 32 * kDown;
constexpr int kOctets = 2 * kAcross;  // of a row, and as many lanes

// Where rows are whole octets of 16 bytes, or of 32, which they always are.
__device__ __forceinline__ void store(__half* to, const __half2 (&values)[4]) {
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(values);
}
__device__ __forceinline__ void store(__nv_bfloat16* to, const __half2 (&values)[4]) {
    __nv_bfloat162 rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = __float22bfloat162_rn(__half22float2(values[i]));
    *reinterpret_cast<uint4*>(to) = reinterpret_cast<const uint4&>(rounded);
}
__device__ __forceinline__ void store(float* to, const __half2 (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const float2 first = __half22float2(values[i]), second = __half22float2(values[i + 1]);
        reinterpret_cast<float4*>(to)[i / 2] = make_float4(first.x, first.y, second.x, second.y);
    }
}

template <typename T, int bits, Code code>
__global__ void __launch_bounds__(kThreads)
    decode_trellis_kernel(const uint32_t* gmem_words, int64_t across, int64_t down, unsigned across_ctas,
                          unsigned down_ctas, T* gmem_out) {
    constexpr int kWords = 8 * bits, kStride = kWords + 4;  // tiles side by side are in other banks
    __shared__ __align__(16) uint32_t words[kDown][kAcross][kStride];
    const unsigned cta_across = blockIdx.x % across_ctas, rest = blockIdx.x / across_ctas;
    const int64_t matrix = rest / down_ctas;
    const int64_t column = int64_t{cta_across} * kAcross, row = int64_t{rest % down_ctas} * kDown;
    const int columns = static_cast<int>(min(across - column, int64_t{kAcross}));
    const int rows = static_cast<int>(min(down - row, int64_t{kDown}));
    const uint32_t* from = gmem_words + ((matrix * across + column) * down + row) * kWords;
    for (int piece = threadIdx.x; piece < kAcross * kDown * kWords / 4; piece += kThreads) {
        const int i = piece / (kDown * kWords / 4), inside = piece % (kDown * kWords / 4);
        const int j = inside / (kWords / 4), word = inside % (kWords / 4) * 4;
        if (i < columns && j < rows) {
            const uint4 loaded = *reinterpret_cast<const uint4*>(from + (i * down + j) * kWords + word);
            *reinterpret_cast<uint4*>(&words[j][i][word]) = loaded;
        }
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, octet = lane % kOctets, tile_down = threadIdx.x / 32;
    const int tile_across = octet / 2, half = octet % 2;
    if (tile_across >= columns || tile_down >= rows) return;
    const uint32_t* stream = words[tile_down][tile_across];
    const int64_t in_features = across * kTrellisTile;
    T* out = gmem_out + ((matrix * down + row + tile_down) * kTrellisTile) * in_features +
             (column + tile_across) * kTrellisTile + half * 8;
#pragma unroll
    for (int i = 0; i < kTrellisTile; i += 2) {
        const int output = i + lane / kOctets;
        __half2 values[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const int weight = output % 8 * 32 + pair * 8 + output / 8 * 4 + half * 2;
            // The second one's window ends in the word `last`, the first one's `bits` before.
            const int end = (weight + 2) * bits, last = (end - 1) / 32, before = (last + kWords - 1) % kWords;
            const int right = 32 * (last + 1) - end;
            const uint32_t second = __funnelshift_r(stream[last], stream[before], right);
            const uint32_t first =
                right + bits < 32
                    ? __funnelshift_r(stream[last], stream[before], right + bits)
                    : __funnelshift_r(stream[before], stream[(before + kWords - 1) % kWords], right + bits - 32);
            values[pair] = two_values<code>(first & 0xFFFF, second & 0xFFFF);
        }
        store(out + output * in_features, values);
    }
}

}  // namespace

cudaError_t decode_trellis(const uint32_t* words, Code code, int bits, int64_t count, int64_t across, int64_t down,
                           void* out, Dtype dtype, const Gpu& gpu, cudaStream_t stream) {
    const int64_t across_ctas = ceil_div(across, kAcross), down_ctas = ceil_div(down, kDown);
    return dispatch_trellis(bits, [&](auto width) {
        return dispatch_code(code, [&](auto its_code) {
            return dispatch<float, __half, __nv_bfloat16>(dtype, [&](auto value) {
                using T = decltype(value);
                static Launcher launcher(decode_trellis_kernel<T, width(), its_code()>, kThreads, 0);
                return launcher.launch(gpu, count * across_ctas * down_ctas, 1, 0, stream, words, across, down,
                                       static_cast<unsigned>(across_ctas), static_cast<unsigned>(down_ctas),
                                       static_cast<T*>(out));
            });
        });
    });
}

}  // namespace hf_kbit::cuda
