// Tile registers of AMX: 16 rows of 64 bytes each, and products of two tiles of rows and one or two of tokens.
#pragma once

#include "cpu/avx512.h"

namespace hf_kbit::cpu {

namespace {

constexpr int kEdge = 16;  // rows of a tile, blocks of a group
constexpr int kTileBytes = 64 * kEdge;
constexpr int kWeightRows = 64;                    // decoded at a time
constexpr int kRowStep = kMostTileTokens * kEdge;  // sums of 16 rows
static_assert(kEdge == Avx512::kWidth && kWeightRows % (2 * kEdge) == 0 && kMostTileTokens % (2 * kEdge) == 0);

// What LDTILECFG reads: all eight registers with 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr TileConfig kTileConfig;  // GCC would not write more than its first words to the stack

struct TileRegisters {
    TileRegisters() { _tile_loadconfig(&kTileConfig); }
    ~TileRegisters() { _tile_release(); }
};

// The compiler does not know what tiles are loaded from: it must have written everything before.
inline void finish_writing() { asm volatile("" ::: "memory"); }

// totals[row tile][token tile][row][token] += weights[row tile] * x[token tile], over a group of Tiles::kGroupTiles:
// two tiles of rows, one or two of tokens. Sums have 32 bits.
template <class Tiles, int token_tiles>
void multiply_group(const void* weights, const void* x, void* totals) {
    constexpr int kGroupBytes = Tiles::kGroupTiles * kTileBytes, kRowStepBytes = 4 * kRowStep;
    const auto* rows = static_cast<const char*>(weights);
    const auto* tokens = static_cast<const char*>(x);
    auto* sums = static_cast<char*>(totals);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kRowStepBytes, 64);
    if constexpr (token_tiles == 2) {
        _tile_loadd(2, sums + kTileBytes, 64);
        _tile_loadd(3, sums + kRowStepBytes + kTileBytes, 64);
    }
    for (int at = 0; at < kGroupBytes; at += kTileBytes) {
        _tile_loadd(4, rows + at, 64);
        _tile_loadd(5, rows + kGroupBytes + at, 64);
        _tile_loadd(6, tokens + at, 64);
        Tiles::first();
        if constexpr (token_tiles == 2) {
            _tile_loadd(7, tokens + kGroupBytes + at, 64);
            Tiles::second();
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kRowStepBytes, 64);
    if constexpr (token_tiles == 2) {
        _tile_stored(2, sums + kTileBytes, 64);
        _tile_stored(3, sums + kRowStepBytes + kTileBytes, 64);
    }
}

}  // namespace

}  // namespace hf_kbit::cpu
