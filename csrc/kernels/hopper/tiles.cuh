// Which tiles of rows and tokens a CTA of gemm_wgmma.cuh has, and where things are in its shared memory.
#pragma once

#include "kernels/hopper/arguments.cuh"
#include "kernels/hopper/experts_plan.h"
#include "kernels/ptx.cuh"

namespace hf_kbit::cuda {

// What a CTA has of a tile.
struct Share {
    int tile, first_slab, slabs;  // none: no slabs
};

// Where a tile is: whose weight, which of its rows for a group of warps, the tokens from one on, before another.
struct Place {
    int weight, row_group, token, end;
};

// kWeights: the most weights of a launch; 1 for experts, whose weights are told as one.
template <int kBits, int kTokens, bool kExperts, int kWeights, typename Arguments>
struct WgmmaTiles {
    static constexpr int kWarps = wgmma_warps(kTokens);
    static constexpr int kSlab = slab_bytes(kBits), kStageBytes = wgmma_stage_bytes(kTokens);

    const Arguments& arguments;
    // Groups of all CTAs of a cluster are parties, which divide the slabs.
    int cluster, rank, groups, parties, group_warps;
    uint32_t window, x, ring, x_full, x_empty, ring_full, ring_empty;

    __device__ __forceinline__ WgmmaTiles(const Arguments& arguments, uint32_t window)
        : arguments(arguments),
          cluster(blockIdx.x >> arguments.split_log2),
          rank(blockIdx.x - (cluster << arguments.split_log2)),
          groups(1 << arguments.groups_log2),
          parties(groups << arguments.split_log2),
          group_warps(kWarps >> arguments.groups_log2),
          window(window),
          x(window + wgmma_x_address()),
          ring(x + groups * arguments.x_stages * kStageBytes),
          x_full(ring + kWarps * arguments.ring_stages * kSlab),
          x_empty(x_full + groups * arguments.x_stages * 8),
          ring_full(x_empty + groups * arguments.x_stages * 8),
          ring_empty(ring_full + kWarps * arguments.ring_stages * 8) {}

    __device__ __forceinline__ Place place_of(int tile) const {
        if constexpr (kExperts) {
            return place_among_experts(tile);
        } else {
            const int weight = weight_of(tile);
            if constexpr (kWeights > 1) tile -= arguments.first_tile[weight];
            const int token = tile % arguments.token_tiles * kTokens;
            return {weight, tile / arguments.token_tiles, token, arguments.weights[0].output.tokens};
        }
    }
    __device__ __forceinline__ int weight_of(int tile) const {
        int weight = 0;
#pragma unroll
        for (int i = 1; i < kWeights; ++i) weight += tile >= arguments.first_tile[i];
        return weight;
    }
    // Whose arguments are those of a weight.
    static __device__ __forceinline__ int number_of(const Place& place) { return kWeights > 1 ? place.weight : 0; }
    __device__ __forceinline__ int row_tile(const Place& place, int warp) const {
        return place.row_group * group_warps + warp % group_warps;
    }
    __device__ __forceinline__ int slabs_before(int party) const {
        return arguments.slabs * party >> (arguments.groups_log2 + arguments.split_log2);
    }

    // Number `number` of those of a party.
    __device__ __forceinline__ Share share(int party, int number) const {
        const int tile = cluster + number * arguments.clusters;
        if (tile < whole()) {
            const int first = slabs_before(party);
            return {tile, first, slabs_before(party + 1) - first};
        }
        if constexpr (kExperts) return {};
        // The part of a tile that another CTA waits for first.
        const int begin = arguments.division.begin(cluster), end = arguments.division.begin(cluster + 1);
        if (begin == end) return {};
        const int of_divided = (end - 1) / arguments.slabs - (number - arguments.turns);
        const int tile_begin = of_divided * arguments.slabs, first = max(begin, tile_begin);
        return {arguments.whole + of_divided, first - tile_begin, min(end, tile_begin + arguments.slabs) - first};
    }

    // --- experts: a table of the first row and the number of token tiles before it of each, and of the end of all ---

    __device__ __forceinline__ uint32_t expert(int number) const {
        return ring_empty + kWarps * arguments.ring_stages * 8 + number * 8;
    }
    // Where others' sums lie.
    __device__ __forceinline__ uint32_t exchange() const {
        return kExperts ? expert(0) + expert_table_bytes(arguments.experts) : x;
    }

    // By a warp, each lane some experts that follow each other. Whatever the offsets are, no row is beyond x.
    __device__ __forceinline__ void list_experts() const {
        const int lane = lane_id(), of_lane = (arguments.experts + kWarp - 1) / kWarp;
        const int first = lane * of_lane, last = min(first + of_lane, arguments.experts);
        const auto row = [&](int number) {
            return min(max(__ldg(arguments.offsets + number), 0), arguments.weights[0].output.tokens);
        };
        const auto tiles = [&](int number) { return (max(row(number + 1) - row(number), 0) + kTokens - 1) / kTokens; };
        int before = 0;
#pragma unroll 4
        for (int i = first; i < last; ++i) before += tiles(i);
        before = sum_up_to_lane(before, lane) - before;
#pragma unroll 4
        for (int i = first; i < last; ++i) {
            store_shared_8(expert(i), make_uint2(row(i), before));
            before += tiles(i);
        }
        if (lane == kWarp - 1) store_shared_8(expert(arguments.experts), make_uint2(row(arguments.experts), before));
    }

    // Tiles that are not divided.
    __device__ __forceinline__ int whole() const {
        if constexpr (kExperts) {
            return static_cast<int>(load_shared_4(expert(arguments.experts) + 4)) * arguments.row_groups;
        } else {
            return arguments.whole;
        }
    }

    // Tiles of an expert and the same rows follow each other.
    __device__ __forceinline__ Place place_among_experts(int tile) const {
        const int token_tile = tile / arguments.row_groups;
        int found = 0, beyond = arguments.experts;
        while (beyond - found > 1) {
            const int middle = (found + beyond) / 2;
            (static_cast<int>(load_shared_4(expert(middle) + 4)) <= token_tile ? found : beyond) = middle;
        }
        const uint2 of_expert = load_shared_8(expert(found)), next = load_shared_8(expert(found + 1));
        const int first = static_cast<int>(of_expert.x), before = static_cast<int>(of_expert.y);
        const int token_tiles = static_cast<int>(next.y) - before, within = tile - before * arguments.row_groups;
        return {found, within / token_tiles, first + within % token_tiles * kTokens, static_cast<int>(next.x)};
    }
};

}  // namespace hf_kbit::cuda
