// Products of bfloat16 weights and activations, for processors that multiply such numbers.

#pragma once

#include <algorithm>
#include <cstdint>

namespace hardpoint {

// Columns that are multiplied at a time.
constexpr int64_t BFLOAT_STEP = 32;
// The most tokens of a tile.
constexpr int64_t BFLOAT_TOKENS = 6;

// A layer's input, or a stretch of its tokens, cut into tiles of few tokens, as even as can be. A tile's numbers stand
// together, step by step: [steps][tokens of the tile][32], filled up with zeros.
struct BfloatTiles {
    int64_t tokens, count, steps;

    BfloatTiles(int64_t all, int64_t columns)
        : tokens(all), count((all + BFLOAT_TOKENS - 1) / BFLOAT_TOKENS), steps((columns + BFLOAT_STEP - 1) / BFLOAT_STEP) {}
    int64_t first(int64_t tile) const { return tile * (tokens / count) + std::min(tile, tokens % count); }
    int64_t numbers(int64_t of) const { return of * steps * BFLOAT_STEP; }
};

// Some rows for some tiles.
struct BfloatJob {
    const uint16_t* weights;  // [rows][columns]
    int64_t rows, columns;
    const BfloatTiles* tiles;
    const uint16_t* x;        // of all tiles
    int64_t from, to;         // tiles
    uint16_t* out;            // of all tokens
    int64_t out_stride;
    const uint16_t* bias;     // or null
};

#if defined(__x86_64__) && !defined(HARDPOINT_NO_AVX512)
void avx512_bfloats(const BfloatJob& job);
#endif

}  // namespace hardpoint
