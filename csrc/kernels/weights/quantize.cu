// Quantizes a weight to bit-planes and E4M4 scales.
//
//   weight    float32, float16 or bfloat16 [rows, K], row-major          (read once)
//   codebook  float32 [2**bits], ascending
//   planes    int32 [rows, B * bits], bit j of word b * bits + p: bit p of the code of column 32 b + j
//   absmax    uint8 [rows, B]
//
// A lane owns a block, so that scale and bit-planes need no talk between lanes. Blocks lie one after another if K is a
// multiple of 32; a warp then brings 32 of them to shared memory with 16-byte asynchronous copies, one chunk ahead:
//
//   gmem  |block 0|block 1| ... |block 31|  --cp.async-->  smem, 16-byte pieces swizzled  --LDS.128-->  lane = block
//
// Code of w: the number of midpoints between levels below r = w * (1 / scale). Searching costs more than the memory
// allows, so the range of r is cut into cells so fine that none holds two midpoints: one look-up gives the number of
// midpoints in the cells below, and the midpoint of the cell itself, if any. A cell number is monotone in r, rounding
// included, so this is exact. Each lane has a private copy of the table: no bank conflicts. A codebook too uneven for
// the cells is searched linearly.
//
// Where scales are searched (kSearched), a lane tries 23 of them for its block.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/codes.cuh"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kStages = 2;

template <int kBits>
struct Cells {
    static constexpr int kLevels = 1 << kBits;
    static constexpr int kCount = 4 * kLevels;              // about 2.5 for each gap between levels
    static constexpr int kStride = kWarp * sizeof(float2);  // bytes from a cell to the next: a copy for each lane
    static constexpr int kBytes = kCount * kStride;
    static constexpr uint32_t kMask = (kCount - 1) * kStride;
};

struct Search {
    float scale;  // of r, in bytes of the table
    bool exact;   // whether every cell holds at most one midpoint
};

// All that r can be, in units of the largest level: half of what a scale of 1 rounds down, and some. A saturated scale
// is the exception; its weights are clamped.
constexpr float kReach = 1.6f;

// Byte offset of the cell of r in the table: a float of exponent 23 has the integer in its low bits.
template <int kBits>
__device__ __forceinline__ uint32_t cell_offset(float r, float scale) {
    return __float_as_uint(__fmaf_rn(r, scale, 0x1p23f + Cells<kBits>::kBytes / 2)) & Cells<kBits>::kMask;
}

__device__ __forceinline__ float midpoint(const float* codebook, int i) {
    return __fmul_rn(__fadd_rn(codebook[i], codebook[i + 1]), 0.5f);
}

// Fills the table: for each cell the midpoint in it (or infinity) and the number of midpoints in the cells below.
template <int kBits>
__device__ Search build_cells(const float* smem_codebook, float largest, float2* smem_cells) {
    using C = Cells<kBits>;
    const float scale = C::kBytes / 2 / (kReach * largest);
    bool crowded = false;
    for (int cell = threadIdx.x; cell < C::kCount; cell += kThreads) {
        float inside = __int_as_float(0x7F800000);
        int below = 0, count = 0;
        for (int i = 0; i < C::kLevels - 1; ++i) {
            const float middle = midpoint(smem_codebook, i);
            const int its_cell = cell_offset<kBits>(middle, scale) / C::kStride;
            below += its_cell < cell;
            if (its_cell == cell) inside = middle, ++count;
        }
        crowded |= count > 1;
        for (int i = 0; i < kWarp; ++i) {
            smem_cells[cell * kWarp + (i + threadIdx.x) % kWarp] = make_float2(inside, __int_as_float(below));
        }
    }
    return {scale, !__syncthreads_or(crowded)};
}

__device__ __forceinline__ void unpack(uint4 piece, float (&values)[4], const float*) {
    values[0] = __uint_as_float(piece.x), values[1] = __uint_as_float(piece.y);
    values[2] = __uint_as_float(piece.z), values[3] = __uint_as_float(piece.w);
}

__device__ __forceinline__ void unpack(uint4 piece, float (&values)[8], const __nv_bfloat16*) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
    }
}

__device__ __forceinline__ void unpack(uint4 piece, float (&values)[8], const __half*) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
        values[2 * i] = two.x, values[2 * i + 1] = two.y;
    }
}

// The largest magnitude of a block; 16-bit numbers are compared two at a time.
template <typename T>
struct Magnitude {
    uint32_t two = 0;

