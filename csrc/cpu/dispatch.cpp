// Chooses the instruction set, once, and sends every kernel there.
#if defined(HF_KBIT_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/implementation.h"
#include "cpu/trellis_encode.h"

namespace hf_kbit::cpu {

namespace {

#if defined(HF_KBIT_AMX)
// Whether there are AMX, with int8 as in every CPU that has its bfloat16, and AVX512_BF16, and Linux lets this process
// use the tile registers, for which it must ask.
bool can_use_amx() {
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBfloat16 = 1u << 22, kAvx512Bfloat16 = 1u << 5;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned kAmx = kTile | kInt8 | kBfloat16;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAmx) != kAmx) return false;
    if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & kAvx512Bfloat16)) return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const Implementation amx_implementation = {
    "amx",    avx512_implementation.quantize,      avx512_implementation.dequantize, avx512_implementation.transform,
    amx_gemm, avx512_implementation.encode_trellis};
#endif

// What this machine can run, best first.
std::vector<const Implementation*> supported() {
    std::vector<const Implementation*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(HF_KBIT_AMX)
    if (avx512 && can_use_amx()) found.push_back(&amx_implementation);
#endif
    if (avx512) found.push_back(&avx512_implementation);
    if (avx2) found.push_back(&avx2_implementation);
#endif
    found.push_back(&portable_implementation);
    return found;
}

// The best one, unless the environment variable HF_KBIT_CPU names another.
const Implementation& choose() {
    const auto candidates = supported();
    const char* wanted = std::getenv("HF_KBIT_CPU");
    if (wanted == nullptr || *wanted == '\0') return *candidates.front();
    std::string names;
    for (const Implementation* candidate : candidates) {
        if (std::string(wanted) == candidate->name) return *candidate;
        names += (names.empty() ? "" : ", ") + std::string(candidate->name);
    }
    throw std::runtime_error("HF_KBIT_CPU: found " + std::string(wanted) + ", this machine supports " + names);
}

const Implementation& chosen() {
    static const Implementation& implementation = choose();
    return implementation;
}

#if defined(HF_KBIT_AVX512_INT8)
bool has_int8_arithmetic() {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("gfni");
}

#if defined(HF_KBIT_AMX_INT8)
const Int8Implementation amx_int8 = {avx512_int8.inverses, avx512_int8.row_bytes, avx512_int8.pack, amx_int8_gemm};
#endif
#endif

const Int8Implementation& chosen_int8() {
    static const Int8Implementation& implementation = []() -> const Int8Implementation& {
#if defined(__x86_64__)
        if (&chosen() == &portable_implementation) return portable_int8;
#if defined(HF_KBIT_AVX512_INT8)
        if (&chosen() != &avx2_implementation && has_int8_arithmetic()) {
#if defined(HF_KBIT_AMX_INT8)
            if (&chosen() == &amx_implementation) return amx_int8;
#endif
            return avx512_int8;
        }
#endif
        return avx2_int8;
#else
        return portable_int8;
#endif
    }();
    return implementation;
}

const TrellisImplementation& chosen_trellis() {
    static const TrellisImplementation& implementation = []() -> const TrellisImplementation& {
#if defined(__x86_64__)
        if (&chosen() == &portable_implementation) return portable_trellis;
#if defined(HF_KBIT_AVX512_TRELLIS)
        const bool has_bytes = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
        if (&chosen() != &avx2_implementation && has_bytes) return avx512_trellis;
#endif
        return avx2_trellis;
#else
        return portable_trellis;
#endif
    }();
    return implementation;
}

// Null without AMX.
const TrellisTileImplementation* chosen_trellis_tiles() {
#if defined(HF_KBIT_AMX) && defined(HF_KBIT_AVX512_TRELLIS) && defined(HF_KBIT_AMX_TRELLIS)
    if (&chosen() == &amx_implementation && &chosen_trellis() == &avx512_trellis) return &amx_trellis;
#endif
    return nullptr;
}

}  // namespace

const char* instruction_set() { return chosen().name; }

void quantize(const void* weight, Dtype dtype, const float* codebook, int bits, bool searched, bool signed_scales,
              int64_t in_features, int32_t* planes, uint8_t* absmax, int64_t begin, int64_t end) {
    chosen().quantize(weight, dtype, codebook, bits, searched, signed_scales, in_features, planes, absmax, begin, end);
}

void dequantize(const int32_t* planes, const uint8_t* absmax, bool signed_scales, const float* codebook, int bits,
                int64_t in_features, const uint8_t* columns, bool rotated, void* out, Dtype dtype, int64_t begin,
                int64_t end) {
    chosen().dequantize(planes, absmax, signed_scales, codebook, bits, in_features, columns, rotated, out, dtype,
                        begin, end);
}

void transform(const void* x, Dtype dtype, int64_t in_features, const uint8_t* columns, bool rotated, void* out,
               Dtype out_dtype, int64_t begin, int64_t end) {
    chosen().transform(x, dtype, in_features, columns, rotated, out, out_dtype, begin, end);
}

