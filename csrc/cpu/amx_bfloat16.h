// Products of AMX's tiles of bfloat16: a group of 16 tile registers, one after another.
#pragma once

#include "cpu/amx.h"

namespace hf_kbit::cpu {

namespace {

constexpr int kTile = 2 * kEdge * kEdge;  // numbers of a tile register
constexpr int kGroupTiles = 16;           // of 16 rows, or of 16 tokens
constexpr int kGroupSize = kGroupTiles * kTile;

// What two tiles of rows add with the first tile of tokens, and with the other.
struct Bfloat16Tiles {
    static constexpr int kGroupTiles = cpu::kGroupTiles;
    static void first() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
    }
    static void second() {
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
};

}  // namespace

}  // namespace hf_kbit::cpu
