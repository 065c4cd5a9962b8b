// What the checks share. Each check computes for the instruction set in use, and compares with plain sums in double
// precision, or with the kernels themselves in other company.
//
// Buffers are vectors of exactly the size that may be touched, so that builds with sanitizers see one number too many.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../floats.h"
#include "../hardpoint.h"

namespace check {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr float NOT_A_NUMBER = __builtin_nanf(""), INFINITE = __builtin_inff();

// Say what is wrong and count it.
void report(const std::string& where, const std::string& what);

// The same numbers in every run.
std::mt19937& generator();
Floats normals(int64_t count, float deviation = 1.0f);

// Whether found[i] is expected[i], give or take tolerance[i]; NaN and infinities have to be the same.
void compare(const std::string& where, const Floats& found, const Doubles& expected, const Doubles& tolerance);
// The same with one tolerance, a share of each number's size and as much at least.
void compare(const std::string& where, const Floats& found, const Doubles& expected, double tolerance);

// Whether both are the same to the bit.
void same(const std::string& where, const Floats& found, const Floats& expected);

inline bool bits_equal(const float* a, const float* b, size_t count) { return !std::memcmp(a, b, 4 * count); }

// A kind of stored weights: the type's number in GGUF files, the columns and bytes of a block, and where in it
// there are float16 numbers.
struct Kind {
    int32_t type;
    const char* name;
    int columns, bytes;
    std::vector<int> halves;
};
const std::vector<Kind>& kinds();
const Kind& kind(const char* name);

// Blocks of any bytes, but with float numbers of ordinary size.
std::vector<uint8_t> blocks_of(const Kind& kind, int64_t numbers);
// The numbers a row of blocks stands for.
Doubles decoded(const Kind& kind, const uint8_t* blocks, int64_t columns);

// A packed or plain matrix and its numbers.
struct Weights {
    std::vector<uint8_t> bytes;
    HpMatrix matrix;
    Doubles numbers;  // [rows][columns]
};
Weights packed(const Kind& kind, int64_t rows, int64_t columns);
Weights plain(const Kind& kind, int64_t rows, int64_t columns);

// A number cut to so many significant bits, to the nearest, ties to even; `least` is the exponent of the smallest step.
double cut(double x, int bits, int least);
inline double to_half(double x) { return cut(x, 11, -24); }
inline double to_bfloat(double x) { return cut(x, 8, -133); }

// What is checked once, and what for each instruction set.
void check_pack();
void check_pool();
void check_linear(const std::string& isa);
void check_plain(const std::string& isa);
void check_attention(const std::string& isa);
void check_ops(const std::string& isa);
void check_draw(const std::string& isa);
void check_program(const std::string& isa);

}  // namespace check