    __device__ __forceinline__ void add(uint4 piece) {
        for (const uint32_t word : {piece.x, piece.y, piece.z, piece.w}) two = __vmaxu2(two, word & 0x7FFF7FFF);
    }
    __device__ __forceinline__ float value() const {
        const auto bits = static_cast<unsigned short>(max(two & 0xFFFF, two >> 16));
        return static_cast<float>(*reinterpret_cast<const T*>(&bits));
    }
};

template <>
struct Magnitude<float> {
    float largest = 0;

    __device__ __forceinline__ void add(uint4 piece) {
        for (const uint32_t word : {piece.x, piece.y, piece.z, piece.w}) {
            largest = fmaxf(largest, fabsf(__uint_as_float(word)));
        }
    }
    __device__ __forceinline__ float value() const { return largest; }
};

// Where a 16-byte piece of a chunk lies in its stage: the swizzle lets eight lanes read the same piece of eight blocks
// from different banks.
__device__ __forceinline__ int swizzled(int piece) { return piece ^ (piece >> 3 & 7); }

// A warp's chunk of 32 blocks, as pieces of 16 bytes; kPieces of them a block.
template <typename T>
struct Chunk {
    static constexpr int kPerPiece = 16 / sizeof(T);
    static constexpr int kPieces = kBlockSize / kPerPiece;
    static constexpr int kBytes = kWarp * kBlockSize * sizeof(T);

    // Starts to copy the chunk; blocks past the end are left out.
    static __device__ __forceinline__ void prefetch(const T* gmem_weight, int64_t first_block, int64_t blocks,
                                                    uint4* smem_stage, int lane) {
        const auto inside = static_cast<int>(max(min(blocks - first_block, int64_t{kWarp}), int64_t{0}));
        const auto* source = reinterpret_cast<const uint4*>(gmem_weight + first_block * kBlockSize) + lane;
        const int place = swizzled(lane);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            // swizzled(32 i + lane): of a piece's row, 4 i changes bit 2 alone.
            uint4* target = smem_stage + i * kWarp + (place ^ 4 * (i & 1));
            if (i * kWarp + lane < inside * kPieces) cp_async_16(target, source + i * kWarp);
        }
        cp_async_commit();
    }

    // The lane's block, and its largest magnitude.
    static __device__ __forceinline__ float read(const uint4* smem_stage, int lane, float (&values)[kBlockSize]) {
        const int first = swizzled(lane * kPieces);
        Magnitude<T> largest;
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            const uint4 piece = smem_stage[first ^ i];
            float part[kPerPiece];
            unpack(piece, part, static_cast<const T*>(nullptr));
            largest.add(piece);
#pragma unroll
            for (int j = 0; j < kPerPiece; ++j) values[i * kPerPiece + j] = part[j];
        }
        return largest.value();
    }
};

// A block of a weight whose rows are not whole blocks, or not aligned, straight from global memory; and how many of
// its columns there are.
template <typename T>
__device__ float read_ragged(const T* gmem_weight, int64_t block, int64_t in_features, float (&values)[kBlockSize],
                             int& columns) {
    const int64_t row_blocks = num_blocks(in_features), row = block / row_blocks;
    const int64_t column = (block - row * row_blocks) * kBlockSize;
    columns = static_cast<int>(min(in_features - column, int64_t{kBlockSize}));
    float largest = 0;
#pragma unroll
    for (int j = 0; j < kBlockSize; ++j) {
        values[j] = column + j < in_features ? static_cast<float>(gmem_weight[row * in_features + column + j]) : 0.0f;
        largest = fmaxf(largest, fabsf(values[j]));
    }
    return largest;
}

// Beyond the largest level a weight's code is the last one, however far.
__device__ __forceinline__ void clamp(float (&values)[kBlockSize], float largest) {
#pragma unroll
    for (int j = 0; j < kBlockSize; ++j) values[j] = fminf(fmaxf(values[j], -largest), largest);
}

// 2^-e of a number m 2^e, 1 <= m < 2.
__device__ __forceinline__ float unit_of(float largest) {
    return __uint_as_float((254 - min(max(__float_as_uint(largest) >> 23, 1u), 253u)) << 23);
}

