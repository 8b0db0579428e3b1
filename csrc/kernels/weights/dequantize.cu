// Decodes a quantized weight, from bit-planes or from tiles: level[code] * scale in float32, turned back to the
// original basis where the weight has column scales or a rotation, rounded once.
//
//   planes    int32 [rows, B * bits]        or words  int32 [N/16, K/256, bits, 32, 4]
//   absmax    uint8 [rows, B]               or scales uint8 [N/16, K/256, 8, 16]
//   codebook  float32 [2**bits]             columns  uint8 [K], as E4M4, or null
//   out       float32, float16, bfloat16 or float64 [rows, K], row-major
//
// A thread makes octets: eight neighbouring columns of a row, one 16-byte store of 16-bit values. From planes, four
// neighbouring threads share a block and each takes a byte of every plane. From tiles, a warp takes half of a 16 x 256
// slab, whose order gives each lane whole octets. A level is one look-up in shared memory, in a private copy for each
// lane: no bank conflicts. Lanes exchange pieces of 16 bytes where a warp's store would otherwise not fill whole
// 128-byte lines. Weights that need no turning back (transform.cuh) have kernels of their own. Writing is the limit: 2
// bytes a weight out for bits / 8 + 1/32 in.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/octets.cuh"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 128;

// Instances: kWide stores pieces of 16 bytes, of rows that are whole blocks, else values go one by one; kTransformed
// turns weights back where they need it.

// --- from planes ---------------------------------------------------------------------------------

// What a thread loads for kUnroll octets, before it decodes those that it loaded a turn ago: one turn's arithmetic
// hides the latency of the next one's loads.
template <int kBits>
struct Blocks {
    static constexpr int kUnroll = kBits < 4 ? 4 : 2;
    uint32_t planes[kUnroll][kBits], scales[kUnroll];

    __device__ __forceinline__ void load(const int32_t* gmem_planes, const uint8_t* gmem_absmax, unsigned first,
                                         unsigned step, unsigned blocks) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const unsigned block = min(first + u * step + threadIdx.x % kWarp / 4, blocks - 1);
            load_block<kBits>(gmem_planes, block, planes[u]);
            scales[u] = gmem_absmax[block];
        }
    }
};

template <typename T, int kBits, bool kWide, bool kTransformed>
__global__ void __launch_bounds__(kThreads)
    dequantize_planes_kernel(const int32_t* gmem_planes, const uint8_t* gmem_absmax, const float* gmem_codebook,
                             const Transform transform, unsigned blocks, int64_t in_features, T* gmem_out) {
    __shared__ Levels<kBits> levels;
    const int lane = threadIdx.x % kWarp, t = lane % 4;
    constexpr int kWarpBlocks = kWarp / 4, kUnroll = Blocks<kBits>::kUnroll;
    const unsigned step = gridDim.x * (kThreads / 4);
    unsigned first = blockIdx.x * (kThreads / 4) + threadIdx.x / kWarp * kWarpBlocks;  // of the warp
    const uint32_t sign = kTransformed && transform.rotated ? kSignBit : 0;
    Blocks<kBits> current, next;
    current.load(gmem_planes, gmem_absmax, first, step, blocks);
    levels.load(gmem_codebook, kThreads);
    for (; first < blocks; first += kUnroll * step) {
        next.load(gmem_planes, gmem_absmax, first + kUnroll * step, step, blocks);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const unsigned warp_block = first + u * step, block = warp_block + lane / 4;
            float values[kOctet];
            decode_octet<kBits>(current.planes[u], t, decode_scale(current.scales[u], sign), levels, values);
            if constexpr (kTransformed) {
                if (transform.any()) {
                    const unsigned column = block % static_cast<unsigned>(num_blocks(in_features)) * kBlockSize;
                    const uint2 scales = load_scales(transform, column + t * kOctet, in_features);
                    to_original(values, scales, transform.rotated, t);
                }
            }
            if constexpr (kWide && sizeof(T) == 4) {
                // Lanes l and l + 16, four blocks apart: first all of the lower 16 octets, then of the upper ones.
                const bool second = lane >= 16;
                uint4 pieces[2] = {as_piece(values, gmem_out), as_piece(values + 4, gmem_out)};
                exchange_pieces<16>(pieces, second);
                T* out = gmem_out + size_t{warp_block} * kBlockSize + lane % 16 * kOctet + (second ? 4 : 0);
                const unsigned low_block = warp_block + lane % 16 / 4;
                if (low_block < blocks) store_16(out, pieces[0]);
                if (low_block + 4 < blocks) store_16(out + 16 * kOctet, pieces[1]);
            } else if constexpr (kWide) {
                if (block < blocks)
                    store_16(gmem_out + size_t{block} * kBlockSize + t * kOctet, as_piece(values, gmem_out));
            } else if (block < blocks) {
                const int64_t row_blocks = num_blocks(in_features), row = block / row_blocks;
                const int64_t column = (block - row * row_blocks) * kBlockSize + t * kOctet;
                store_ragged(values, gmem_out + row * in_features + column, in_features - column);
            }
        }
        current = next;
    }
}

