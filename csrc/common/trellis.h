// EXL3's trellis as compiled code sees it. hf_kbit/format/trellis.py defines the form, what a code makes of a window,
// and which path the encoder finds.
#pragma once

#include <cstdint>

namespace hf_kbit {

constexpr int kTrellisTile = 16;                            // in_features and out_features of a tile
constexpr int kTrellisSteps = kTrellisTile * kTrellisTile;  // its weights
constexpr int kWindowBits = 16, kWindows = 1 << kWindowBits;
constexpr int kMostTrellisBits = 8, kMostLead = kTrellisSteps / 2;
constexpr int kTrellisParts = 4;  // weights that share inputs and a launch

enum class Code { three_inst, mcg, mul1 };
constexpr uint32_t code_factor(Code code) {
    return code == Code::three_inst ? 89226354u : code == Code::mcg ? 0xCBAC1FEDu : 0x83DCD12Du;
}
constexpr uint32_t code_added(Code code) { return code == Code::three_inst ? 64248484u : 0; }

// Of mul1: a window's value is the sum of four bytes times kSumScale and kSumZero more, both multiples of kSumUnit; of
// the others the sum of two halves, which are float16.
constexpr float kSumScale = 0x6EEp-18f, kSumZero = -0x6E8p-9f, kSumUnit = 0x1p-18f;
constexpr uint32_t kHalvesMask = 0x8FFF8FFFu, kHalvesFlipped = 0x3B603B60u;

// A state is what the next window keeps of one. State e comes from the states `h << (state_bits - bits) | e >> bits`,
// one for each branch h, by the windows `h << state_bits | e`.
//
// Costs are sums of squares of whole numbers: sums of four bytes, times `factor`, less weights, multiples of
// `quantum`. Where `packed`, squares are multiples of `branches`, and the lowest bits of a cost hold the branch that
// it came by: of equal costs that of the lowest branch is then the least. Else costs would not fit into 32 bits.
template <int bits>
struct Trellis {
    static constexpr bool packed = bits <= 6;
    static constexpr int state_bits = kWindowBits - bits, states = 1 << state_bits, branches = 1 << bits;
    static constexpr int factor = bits <= 3 ? 4 : bits == 4 ? 8 : 16;
    static constexpr int quantum = packed ? 1 << (bits + 1) / 2 : 1;
    static constexpr uint32_t branch_mask = packed ? branches - 1 : 0;
    // The cost of a state that no path around the tile starts from: more than any path's.
    static constexpr uint32_t closed = 1u << 31;
};

// A weight as a multiple of 1 / `steps` of a sum: x * kSumOfOne + kSumOfZero, times `steps`, held to what sums can be,
// rounded half to even.
constexpr float kSumOfOne = 0x1p18f / 0x6EE;
constexpr float kSumOfZero = static_cast<float>(0x531p11 / 0x6EE - 1024);
constexpr int kMostSum = 4 * 255;

// What is around the tiles of a weight: scales, float16, and rotations in blocks of 32, 64 or 128, of which both sides
// are padded to multiples.
struct TrellisSides {
    const uint16_t *suh, *svh;
    int64_t in_features, out_features, padded_in, padded_out;
    int block;
};

// Products in whole numbers (docs/internals.md): the largest input, and of a token what 1 stands for, and the sum of
// its inputs.
constexpr int kMostTrellisInput = 8191;
struct TrellisToken {
    float scale;
    int64_t sum;
};

}  // namespace hf_kbit
