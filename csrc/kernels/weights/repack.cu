// Turns bit-planes into tiles, and back, without loss.
//
//   planes  int32 [N, B * bits]                    absmax  uint8 [N, B]
//   words   int32 [N/16, K/256, bits, 32, 4]       scales  uint8 [N/16, K/256, 8, 16], both rounded up, zeros in the
//   padding
//
// A warp moves one 16 x 256 slab. Its planes are 16 stretches of memory, one a row, that pass through shared memory:
//
//   planes, 16 rows x (8 blocks x bits) words  <->  smem, rows kPitch words apart  <->  lane (g, t): bytes t of the
//   planes of rows g and g + 8  <->  octets  <->  4 * bits words a lane, `bits` coalesced 16-byte accesses
//
// kPitch puts the words that eight rows read at once into different banks. Both sides are read and written once: 2 *
// (bits / 8 + 1/32) bytes a weight. The bits of eight or sixteen codes move at once, by swaps of whole fields
// (codes.cuh).
#include "kernels/codes.cuh"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

template <int kBits>
struct Slab {
    static constexpr int kRowWords = kSlabBlocks * kBits;
    static constexpr int kPitch = kRowWords + 4;
    static constexpr int kWords = kTileRows * kPitch;
};

// Which slab a warp works on, and how much of it lies inside the matrix. A CTA takes neighbouring slabs of a row tile;
// CTAs go along K first, so that those at work at a time read and write whole rows.
struct Place {
    int64_t row, row_blocks;  // the first row, over all matrices, and its length
    int64_t slab;             // over all matrices, in the order of the tiles
    unsigned block;           // the first block in the row
    int rows, blocks;         // inside the matrix
    bool exists;

    __device__ __forceinline__ Place(unsigned row_tiles, unsigned slabs, int64_t out_features, int64_t row_blocks)
        : row_blocks(row_blocks) {
        const unsigned row_ctas = (slabs + kWarps - 1) / kWarps, tile_row = blockIdx.x / row_ctas;
        const unsigned column = (blockIdx.x - tile_row * row_ctas) * kWarps + threadIdx.x / kWarp;
        const unsigned matrix = tile_row / row_tiles;
        const int64_t first = int64_t{tile_row - matrix * row_tiles} * kTileRows;
        exists = column < slabs;
        slab = int64_t{tile_row} * slabs + column;
        block = column * kSlabBlocks;
        row = matrix * out_features + first;
        rows = static_cast<int>(min(out_features - first, int64_t{kTileRows}));
        blocks = static_cast<int>(min(row_blocks - block, int64_t{kSlabBlocks}));
    }
};

// Moves the slab's planes between global and shared memory. kWide: in pieces of 16 bytes, which needs rows aligned to
// them and slabs inside the matrix along K.
template <int kBits, bool kWide, bool kToShared>
__device__ __forceinline__ void move_planes(int32_t* gmem_planes, const Place& place, uint32_t* smem_planes,
                                            int lane) {
    using S = Slab<kBits>;
    constexpr int kPiece = kWide ? 4 : 1, kRowPieces = S::kRowWords / kPiece;
    int32_t* gmem_slab = gmem_planes + (place.row * place.row_blocks + place.block) * kBits;
#pragma unroll
    for (int i = 0; i < kTileRows * kRowPieces / kWarp; ++i) {
        const int piece = i * kWarp + lane, row = piece / kRowPieces, column = piece % kRowPieces * kPiece;
        const bool inside = row < place.rows && (kWide || column < place.blocks * kBits);
        auto* gmem = gmem_slab + row * place.row_blocks * kBits + column;
        uint32_t* smem = smem_planes + row * S::kPitch + column;
        if constexpr (kWide && kToShared) {
            *reinterpret_cast<uint4*>(smem) = inside ? *reinterpret_cast<const uint4*>(gmem) : make_uint4(0, 0, 0, 0);
        } else if constexpr (kWide) {
            if (inside) *reinterpret_cast<uint4*>(gmem) = *reinterpret_cast<const uint4*>(smem);
        } else if constexpr (kToShared) {
            *smem = inside ? static_cast<uint32_t>(*gmem) : 0;
        } else {
            if (inside) *gmem = static_cast<int32_t>(*smem);
        }
    }
}

