// Outputs of products by a trellis (many_tokens.cu): sums turned, scaled and stored.
//
// Of each 16 rows of the weight sums lie in the order 0, 8, 1, 9, ..., 7, 15. Four lanes have the 128 rows of a tile:
// lane q the pieces q + 4 j of 16, of each rows 32 j + 16 (q / 2) + 4 (q % 2) + i % 4 + 8 (i / 4).
#pragma once

#include <algorithm>

#include "kernels/trellis/many_plan.h"
#include "kernels/trellis/turn.cuh"

namespace hf_kbit::cuda {

constexpr int kOutputLanes = 4;

template <typename T>
struct ManyTrellisOutputsOfPart {
    const __half* svh;
    const T* bias;
    T* y;
    int out_features, first_tile;  // of 128 rows
};

template <typename T>
struct ManyTrellisOutputs {
    ManyTrellisOutputsOfPart<T> parts[kTrellisParts];
    const float* units;   // of rows of inputs
    const int* row_sums;  // of those in int8, or null
    float row_zero;       // what weights are off by, times a row's sum
    const int* weights;   // of experts which of num_weights a row has, or else none
    int num_parts, num_weights, rows, tokens, padded_out, block;
    float scale;

    // Whether rows of all outputs are whole octets.
    bool octets() const {
        return std::all_of(parts, parts + num_parts, [](auto& part) { return part.out_features % 8 == 0; });
    }
};

// The eight sums of a piece, as rows i of it.
__device__ __forceinline__ void add_piece(uint4 piece, float (&sums)[8]) {
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 two = unpack_two<__half>(words[i]);
        sums[i] += two.x, sums[i + 4] += two.y;
    }
}

// By all lanes of a warp: turns sums, values [j][i], and stores them if the row is `there`. row: of inputs, those of
// one part behind those of the other; row_tile: of all parts. kOctets: outputs.octets().
template <bool kOctets, typename T>
__device__ __forceinline__ void store_outputs(const ManyTrellisOutputs<T>& of, int part, float (&values)[4][8],
                                              int row, int row_tile, bool there, int weight) {
    const ManyTrellisOutputsOfPart<T>& own_part = of.parts[part];
    const int q = static_cast<int>(threadIdx.x) % kOutputLanes;
    const bool has_weight = there && weight < of.num_weights;
    const float unit = has_weight ? of.units[row] * of.scale : 0.0f;
    // What is the same in all rows is only in the first one of each block behind the rotation.
    const float zero =
        of.row_sums && has_weight && q == 0 ? of.row_zero * of.block * static_cast<float>(of.row_sums[row]) : 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float (&own)[8] = values[j];
        turn_own(own);
        // Two lanes exchange halves: then each has eight rows that follow each other, from 32 j + 8 q on.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(kAllLanes, q % 2 ? own[i] : own[i + 4], 1);
            const float first = q % 2 ? other : own[i], second = q % 2 ? own[i + 4] : other;
            own[i] = first + second, own[i + 4] = first - second;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) own[i] = turned_with_lane(own[i], 2);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (of.block > 32) turn_two(values[0][i], values[1][i]), turn_two(values[2][i], values[3][i]);
        if (of.block > 64) turn_two(values[0][i], values[2][i]), turn_two(values[1][i], values[3][i]);
    }
    if (!there) return;
    const int out_features = own_part.out_features;
    T* to = own_part.y + int64_t{row - part * of.tokens} * out_features;
    if (of.weights) {
        to = own_part.y + (int64_t{row % of.tokens} * (of.rows / of.tokens) + row / of.tokens) * out_features;
    }
    const __half* svh = own_part.svh + (has_weight ? int64_t{weight} * of.padded_out : 0);
    const int tile_row = (row_tile - own_part.first_tile) * kManyTrellisRows;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const int first = tile_row + 32 * j + 8 * q;
        if (32 * j % of.block == 0) values[j][0] += zero;
        if constexpr (kOctets) {
            if (first >= out_features) continue;
            float scales[8], addend[8] = {};
            eight_floats(svh + first, scales);
            if (own_part.bias) eight_floats(own_part.bias + first, addend);
#pragma unroll
            for (int i = 0; i < 8; ++i) values[j][i] = values[j][i] * unit * scales[i] + addend[i];
            store_16(to + first, pack_octet<T>(values[j]));
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (first + i >= out_features) continue;
                const float value = values[j][i] * unit * __half2float(svh[first + i]);
                store(to + first + i, own_part.bias ? value + as_float(own_part.bias[first + i]) : value);
            }
        }
    }
}

}  // namespace hf_kbit::cuda
