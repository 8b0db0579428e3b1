// From the tensor cores' sums to y. Shared by hopper/ and mma/.
#pragma once

#include <cstdint>

#include "kernels/half.cuh"
#include "kernels/ptx.cuh"
#include "kernels/quad.cuh"

namespace hf_kbit::cuda {

// bias [out_features] or null, y [tokens, out_features], row-major, both of one 16-bit dtype.
struct Output {
    const void* bias;
    void* y;
    int tokens, out_features;
};

// What to add to a lane's rows of 16: g and g + 8 of first_row on.
template <typename T>
__device__ __forceinline__ void load_bias(const Output& output, int first_row, int lane, float (&bias)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        const bool biased = output.bias && row < output.out_features;
        bias[half] = biased ? static_cast<float>(static_cast<const T*>(output.bias)[row]) : 0;
    }
}

// A warp's 16 rows of eight tokens: a lane's two numbers of the first and of the last eight rows, as an instruction of
// 16 rows and eight columns leaves them.
__device__ __forceinline__ void store_eight(const Output& output, uint32_t upper, uint32_t lower, int first_row,
                                            int first_token, int lane) {
    upper = transpose_8x8(upper), lower = transpose_8x8(lower);
    const int token = first_token + lane / 4, row = first_row + lane % 4 * 2;
    if (token >= output.tokens) return;
    auto* y = static_cast<uint16_t*>(output.y) + static_cast<int64_t>(token) * output.out_features + row;
#pragma unroll
    for (int half = 0; half < 2; ++half, y += 8) {
        const uint32_t two = half == 0 ? upper : lower;
        const int rows = output.out_features - row - 8 * half;
        if (rows >= 2 && output.out_features % 2 == 0) {
            *reinterpret_cast<uint32_t*>(y) = two;
        } else {
            const auto* each = reinterpret_cast<const uint16_t*>(&two);
            if (rows > 0) y[0] = each[0];
            if (rows > 1) y[1] = each[1];
        }
    }
}

// Of their sums.
template <typename T>
__device__ __forceinline__ void store_eight(const Output& output, const float* sums, float unit,
                                            const float (&bias)[2], int first_row, int first_token, int lane) {
    const uint32_t upper = pack_two<T>(sums[0] * unit + bias[0], sums[1] * unit + bias[0]);
    const uint32_t lower = pack_two<T>(sums[2] * unit + bias[1], sums[3] * unit + bias[1]);
    store_eight(output, upper, lower, first_row, first_token, lane);
}

// From int32 sums of 8-bit inputs to y, of a lane's rows of 16: ((sum * what 1 stands for in the token) * what it
// stands for in the row) + bias, each step rounded, to float16 (half) or bfloat16 in the end.
struct Int8Rows {
    bool half;
    float of_rows[2], bias[2];

    // unit: what 1 stands for where `inverses`, float16 [out_features], are 1; before: rows of other weights ahead of
    // these in `inverses` and the bias.
    template <typename Index = int>
    __device__ __forceinline__ Int8Rows(const Output& output, const __half* inverses, float unit, bool half,
                                        int first_row, int lane, Index before = 0)
        : half(half) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Index row = min(first_row + lane / 4 + 8 * r, output.out_features - 1) + before;
            of_rows[r] = __fdiv_rn(unit, __half2float(__ldg(inverses + row)));
            bias[r] = -0.0f;  // leaves a negative zero as it is
            if (output.bias && half) bias[r] = __half2float(static_cast<const __half*>(output.bias)[row]);
            if (output.bias && !half)
                bias[r] = static_cast<float>(static_cast<const __nv_bfloat16*>(output.bias)[row]);
        }
    }
    // The lane's two tokens of its row r.
    __device__ __forceinline__ uint32_t scaled(int sum_even, int sum_odd, float2 of_tokens, int r) const {
        const auto one = [&](int sum, float of_token) {
            return __fadd_rn(__fmul_rn(__fmul_rn(__int2float_rn(sum), of_token), of_rows[r]), bias[r]);
        };
        const float even = one(sum_even, of_tokens.x), odd = one(sum_odd, of_tokens.y);
        return half ? pack_two<__half>(even, odd) : pack_two<__nv_bfloat16>(even, odd);
    }
};

// A warp's 16 rows of sixteen tokens, of which those from `begin` on, before `end`, are stored, 16 bytes at a time.
// words: for each eight tokens the lane's two numbers of the first and of the last eight rows, as transpose_8x8 leaves
// them.
template <typename T>
__device__ __forceinline__ void store_eights(const Output& output, uint32_t (&words)[4], int first_row,
                                             int first_token, int begin, int end, int lane) {
    const int part = lane % 4;  // which of the quad's four pieces of eight rows of a token the lane stores
    Quad(part).transpose(words);
    const int token = first_token + part / 2 * 8 + lane / 4, row = first_row + part % 2 * 8;
    if (token < begin || token >= end) return;
    T* y = static_cast<T*>(output.y) + static_cast<int64_t>(token) * output.out_features + row;
    const int rows = output.out_features - row;
    if (rows >= 8 && output.out_features % 8 == 0) {
        store_16(y, make_uint4(words[0], words[1], words[2], words[3]));
    } else {
        const T* each = reinterpret_cast<const T*>(words);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < rows) y[i] = each[i];
        }
    }
}

}  // namespace hf_kbit::cuda
