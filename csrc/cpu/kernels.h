// The ops for CPUs: raw pointers in, a range of rows to work on, no threads of their own (csrc/ops spreads the rows
// over torch's pool). The best instruction set is chosen at run time: AVX-512 with AMX, AVX-512, AVX2 with FMA and
// F16C, or portable C++; the environment variable HF_KBIT_CPU names a lower one.
//
// Shapes: N rows (out_features), K in_features, B = ceil(K / 32) blocks a row, M tokens. Everything is row-major and
// contiguous. planes is int32 [N, B * bits], absmax uint8 [N, B], with signs if signed_scales, codebook float32
// [2**bits] ascending. columns, uint8 [K] or null, and rotated say how W was made into what is stored, see
// hf_kbit/format/transforms.py.
#pragma once

#include <cstdint>

#include "common/format.h"
#include "common/trellis.h"

namespace hf_kbit::cpu {

// The instruction set in use: "amx", "avx512", "avx2" or "portable". Throws std::runtime_error for another
// HF_KBIT_CPU.
const char* instruction_set();

// Rows [begin, end) of weight [N, K] (float32, float16 or bfloat16) to planes and absmax, whose scales are searched or
// not. Bit-identical to hf_kbit.format.reference.quantize.
void quantize(const void* weight, Dtype dtype, const float* codebook, int bits, bool searched, bool signed_scales,
              int64_t in_features, int32_t* planes, uint8_t* absmax, int64_t begin, int64_t end);

// Rows [begin, end) of the decoded weight, out [N, K]: the float32 product level * scale, turned back and scaled in
// float32, rounded once to dtype. Bit-identical to hf_kbit.format.reference.dequantize.
void dequantize(const int32_t* planes, const uint8_t* absmax, bool signed_scales, const float* codebook, int bits,
                int64_t in_features, const uint8_t* columns, bool rotated, void* out, Dtype dtype, int64_t begin,
                int64_t end);

// Rows [begin, end) of x [M, K] (float32, float16 or bfloat16) as the stored weight meets them, computed in float32
// and rounded once to out_dtype, which is that of x or float32: out [M, K], or [M, 32 * B] if rotated.
void transform(const void* x, Dtype dtype, int64_t in_features, const uint8_t* columns, bool rotated, void* out,
               Dtype out_dtype, int64_t begin, int64_t end);

// With AMX, up to so many tokens of bfloat16 are multiplied by its tiles; bounds a buffer of sums.
constexpr int kMostTileTokens = 256;

// x @ W.T + bias, in two steps. `gemm_pack` transforms rows [begin, end) of x [M, K] and puts them into the order that
// `gemm` reads, as float32 or, for tiles, bfloat16, padded with zeros; `panel` has gemm_panel_size floats and is
// aligned to 64 bytes.
int64_t gemm_panel_size(Dtype dtype, int64_t tokens, bool batch_invariant, int64_t in_features);
void gemm_pack(const void* x, Dtype dtype, int64_t tokens, bool batch_invariant, int64_t in_features,
               const uint8_t* columns, bool rotated, float* panel, int64_t begin, int64_t end);

// Columns [begin, end) of out [M, N] = x @ W.T + bias. Weights are decoded in registers, for tiles rounded to
// bfloat16, sums are kept in float32 and rounded once to dtype. bias (dtype, [N]) may be null. One token is added up
// in an order of its own, which is faster, unless batch_invariant.
void gemm(const float* panel, int64_t tokens, bool batch_invariant, const int32_t* planes, const uint8_t* absmax,
          bool signed_scales, const float* codebook, int bits, const void* bias, void* out, Dtype dtype,
          int64_t out_features, int64_t in_features, int64_t begin, int64_t end);

// --- trellises, bit-identical to hf_kbit/format/trellis.py; of 1 to 8 bits ---

// Tiles [begin, end): words, 32-bit ones [tiles, 8 * bits], of the path of least squared error for targets [tiles,
// 256]. `lead` is 1 to 128. scratch has encode_trellis_scratch bytes, aligned to 64, for each call at a time.
int64_t encode_trellis_scratch(int bits);
void encode_trellis(const float* targets, int bits, int lead, uint32_t* words, void* scratch, int64_t begin,
                    int64_t end);

// The tiles of a matrix, of 8 * bits words each, anywhere in memory; those of the first row of tiles have the first 16
// out_features.
struct TrellisTiles {
    const uint32_t* words;
    int64_t across, across_step, down_step;  // columns of tiles; words from one to the next along K, and along N
    int bits;
    Code code;
    const uint32_t* at(int64_t column, int64_t row) const { return words + column * across_step + row * down_step; }
};

// Rows of tiles [begin, end) of out [N, K], what tiles stand for in float16, as float16, float32 or bfloat16.
void decode_trellis(const TrellisTiles& tiles, void* out, Dtype dtype, int64_t begin, int64_t end);

// What is around a product: rows [begin, end) of x [M, in_features] as it meets the weight, out [M, padded_in],
// float32 or bfloat16, each 16 of them in their order or in that which the kernels of few tokens read; and of inner
// [M, padded_out], float32 or bfloat16, those of out [M, out_features]. bias (dtype, [out_features]) may be null.
void turn_trellis(const void* x, Dtype dtype, const TrellisSides& sides, bool tile_order, void* out, Dtype out_dtype,
                  int64_t begin, int64_t end);
void finish_trellis(const void* inner, Dtype inner_dtype, const TrellisSides& sides, const void* bias, void* out,
                    Dtype dtype, int64_t begin, int64_t end);

// Between the two, of few tokens: rows of tiles [begin, end) of inner [M, padded_out], both float32.
void multiply_few_trellis(const float* turned, int64_t count, const TrellisTiles& tiles, float* inner,
                          int64_t padded_in, int64_t padded_out, int64_t begin, int64_t end);

// A product without decoding, of code mul1 and inputs of 14 bits: rows [begin, end) of x, panel [padded_in / 16, M,
// 32]; then rows of tiles [begin, end), whole blocks, of out [M, out_features]. The same bits on every CPU, whatever
// tokens are beside one.
void pack_trellis(const void* x, Dtype dtype, int64_t count, const TrellisSides& sides, int16_t* panel,
                  TrellisToken* tokens, int64_t begin, int64_t end);
void multiply_trellis(const int16_t* panel, const TrellisToken* tokens, int64_t count, const TrellisTiles& tiles,
                      const TrellisSides& sides, const void* bias, void* out, Dtype dtype, int64_t begin, int64_t end);

// With AMX alone, of up to kMostTileTokens tokens of bfloat16: rows [begin, end) of what turn_trellis gives, put into
// a panel of so many numbers, zeros before; then rows of tiles [begin, end) of inner [M, padded_out].
bool has_trellis_tiles();
int64_t trellis_tile_panel_size(int64_t tokens, int64_t padded_in);
void pack_trellis_tiles(const uint16_t* turned, int64_t tokens, int64_t padded_in, uint16_t* panel, int64_t begin,
                        int64_t end);
void multiply_trellis_tiles(const uint16_t* panel, int64_t tokens, const TrellisTiles& tiles, float* inner,
                            int64_t padded_out, int64_t begin, int64_t end);

// --- 8-bit inputs, bit-identical to hf_kbit.reference; AVX-512 needs VNNI, VBMI and GFNI, or AVX2 does it ---

// A rotated weight, whose scales have signs. inverses, float16 [N], are what int8_inverses finds.
struct Int8Weight {
    const int32_t* planes;
    const uint8_t* absmax;
    const float* codebook;
    const uint16_t* inverses;
    int bits;
    int64_t out_features, in_features;
};

// Of a token: what 1 stands for, and the sum of its int8 numbers.
struct Int8Token {
    float scale;
    int32_t sum;
};

// What 1 stands for in rows [begin, end), inverted; does not read weight.inverses.
void int8_inverses(const Int8Weight& weight, uint16_t* inverses, int64_t begin, int64_t end);

// Rows [begin, end) of x [M, K], transformed, as int8 in the order that gemm_int8 reads: int8_row_bytes each, from
// `panel` on, which is aligned to 64 bytes.
int64_t int8_row_bytes(int64_t in_features);
void int8_pack(const void* x, Dtype dtype, int64_t in_features, const uint8_t* columns, int8_t* panel,
               Int8Token* tokens, int64_t begin, int64_t end);

// Columns [begin, end) of out [M, N], of `count` tokens. scratch has int8_scratch_bytes, aligned to 64 bytes, for each
// call at a time.
int64_t int8_scratch_bytes(int64_t count, int64_t in_features);
void gemm_int8(const int8_t* panel, const Int8Token* tokens, int64_t count, const Int8Weight& weight, const void* bias,
               void* out, Dtype dtype, int8_t* scratch, int64_t begin, int64_t end);

}  // namespace hf_kbit::cpu
