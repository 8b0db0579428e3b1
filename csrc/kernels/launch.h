// Launches of kernels, and what is asked of the driver once for each of them.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/gpu.h"

namespace hf_kbit::cuda {

constexpr int kAllShared = 1 << 30;  // as much as the GPU has: for kernels without static shared memory

// One for each kernel, static: on each GPU the driver is told at the first launch how much shared memory the kernel
// may have, and asked at most once how many of its CTAs are at work at a time.
template <typename... Arguments>
class Launcher {
    using Kernel = void (*)(Arguments...);

    const Kernel kernel;
    const int threads, most_shared;
    std::atomic<bool> prepared[kMostGpus] = {};
    std::atomic<int> resident[kMostGpus] = {};  // CTAs of a processor; 0: not known

    cudaError_t prepare(const Gpu& gpu) {
        if (prepared[gpu.index].load()) return cudaSuccess;
        const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       std::min(most_shared, gpu.shared_limit));
        if (error == cudaSuccess) prepared[gpu.index].store(true);
        return error;
    }

    cudaError_t start(const Gpu& gpu, int64_t ctas, int cluster, int shared_bytes, bool overlaps, cudaStream_t stream,
                      const Arguments&... arguments) {
        if (ctas < 1 || ctas > INT32_MAX) return cudaErrorInvalidConfiguration;
        const cudaError_t error = prepare(gpu);
        if (error != cudaSuccess) return error;
        cudaLaunchConfig_t config{};
        config.gridDim = static_cast<unsigned>(ctas);
        config.blockDim = static_cast<unsigned>(threads);
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.stream = stream;
        cudaLaunchAttribute attributes[2] = {};
        config.attrs = attributes;
        if (cluster > 1) {
            cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
            attribute.id = cudaLaunchAttributeClusterDimension;
            attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
        }
        if (overlaps) {
            cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
        }
        return cudaLaunchKernelEx(&config, kernel, arguments...);
    }

public:
    // Dynamic shared memory of a launch is at most most_shared.
    constexpr Launcher(Kernel kernel, int threads, int most_shared)
        : kernel(kernel), threads(threads), most_shared(most_shared) {}

    cudaError_t launch(const Gpu& gpu, int64_t ctas, int cluster, int shared_bytes, cudaStream_t stream,
                       const Arguments&... arguments) {
        return start(gpu, ctas, cluster, shared_bytes, false, stream, arguments...);
    }

    // May start before the kernel before it in the stream has ended (ptx.cuh, wait_for_kernel_before), if code from
    // sm_90 on runs: older code would not wait.
    cudaError_t launch_overlapping(const Gpu& gpu, int64_t ctas, int cluster, int shared_bytes, cudaStream_t stream,
                                   const Arguments&... arguments) {
        return start(gpu, ctas, cluster, shared_bytes, gpu.arch >= 900, stream, arguments...);
    }

    // As many CTAs as are needed, with most_shared bytes each; where the GPU has room for fewer, these, which go
    // through the work in turns.
    cudaError_t launch_resident(const Gpu& gpu, int64_t needed, cudaStream_t stream, const Arguments&... arguments) {
        int ctas = resident[gpu.index].load();
        if (ctas == 0) {
            cudaError_t error = prepare(gpu);
            if (error != cudaSuccess) return error;
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, threads, most_shared);
            if (error != cudaSuccess) return error;
            resident[gpu.index].store(ctas);
        }
        // None fit: launch() says so.
        return launch(gpu, std::min(needed, int64_t{gpu.processors} * ctas), 1, most_shared, stream, arguments...);
    }
};

}  // namespace hf_kbit::cuda
