// The activations of one token that a CTA of gemm.cu transforms by itself.
#pragma once

#include "kernels/few_tokens/arguments.cuh"
#include "kernels/inputs/swiglu.cuh"
#include "kernels/operands.cuh"

namespace hf_kbit::cuda::few_tokens {

// Those of one token, of the CTA's slabs. Octet number `lane` of every kWarps-th slab waits in registers of one lane,
// with its columns' scales, until the table is there; then all of them go through shared memory to those who multiply.
// With kSwiglu there may be two numbers for each column, of which they are swiglu_octet.
template <typename T, int kWarps, bool kSwiglu>
struct Activations {
    uint4 octets[kTransformOctets], ups[kSwiglu ? kTransformOctets : 1];
    uint2 scales[kTransformOctets];

    // Asks for x and columns; zeros beyond K.
    __device__ __forceinline__ void bring(const Part& part, int in_features, bool swiglu, int first_slab, int slabs,
                                          int warp, int lane) {
#pragma unroll
        for (int i = 0; i < kTransformOctets; ++i) {
            const int slab = warp + i * kWarps, column = (first_slab + slab) * kSlabColumns + lane * kOctet;
            const bool there = slab < slabs && column < in_features;
            octets[i] = make_uint4(0, 0, 0, 0);
            scales[i] = make_uint2(kScalesOfOne, kScalesOfOne);
            const T* x = static_cast<const T*>(part.x) + column;
            if constexpr (kSwiglu) {  // the kernel before may have just written it
                ups[i] = octets[i];
                if (there) octets[i] = *reinterpret_cast<const uint4*>(x);
                if (there && swiglu) ups[i] = *reinterpret_cast<const uint4*>(x + in_features);
            } else {
                if (there) octets[i] = __ldg(reinterpret_cast<const uint4*>(x));
            }
            if (there && part.columns) scales[i] = __ldg(reinterpret_cast<const uint2*>(part.columns + column));
        }
    }

    __device__ __forceinline__ void transform(uint32_t to, const Part& part, bool swiglu, int slabs, int k_warps_log2,
                                              int warp, int lane) const {
        const bool rotated = part.rotated;
#pragma unroll
        for (int i = 0; i < kTransformOctets; ++i) {
            const int slab = warp + i * kWarps;
            if (slab >= slabs) return;
            float columns[kOctet];
            decode_scales(scales[i], columns);
            uint4 octet = octets[i];
            if constexpr (kSwiglu) {
                if (swiglu) octet = swiglu_octet<T>(octet, ups[i]);
            }
            const uint4 made = transform_octet<T>(octet, columns, rotated, lane % 4);
            store_shared_16(address(to, slab, k_warps_log2, lane * 16), made);
        }
    }

    // In the loop 8 lanes read 64 bytes each of two of the warp's slabs, in one turn of shared memory if these lie in
    // different halves of 128 bytes: so every other one has its blocks' places swapped in pairs.
    static __device__ __forceinline__ uint32_t address(uint32_t begin, int slab, int k_warps_log2, int byte) {
        return begin + slab * kSlabActivations + (byte ^ 64 * (slab >> k_warps_log2 & 1));
    }

    // The octets of a lane of four in all blocks of a slab: zeros where there is none.
    static __device__ __forceinline__ void load(uint32_t from, int slab, bool there, int k_warps_log2, int t,
                                                uint32_t (&to)[kSlabBlocks][4]) {
#pragma unroll
        for (int block = 0; block < kSlabBlocks; ++block) {
            uint4 octet = make_uint4(0, 0, 0, 0);
            if (there) octet = load_shared_16(address(from, slab, k_warps_log2, block * 64 + t * 16));
            to[block][0] = octet.x, to[block][1] = octet.y, to[block][2] = octet.z, to[block][3] = octet.w;
        }
    }
};

}  // namespace hf_kbit::cuda::few_tokens
