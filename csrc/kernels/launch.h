// Launches of kernels that take all of a GPU's shared memory.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "kernels/gpu.h"

namespace hf_kbit::cuda {

// One for each kernel: a kernel is told once, on each GPU, that it may have more shared memory than usual.
class Launcher {
    std::atomic<uint64_t> prepared{0};  // a bit for each GPU

public:
    template <typename... Arguments>
    cudaError_t launch(void (*kernel)(Arguments...), const Gpu& gpu, int ctas, int threads, int cluster,
                       int shared_bytes, cudaStream_t stream, const Arguments&... arguments) {
        const uint64_t bit = uint64_t{1} << gpu.index % 64;
        if (!(prepared.load() & bit)) {
            const cudaError_t error =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gpu.shared_limit);
            if (error != cudaSuccess) return error;
            prepared.fetch_or(bit);
        }
        cudaLaunchConfig_t config{};
        config.gridDim = static_cast<unsigned>(ctas);
        config.blockDim = static_cast<unsigned>(threads);
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.stream = stream;
        cudaLaunchAttribute attribute{};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
        config.attrs = &attribute;
        config.numAttrs = cluster > 1;
        return cudaLaunchKernelEx(&config, kernel, arguments...);
    }
};

}  // namespace hf_kbit::cuda
