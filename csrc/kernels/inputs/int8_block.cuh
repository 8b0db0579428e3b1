// A block of 32 columns of a token as int8, in the registers of one thread (docs/internals.md, "8-bit inputs"): no
// lane waits for another one. Each step has the reference's bits, some by another way:
//
// - A product of a 16-bit number with a column scale is exact in float32. So one instruction makes a product and the
//   first sum. Where such a product overflows, either its sum or its difference does, and the token is NaN as well.
// - Of a pair the larger magnitude of sum and difference is the sum of both magnitudes.
// - The largest number times the rotation's unit is the largest of all such products.
// - An integer is what is left of a number beside 1.5 * 2**23, to which it was added: its low byte is that of q.
#pragma once

#include "kernels/kernels.h"
#include "kernels/ptx.cuh"
#include "kernels/transform.cuh"

namespace hf_kbit::cuda {

constexpr int kWarp = 32, kBlock = 32, kBlockOctets = kBlock / kOctet;
constexpr int kOctetBytes = kOctet * 2;

// Of x, as Rows says.
__device__ __forceinline__ int picked_row(const int32_t* rows, int last_row, unsigned token) {
    return rows ? min(max(rows[token], 0), last_row) : static_cast<int>(token);
}

// Of an octet of columns, as transform_block wants them.
__device__ __forceinline__ void load_scales(const uint8_t* columns, int column, int in_features,
                                            float (&scales)[kOctet]) {
    uint2 bytes = make_uint2(kScalesOfOne, kScalesOfOne);
    if (columns && column < in_features) bytes = __ldg(reinterpret_cast<const uint2*>(columns + column));
    decode_scales(bytes, scales);
#pragma unroll
    for (float& scale : scales) scale *= kScaleUnit;
}

// A warp's x in shared memory, at a multiple of 64 bytes: octets of neighbouring lanes lie side by side when they are
// copied, and a lane reads four that follow each other. Either way eight lanes reach all banks.
struct WarpX {
    uint32_t copied, read;  // addresses of the lane

    __device__ __forceinline__ WarpX(uint32_t smem, unsigned lane)
        : copied(smem + (lane ^ lane / 8) * kOctetBytes),
          read(smem + (lane * kBlockOctets + lane / 2 % 4) * kOctetBytes) {}
    __device__ __forceinline__ uint32_t octet(int i) const { return read ^ i * kOctetBytes; }
};

// (x * c) times the Hadamard matrix, without the root, and the bits of the largest magnitude, among which those of NaN
// are the largest. load(i, scales): what decode_scales gives, times kScaleUnit, of octet i.
template <typename T, typename Load>
__device__ __forceinline__ uint32_t transform_block(const uint4 (&octets)[kBlockOctets], const Load& load,
                                                    float (&values)[kBlock]) {
#pragma unroll
    for (int octet = 0; octet < kBlockOctets; ++octet) {
        float x[kOctet], scales[kOctet];
        unpack_octet<T>(octets[octet], x);
        load(octet, scales);
#pragma unroll
        for (int i = 0; i < kOctet; i += 2) {
            const float second = __fmul_rn(x[i + 1], scales[i + 1]);
            values[octet * kOctet + i] = __fmaf_rn(x[i], scales[i], second);
            values[octet * kOctet + i + 1] = __fmaf_rn(x[i], scales[i], -second);
        }
    }
    uint32_t most = 0;
#pragma unroll
    for (int distance = 2; distance < kBlock; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            if (i & distance) continue;
            const float first = values[i], second = values[i + distance];
            values[i] = __fadd_rn(first, second);
            values[i + distance] = __fsub_rn(first, second);
            if (2 * distance == kBlock) most = max(most, __float_as_uint(__fadd_rn(fabsf(first), fabsf(second))));
        }
    }
    return most;
}

// What 1 stands for in a token, and by what its numbers are multiplied; `usual`, unless all are to be 0.
struct TokenUnit {
    float scale, inverse;
    bool usual;

    // most: of all its blocks.
    __device__ __forceinline__ explicit TokenUnit(uint32_t most) {
        constexpr float kLeast = 0x1p-100f;  // 127 over smaller numbers might be infinite
        const float largest = __fmul_rn(__uint_as_float(most), kRotationUnit);
        usual = largest >= kLeast && largest < __uint_as_float(0x7F800000);
        inverse = __fmul_rn(127.0f, __frcp_rn(largest));
        scale = __fmul_rn(largest, 1.0f / 127);
    }
    __device__ __forceinline__ void store(const Int8Tokens& output, unsigned token, int tokens) const {
        output.scales[token] = scale;
        if (token + 1 == static_cast<unsigned>(tokens)) output.scales[tokens] = 0;
    }
};

// As int8: of each octet the first half in the first half of the block's bytes, the other one in the other. Two lanes,
// with blocks 2 i and 2 i + 1, store both of them together, one after the other: all of a sector at a time. All lanes
// of a warp.
__device__ __forceinline__ void store_blocks(const Int8Tokens& output, unsigned token, int block, int blocks,
                                             const float (&values)[kBlock], const TokenUnit& unit) {
    constexpr float kRounds = 0x1.8p23f;
    uint32_t halves[2][kBlockOctets] = {};
    if (unit.usual) {
#pragma unroll
        for (int i = 0; i < kBlock; i += 4) {
            uint32_t bytes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float turned = __fmul_rn(values[i + j], kRotationUnit);
                bytes[j] = __float_as_uint(__fadd_rn(__fmul_rn(turned, unit.inverse), kRounds));
            }
            halves[i / 4 % 2][i / kOctet] =
                __byte_perm(__byte_perm(bytes[0], bytes[1], 0x40), __byte_perm(bytes[2], bytes[3], 0x40), 0x5410);
        }
    }
    const bool odd = block % 2;
#pragma unroll
    for (int i = 0; i < kBlockOctets; ++i) {
        uint32_t &first = halves[0][i], &second = halves[1][i];
        const uint32_t received = __shfl_xor_sync(0xFFFFFFFF, odd ? first : second, 1);
        (odd ? first : second) = received;
    }
    const auto row_bytes = static_cast<unsigned>(blocks * kBlock);
    int8_t* const to = output.out + (block - odd) * kBlock + odd * kBlock / 2 + uint64_t{token} * row_bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t (&half)[kBlockOctets] = halves[i];
        if (block - odd + i < blocks) store_16(to + i * kBlock, make_uint4(half[0], half[1], half[2], half[3]));
    }
}

}  // namespace hf_kbit::cuda
