// A program that holds the linear kernels against sums in double precision: every storage type, instruction set and
// shape, alone and in batches, with one thread and with several. For builds with sanitizers, and for processors
// that are emulated. `python csrc/build.py OUTPUT --check`, with `--sanitize` or `--target aarch64`.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "hardpoint.h"

namespace {

struct Kind { int32_t type; const char* name; int columns, bytes; std::vector<int> halves; };

const std::vector<Kind> KINDS = {
    {0, "F32", 1, 4, {}}, {1, "F16", 1, 2, {0}}, {30, "BF16", 1, 2, {}}, {2, "Q4_0", 32, 18, {0}},
    {3, "Q4_1", 32, 20, {0, 2}}, {6, "Q5_0", 32, 22, {0}}, {7, "Q5_1", 32, 24, {0, 2}}, {8, "Q8_0", 32, 34, {0}},
    {10, "Q2_K", 256, 84, {80, 82}}, {11, "Q3_K", 256, 110, {108}}, {12, "Q4_K", 256, 144, {0, 2}},
    {13, "Q5_K", 256, 176, {0, 2}}, {14, "Q6_K", 256, 210, {208}},
};

std::mt19937 generator(7);

// A file's blocks: any bytes, but float16 and float32 numbers of ordinary size.
std::vector<uint8_t> blocks_of(const Kind& kind, int64_t numbers) {
    std::vector<uint8_t> all(numbers / kind.columns * kind.bytes);
    for (auto& byte : all) byte = static_cast<uint8_t>(generator());
    for (size_t block = 0; block < all.size(); block += kind.bytes) {
        // Exponents around one: 0x2c00 is 1/16, 0x3d80 the same as bfloat16.
        for (const int half : kind.halves) all[block + half + 1] = 0x2c | (all[block + half + 1] & 0x80);
        if (kind.type == 0) all[block + 3] = 0x3d | (all[block + 3] & 0x80);
        if (kind.type == 30) all[block + 1] = 0x3d | (all[block + 1] & 0x80);
    }
    return all;
}

struct Packed {
    std::unique_ptr<uint8_t[]> bytes;  // of exactly this size, so that reading beyond is seen
    HpMatrix matrix;
    std::vector<float> numbers;
};

Packed pack(const Kind& kind, int64_t rows, int64_t columns) {
    const auto stored = blocks_of(kind, rows * columns);
    Packed out{std::make_unique<uint8_t[]>(hp_packed_bytes(kind.type, rows, columns)), {}, {}};
    hp_pack(kind.type, stored.data(), columns / kind.columns * kind.bytes, nullptr, rows, columns, out.bytes.get());
    out.matrix = {kind.type, 0, rows, out.bytes.get()};
    std::vector<int64_t> ids(rows);
    for (int64_t i = 0; i < rows; ++i) ids[i] = i;
    out.numbers.resize(rows * columns);
    hp_lookup(&out.matrix, columns, ids.data(), rows, out.numbers.data());
    return out;
}

int failures = 0;

void report(const std::string& where, const char* what) {
    ++failures;
    std::printf("%s: %s\n", where.c_str(), what);
}

void compare(const std::string& where, const Packed& weights, int64_t columns, const std::vector<float>& x,
             const std::vector<float>& found) {
    const int64_t rows = weights.matrix.rows, tokens = static_cast<int64_t>(found.size()) / rows;
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t r = 0; r < rows; ++r) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < columns; ++k) {
                const double product = static_cast<double>(x[t * columns + k]) * weights.numbers[r * columns + k];
                sum += product;
                size += std::fabs(product);
            }
            if (!(std::fabs(found[t * rows + r] - sum) <= 2e-3 * size + 1e-6)) return report(where, "differs");
        }
    }
}

void check(const Kind& kind, const std::string& isa, int64_t rows, int64_t columns) {
    const Packed weights = pack(kind, rows, columns);
    const HpLinear layer{columns, 1, &weights.matrix};
    std::normal_distribution<float> normal;
    constexpr int64_t MOST = 21;
    std::vector<float> x(MOST * columns), alone(MOST * rows);
    for (auto& number : x) number = normal(generator);
    hp_set_threads(1, nullptr);
    for (int64_t t = 0; t < MOST; ++t)
        hp_linear(&layer, x.data() + t * columns, columns, 1, alone.data() + t * rows, rows, nullptr);
    const std::string where = isa + " " + kind.name + " " + std::to_string(rows) + " x " + std::to_string(columns);
    compare(where, weights, columns, x, alone);
    hp_set_threads(3, nullptr);
    for (const int64_t tokens : {2, 3, 5, 8, 9, 21}) {
        std::vector<float> together(tokens * rows);
        hp_linear(&layer, x.data(), columns, tokens, together.data(), rows, nullptr);
        if (std::memcmp(together.data(), alone.data(), together.size() * 4)) report(where, "depends on the batch");
    }
}

}  // namespace

int main() {
    std::stringstream isas(hp_isas());
    for (std::string isa; std::getline(isas, isa, ',');) {
        hp_use_isa(isa.c_str());
        for (const Kind& kind : KINDS) {
            const int64_t whole = kind.columns == 256 ? 256 : 32;
            check(kind, isa, 1, whole);
            check(kind, isa, 35, 3 * whole);
        }
        std::printf("%s: %d failures\n", isa.c_str(), failures);
    }
    return failures != 0;
}
