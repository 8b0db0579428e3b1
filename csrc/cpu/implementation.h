// The table of kernels that each instruction set fills in and dispatch.cpp chooses from; kernels.h documents them.
#pragma once

#include "cpu/kernels.h"

namespace hf_kbit::cpu {

struct Implementation {
    const char* name;
    decltype(&cpu::quantize) quantize;
    decltype(&cpu::dequantize) dequantize;
    decltype(&cpu::transform) transform;
    decltype(&cpu::gemm_panel_size) gemm_panel_size;
    decltype(&cpu::gemm_pack) gemm_pack;
    decltype(&cpu::gemm) gemm;
};

extern const Implementation portable_implementation;  // portable.cpp
#if defined(__x86_64__)
extern const Implementation avx2_implementation;    // avx2.cpp
extern const Implementation avx512_implementation;  // avx512.cpp
extern const Implementation amx_implementation;     // amx.cpp, if HF_KBIT_AMX is defined
#endif

}  // namespace hf_kbit::cpu
