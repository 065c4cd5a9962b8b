// Layers of bfloat16 numbers: cut into pieces for the threads.

#include "bfloats.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "formats.h"
#include "hardpoint.h"
#include "linear.h"
#include "pool.h"

using namespace hardpoint;

namespace {

using Product = void (*)(const BfloatJob&);

Product product() {
#if defined(__x86_64__) && !defined(HARDPOINT_NO_AVX512)
    static const bool there = __builtin_cpu_supports("avx512bf16");
    if (there && std::string_view(kernels().name) == "avx512") return avx512_bfloats;
#endif
    return nullptr;
}

// Products of a piece: some 20 us of work. Tiles of a piece: their activations stay in a core's cache.
constexpr int64_t PIECE_PRODUCTS = 1 << 18, PIECE_TILES = 24, ROWS_EACH = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void put_tile(const BfloatTiles& tiles, int64_t tile, const uint16_t* x, int64_t x_stride, int64_t columns, uint16_t* to) {
    const int64_t first = tiles.first(tile), last = tiles.first(tile + 1);
    to += tiles.numbers(first);
    for (int64_t k = 0; k < columns; k += BFLOAT_STEP) {
        const int64_t count = std::min(BFLOAT_STEP, columns - k);
        for (int64_t token = first; token < last; ++token, to += BFLOAT_STEP) {
            std::memcpy(to, x + token * x_stride + k, 2 * count);
            if (count < BFLOAT_STEP) std::fill(to + count, to + BFLOAT_STEP, uint16_t{0});
        }
    }
}

// Room for the input of the caller that holds Pool::busy. Never destroyed, as the pool.
Lane& room() {
    static Lane* made = new Lane(0);
    return *made;
}

}  // namespace

int32_t hp_bfloat_products() { return product() != nullptr; }

int32_t hp_bfloat_linear(const uint16_t* weights, int64_t rows, int64_t columns, const uint16_t* x, int64_t x_stride,
                         int64_t tokens, uint16_t* out, int64_t out_stride, const uint16_t* bias) {
    const std::lock_guard lock(Pool::get().busy);
    const Product compute = product();
    if (!compute) return -1;
    if (tokens <= 0) return 0;
    const BfloatTiles tiles(tokens, columns);
    auto* input = static_cast<uint16_t*>(room().scratch(2 * tiles.numbers(tokens)));
    const auto put = [&](int64_t piece, Lane&) {
        for (int64_t i = piece * PIECE_TILES; i < std::min(tiles.count, (piece + 1) * PIECE_TILES); ++i)
            put_tile(tiles, i, x, x_stride, columns, input);
    };
    const int64_t panels = ceil_div(tiles.count, PIECE_TILES), panel = ceil_div(tiles.count, panels);
    const int64_t each = ceil_div(PIECE_PRODUCTS, ROWS_EACH * columns * ceil_div(tokens, panels)) * ROWS_EACH;
    const int64_t runs = ceil_div(rows, each);
    const auto one = [&](int64_t piece, Lane&) {
        const int64_t row = piece % runs * each, tile = piece / runs * panel;
        compute({weights + row * columns, std::min(each, rows - row), columns, &tiles, input, tile,
                 std::min(tiles.count, tile + panel), out + row, out_stride, bias ? bias + row : nullptr});
    };
    const Phase phases[2] = {phase_of(put, panels), phase_of(one, runs * panels)};
    Pool::get().run(phases, 2, rows * columns * tokens >= LINEAR_WAKE);
    return 0;
}
