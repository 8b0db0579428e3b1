// The gate of experts: silu(gate) * up, of numbers that lie side by side in a row of 2 K, gates first.
#pragma once

#include "kernels/transform.cuh"

namespace hf_kbit::cuda {

// Computed in float32, rounded once.
template <typename T>
__device__ __forceinline__ uint4 swiglu_octet(uint4 gate, uint4 up) {
    float gates[kOctet], values[kOctet];
    unpack_octet<T>(gate, gates);
    unpack_octet<T>(up, values);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) values[i] *= __fdividef(gates[i], 1 + __expf(-gates[i]));
    return pack_octet<T>(values);
}

}  // namespace hf_kbit::cuda
