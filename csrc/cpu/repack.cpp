// See hf_kbit/format/reference.py, `repack`, for the layout: a lane of a 16 x 64 tile owns rows g and g + 8 (g = lane
// / 4) and columns 8 t .. 8 t + 7 (t = lane % 4) of both blocks; neighbours along K form the pairs that its words
// hold.
#include "cpu/repack.h"

#include "common/format.h"

namespace hf_kbit::cpu {

namespace {

// Calls visit(word, shift, code_bit, width) for each run of a code's bits that lie together in one word of the slab.
template <typename Visit>
void visit_code(int bits, int row, int block, int column, const Visit& visit) {
    const int lane = 4 * (row % 8) + column / 8, row_half = row / 8;
    const int instruction = 2 * (block % 2) + column % 8 / 4, k_half = column % 4 / 2, neighbour = column % 2;
    const auto word = [&](int index) {
        return ((block / 2 * bits + index) / 4 * kLanes + lane) * 4 + (block / 2 * bits + index) % 4;
    };
    const int first = bits * neighbour;  // bit of the pair
    if (bits == 2) {
        visit(word(instruction / 2), 8 * (instruction % 2 * 2 + k_half) + 4 * neighbour + 2 * row_half, 0, bits);
    } else if (bits == 3) {
        const int shift = 8 * (2 * k_half + row_half);
        if (instruction < 3) {
            visit(word(instruction), shift + 2 + first, 0, bits);
        } else {
            for (int bit = 0; bit < bits; ++bit) visit(word(2 - (first + bit) / 2), shift + (first + bit) % 2, bit, 1);
        }
    } else {
        const int pair = 4 * instruction + 2 * k_half + row_half, per_word = 32 / (2 * bits);
        if (pair < per_word * bits) {
            visit(word(pair / per_word), 2 * bits * (pair % per_word) + first, 0, bits);
        } else {  // the sixteenth pair of 5 bits: two of its bits at the top of each word
            for (int bit = 0; bit < bits; ++bit) visit(word((first + bit) / 2), 30 + (first + bit) % 2, bit, 1);
        }
    }
}

template <typename Visit>
void visit_blocks(int64_t out_features, int64_t in_features, int64_t begin, int64_t end, const Visit& visit) {
    const int64_t blocks = num_blocks(in_features), slabs = ceil_div(blocks, kSlabBlocks);
    for (int64_t row = begin * kTileRows; row < end * kTileRows && row < out_features; ++row) {
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t slab = row / kTileRows * slabs + block / kSlabBlocks;
            const int tile_row = static_cast<int>(row % kTileRows), slab_block = static_cast<int>(block % kSlabBlocks);
            const int64_t scale =
                slab * kTileRows * kSlabBlocks + tile_row % 8 * 2 * kSlabBlocks + 2 * slab_block + tile_row / 8;
            visit(row * blocks + block, slab, tile_row, slab_block, scale);
        }
    }
}

}  // namespace

void repack(const int32_t* planes, const uint8_t* absmax, int bits, int64_t out_features, int64_t in_features,
            int32_t* words, uint8_t* scales, int64_t begin, int64_t end) {
    const int64_t slabs = ceil_div(num_blocks(in_features), kSlabBlocks), slab_words = bits * kLanes * 4;
    for (int64_t i = begin * slabs * slab_words; i < end * slabs * slab_words; ++i) words[i] = 0;
    const int64_t slab_scales = kTileRows * kSlabBlocks;
    for (int64_t i = begin * slabs * slab_scales; i < end * slabs * slab_scales; ++i) scales[i] = 0;
    visit_blocks(out_features, in_features, begin, end,
                 [&](int64_t from, int64_t slab, int row, int block, int64_t scale) {
                     scales[scale] = absmax[from];
                     const auto* plane = reinterpret_cast<const uint32_t*>(planes) + from * bits;
                     auto* slab_start = reinterpret_cast<uint32_t*>(words) + slab * slab_words;
                     for (int column = 0; column < kBlockSize; ++column) {
                         uint32_t code = 0;
                         for (int p = 0; p < bits; ++p) code |= (plane[p] >> column & 1) << p;
                         visit_code(bits, row, block, column, [&](int word, int shift, int bit, int width) {
                             slab_start[word] |= (code >> bit & ((1u << width) - 1)) << shift;
                         });
                     }
                 });
}

void repack_inverse(const int32_t* words, const uint8_t* scales, int bits, int64_t out_features, int64_t in_features,
                    int32_t* planes, uint8_t* absmax, int64_t begin, int64_t end) {
    const int64_t slab_words = bits * kLanes * 4;
    visit_blocks(out_features, in_features, begin, end,
                 [&](int64_t to, int64_t slab, int row, int block, int64_t scale) {
                     absmax[to] = scales[scale];
                     auto* plane = reinterpret_cast<uint32_t*>(planes) + to * bits;
                     for (int p = 0; p < bits; ++p) plane[p] = 0;
                     const auto* slab_start = reinterpret_cast<const uint32_t*>(words) + slab * slab_words;
                     for (int column = 0; column < kBlockSize; ++column) {
                         uint32_t code = 0;
                         visit_code(bits, row, block, column, [&](int word, int shift, int bit, int width) {
                             code |= (slab_start[word] >> shift & ((1u << width) - 1)) << bit;
                         });
                         for (int p = 0; p < bits; ++p) plane[p] |= (code >> p & 1) << column;
                     }
                 });
}

}  // namespace hf_kbit::cpu
