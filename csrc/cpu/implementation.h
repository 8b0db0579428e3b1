// The tables of kernels that each instruction set fills in and dispatch.cpp chooses from; kernels.h documents them.
// They are constants: code that filled one in while the library is loaded would be of that instruction set.
#pragma once

#include "cpu/kernels.h"

namespace hf_kbit::cpu {

struct GemmImplementation {
    decltype(&cpu::gemm_panel_size) panel_size;
    decltype(&cpu::gemm_pack) pack;
    decltype(&cpu::gemm) multiply;
};

struct Implementation {
    const char* name;
    decltype(&cpu::quantize) quantize;
    decltype(&cpu::dequantize) dequantize;
    decltype(&cpu::transform) transform;
    GemmImplementation gemm;
    decltype(&cpu::encode_trellis) encode_trellis;
};

// Of products of 8-bit inputs.
struct Int8GemmImplementation {
    decltype(&cpu::int8_scratch_bytes) scratch_bytes;
    decltype(&cpu::gemm_int8) multiply;
};

struct Int8Implementation {
    decltype(&cpu::int8_inverses) inverses;
    decltype(&cpu::int8_row_bytes) row_bytes;
    decltype(&cpu::int8_pack) pack;
    Int8GemmImplementation gemm;
};

// Of weights that have a trellis.
struct TrellisImplementation {
    decltype(&cpu::decode_trellis) decode;
    decltype(&cpu::turn_trellis) turn;
    decltype(&cpu::finish_trellis) finish;
    decltype(&cpu::multiply_few_trellis) multiply_few;
    decltype(&cpu::pack_trellis) pack;
    decltype(&cpu::multiply_trellis) multiply;
};

// With AMX.
struct TrellisTileImplementation {
    decltype(&cpu::trellis_tile_panel_size) panel_size;
    decltype(&cpu::pack_trellis_tiles) pack;
    decltype(&cpu::multiply_trellis_tiles) multiply;
};

extern const Implementation portable_implementation;  // portable.cpp
extern const Int8Implementation portable_int8;
extern const TrellisImplementation portable_trellis;
#if defined(__x86_64__)
extern const Implementation avx2_implementation;    // avx2.cpp
extern const Implementation avx512_implementation;  // avx512.cpp
extern const GemmImplementation amx_gemm;           // amx.cpp, if HF_KBIT_AMX is defined
extern const Int8Implementation avx2_int8;
extern const Int8Implementation avx512_int8;        // avx512_int8.cpp, if HF_KBIT_AVX512_INT8 is defined
extern const Int8GemmImplementation amx_int8_gemm;  // amx_int8.cpp, if HF_KBIT_AMX_INT8 is defined
extern const TrellisImplementation avx2_trellis;
extern const TrellisImplementation avx512_trellis;   // avx512_trellis.cpp, if HF_KBIT_AVX512_TRELLIS is defined
extern const TrellisTileImplementation amx_trellis;  // amx_trellis.cpp, if HF_KBIT_AMX_TRELLIS is defined
#endif

}  // namespace hf_kbit::cpu
