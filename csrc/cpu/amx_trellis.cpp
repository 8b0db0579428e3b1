// AVX-512 with AMX, for weights that have a trellis and tokens of bfloat16; amx.cpp says how tiles multiply.
//
// A row of a tile register has 32 inputs of an output: those of two tiles of the trellis, each in tile order.
#if defined(HF_KBIT_AMX_TRELLIS)

#include "cpu/amx_bfloat16.h"
#include "cpu/avx512_trellis.h"

namespace hf_kbit::cpu {

namespace {

constexpr int64_t kGroupColumns = 2 * kGroupTiles;  // of tiles of the trellis

// A tile of the trellis as half of each row of a tile register, rounded once: not to float16 before.
template <Code code>
void decode_tile(const uint32_t* words, int bits, uint16_t* weights) {
    const Avx512Trellis::Tile tile(words, bits);
#pragma GCC unroll 8
    for (int chunk = 0; chunk < kChunks; ++chunk) {
        Avx512Trellis::F values[2][1];
        decode_chunk<Avx512Trellis, code>(tile, chunk, values);
        const auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values[1][0], values[0][0]));
        auto* to = reinterpret_cast<__m256i*>(weights + chunk * 2 * kEdge);
        _mm256_store_si256(to, _mm512_castsi512_si256(rounded));
        _mm256_store_si256(to + 8 * 2, _mm512_extracti64x4_epi64(rounded, 1));
    }
}

template <Code code>
void multiply_rows(const uint16_t* panel, int64_t tokens, const TrellisTiles& tiles, float* inner, int64_t padded_out,
                   int64_t begin, int64_t end) {
    constexpr int kRows = kWeightRows / kEdge;
    const TileRegisters registers;
    const int token_tiles = static_cast<int>(ceil_div(tokens, kEdge));
    alignas(64) uint16_t weights[kRows * kGroupSize] = {};  // what no column fills meets zeros
    alignas(64) float totals[kRows * kRowStep];
    for (int64_t row = begin; row < end; row += kRows) {
        const int rows = static_cast<int>(end - row < kRows ? end - row : kRows);
        std::memset(totals, 0, sizeof totals);
        for (int64_t first = 0; first < tiles.across; first += kGroupColumns) {
            const int64_t columns = tiles.across - first < kGroupColumns ? tiles.across - first : kGroupColumns;
            for (int64_t column = 0; column < columns; ++column) {
                for (int r = 0; r < rows; ++r) {
                    ask_for(tiles, first + column, row + r);
                    uint16_t* to = weights + r * kGroupSize + column / 2 * kTile + column % 2 * kEdge;
                    decode_tile<code>(tiles.at(first + column, row + r), tiles.bits, to);
                }
            }
            finish_writing();
            const uint16_t* x = panel + first / kGroupColumns * token_tiles * kGroupSize;
            for (int t = 0; t < token_tiles; t += 2) {
                const auto multiply =
                    t + 2 <= token_tiles ? multiply_group<Bfloat16Tiles, 2> : multiply_group<Bfloat16Tiles, 1>;
                for (int r = 0; r < rows; r += 2) {
                    multiply(weights + r * kGroupSize, x + t * kGroupSize, totals + r * kRowStep + t * kEdge * kEdge);
                }
            }
        }
        for (int64_t t = 0; t < tokens; ++t) {
            for (int i = 0; i < rows * kEdge; ++i) {
                inner[t * padded_out + row * kEdge + i] =
                    totals[i / kEdge * kRowStep + (t / kEdge * kEdge + i % kEdge) * kEdge + t % kEdge];
            }
        }
    }
}

int64_t panel_size(int64_t tokens, int64_t padded_in) {
    return ceil_div(padded_in, kGroupColumns * kTrellisTile) * ceil_div(tokens, kEdge) * kGroupSize;
}

// Pairs of inputs, which a word holds.
void pack(const uint16_t* turned, int64_t tokens, int64_t padded_in, uint16_t* panel, int64_t begin, int64_t end) {
    const int64_t token_tiles = ceil_div(tokens, kEdge), pairs = padded_in / 2;
    const auto* from = reinterpret_cast<const uint32_t*>(turned);
    auto* to = reinterpret_cast<uint32_t*>(panel);
    for (int64_t token = begin; token < end; ++token) {
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const int64_t group = pair / (kGroupSize / 2 / kEdge), place = pair % (kGroupSize / 2 / kEdge);
            const int64_t at = (group * token_tiles + token / kEdge) * kGroupSize / 2 + place * kEdge + token % kEdge;
            to[at] = from[token * pairs + pair];
        }
    }
}

void multiply(const uint16_t* panel, int64_t tokens, const TrellisTiles& tiles, float* inner, int64_t padded_out,
              int64_t begin, int64_t end) {
    const auto run = tiles.code == Code::mul1  ? multiply_rows<Code::mul1>
                     : tiles.code == Code::mcg ? multiply_rows<Code::mcg>
                                               : multiply_rows<Code::three_inst>;
    run(panel, tokens, tiles, inner, padded_out, begin, end);
}

}  // namespace

const TrellisTileImplementation amx_trellis = {panel_size, pack, multiply};

}  // namespace hf_kbit::cpu

#endif
