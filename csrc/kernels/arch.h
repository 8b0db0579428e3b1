// A GPU as plans see it, and what is known of architectures (800 for compute capability 8.0): pure functions, tested
// on a CPU (tests/csrc/test_arch.py).
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <system_error>

namespace hf_kbit {

struct Gpu {
    int index;
    int processors;       // 1 or more
    int shared_limit;     // bytes that a CTA may have
    int shared_reserved;  // bytes before these, which the driver keeps
    // Of the code that runs there, which may have been built for an older GPU. No plan may ask for what the code
    // lacks.
    int arch;
};

// Shared memory that a CTA may have. (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")
constexpr int shared_limit_of(int arch) {
    if (arch < 800) return 64 << 10;
    if (arch == 800 || arch == 870) return 163 << 10;
    if (arch < 900 || arch >= 1200) return 99 << 10;
    return 227 << 10;
}

// The architecture that the environment variable HF_KBIT_CUDA_ARCH names, as in "86", or that of the GPU where it
// names none: one on which the code runs that runs here.
inline int wanted_arch(const char* wanted, int of_code, int of_gpu) {
    if (wanted == nullptr || *wanted == '\0') return of_gpu;
    const std::string text(wanted);
    int number = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool whole = parsed.ec == std::errc() && parsed.ptr == text.data() + text.size();
    if (!whole || number < of_code / 10 || number > of_gpu / 10) {
        throw std::invalid_argument("HF_KBIT_CUDA_ARCH: found " + text + ", expected a number from " +
                                    std::to_string(of_code / 10) + ", for which the code in use was built, to " +
                                    std::to_string(of_gpu / 10) + ", this GPU's");
    }
    return number * 10;
}

}  // namespace hf_kbit
