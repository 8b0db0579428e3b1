// AVX-512 with VNNI, VBMI and GFNI: products of 8-bit inputs alone.
#if defined(HF_KBIT_AVX512_INT8)

#include "cpu/avx512_int8.h"

namespace hf_kbit::cpu {

const Int8Implementation avx512_int8 = int8_implementation_with<Avx512Int8>();

}  // namespace hf_kbit::cpu

#endif
