#include "kernels/gpu.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

namespace hf_kbit::cuda {

namespace {

// Is never launched: the driver says of it for which architecture the code was built that it would run.
__global__ void arch_kernel() {}

Gpu find_gpu(int index) {
    const auto attribute = [index](cudaDeviceAttr which) {
        int value = 0;
        check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&value, which, index));
        return value;
    };
    cudaFuncAttributes code{};
    check("looking for code for this GPU (`hf-kbit info` says for which there is some)",
          cudaFuncGetAttributes(&code, arch_kernel));
    const int capability =
        100 * attribute(cudaDevAttrComputeCapabilityMajor) + 10 * attribute(cudaDevAttrComputeCapabilityMinor);
    Gpu gpu{};
    gpu.index = index;
    gpu.arch = 10 * code.ptxVersion;
    gpu.processors = attribute(cudaDevAttrMultiProcessorCount);
    gpu.shared_reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
    gpu.shared_limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    static const char* const wanted = std::getenv("HF_KBIT_CUDA_ARCH");
    const int limits_of = wanted_arch(wanted, gpu.arch, capability);
    if (limits_of != capability) gpu.shared_limit = std::min(gpu.shared_limit, shared_limit_of(limits_of));
    return gpu;
}

}  // namespace

const Gpu& current_gpu() {
    static Gpu gpus[kMostGpus];
    static std::once_flag found[kMostGpus];
    int index = 0;
    check("cudaGetDevice", cudaGetDevice(&index));
    if (index >= kMostGpus) {
        throw std::runtime_error("hf_kbit: found GPU number " + std::to_string(index) + ", expected less than " +
                                 std::to_string(kMostGpus));
    }
    std::call_once(found[index], [index] { gpus[index] = find_gpu(index); });
    return gpus[index];
}

}  // namespace hf_kbit::cuda
