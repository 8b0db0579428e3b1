#if defined(__x86_64__)

#include "cpu/avx512.h"

namespace hf_kbit::cpu {

const Implementation avx512_implementation = implementation_with<Avx512>("avx512");

}  // namespace hf_kbit::cpu

#endif
