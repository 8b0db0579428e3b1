// What 1 stands for in a row and in a token of 8-bit inputs, for tiles of gemm_wgmma.cuh: the rows' before the
// product, both after it (docs/internals.md, "8-bit inputs").
#pragma once

#include "kernels/hopper/tiles.cuh"
#include "kernels/outputs.cuh"

namespace hf_kbit::cuda {

template <int kBits, int kTokens, bool kExperts, int kWeights>
struct Int8Tiles : WgmmaTiles<kBits, kTokens, kExperts, kWeights, Int8Arguments<kWeights>> {
    using Tiles = WgmmaTiles<kBits, kTokens, kExperts, kWeights, Int8Arguments<kWeights>>;
    using Tiles::place_of, Tiles::number_of, Tiles::row_tile;
    using Tiles::Tiles, Tiles::arguments, Tiles::rank, Tiles::groups, Tiles::group_warps;

    // Of a lane's rows.
    __device__ __forceinline__ void load_inverses(int tile, int warp, __half2 (&inverse)[2]) const {
        const Place place = place_of(tile);
        const __half* inverses = arguments.inverses[number_of(place)];
        const int out_features = arguments.weights[number_of(place)].output.out_features;
        if constexpr (kExperts) inverses += int64_t{place.weight} * out_features;
        const int row = row_tile(place, warp) * kTileRows + lane_id() / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int its = min(row + 8 * half, out_features - 1);
            inverse[half] = __half2half2(__ldg(inverses + its));
        }
    }

    // Of the tile's tokens those that the warp's party owns: by the same code for any number of parties.
    template <typename Y>
    __device__ __forceinline__ void store_scaled(const int32_t (&sums)[kTokens / 2], float unit, int tile,
                                                 int warp) const {
        const int lane = lane_id(), t = lane % 4;
        const Place place = place_of(tile);
        const Output& output = arguments.weights[number_of(place)].output;
        const float* token_scales = arguments.token_scales[number_of(place)];
        // All requests to memory at once, before any store. A lane has those of every eighth group of eight tokens,
        // and others ask it.
        constexpr int kLoads = (kTokens + 63) / 64;
        float2 of_tokens[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            if constexpr (kExperts) {  // whose first token may be odd
                const int token = place.token + 64 * i + lane / 4 * 8 + t * 2, last = output.tokens - 1;
                const auto scale_of = [&](int its) { return __ldcg(token_scales + min(its, last)); };
                of_tokens[i] = make_float2(scale_of(token), scale_of(token + 1));
            } else {
                // An even one, and the next one, which has a scale too, also behind the last token.
                const int token = min(place.token + 64 * i + lane / 4 * 8 + t * 2, (output.tokens - 1) & ~1);
                of_tokens[i] = __ldcg(reinterpret_cast<const float2*>(token_scales + token));
            }
        }
        const int row = row_tile(place, warp) * kTileRows;
        std::conditional_t<kExperts, int64_t, int> before = 0;
        if constexpr (kExperts) before = int64_t{place.weight} * output.out_features;
        const Int8Rows rows(output, arguments.inverses[number_of(place)], unit, std::is_same_v<Y, __half>, row, lane,
                            before);
        const int owned = max(kTokens >> (arguments.groups_log2 + arguments.split_log2), 8);
        const int first = (rank * groups + warp / group_warps) * owned;
        const int begin = place.token + first;
        const int end = min(begin + owned, kExperts ? place.end : output.tokens);
#pragma unroll
        for (int token = 0; token < kTokens; token += 16) {
            if (token + 8 < first || token >= first + owned) continue;
            uint32_t words[4];
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                const int number = token / 8 + eight, from = number % 8 * 4 + t;
                const int32_t* four = sums + 4 * number;
                const float2 of_two = {__shfl_sync(0xFFFFFFFF, of_tokens[number / 8].x, from),
                                       __shfl_sync(0xFFFFFFFF, of_tokens[number / 8].y, from)};
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    words[2 * eight + half] =
                        transpose_8x8(rows.scaled(four[2 * half], four[2 * half + 1], of_two, half));
                }
            }
            store_eights<Y>(output, words, row, place.token + token, begin, end, lane);
        }
    }
};

// T: of operands A and B.
template <int kBits, typename T, int kTokens, bool kExperts, int kWeights>
using TilesOf = std::conditional_t<std::is_same_v<T, int8_t>, Int8Tiles<kBits, kTokens, kExperts, kWeights>,
                                   WgmmaTiles<kBits, kTokens, kExperts, kWeights, WgmmaArguments<kWeights>>>;

}  // namespace hf_kbit::cuda
