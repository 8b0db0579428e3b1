// What 1 stands for in each row of a rotated weight as int8, inverted (docs/internals.md, "8-bit inputs"): 127 over
// the largest magnitude of level * scale, levels in float16 as of 2**14, scales in sixteenths; 2**15 at most.
//
//   words   int32 [N/16, K/256, bits, 32, 4]     scales  uint8 [N/16, K/256, 8, 16], with signs
//   codebook  float32 [2**bits]                  out     float16 [N]
//
// A CTA has a row tile, its warps half slabs in turns. What is padded has scales of zero.
#include "kernels/dispatch.h"
#include "kernels/launch.h"
#include "kernels/octets.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 256;

template <int kBits>
__global__ void __launch_bounds__(kThreads)
    int8_inverses_kernel(const int32_t* gmem_words, const uint8_t* gmem_scales, const float* gmem_codebook,
                         unsigned slabs, int64_t out_features, __half* gmem_out) {
    __shared__ Levels<kBits> levels;
    __shared__ unsigned largest[kTileRows];
    constexpr int kLevels = 1 << kBits;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, g = lane / 4;
    if (thread < kTileRows) largest[thread] = 0;
    levels.load(gmem_codebook, kThreads);
    // The exponent of the largest level, as LevelTable::normalize has it.
    float most = 0;
    for (int code = 0; code < kLevels; ++code) most = fmaxf(most, fabsf(levels.copies[code * kWarp + lane]));
    const int exponent = min(max(static_cast<int>(__float_as_uint(most) >> 23), 15), 254);
    const float unit = __uint_as_float(static_cast<uint32_t>(268 - exponent) << 23);  // 2**14 over a power of two
    __syncthreads();
    for (int i = thread; i < kLevels * kWarp; i += kThreads) {
        levels.copies[i] = __half2float(__float2half_rn(levels.copies[i] * unit));
    }
    __syncthreads();

    float of_rows[2] = {};
    for (unsigned index = thread / kWarp; index < slabs * kParts; index += kThreads / kWarp) {
        const unsigned part = index % kParts;
        const int64_t slab = int64_t{blockIdx.x} * slabs + index / kParts;
        uint32_t words[kPartTiles][kBits];
        load_part<kBits>(reinterpret_cast<const uint4*>(gmem_words) + slab * kBits * kWarp + lane, part, words);
        const uint2 scales = reinterpret_cast<const uint2*>(gmem_scales)[(slab * kTileRows / 2 + g) * kParts + part];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int block = 0; block < kPartBlocks; ++block) {
                float values[kOctet];
                decode_octet<kBits>(words, scales, kSignBit, block, half, levels, values);
#pragma unroll
                for (const float value : values) of_rows[half] = fmaxf(of_rows[half], fabsf(value));
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) atomicMax(&largest[g + 8 * half], __float_as_uint(of_rows[half]));
    __syncthreads();
    const int64_t row = int64_t{blockIdx.x} * kTileRows + thread;
    if (thread < kTileRows && row < out_features) {
        const float its = __uint_as_float(largest[thread]) * (1.0f / 16);
        gmem_out[row] = __float2half_rn(fminf(__fmul_rn(127.0f, __frcp_rn(its)), 0x1p15f));
    }
}

}  // namespace

cudaError_t int8_inverses(const int32_t* words, const uint8_t* scales, const float* codebook, int bits,
                          int64_t out_features, int64_t in_features, void* out, const Gpu& gpu, cudaStream_t stream) {
    const TileLayout layout(out_features, in_features);
    return dispatch(bits, [&](auto width) {
        static Launcher launcher(int8_inverses_kernel<width()>, kThreads, 0);
        return launcher.launch(gpu, layout.row_tiles, 1, 0, stream, words, scales, codebook,
                               static_cast<unsigned>(layout.slabs), out_features, static_cast<__half*>(out));
    });
}

}  // namespace hf_kbit::cuda
