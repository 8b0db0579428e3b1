// Looks rows of a packed table up and decodes them, from bit-planes or from tiles, to the bits that dequantize.cu gives.
//
//   indices   int64 or int32 [count], each 0 to V - 1
//   planes    int32 [V, B * bits]        or words  int32 [V/16, D/256, bits, 32, 4]
//   absmax    uint8 [V, B]               or scales uint8 [V/16, D/256, 8, 16]
//   codebook  float32 [2**bits]          columns   uint8 [D], as E4M4, or null
//   out       float32, float16, bfloat16 or float64 [count, D], row-major
//
// A warp's turn is 32 blocks of a row, 1024 columns, so that one token, too, keeps several warps busy. Each quad of
// lanes takes four of the blocks, a lane four octets, whose loads are all on their way before the first is decoded:
//
//   quad            0       1     ...    7          q has block 8 u + q of planes, for u = 0 .. 3: stores of a warp
//   from planes   0 8 ..  1 9 ..  ...  7 15 ..      are neighbours; and block 4 q + u of tiles, half a slab, of which
//   from tiles    0 1 ..  4 5 ..  ...  28 29 ..     a row's four lanes g hold the words
//
// As many CTAs as the GPU has room for go through the turns, and load the next index while they decode. The lanes of a
// warp share a row, so that whether its tiles have it above or below is no divergence.
//
// The limit is memory: a weight of 16 bits is 2 bytes out for bits / 8 + 1/32 in, from tiles twice that, as their
// words hold rows g and g + 8 together. At 4 bits 16 x 2048 rows of 4096 are 340 MB from planes and 411 MB from tiles,
// 81 and 98 us at the 4.2 TB/s of an H200. Counted in its code (sm_90a, bfloat16), INSTRUCTIONS
#undef NDEBUG  // the assertion is part of what the op promises
#include <cassert>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/octets.cuh"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarp;
constexpr int kQuads = kWarp / 4, kQuadBlocks = kPartBlocks, kTurnBlocks = kQuads * kQuadBlocks;

// The table as a kernel reads it.
struct Table {
    const int32_t* words;
    const uint8_t* scales;
    int64_t rows, columns;
};

// --- what a quad loads of a row ------------------------------------------------------------------

// Block number u of the quad lies block(quad, u) behind the first of the turn. Loads of blocks behind the row's last
// one are of that one.
template <int kBits>
struct FromPlanes {
    uint32_t planes[kQuadBlocks][kBits], scales[kQuadBlocks];

    static __device__ __forceinline__ int block(int quad, int u) { return u * kQuads + quad; }

    __device__ __forceinline__ void load(const Table& table, int64_t row, unsigned first, int quad, int) {
        const auto blocks = static_cast<unsigned>(num_blocks(table.columns));
#pragma unroll
        for (int u = 0; u < kQuadBlocks; ++u) {
            const unsigned its_block = min(first + block(quad, u), blocks - 1);
            load_block<kBits>(table.words + row * blocks * kBits, its_block, planes[u]);
            scales[u] = table.scales[row * blocks + its_block];
        }
    }
    __device__ __forceinline__ void decode(int u, int t, uint32_t sign, const Levels<kBits>& levels,
                                           float (&values)[kOctet]) const {
        decode_octet<kBits>(planes[u], t, decode_scale(scales[u], sign), levels, values);
    }
};

template <int kBits>
struct FromTiles {
    uint32_t words[kPartTiles][kBits];
    uint2 scales;
    bool lower;  // whether the row is g + 8

    static __device__ __forceinline__ int block(int quad, int u) { return quad * kQuadBlocks + u; }

    __device__ __forceinline__ void load(const Table& table, int64_t row, unsigned first, int quad, int t) {
        const int64_t slabs = num_slabs(table.columns);
        const int64_t slab = row / kTileRows * slabs + min(int64_t{first / kSlabBlocks + quad / kParts}, slabs - 1);
        const int g = static_cast<int>(row % 8), part = quad % kParts;
        lower = row % kTileRows >= 8;
        load_part<kBits>(reinterpret_cast<const uint4*>(table.words) + slab * kBits * kWarp + 4 * g + t, part, words);
        scales = reinterpret_cast<const uint2*>(table.scales)[(slab * kTileRows / 2 + g) * kParts + part];
    }
    __device__ __forceinline__ void decode(int u, int, uint32_t sign, const Levels<kBits>& levels,
                                           float (&values)[kOctet]) const {
        if (lower) {
            decode_octet<kBits>(words, scales, sign, u, 1, levels, values);
        } else {
            decode_octet<kBits>(words, scales, sign, u, 0, levels, values);
        }
    }
};