// --- from tiles ----------------------------------------------------------------------------------

// A CTA takes neighbouring parts of a row tile; CTAs go along K first, so that those at work at a time write whole
// rows.
template <typename T, int kBits, bool kWide, bool kTransformed>
__global__ void __launch_bounds__(kThreads)
    dequantize_tiles_kernel(const int32_t* gmem_words, const uint8_t* gmem_scales, const float* gmem_codebook,
                            const Transform transform, unsigned row_tiles, unsigned slabs, int64_t row_slabs,
                            int64_t out_features, int64_t in_features, T* gmem_out) {
    __shared__ Levels<kBits> levels;
    const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    constexpr unsigned kWarps = kThreads / kWarp;
    const unsigned parts = slabs * kParts, row_ctas = (parts + kWarps - 1) / kWarps, tile_row = blockIdx.x / row_ctas;
    const unsigned index = (blockIdx.x - tile_row * row_ctas) * kWarps + threadIdx.x / kWarp;  // in the row tile
    const unsigned part = index % kParts;
    const int64_t slab = tile_row * row_slabs + min(index / kParts, slabs - 1);
    uint32_t words[kPartTiles][kBits];
    load_part<kBits>(reinterpret_cast<const uint4*>(gmem_words) + slab * kBits * kWarp + lane, part, words);
    const uint2 scales = reinterpret_cast<const uint2*>(gmem_scales)[(slab * kTileRows / 2 + g) * kParts + part];
    levels.load(gmem_codebook, kThreads);
    if (index >= parts) return;

    const unsigned matrix = tile_row / row_tiles;
    const int64_t row = int64_t{tile_row - matrix * row_tiles} * kTileRows;
    const int64_t column = int64_t{index} * kPartBlocks * kBlockSize;
    T* out = gmem_out + (matrix * out_features + row) * in_features + column;
    const auto rows = static_cast<int>(min(out_features - row, int64_t{kTileRows}));
    const auto columns = static_cast<int>(min(in_features - column, int64_t{kPartBlocks * kBlockSize}));
    const bool second = g & 1;  // of two neighbouring rows, whose lanes exchange pieces
    [[maybe_unused]] uint2 of_columns[kPartBlocks];
    if constexpr (kTransformed) {
#pragma unroll
        for (int block = 0; block < kPartBlocks; ++block)
            of_columns[block] = load_scales(transform, column + block * kBlockSize + t * kOctet, in_features);
    }
    const uint32_t sign = kTransformed && transform.rotated ? kSignBit : 0;
    const auto decode = [&](int block, int half, float (&values)[kOctet]) {
        decode_octet<kBits>(words, scales, sign, block, half, levels, values);
        if constexpr (kTransformed) {
            if (transform.any()) to_original(values, of_columns[block], transform.rotated, t);
        }
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int block = 0; block < kPartBlocks; block += sizeof(T) == 2 ? 2 : 1) {
            float values[kOctet];
            decode(block, half, values);
            if constexpr (kWide) {
                // A line of 128 bytes: two blocks of 16-bit values, one of float32. Its lower half, or the lower
                // halves of its octets, goes with the even rows' lanes, the upper one with the odd rows'.
                uint4 pieces[2] = {as_piece(values, gmem_out)};
                int offset = block * kBlockSize + t * kOctet;
                if constexpr (sizeof(T) == 2) {
                    decode(block + 1, half, values);
                    pieces[1] = as_piece(values, gmem_out);
                    offset += second ? kBlockSize : 0;
                } else {
                    pieces[1] = as_piece(values + 4, gmem_out);
                    offset += second ? 4 : 0;
                }
                exchange_pieces<4>(pieces, second);
                const int even_row = (g & ~1) + 8 * half;
                T* line = out + even_row * in_features + offset;
                if (even_row < rows && offset < columns) store_16(line, pieces[0]);
                if (even_row + 1 < rows && offset < columns) store_16(line + in_features, pieces[1]);
            } else {
                const int tile_row = g + 8 * half;
                const auto store = [&](int its_block) {
                    const int offset = its_block * kBlockSize + t * kOctet;
                    if (tile_row < rows) store_ragged(values, out + tile_row * in_features + offset, columns - offset);
                };
                store(block);
                if constexpr (sizeof(T) == 2) {
                    decode(block + 1, half, values);
                    store(block + 1);
                }
            }
        }
    }
}

