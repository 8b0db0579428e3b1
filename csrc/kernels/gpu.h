// The current GPU, and what becomes of CUDA's errors.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernels/arch.h"

namespace hf_kbit::cuda {

using hf_kbit::Gpu;

constexpr int kMostGpus = 128;  // of one machine; torch knows fewer

// The current one. Throws std::runtime_error where the driver does not answer or nothing was built for the GPU.
// HF_KBIT_CUDA_ARCH, read once, limits shared memory to that of an older GPU (arch.h).
const Gpu& current_gpu();

// Throws std::runtime_error for an error, naming the plan of the launch if there is one. Clears CUDA's last error: the
// next launch, whose error is looked for there, is not to blame.
template <typename... Plan>
void check(const char* what, cudaError_t error, const Plan&... plan) {
    if (error == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    const std::string planned = (std::string() + ... + (" (" + to_string(plan) + ")"));
    throw std::runtime_error(std::string("hf_kbit: ") + what + planned + ": " + cudaGetErrorString(error));
}

}  // namespace hf_kbit::cuda