// --- the kernel ----------------------------------------------------------------------------------

// Stores the octets of a warp, that of a lane at `column` of a row of so many; lanes 16 apart are `apart` columns
// apart.
template <typename T>
__device__ __forceinline__ void store_octets(const float (&values)[kOctet], int64_t column, int apart, int64_t columns,
                                             T* gmem_row) {
    if (sizeof(T) == 8 || columns % kOctet) {
        store_ragged(values, gmem_row + column, columns - column);
    } else if constexpr (sizeof(T) == 4) {  // first all of the lower 16 octets, then of the upper ones
        const bool second = threadIdx.x % kWarp >= 16;
        uint4 pieces[2] = {as_piece(values, gmem_row), as_piece(values + 4, gmem_row)};
        exchange_pieces<16>(pieces, second);
        if (second) column -= apart;
        T* out = gmem_row + column + (second ? 4 : 0);
        if (column < columns) store_16(out, pieces[0]);
        if (column + apart < columns) store_16(out + apart, pieces[1]);
    } else if (column < columns) {
        store_16(gmem_row + column, as_piece(values, gmem_row));
    }
}

template <typename T, int kBits, template <int> class Source>
__global__ void __launch_bounds__(kThreads)
    embed_kernel(const void* gmem_indices, bool wide, int64_t count, const Table table, const float* gmem_codebook,
                 const Transform transform, T* gmem_out) {
    __shared__ Levels<kBits> levels;
    const auto index_of = [&](int64_t i) {
        return wide ? static_cast<const int64_t*>(gmem_indices)[i] : static_cast<const int32_t*>(gmem_indices)[i];
    };
    const int quad = threadIdx.x % kWarp / 4, t = threadIdx.x % 4;
    const auto turns = static_cast<unsigned>(ceil_div(num_blocks(table.columns), kTurnBlocks));  // of a row
    const unsigned warp = blockIdx.x * kWarps + threadIdx.x / kWarp, warps = gridDim.x * kWarps;
    int64_t i = warp / turns;
    unsigned turn = warp % turns;
    int64_t next = i < count ? index_of(i) : 0;
    levels.load(gmem_codebook, kThreads);
    const uint32_t sign = transform.rotated ? kSignBit : 0;
    while (i < count) {
        const int64_t row = next;
        assert(0 <= row && row < table.rows && "indices: each is 0 to V - 1");
        const unsigned first = turn * kTurnBlocks;
        T* gmem_row = gmem_out + i * table.columns;
        Source<kBits> source;
        source.load(table, row, first, quad, t);
        i += warps / turns, turn += warps % turns;
        if (turn >= turns) ++i, turn -= turns;
        if (i < count) next = index_of(i);
#pragma unroll
        for (int u = 0; u < kQuadBlocks; ++u) {
            const int64_t column = int64_t{first + Source<kBits>::block(quad, u)} * kBlockSize + t * kOctet;
            float values[kOctet];
            source.decode(u, t, sign, levels, values);
            if (transform.any()) {
                to_original(values, load_scales(transform, column, table.columns), transform.rotated, t);
            }
            constexpr int kApart = 4;  // quads
            const int apart = Source<kBits>::block(kApart, u) - Source<kBits>::block(0, u);
            store_octets(values, column, apart * kBlockSize, table.columns, gmem_row);
        }
    }
}

}  // namespace

cudaError_t embed(const void* indices, bool wide, int64_t count, const int32_t* words, const uint8_t* scales,
                  bool tiled, const float* codebook, const Transform& transform, int bits, int64_t rows,
                  int64_t in_features, void* out, Dtype dtype, const Gpu& gpu, cudaStream_t stream) {
    return dispatch<float, __half, __nv_bfloat16, double>(bits, dtype, [&](auto width, auto value) {
        using T = decltype(value);
        static Launcher planes(embed_kernel<T, width(), FromPlanes>, kThreads, 0);
        static Launcher tiles(embed_kernel<T, width(), FromTiles>, kThreads, 0);
        const int64_t warps = count * ceil_div(num_blocks(in_features), kTurnBlocks);
        return (tiled ? tiles : planes)
            .launch_resident(gpu, ceil_div(warps, kWarps), stream, indices, wide, count,
                             Table{words, scales, rows, in_features}, codebook, transform, static_cast<T*>(out));
    });
}

}  // namespace hf_kbit::cuda
