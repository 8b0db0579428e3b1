// Looks rows of a packed table up and decodes them, from bit-planes or from tiles, to the bits of dequantize.cu.
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
// As many CTAs as the GPU has room for go through the rows, and load the next index while they decode. The lanes of a
// warp share a row, so that which half of its tiles has it is no divergence.
//
// The limit is memory: a weight of 16 bits is 2 bytes out for bits / 8 + 1/32 in, from tiles twice that in, as their
// words and scales hold rows g and g + 8 together (docs/lab).
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

constexpr int64_t kRounds = 4;  // with fewer, warps with one more than others would take a fourth of the time

// The table as a kernel reads it.
struct Table {
    const int32_t* words;
    const uint8_t* scales;
    int64_t rows, columns;
};

// A warp's turn: a row of the table, the first of the blocks, and how many columns there are from it on.
struct Turn {
    int64_t row;
    unsigned first;
    int held;

    __device__ __forceinline__ Turn(const Table& table, int64_t row, unsigned number)
        : row(row), first(number * kTurnBlocks) {
        held = static_cast<int>(min(table.columns - before(), int64_t{kTurnBlocks * kBlockSize}));
    }
    __device__ __forceinline__ int64_t before() const { return int64_t{first} * kBlockSize; }
};

// --- what a quad loads of a turn -----------------------------------------------------------------

// Its octet u is in block kFirst * quad + kStep * u of the turn. Where the row has ended, the last block is loaded.
template <int kBits>
struct FromPlanes {
    static constexpr int kFirst = 1, kStep = kQuads;
    uint32_t planes[kQuadBlocks][kBits], scales[kQuadBlocks];

    __device__ __forceinline__ void load(const Table& table, const Turn& turn, int quad, int) {
        const int64_t from = turn.row * num_blocks(table.columns) + turn.first;
        const int32_t* gmem_words = table.words + from * kBits;
        const uint8_t* gmem_scales = table.scales + from;
        asm("" : "+l"(gmem_words), "+l"(gmem_scales));  // or the compiler takes them apart, for longer sums
        const unsigned last = static_cast<unsigned>(turn.held - 1) / kBlockSize;
#pragma unroll
        for (int u = 0; u < kQuadBlocks; ++u) {
            const unsigned block = min(static_cast<unsigned>(kFirst * quad + kStep * u), last);
            load_block<kBits>(gmem_words, block, planes[u]);
            scales[u] = gmem_scales[block];
        }
    }
    __device__ __forceinline__ void decode(int u, int t, uint32_t sign, const Levels<kBits>& levels,
                                           float (&values)[kOctet]) const {
        decode_octet<kBits>(planes[u], t, decode_scale(scales[u], sign), levels, values);
    }
};

template <int kBits>
struct FromTiles {
    static constexpr int kFirst = kQuadBlocks, kStep = 1;
    uint32_t words[kPartTiles][kBits];
    uint2 scales;
    bool lower;  // whether the row is g + 8

    __device__ __forceinline__ void load(const Table& table, const Turn& turn, int quad, int t) {
        const int g = static_cast<int>(turn.row % 8), part = quad % kParts;
        const int64_t slab = turn.row / kTileRows * num_slabs(table.columns) + turn.first / kSlabBlocks +
                             min(quad / kParts, (turn.held - 1) / kSlabColumns);
        lower = turn.row & 8;
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

// Stores the octets of a warp in pieces: that of a lane goes to gmem_out, where `left` columns are left, and those of
// lanes 16 apart are kApart columns apart.
template <int kApart, typename T>
__device__ __forceinline__ void store_pieces(const float (&values)[kOctet], int left, T* gmem_out) {
    if constexpr (sizeof(T) == 4) {  // first all of the lower 16 octets, then of the upper ones
        const bool second = threadIdx.x % kWarp >= 16;
        uint4 pieces[2] = {as_piece(values, gmem_out), as_piece(values + 4, gmem_out)};
        exchange_pieces<16>(pieces, second);
        if (second) gmem_out += 4 - kApart, left += kApart;
        if (left > 0) store_16(gmem_out, pieces[0]);
        if (left > kApart) store_16(gmem_out + kApart, pieces[1]);
    } else if (left > 0) {
        store_16(gmem_out, as_piece(values, gmem_out));
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
    // So many warps share a row that each has some rounds, if there are as many turns; those left over have no row.
    const int64_t wanted = max(kRounds * warps / count, int64_t{1});
    const unsigned sharing = min(static_cast<unsigned>(min(wanted, int64_t{turns})), warps);
    unsigned step = warps / sharing;
    asm("" : "+r"(step));  // or the compiler divides again at each row
    int64_t i = warp < step * sharing ? warp / sharing : count;
    int64_t next = i < count ? index_of(i) : 0;
    levels.load(gmem_codebook, kThreads);
    const uint32_t sign = transform.rotated ? kSignBit : 0;
    const bool whole = table.columns % kOctet == 0;  // octets
    while (i < count) {
        const int64_t row = next;
        assert(0 <= row && row < table.rows && "indices: each is 0 to V - 1");
        T* gmem_row = gmem_out + i * table.columns;
        i += step;
        if (i < count) next = index_of(i);
        for (unsigned number = warp % sharing; number < turns; number += sharing) {
            const Turn turn(table, row, number);
            Source<kBits> source;
            source.load(table, turn, quad, t);
            // Of the lane's octets, the first one's column in the turn, and how many there are to the next one's.
            constexpr int kApart = Source<kBits>::kFirst * kBlockSize, kStep = Source<kBits>::kStep * kBlockSize;
            const int own = kApart * quad + t * kOctet, left = turn.held - own;
            T* out = gmem_row + turn.before() + own;
            const Transform its_transform{transform.columns ? transform.columns + turn.before() + own : nullptr,
                                          transform.rotated};
#pragma unroll
            for (int u = 0; u < kQuadBlocks; ++u) {
                float values[kOctet];
                source.decode(u, t, sign, levels, values);
                if (transform.any()) {
                    to_original(values, load_scales(its_transform, kStep * u, left), transform.rotated, t);
                }
                if (sizeof(T) < 8 && whole) {
                    store_pieces<16 / 4 * kApart>(values, left - kStep * u, out + kStep * u);
                } else {
                    store_ragged(values, out + kStep * u, left - kStep * u);
                }
            }
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