// Moves the slab's scales between absmax [16 rows, 8 blocks] and scales [8 row pairs, 8 blocks, 2 rows].
template <bool kWide, bool kToTiles>
__device__ __forceinline__ void move_scales(uint8_t* gmem_absmax, const Place& place, uint8_t* gmem_scales, int lane) {
    uint8_t* absmax = gmem_absmax + place.row * place.row_blocks + place.block;
    if constexpr (kWide) {  // lanes g and g + 8 have a row of 8 bytes each, lane g their pairs
        const int g = lane % 8;
        auto* row = reinterpret_cast<uint2*>(absmax + lane % 16 * place.row_blocks);
        auto* pairs = reinterpret_cast<uint4*>(gmem_scales) + g;
        const bool inside = lane < 16 && lane < place.rows;
        if constexpr (kToTiles) {
            const uint2 own = inside ? *row : make_uint2(0, 0);
            const uint2 other =
                make_uint2(__shfl_xor_sync(0xFFFFFFFF, own.x, 8), __shfl_xor_sync(0xFFFFFFFF, own.y, 8));
            if (lane < 8) {
                *pairs = make_uint4(__byte_perm(own.x, other.x, 0x5140), __byte_perm(own.x, other.x, 0x7362),
                                    __byte_perm(own.y, other.y, 0x5140), __byte_perm(own.y, other.y, 0x7362));
            }
        } else if (inside) {
            const uint4 four = *pairs;
            const uint32_t own = lane < 8 ? 0x6420 : 0x7531;
            *row = make_uint2(__byte_perm(four.x, four.y, own), __byte_perm(four.z, four.w, own));
        }
    } else {
#pragma unroll
        for (int i = 0; i < kTileRows * kSlabBlocks / kWarp; ++i) {
            const int index = i * kWarp + lane, block = index % 16 / 2, row = index / 16 + index % 2 * 8;
            const bool inside = row < place.rows && block < place.blocks;
            uint8_t* from = absmax + row * place.row_blocks + block;
            if (kToTiles) {
                gmem_scales[index] = inside ? *from : 0;
            } else if (inside) {
                *from = gmem_scales[index];
            }
        }
    }
}

template <int kBits, bool kWide>
__global__ void __launch_bounds__(kThreads)
    repack_kernel(const int32_t* gmem_planes, const uint8_t* gmem_absmax, unsigned row_tiles, unsigned slabs,
                  int64_t out_features, int64_t row_blocks, int32_t* gmem_words, uint8_t* gmem_scales) {
    using S = Slab<kBits>;
    __shared__ __align__(16) uint32_t smem[kWarps][S::kWords];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const Place place(row_tiles, slabs, out_features, row_blocks);
    if (!place.exists) return;
    move_planes<kBits, kWide, true>(const_cast<int32_t*>(gmem_planes), place, smem[warp], lane);
    move_scales<kWide, true>(const_cast<uint8_t*>(gmem_absmax), place,
                             gmem_scales + place.slab * TileLayout::kSlabScales, lane);
    __syncwarp();

    uint32_t words[4][kBits] = {};
#pragma unroll
    for (int block = 0; block < kSlabBlocks; ++block) {
        uint32_t planes[2][kBits], octets[2], tops[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int p = 0; p < kBits; ++p)
                planes[half][p] = smem[warp][(g + 8 * half) * S::kPitch + block * kBits + p];
            tops[half] = planes[half][kBits - 1] >> 8 * t;
        }
        if constexpr (kBits == 2) {
            words[block / 2][block % 2] = two_bit_word(planes[0], planes[1], t);
        } else {
            for (int half = 0; half < 2; ++half)
                octets[half] = octet_of_planes(gather_plane_bytes<kBits>(planes[half], t));
            insert_octets<kBits>(octets, tops, block % 2, words[block / 2]);
        }
    }
    auto* target = reinterpret_cast<uint4*>(gmem_words) + place.slab * kBits * kWarp + lane;
#pragma unroll
    for (int store = 0; store < kBits; ++store) {
        const auto word = [&](int i) { return words[(4 * store + i) / kBits][(4 * store + i) % kBits]; };
        target[store * kWarp] = make_uint4(word(0), word(1), word(2), word(3));
    }
}

