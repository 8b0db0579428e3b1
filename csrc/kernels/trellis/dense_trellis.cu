// The weight itself of trellises whose sides are rotated in blocks of 128: decoded, turned and scaled.
//
//   words  32-bit ones [count, K/16, N/16, 8 * bits]      out  float16 or bfloat16 [count, N, K], without the padding
//
// A CTA has a block of 128 x 128, a warp 32 of its rows. Lane 4 g + t decodes of four tiles along K from tile t the
// weights of rows g and g + 8, `bits` words of its stream: operand B of mma, for columns 2 m, 2 m + 1, + 8 and + 9 of
// all four tiles. Tensor cores turn these 16 columns, which gives operand A of a product that turns 16 rows. Other
// columns of a lane meet in registers, and so do its two tiles of rows; the warps' rows meet in shared memory. Numbers
// are float16, whose sums stay below 56,800.
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/launch.h"
#include "kernels/ptx.cuh"
#include "kernels/trellis/turn.cuh"
#include "kernels/trellis/values.cuh"

namespace hf_kbit::cuda {

namespace {

constexpr int kThreads = 128, kBlock = 128, kBlockTiles = kBlock / kTrellisTile, kOctets = kBlock / 8;

__device__ __forceinline__ uint32_t as_word(const __half2& two) { return reinterpret_cast<const uint32_t&>(two); }
// What makes two numbers negative, if an odd number of bits is set.
__device__ __forceinline__ uint32_t signs_of(int bits) { return __popc(bits) % 2 ? 0x80008000 : 0; }

// d = a @ b of float16, m16n8k16.
__device__ __forceinline__ void multiply_halves(uint32_t (&d)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%8, %8};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
}

template <typename T, int bits, Code code>
__global__ void __launch_bounds__(kThreads)
    dense_trellis_kernel(const uint32_t* words, const __half* suh, const __half* svh, int blocks_across,
                         int blocks_down, int64_t rows, int64_t columns, T* out) {
    __shared__ uint4 room[kBlock][kOctets];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int block_down = static_cast<int>(blockIdx.x) % blocks_down,
              rest = static_cast<int>(blockIdx.x) / blocks_down;
    const int block_across = rest % blocks_across;
    const int64_t matrix = rest / blocks_across;
    const int64_t across = int64_t{blocks_across} * kBlockTiles, down = int64_t{blocks_down} * kBlockTiles;

    // Signs of Hadamard's matrix of 16. Of columns place 8 h + 2 t + e is 16 t + 8 h + e, and place 8 f + g of the
    // result 8 g + f. Of rows all are as they are.
    const uint32_t one = 0x3C003C00, first_less = 0x80000000;
    const uint32_t shared = one ^ signs_of(g / 2 & t);
    const uint32_t of_columns[4] = {shared, shared ^ first_less, shared ^ signs_of(g & 1),
                                    shared ^ first_less ^ signs_of(g & 1)};
    const uint32_t of_rows = shared ^ (g % 2 ? first_less : 0);

    // [rows 16 i][columns 64 u][2 m][rows 8 r + 2 t and the next][columns 8 g + f]
    uint32_t all[2][2][4][2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const int64_t column = block_across * kBlockTiles + 4 * u + t,
                          row = block_down * kBlockTiles + 2 * warp + i;
            uint32_t own[bits + 1];
            load_words(words + (((matrix * across + column) * down + row) * 8 + g) * bits, lane, own);
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const __half2 low = two_weights<code>(own, 8 * m + 4 * r),
                                  high = two_weights<code>(own, 8 * m + 4 * r + 2);
                    const uint32_t b[2] = {as_word(low), as_word(high)};
                    multiply_halves(all[i][u][m][r], of_columns, b);
                }
            }
        }
    }
    // Bits 1, 2 and 6 of the column.
    const auto turn_words = [](uint32_t& a, uint32_t& b) {
        turn_two(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int r = k / 2 % 2, f = k % 2, u = k / 4 % 2, pair = k / 8;
            turn_words(all[i][u][2 * pair][r][f], all[i][u][2 * pair + 1][r][f]);
        }
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int r = k / 2 % 2, f = k % 2, u = k / 4 % 2, pair = k / 8;
            turn_words(all[i][u][pair][r][f], all[i][u][pair + 2][r][f]);
        }
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const int r = k / 2 % 2, f = k % 2, m = k / 4;
            turn_words(all[i][0][m][r][f], all[i][1][m][r][f]);
        }
    }
    // Bits 0 to 3 of the row: of columns 8 g + f rows 8 r + 2 t and the next, as before, but turned.
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        auto& of_sixteen = all[k / 8][k / 4 % 2][k % 4];
        const uint32_t a[4] = {of_sixteen[0][0], of_sixteen[0][1], of_sixteen[1][0], of_sixteen[1][1]};
        const uint32_t b[2][2] = {{of_rows, of_rows}, {of_rows, of_rows ^ 0x80008000}};
#pragma unroll
        for (int r = 0; r < 2; ++r) multiply_halves(of_sixteen[r], a, b[r]);
    }
    // Bit 4 of it.
#pragma unroll
    for (int k = 0; k < 32; ++k) {
        const int u = k / 16, m = k / 4 % 4, r = k / 2 % 2, f = k % 2;
        turn_words(all[0][u][m][r][f], all[1][u][m][r][f]);
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const int i = k / 8, u = k / 4 % 2, r = k / 2 % 2, next = k % 2,
                  row = 32 * warp + 16 * i + 8 * r + 2 * t + next;
        uint32_t octet[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            octet[m] = __byte_perm(all[i][u][m][r][0], all[i][u][m][r][1], next ? 0x7632 : 0x5410);
        }
        room[row][(8 * u + g) ^ (2 * t)] = make_uint4(octet[0], octet[1], octet[2], octet[3]);
    }
    __syncthreads();

    // Bits 5 and 6 of the row are left, of eight columns.
    const int octet = static_cast<int>(threadIdx.x) % kOctets;
    const int64_t column = int64_t{block_across} * kBlock + 8 * octet;
    float scales[8];
    eight_floats(suh + matrix * across * kTrellisTile + column, scales);
#pragma unroll 1
    for (int row = static_cast<int>(threadIdx.x) / kOctets; row < 32; row += kThreads / kOctets) {
        uint4 octets[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) octets[i] = room[row + 32 * i][octet ^ (row & 6)];
#pragma unroll
        for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (i & distance) continue;
                uint4 &a = octets[i], &b = octets[i + distance];
                turn_words(a.x, b.x), turn_words(a.y, b.y), turn_words(a.z, b.z), turn_words(a.w, b.w);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int64_t own_row = int64_t{block_down} * kBlock + 32 * i + row;
            if (own_row >= rows) continue;
            const float by = __half2float(svh[matrix * down * kTrellisTile + own_row]) / kBlock;
            float values[8];
            unpack_octet<__half>(octets[i], values);
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] *= scales[j] * by;
            T* to = out + (matrix * rows + own_row) * columns + column;
            if (columns % 8 == 0 && column < columns) {
                store_16(to, pack_octet<T>(values));
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (column + j < columns) store(to + j, values[j]);
                }
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