// Of the bytes around `around`, from 1 on, that with the least squared error of the block's first `columns` weights;
// if several, `around`, else the lowest. `find` gives the code of r, lanes have the levels of the codes that are their
// numbers. As in hf_kbit/format/reference.py every operation is rounded by itself, and halves are added to each other.
template <typename Find>
__device__ __forceinline__ uint32_t search_scale(const float (&values)[kBlockSize], int columns, uint32_t around,
                                                 bool signed_scales, const float* smem_inverse, float level,
                                                 float reach, const Find& find) {
    uint32_t best = around;
    float least = 0;
    const int most = most_scale(signed_scales);
    const int below = search_below(signed_scales), above = search_above(signed_scales);
#pragma unroll 1
    for (int step = -below - 1; step <= above; ++step) {
        const bool first = step < -below;
        const uint32_t byte =
            first ? around : static_cast<uint32_t>(min(max(static_cast<int>(around) + step, 1), most));
        const float inverse = smem_inverse[byte], scale = decode_e4m4(byte);
        const auto square = [&](int j) {
            const float ratio = __fmul_rn(values[j], inverse);
            const uint32_t code = find(0, fminf(fmaxf(ratio, -reach), reach));
            const float difference = __fsub_rn(ratio, __shfl_sync(0xFFFFFFFF, level, code));
            return j < columns ? __fmul_rn(difference, difference) : 0.0f;
        };
        float eighths[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            eighths[j] = __fadd_rn(__fadd_rn(square(j), square(j + 16)), __fadd_rn(square(j + 8), square(j + 24)));
        }
        float fourths[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) fourths[j] = __fadd_rn(eighths[j], eighths[j + 4]);
        const float sum = __fadd_rn(__fadd_rn(fourths[0], fourths[2]), __fadd_rn(fourths[1], fourths[3]));
        const float error = __fmul_rn(__fmul_rn(sum, scale), scale);
        if (first || error < least) least = error, best = byte;
    }
    return around == 0 ? 0 : best;
}

// Whether the scale of a block is negative, where scales have signs: its weight of largest magnitude is to be on the
// side of the level of largest magnitude. If so, negates the block, which is quantized so.
__device__ __forceinline__ bool take_sign(float (&values)[kBlockSize], const float* smem_codebook, int levels) {
    float most = 0, least = 0;
#pragma unroll
    for (int j = 0; j < kBlockSize; ++j) most = fmaxf(most, values[j]), least = fmaxf(least, -values[j]);
    const bool below = smem_codebook[levels - 1] < -smem_codebook[0], negative = below ? most > least : least > most;
#pragma unroll
    for (int j = 0; j < kBlockSize; ++j) values[j] = negative ? -values[j] : values[j];
    return negative;
}

// The codes of a block, code 8 m + i in byte m of bytes[i]; `find` adds the code of r to a number.
template <typename Find>
__device__ __forceinline__ void find_codes(const float (&values)[kBlockSize], float inverse, const Find& find,
                                           uint32_t (&bytes)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        bytes[i] = 0;
#pragma unroll
        for (int m = 3; m >= 0; --m) bytes[i] = find(bytes[i] << 8, __fmul_rn(values[8 * m + i], inverse));
    }
}

// Eight words of codes, code 8 m + i in byte m of bytes[i], to bit-planes: bit 8 m + i of a plane is of that code.
template <int kBits>
__device__ __forceinline__ void transpose_codes(const uint32_t (&bytes)[8], uint32_t (&planes)[kBits]) {
    static_assert(kBits <= 5, "a nibble and a fifth bit");
    if constexpr (kBits == 5) {
        uint32_t top = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) top |= shifted(bytes[i], i - 4) & 0x01010101u << i;
        planes[4] = top;
    }
    uint32_t rows[4];  // nibble n: code 4 n + k
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        rows[k] =
            kBits == 5 ? (bytes[k] & 0x0F0F0F0F) | (bytes[k + 4] << 4 & 0xF0F0F0F0) : bytes[k] + (bytes[k + 4] << 4);
    }
    if constexpr (kBits == 2) {
        const uint32_t even = rows[0] + (rows[2] << 2), odd = rows[1] + (rows[3] << 2);
        planes[0] = (even & 0x55555555) | (odd << 1 & 0xAAAAAAAA);
        planes[1] = (even >> 1 & 0x55555555) | (odd & 0xAAAAAAAA);
    } else {
        const auto swap = [](uint32_t& a, uint32_t& b, int distance, uint32_t mask) {
            const uint32_t t = ((a >> distance) ^ b) & mask;
            b ^= t, a ^= t << distance;
        };
        swap(rows[0], rows[1], 1, 0x55555555);
        swap(rows[2], rows[3], 1, 0x55555555);
        swap(rows[0], rows[2], 2, 0x33333333);
        swap(rows[1], rows[3], 2, 0x33333333);
#pragma unroll
        for (int p = 0; p < (kBits < 4 ? kBits : 4); ++p) planes[p] = rows[p];
    }
}