int64_t gemm_panel_size(Dtype dtype, int64_t tokens, bool batch_invariant, int64_t in_features) {
    return chosen().gemm.panel_size(dtype, tokens, batch_invariant, in_features);
}

void gemm_pack(const void* x, Dtype dtype, int64_t tokens, bool batch_invariant, int64_t in_features,
               const uint8_t* columns, bool rotated, float* panel, int64_t begin, int64_t end) {
    chosen().gemm.pack(x, dtype, tokens, batch_invariant, in_features, columns, rotated, panel, begin, end);
}

void gemm(const float* panel, int64_t tokens, bool batch_invariant, const int32_t* planes, const uint8_t* absmax,
          bool signed_scales, const float* codebook, int bits, const void* bias, void* out, Dtype dtype,
          int64_t out_features, int64_t in_features, int64_t begin, int64_t end) {
    chosen().gemm.multiply(panel, tokens, batch_invariant, planes, absmax, signed_scales, codebook, bits, bias, out,
                           dtype, out_features, in_features, begin, end);
}

int64_t encode_trellis_scratch(int bits) {
    int64_t bytes = 0;
    with_trellis_bits(bits, [&](auto width) { bytes = kTrellisScratch<width()>; });
    return bytes;
}

void encode_trellis(const float* targets, int bits, int lead, uint32_t* words, void* scratch, int64_t begin,
                    int64_t end) {
    chosen().encode_trellis(targets, bits, lead, words, scratch, begin, end);
}

void decode_trellis(const TrellisTiles& tiles, void* out, Dtype dtype, int64_t begin, int64_t end) {
    chosen_trellis().decode(tiles, out, dtype, begin, end);
}

void turn_trellis(const void* x, Dtype dtype, const TrellisSides& sides, bool tile_order, void* out, Dtype out_dtype,
                  int64_t begin, int64_t end) {
    chosen_trellis().turn(x, dtype, sides, tile_order, out, out_dtype, begin, end);
}

void finish_trellis(const void* inner, Dtype inner_dtype, const TrellisSides& sides, const void* bias, void* out,
                    Dtype dtype, int64_t begin, int64_t end) {
    chosen_trellis().finish(inner, inner_dtype, sides, bias, out, dtype, begin, end);
}

void multiply_few_trellis(const float* turned, int64_t count, const TrellisTiles& tiles, float* inner,
                          int64_t padded_in, int64_t padded_out, int64_t begin, int64_t end) {
    chosen_trellis().multiply_few(turned, count, tiles, inner, padded_in, padded_out, begin, end);
}

void pack_trellis(const void* x, Dtype dtype, int64_t count, const TrellisSides& sides, int16_t* panel,
                  TrellisToken* tokens, int64_t begin, int64_t end) {
    chosen_trellis().pack(x, dtype, count, sides, panel, tokens, begin, end);
}

void multiply_trellis(const int16_t* panel, const TrellisToken* tokens, int64_t count, const TrellisTiles& tiles,
                      const TrellisSides& sides, const void* bias, void* out, Dtype dtype, int64_t begin,
                      int64_t end) {
    chosen_trellis().multiply(panel, tokens, count, tiles, sides, bias, out, dtype, begin, end);
}

bool has_trellis_tiles() { return chosen_trellis_tiles() != nullptr; }

int64_t trellis_tile_panel_size(int64_t tokens, int64_t padded_in) {
    return chosen_trellis_tiles()->panel_size(tokens, padded_in);
}

void pack_trellis_tiles(const uint16_t* turned, int64_t tokens, int64_t padded_in, uint16_t* panel, int64_t begin,
                        int64_t end) {
    chosen_trellis_tiles()->pack(turned, tokens, padded_in, panel, begin, end);
}

void multiply_trellis_tiles(const uint16_t* panel, int64_t tokens, const TrellisTiles& tiles, float* inner,
                            int64_t padded_out, int64_t begin, int64_t end) {
    chosen_trellis_tiles()->multiply(panel, tokens, tiles, inner, padded_out, begin, end);
}

void int8_inverses(const Int8Weight& weight, uint16_t* inverses, int64_t begin, int64_t end) {
    chosen_int8().inverses(weight, inverses, begin, end);
}

int64_t int8_row_bytes(int64_t in_features) { return chosen_int8().row_bytes(in_features); }

void int8_pack(const void* x, Dtype dtype, int64_t in_features, const uint8_t* columns, int8_t* panel,
               Int8Token* tokens, int64_t begin, int64_t end) {
    chosen_int8().pack(x, dtype, in_features, columns, panel, tokens, begin, end);
}

int64_t int8_scratch_bytes(int64_t count, int64_t in_features) {
    return chosen_int8().gemm.scratch_bytes(count, in_features);
}

void gemm_int8(const int8_t* panel, const Int8Token* tokens, int64_t count, const Int8Weight& weight, const void* bias,
               void* out, Dtype dtype, int8_t* scratch, int64_t begin, int64_t end) {
    chosen_int8().gemm.multiply(panel, tokens, count, weight, bias, out, dtype, scratch, begin, end);
}

}  // namespace hf_kbit::cpu
