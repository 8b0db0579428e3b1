// The kernels as templates over V, a struct of static functions that wraps one instruction set: Portable, Avx2 or
// Avx512, each in a .cpp of its own that is compiled for its instructions and ends with implementation_with<V>.
//
// V must be in an anonymous namespace, and every function be static or made from V: then all of it is local to its
// .cpp, and the linker cannot put code for AVX where a CPU without it would run. (`nm -C` shows no W in the objects.)
//
// V offers vectors F of kWidth float32 and I of kWidth int32, their arithmetic, loads and stores of other dtypes, and:
//   lookup<entries>(table, index)   table[index] for each lane; the table repeats up to 16 entries
//   less, bits, append              a comparison, its lanes as bits, and 2 * index + comparison
//   Levels<bits>                    the codebook: of_bytes (four codes a lane) and of_block (one block, in order)
//   kUsesAntisymmetry               whether Levels<5, true>, for levels[31 - n] = -levels[n], is there and is faster
//   butterfly<distance>(a)          the sum of each two lanes at that distance, then the first less the second
//   block_of, byte_of, spread       which block and which byte of its codes are in a lane of of_bytes' parts
//   load_planes                     of one group of kWidth blocks, a block in each lane
//   load_scales(absmax, sign)       kWidth scales, decoded as decode_scale does
// trellis_encode.h and trellis.h say what they need besides.
#pragma once

#include "cpu/dequantize.h"
#include "cpu/gemm.h"
#include "cpu/gemm_int8.h"
#include "cpu/implementation.h"
#include "cpu/quantize.h"
#include "cpu/transform.h"
#include "cpu/trellis_encode.h"

namespace hf_kbit::cpu {

template <class V>
static constexpr Implementation implementation_with(const char* name) {
    return {name,
            quantize_with<V>,
            dequantize_with<V>,
            transform_with<V>,
            {gemm_panel_size_with<V>, gemm_pack_with<V>, gemm_with<V>},
            encode_trellis_with<V>};
}

}  // namespace hf_kbit::cpu