// The planes of a warp's blocks to global memory; `smem_stage` is free for use.
template <int kBits>
__device__ __forceinline__ void store_planes(const uint32_t (&planes)[kBits], int32_t* gmem_planes,
                                             int64_t first_block, int64_t blocks, uint32_t* smem_stage, int lane) {
    auto* target = reinterpret_cast<uint32_t*>(gmem_planes) + first_block * kBits;
    if constexpr (kBits == 2) {
        if (first_block + lane < blocks) reinterpret_cast<uint2*>(target)[lane] = make_uint2(planes[0], planes[1]);
    } else if constexpr (kBits == 4) {
        if (first_block + lane < blocks) {
            reinterpret_cast<uint4*>(target)[lane] = make_uint4(planes[0], planes[1], planes[2], planes[3]);
        }
    } else {  // an odd stride: through shared memory without conflicts, so that the warp writes whole lines
        __syncwarp();
#pragma unroll
        for (int p = 0; p < kBits; ++p) smem_stage[lane * kBits + p] = planes[p];
        __syncwarp();
#pragma unroll
        for (int p = 0; p < kBits; ++p) {
            const int word = p * kWarp + lane;
            if (word < (blocks - first_block) * kBits) target[word] = smem_stage[word];
        }
    }
}

// A stage has a chunk of the weight, if it is whole, then the chunk's planes on their way out.
template <typename T>
constexpr int stage_bytes(bool whole) {
    constexpr int kPlanes = 1024;  // a power of two: simple addresses
    static_assert(kPlanes >= kWarp * kMaxBits * 4 && Chunk<T>::kBytes >= kPlanes);
    return whole ? Chunk<T>::kBytes : kPlanes;
}

template <typename T, int kBits>
constexpr int shared_bytes(bool whole) {
    return Cells<kBits>::kBytes + kWarps * kStages * stage_bytes<T>(whole);
}

// What the kernel has besides: levels and inverses of scales.
template <int kBits>
constexpr int kStaticBytes = ((1 << kBits) + 256) * 4;

