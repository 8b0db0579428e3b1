// What kernels are chosen by, and what becomes of CUDA's errors.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace hf_kbit::cuda {

struct Gpu {
    int index;
    int processors;       // 1 or more
    int shared_limit;     // bytes that a CTA may have
    int shared_reserved;  // bytes before these, which the driver keeps
    // Of the code that runs there, which may have been built for an older GPU: 800 for compute capability 8.0. What
    // the code does not do, no plan may ask for.
    int arch;
};

constexpr int kMostGpus = 128;  // of one machine; torch knows fewer

// The current one. Throws std::runtime_error where the driver does not answer or nothing was built for the GPU.
// HF_KBIT_CUDA_ARCH, read once, limits shared memory to that of an older GPU (arch.h).
const Gpu& current_gpu();

// Throws std::runtime_error for an error, and takes it from where CUDA keeps the last one: the next launch, whose
// error is looked for there, is not to blame.
inline void check(const char* what, cudaError_t error) {
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    throw std::runtime_error(std::string("hf_kbit: ") + what + ": " + cudaGetErrorString(error));
}

}  // namespace hf_kbit::cuda
