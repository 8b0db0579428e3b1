// From numbers known when running to template arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "common/format.h"
#include "common/trellis.h"

namespace hf_kbit::cuda {

template <typename T>
constexpr Dtype kDtypeOf = std::is_same_v<T, double>   ? Dtype::float64
                           : std::is_same_v<T, float>  ? Dtype::float32
                           : std::is_same_v<T, __half> ? Dtype::float16
                                                       : Dtype::bfloat16;

// run(std::integral_constant<int, bits>)
template <int kBits = kMinBits, typename Run>
cudaError_t dispatch(int bits, const Run& run) {
    if (bits == kBits) return run(std::integral_constant<int, kBits>{});
    if constexpr (kBits < kMaxBits) return dispatch<kBits + 1>(bits, run);
    return cudaErrorInvalidValue;
}

// The same of a trellis.
template <int kBits = 1, typename Run>
cudaError_t dispatch_trellis(int bits, const Run& run) {
    if (bits == kBits) return run(std::integral_constant<int, kBits>{});
    if constexpr (kBits < kMostTrellisBits) return dispatch_trellis<kBits + 1>(bits, run);
    return cudaErrorInvalidValue;
}

// run(std::integral_constant<Code, code>)
template <typename Run>
cudaError_t dispatch_code(Code code, const Run& run) {
    switch (code) {
        case Code::three_inst:
            return run(std::integral_constant<Code, Code::three_inst>{});
        case Code::mcg:
            return run(std::integral_constant<Code, Code::mcg>{});
        case Code::mul1:
            return run(std::integral_constant<Code, Code::mul1>{});
    }
    return cudaErrorInvalidValue;
}

// run(a value of the one of these types whose dtype it is)
template <typename First, typename... Others, typename Run>
cudaError_t dispatch(Dtype dtype, const Run& run) {
    if (dtype == kDtypeOf<First>) return run(First{});
    if constexpr (sizeof...(Others) > 0) return dispatch<Others...>(dtype, run);
    return cudaErrorInvalidValue;
}

// Both: run(std::integral_constant<int, bits>, a value of the type)
template <typename... Types, typename Run>
cudaError_t dispatch(int bits, Dtype dtype, const Run& run) {
    return dispatch(
        bits, [&](auto width) { return dispatch<Types...>(dtype, [&](auto value) { return run(width, value); }); });
}

}  // namespace hf_kbit::cuda