template <int kBits, bool kWide>
__global__ void __launch_bounds__(kThreads)
    repack_inverse_kernel(const int32_t* gmem_words, const uint8_t* gmem_scales, unsigned row_tiles, unsigned slabs,
                          int64_t out_features, int64_t row_blocks, int32_t* gmem_planes, uint8_t* gmem_absmax) {
    using S = Slab<kBits>;
    __shared__ __align__(16) uint32_t smem[kWarps][S::kWords];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
    const Place place(row_tiles, slabs, out_features, row_blocks);
    if (!place.exists) return;
    uint32_t words[4][kBits];
    const auto* source = reinterpret_cast<const uint4*>(gmem_words) + place.slab * kBits * kWarp + lane;
#pragma unroll
    for (int load = 0; load < kBits; ++load) {
        const uint4 four = source[load * kWarp];
        const uint32_t parts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) words[(4 * load + i) / kBits][(4 * load + i) % kBits] = parts[i];
    }
    move_scales<kWide, false>(gmem_absmax, place,
                              const_cast<uint8_t*>(gmem_scales) + place.slab * TileLayout::kSlabScales, lane);
#pragma unroll
    for (int block = 0; block < kSlabBlocks; ++block) {
        const auto store = [&](int half, int p, uint32_t byte) {
            uint32_t* word = &smem[warp][(g + 8 * half) * S::kPitch + block * kBits + p];
            reinterpret_cast<uint8_t*>(word)[t] = static_cast<uint8_t>(byte);
        };
        if constexpr (kBits == 2) {
            const uint32_t bytes = two_bit_planes(words[block / 2][block % 2]);
#pragma unroll
            for (int i = 0; i < 4; ++i) store(i % 2, i / 2, bytes >> 8 * i);
        } else {
            uint32_t octets[2], tops[2];
            extract_octets<kBits>(words[block / 2], block % 2, octets, tops);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t plane_bytes = planes_of_octet(octets[half]);
#pragma unroll
                for (int p = 0; p < kBits; ++p) store(half, p, p < 4 ? plane_bytes >> 8 * p : tops[half]);
            }
        }
    }
    __syncwarp();
    move_planes<kBits, kWide, false>(gmem_planes, place, smem[warp], lane);
}

template <int kBits, bool kWide, bool kInverse>
cudaError_t launch(const int32_t* from_words, const uint8_t* from_scales, int64_t count, int64_t out_features,
                   int64_t in_features, int32_t* to_words, uint8_t* to_scales, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(kInverse ? repack_inverse_kernel<kBits, kWide> : repack_kernel<kBits, kWide>, kThreads,
                             0);
    const TileLayout layout(out_features, in_features);
    const int64_t ctas = count * layout.row_tiles * ceil_div(layout.slabs, kWarps);
    return launcher.launch(gpu, ctas, 1, 0, stream, from_words, from_scales, static_cast<unsigned>(layout.row_tiles),
                           static_cast<unsigned>(layout.slabs), out_features, num_blocks(in_features), to_words,
                           to_scales);
}

template <bool kInverse>
cudaError_t launch(int bits, const int32_t* from_words, const uint8_t* from_scales, int64_t count,
                   int64_t out_features, int64_t in_features, int32_t* to_words, uint8_t* to_scales, const Gpu& gpu,
                   cudaStream_t stream) {
    const bool wide = num_blocks(in_features) % kSlabBlocks == 0;
    return dispatch(bits, [&](auto width) {
        const auto run = wide ? launch<width(), true, kInverse> : launch<width(), false, kInverse>;
        return run(from_words, from_scales, count, out_features, in_features, to_words, to_scales, gpu, stream);
    });
}

}  // namespace

cudaError_t repack(const int32_t* planes, const uint8_t* absmax, int bits, int64_t count, int64_t out_features,
                   int64_t in_features, int32_t* words, uint8_t* scales, const Gpu& gpu, cudaStream_t stream) {
    return launch<false>(bits, planes, absmax, count, out_features, in_features, words, scales, gpu, stream);
}

cudaError_t repack_inverse(const int32_t* words, const uint8_t* scales, int bits, int64_t count, int64_t out_features,
                           int64_t in_features, int32_t* planes, uint8_t* absmax, const Gpu& gpu,
                           cudaStream_t stream) {
    return launch<true>(bits, words, scales, count, out_features, in_features, planes, absmax, gpu, stream);
}

}  // namespace hf_kbit::cuda
