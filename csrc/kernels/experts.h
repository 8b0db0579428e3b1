// Rows of experts and the tiles of tokens that they fill. How many rows each expert has, the host does not know; plans
// suppose that a row has any of the experts, at random.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hf_kbit {

constexpr int kMostExperts = 1024;

// At most so many tiles of tokens have a row: those without a full one, and all full ones.
constexpr int64_t most_token_tiles(int64_t rows, int64_t experts, int token_tile) {
    const int64_t with_rows = std::min(rows, experts);
    return with_rows + (rows - with_rows) / token_tile;
}

// The mean number of tiles of tokens, counting those with more than `beyond` rows. The rows of an expert have a
// Poisson distribution; an expert has a tile for its first row and one for each row that follows a full tile.
inline double expected_token_tiles(int64_t rows, int64_t experts, int token_tile, int beyond = 0) {
    const double mean = static_cast<double>(rows) / static_cast<double>(experts);
    if (mean > 4 * token_tile) return experts * ((mean - beyond) / token_tile + 0.5);
    double tiles = beyond == 0 ? 1 - std::exp(-mean) : 0;
    for (int full = beyond == 0 ? token_tile : beyond; full < mean + 5 * std::sqrt(mean); full += token_tile) {
        tiles += 0.5 * std::erfc((full + 0.5 - mean) / std::sqrt(2 * mean));  // the chance of more rows than these
    }
    return experts * tiles;
}

}  // namespace hf_kbit
