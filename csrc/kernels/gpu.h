// What kernels are chosen by.
#pragma once

#include <cuda_runtime.h>

namespace hf_kbit::cuda {

// The current one.
struct Gpu {
    int index = 0, processors = 0, shared_limit = 0, major = 0, minor = 0;

    Gpu() {
        cudaGetDevice(&index);
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index);
        cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    }
    int arch() const { return 100 * major + 10 * minor; }
};

}  // namespace hf_kbit::cuda