// kWhole: blocks lie one after another and are aligned.
template <typename T, int kBits, bool kWhole, bool kSearched>
__global__ void __launch_bounds__(kThreads, kSearched ? 2 : 3)
    quantize_kernel(const T* gmem_weight, const float* gmem_codebook, bool signed_scales, int64_t blocks,
                    int64_t in_features, int32_t* gmem_planes, uint8_t* gmem_absmax) {
    extern __shared__ __align__(128) char smem[];                   // the cells, then kStages stages for each warp
    __shared__ float smem_codebook[1 << kBits], smem_inverse[256];  // of a scale: 1 / scale, of zero: 0
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    constexpr int kStageBytes = stage_bytes<T>(kWhole);
    char* smem_stages = smem + Cells<kBits>::kBytes + warp * kStages * kStageBytes;
    const auto stage_at = [&](int stage) { return reinterpret_cast<uint4*>(smem_stages + stage * kStageBytes); };
    const int64_t step = int64_t{gridDim.x} * kWarps * kWarp;
    int64_t first = (int64_t{blockIdx.x} * kWarps + warp) * kWarp;

    if (kWhole) Chunk<T>::prefetch(gmem_weight, first, blocks, stage_at(0), lane);
    if (threadIdx.x < 1 << kBits) smem_codebook[threadIdx.x] = gmem_codebook[threadIdx.x];
    static_assert(kThreads == 256);
    smem_inverse[threadIdx.x] = threadIdx.x ? __frcp_rn(decode_e4m4(threadIdx.x)) : 0.0f;
    __syncthreads();
    float largest = fmaxf(fabsf(smem_codebook[0]), fabsf(smem_codebook[(1 << kBits) - 1])), unit = 1;
    if constexpr (kSearched) {
        // In units of a power of two no square leaves the range of float32.
        unit = unit_of(largest), largest *= unit;
        __syncthreads();  // all have read the largest
        if (threadIdx.x < 1 << kBits) smem_codebook[threadIdx.x] *= unit;
        __syncthreads();
    }
    const Search search = build_cells<kBits>(smem_codebook, largest, reinterpret_cast<float2*>(smem));

    for (int stage = 0; first < blocks; first += step, stage ^= 1) {
        float values[kBlockSize], magnitude;
        int columns = kBlockSize;
        if (kWhole) {
            Chunk<T>::prefetch(gmem_weight, first + step, blocks, stage_at(stage ^ 1), lane);
            cp_async_wait<1>();
            __syncwarp();
            magnitude = Chunk<T>::read(stage_at(stage), lane, values);
        } else {
            magnitude = read_ragged(gmem_weight, min(first + lane, blocks - 1), in_features, values, columns);
        }
        if constexpr (kSearched) {
#pragma unroll
            for (int j = 0; j < kBlockSize; ++j) values[j] *= unit;
            magnitude *= unit;
        }
        const bool negative = signed_scales && take_sign(values, smem_codebook, 1 << kBits);
        const uint32_t most_byte = most_scale(signed_scales);
        uint32_t scale = min(encode_e4m4(__fdiv_rn(magnitude, largest)), most_byte);
        uint32_t bytes[8], planes[kBits];
        const auto quantize = [&](const auto& find) {
            if constexpr (kSearched) {
                // Beyond the largest level, which is below this, codes do not change.
                constexpr float kBeyond = 1.5f;
                scale = search_scale(values, columns, scale, signed_scales, smem_inverse,
                                     smem_codebook[lane % (1 << kBits)], kBeyond * largest, find);
                const float most = kBeyond * largest * decode_e4m4(scale);
                clamp(values, most);
            } else if (scale == most_byte) {
                clamp(values, (signed_scales ? 0.125f : 32.0f) * largest);  // what would be the scale after it
            }
            find_codes(values, smem_inverse[scale], find, bytes);
        };
        if (search.exact) {
            const char* cells = smem + lane * sizeof(float2);
            quantize([&](uint32_t number, float r) {
                const float2 cell = *reinterpret_cast<const float2*>(cells + cell_offset<kBits>(r, search.scale));
                number += __float_as_uint(cell.y);
                if (r > cell.x) ++number;
                return number;
            });
        } else {
            quantize([&](uint32_t number, float r) {
#pragma unroll 1
                for (int level = 0; level < (1 << kBits) - 1; ++level) number += r > midpoint(smem_codebook, level);
                return number;
            });
        }
        transpose_codes<kBits>(bytes, planes);
        if (negative && scale > 0) scale |= kSignBit;
        if (first + lane < blocks) gmem_absmax[first + lane] = static_cast<uint8_t>(scale);
        store_planes<kBits>(planes, gmem_planes, first, blocks, reinterpret_cast<uint32_t*>(stage_at(stage)), lane);
        __syncwarp();  // the stage is free for the next copy
    }
}

template <typename T, int kBits, bool kWhole, bool kSearched>
cudaError_t launch(const void* weight, const float* codebook, bool signed_scales, int64_t rows, int64_t in_features,
                   int32_t* planes, uint8_t* absmax, const Gpu& gpu, cudaStream_t stream) {
    static Launcher launcher(quantize_kernel<T, kBits, kWhole, kSearched>, kThreads, shared_bytes<T, kBits>(kWhole));
    const int64_t blocks = rows * num_blocks(in_features);
    return launcher.launch_resident(gpu, ceil_div(blocks, kThreads), stream, static_cast<const T*>(weight), codebook,
                                    signed_scales, blocks, in_features, planes, absmax);
}

}  // namespace

cudaError_t quantize(const void* weight, Dtype dtype, const float* codebook, int bits, bool searched,
                     bool signed_scales, int64_t rows, int64_t in_features, int32_t* planes, uint8_t* absmax,
                     const Gpu& gpu, cudaStream_t stream) {
    const bool aligned = in_features % kBlockSize == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0;
    return dispatch<float, __half, __nv_bfloat16>(bits, dtype, [&](auto width, auto value) {
        using T = decltype(value);
        constexpr int kBits = width();
        // 64 KB, which GPUs before sm_80 have, are too few for some chunks.
        const bool whole = aligned && shared_bytes<T, kBits>(true) + kStaticBytes<kBits> <= gpu.shared_limit;
        const auto run = searched ? (whole ? launch<T, kBits, true, true> : launch<T, kBits, false, true>)
                                  : (whole ? launch<T, kBits, true, false> : launch<T, kBits, false, false>);
        return run(weight, codebook, signed_scales, rows, in_features, planes, absmax, gpu, stream);
    });
}

}  // namespace hf_kbit::cuda
