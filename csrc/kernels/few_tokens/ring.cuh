// The slabs of a warp of gemm.cu on their way through shared memory.
#pragma once

#include "kernels/few_tokens/arguments.cuh"
#include "kernels/operands.cuh"

namespace hf_kbit::cuda::few_tokens {

// A warp's slabs on their way. Bulk copies take the fewest wavefronts, cp.async the fewest instructions, which count
// for more at 2 bits.
template <int kBits, int kTokenTiles, int kWarps>
struct Ring {
    static constexpr bool kBulk = kSm90 && kBits > 2;
    static constexpr int kStages = ring_stages(kBits, kWarps, 8 * kTokenTiles);
    static constexpr int kSlab = slab_bytes(kBits);
    // What is asked for before the table is there: enough to keep memory busy, little enough not to hold up others'
    // requests for codebook and activations.
    static constexpr int kEarly = kBits == 2 && kStages > 1 ? 2 : 1;

    const int32_t* words;
    const uint8_t* scales;
    uint32_t begin, stage, barriers, barrier;  // shared memory: the warp's first stage and the next, as their barriers
    // The slab to ask for next. The warp goes through every tile_step-th slab below rows_end, the same columns of all
    // its row tiles; a turn takes it from there to its first row tile again, k_warps slabs further along K.
    int ahead, tile_step, rows_end, turn;
    int fetched, all;  // slabs asked for, and those that there are for the warp

    __device__ __forceinline__ Ring(const Part& part, uint32_t window, int warp, int first_slab, int tile_step,
                                    int rows_end, int warp_tiles, int warp_slabs, int k_warps)
        : words(part.words),
          scales(part.scales),
          begin(window + ring_address(kBits, kWarps) + warp * kStages * kSlab),
          stage(begin),
          barriers(window + ring_address(kBits, kWarps) + (kWarps * kSlab + warp * 8) * kStages),
          barrier(barriers),
          ahead(first_slab),
          tile_step(tile_step),
          rows_end(rows_end),
          turn(k_warps - warp_tiles * tile_step),
          fetched(0),
          all(warp_tiles * warp_slabs) {
        if constexpr (kBulk) {
            if (threadIdx.x % kWarp == 0) {
#pragma unroll
                for (int i = 0; i < kStages; ++i) init_barrier(barriers + 8 * i, 1);
            }
            __syncwarp();
        }
    }

    // Asks for the next slab, or for none after the last: a call for each stage, then one for each slab taken.
    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % kWarp;
        const int64_t slab = ahead;
        if constexpr (kBulk) {
            if (fetched < all && lane == 0) {
                release_to_bulk_copies();  // all lanes have read the stage: take() ends with __syncwarp
                bring_slab<kBits>(stage, words, scales, slab, barrier);
            }
        } else {
            if (fetched < all) {
                const char* from = reinterpret_cast<const char*>(words) + slab * word_bytes(kBits) + lane * 16;
#pragma unroll
                for (int i = 0; i < kBits; ++i) cp_async_16(stage + i * 512 + lane * 16, from + i * 512);
                if (lane < kScaleBytes / 16) {
                    cp_async_16(stage + word_bytes(kBits) + lane * 16, scales + slab * kScaleBytes + lane * 16);
                }
            }
            cp_async_commit();
        }
        ++fetched;
        ahead += tile_step;
        if (ahead >= rows_end) ahead += turn;
        if constexpr (kStages > 1) {
            stage += kSlab;
            barrier += 8;
            if (stage == begin + kStages * kSlab) {
                stage = begin;
                barrier = barriers;
            }
        }
    }

    // Waits for the oldest slab and brings it into registers, all eight blocks' scales of rows g and g + 8 too.
    __device__ __forceinline__ void take(uint32_t (&to_words)[4][kBits], uint32_t (&to_scales)[4]) const {
        if constexpr (kBulk) {
            wait_barrier(barrier, fetched / kStages - 1 & 1);
        } else {
            cp_async_wait<kStages - 1>();
            __syncwarp();  // lanes copied scales for each other
        }
        load_slab<kBits, 1>(stage, 0, to_words, to_scales);
        __syncwarp();  // before the stage is filled again
    }
};

}  // namespace hf_kbit::cuda::few_tokens
