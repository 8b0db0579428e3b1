// Planes to tiles and back on a CPU. The tiles are a GPU's form, so this is plain C++: correct, not tuned.
#pragma once

#include <cstdint>

namespace hf_kbit::cpu {

// Row tiles [begin, end) of one matrix [N, K]. Tiles hold zeros where they pad N and K; the way back drops them.
void repack(const int32_t* planes, const uint8_t* absmax, int bits, int64_t out_features, int64_t in_features,
            int32_t* words, uint8_t* scales, int64_t begin, int64_t end);
void repack_inverse(const int32_t* words, const uint8_t* scales, int bits, int64_t out_features, int64_t in_features,
                    int32_t* planes, uint8_t* absmax, int64_t begin, int64_t end);

}  // namespace hf_kbit::cpu