// --- launchers -----------------------------------------------------------------------------------

template <typename T, int kBits, bool kWide, bool kTransformed>
cudaError_t launch_planes(const int32_t* planes, const uint8_t* absmax, const float* codebook,
                          const Transform& transform, int64_t rows, int64_t in_features, void* out, const Gpu& gpu,
                          cudaStream_t stream) {
    static Launcher launcher(dequantize_planes_kernel<T, kBits, kWide, kTransformed>, kThreads, 0);
    const int64_t blocks = rows * num_blocks(in_features);
    return launcher.launch_resident(gpu, ceil_div(blocks, kThreads / 4 * Blocks<kBits>::kUnroll), stream, planes,
                                    absmax, codebook, transform, static_cast<unsigned>(blocks), in_features,
                                    static_cast<T*>(out));
}

template <typename T, int kBits, bool kWide, bool kTransformed>
cudaError_t launch_tiles(const int32_t* words, const uint8_t* scales, const float* codebook,
                         const Transform& transform, int64_t count, int64_t out_features, int64_t in_features,
                         int64_t row_slabs, void* out, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(dequantize_tiles_kernel<T, kBits, kWide, kTransformed>, kThreads, 0);
    const TileLayout layout(out_features, in_features);
    const int64_t ctas = count * layout.row_tiles * ceil_div(layout.slabs * kParts, kThreads / kWarp);
    return launcher.launch(gpu, ctas, 1, 0, stream, words, scales, codebook, transform,
                           static_cast<unsigned>(layout.row_tiles), static_cast<unsigned>(layout.slabs), row_slabs,
                           out_features, in_features, static_cast<T*>(out));
}

// run(bits, a value of the dtype's type, kWide, kTransformed), each a type of its own.
template <typename Run>
cudaError_t dispatch_rows(int bits, Dtype dtype, int64_t in_features, const Transform& transform, const Run& run) {
    return dispatch<float, __half, __nv_bfloat16, double>(bits, dtype, [&](auto width, auto value) {
        // float64 serves numerical checks of gradients, not speed.
        if constexpr (sizeof(value) < 8) {
            if (in_features % kBlockSize == 0) {
                if (!transform.any()) return run(width, value, std::true_type{}, std::false_type{});
                return run(width, value, std::true_type{}, std::true_type{});
            }
        }
        return run(width, value, std::false_type{}, std::true_type{});
    });
}

}  // namespace

cudaError_t dequantize_planes(const int32_t* planes, const uint8_t* absmax, const float* codebook,
                              const Transform& transform, int bits, int64_t rows, int64_t in_features, void* out,
                              Dtype dtype, const Gpu& gpu, cudaStream_t stream) {
    return dispatch_rows(bits, dtype, in_features, transform,
                         [&](auto width, auto value, auto wide, auto transformed) {
                             return launch_planes<decltype(value), width(), wide(), transformed()>(
                                 planes, absmax, codebook, transform, rows, in_features, out, gpu, stream);
                         });
}

cudaError_t dequantize_tiles(const int32_t* words, const uint8_t* scales, const float* codebook,
                             const Transform& transform, int bits, int64_t count, int64_t out_features,
                             int64_t in_features, int64_t row_slabs, void* out, Dtype dtype, const Gpu& gpu,
                             cudaStream_t stream) {
    return dispatch_rows(
        bits, dtype, in_features, transform, [&](auto width, auto value, auto wide, auto transformed) {
            return launch_tiles<decltype(value), width(), wide(), transformed()>(
                words, scales, codebook, transform, count, out_features, in_features, row_slabs, out, gpu, stream);
        });
}

}  // namespace hf_kbit::cuda
