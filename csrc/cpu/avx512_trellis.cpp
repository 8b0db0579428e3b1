// AVX-512 with VNNI and VBMI: weights that have a trellis alone.
#if defined(HF_KBIT_AVX512_TRELLIS)

#include "cpu/avx512_trellis.h"
#include "cpu/trellis_product.h"

namespace hf_kbit::cpu {

const TrellisImplementation avx512_trellis = trellis_implementation_with<Avx512Trellis>();

}  // namespace hf_kbit::cpu

#endif
