// The weight itself of trellises whose sides are rotated in blocks of 128: decoded, turned and scaled.
//
//   words  32-bit ones [count, K/16, N/16, 8 * bits]      out  float16 or bfloat16 [count, N, K], without the padding
//
// A CTA has a block of 128 x 128. A warp decodes 16 of its rows and again 16: lane 4 g + t takes of four tiles along K
// from tile t the weights of rows g and g + 8, `bits` words of its stream. What lies in other lanes of a quad meets by
// shuffles, other rows in shared memory. Arithmetic is float16, whose sums stay below 56,800.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/trellis/turn.cuh"
#include "kernels/trellis/values.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 128, kBlock = 128, kBlockTiles = kBlock / kTrellisTile;

// As many words as fit into one load at a time.
template <int bits>
__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t* to) {
    constexpr int each = bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
    using Load = std::conditional_t<each == 4, uint4, std::conditional_t<each == 2, uint2, uint32_t>>;
#pragma unroll
    for (int i = 0; i < bits; i += each) {
        const Load loaded = __ldg(reinterpret_cast<const Load*>(from + i));
#pragma unroll
        for (int j = 0; j < each; ++j) to[i + j] = reinterpret_cast<const uint32_t*>(&loaded)[j];
    }
}

template <typename T, int bits, Code code>
__global__ void __launch_bounds__(kThreads)
    dense_trellis_kernel(const uint32_t* words, const __half* suh, const __half* svh, int blocks_across,
                         int blocks_down, int64_t rows, int64_t columns, T* out) {
    __shared__ __half2 room[kBlock * kBlock / 2];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int block_down = static_cast<int>(blockIdx.x) % blocks_down,
              rest = static_cast<int>(blockIdx.x) / blocks_down;
    const int block_across = rest % blocks_across;
    const int64_t matrix = rest / blocks_across;
    const int64_t across = int64_t{blocks_across} * kBlockTiles, down = int64_t{blocks_down} * kBlockTiles;

    // Of a row of 128: i % 4 is bits 1 and 2 of the column, then come bits 3 and 6; then bits 3 and 6 of the row.
    __half2 all[64];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int64_t column = block_across * kBlockTiles + 4 * u + t,
                          row = block_down * kBlockTiles + warp + 4 * w;
            uint32_t own[bits + 1];
            load_words<bits>(words + (((matrix * across + column) * down + row) * 8 + g) * bits, own + 1);
            own[0] = __shfl_sync(0xFFFFFFFF, own[bits], (lane + 28) % 32);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    all[w * 32 + h * 16 + u * 8 + i] = two_weights<code>(own, 8 * (i % 4) + 4 * h + 2 * (i / 4));
                }
            }
        }
    }
    const __half2 first_less = __floats2half2_rn(1, -1);
#pragma unroll
    for (int i = 0; i < 64; ++i) all[i] = __hfma2(all[i], first_less, __lowhigh2highlow(all[i]));
    turn_own(all);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
        const __half2 sign = __float2half2_rn(t & distance ? -1.0f : 1.0f);
#pragma unroll
        for (int i = 0; i < 64; ++i) all[i] = __hfma2(sign, all[i], __shfl_xor_sync(0xFFFFFFFF, all[i], distance));
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int row = 16 * (warp + 4 * (i / 32)) + 8 * (i / 16 % 2) + g;
        const int pair = 32 * (i / 8 % 2) + 8 * t + 4 * (i / 4 % 2) + i % 4;
        room[row * (kBlock / 2) + (pair ^ g)] = all[i];
    }
    __syncthreads();

    // Bits 0 to 2, 4 and 5 of the row are left.
    const int pair = static_cast<int>(threadIdx.x) % 64, h = static_cast<int>(threadIdx.x) / 64;
    const int64_t column = int64_t{block_across} * kBlock + 2 * pair;
    float2 scale = __half22float2(*reinterpret_cast<const __half2*>(suh + matrix * across * kTrellisTile + column));
    scale.x /= kBlock, scale.y /= kBlock;
#pragma unroll 1
    for (int w = 0; w < 2; ++w) {
        __half2 own[32];
        const auto row_of = [&](int i) { return 64 * w + i / 8 * 16 + 8 * h + i % 8; };
#pragma unroll
        for (int i = 0; i < 32; ++i) own[i] = room[row_of(i) * (kBlock / 2) + (pair ^ i % 8)];
        turn_own(own);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int64_t row = int64_t{block_down} * kBlock + row_of(i);
            if (row >= rows || column >= columns) continue;
            const float by = __half2float(svh[matrix * down * kTrellisTile + row]);
            const float2 two = __half22float2(own[i]);
            const float2 value = make_float2(two.x * scale.x * by, two.y * scale.y * by);
            T* to = out + (matrix * rows + row) * columns + column;
            if (columns % 2 == 0) {
                *reinterpret_cast<uint32_t*>(to) = pack_two<T>(value.x, value.y);
            } else {
                store(to, value.x);
                if (column + 1 < columns) store(to + 1, value.y);
            }
        }
    }
}

}  // namespace

cudaError_t dense_trellis(const uint32_t* words, Code code, int bits, const uint16_t* suh, const uint16_t* svh,
                          int64_t count, int64_t across, int64_t down, int64_t rows, int64_t columns, void* out,
                          Dtype dtype, const Gpu& gpu, cudaStream_t stream) {
    const int64_t blocks_across = across / kBlockTiles, blocks_down = down / kBlockTiles;
    return dispatch_trellis(bits, [&](auto width) {
        return dispatch_code(code, [&](auto its_code) {
            return dispatch<__half, __nv_bfloat16>(dtype, [&](auto value) {
                using T = decltype(value);
                static Launcher launcher(dense_trellis_kernel<T, width(), its_code()>, kThreads, 0);
                return launcher.launch(gpu, count * blocks_across * blocks_down, 1, 0, stream, words,
                                       reinterpret_cast<const __half*>(suh), reinterpret_cast<const __half*>(svh),
                                       static_cast<int>(blocks_across), static_cast<int>(blocks_down), rows, columns,
                                       static_cast<T*>(out));
            });
        });
    });
}

}  // namespace hf_kbit::cuda
