// How sixteen lanes' simd_*.h finds the codes of a block where it has no instructions of its own for that.

#pragma once

#include <cstring>

#include "formats.h"

namespace {

// The largest of 32 numbers without their signs, as bits: these order as the numbers do, and infinities and NaN
// come last.
inline uint32_t largest(const float* x) {
    uint32_t most = 0;
    for (int i = 0; i < hardpoint::BLOCK; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

// Round to the nearest, ties to even: adding this leaves the integer in the lowest bits.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4B400000;

inline int32_t rounded(float x) {
    const float moved = x + ROUNDER;
    int32_t bits;
    std::memcpy(&bits, &moved, 4);
    return bits - ROUNDER_BITS;
}

// The codes of a block's numbers times `inverse`, as the instruction set stores them, and the sums of both halves.
// A product with zero is zero, whatever the number.
inline void round_block(const float* x, float inverse, uint8_t* to, int32_t (&halves)[2]) {
    int16_t codes[hardpoint::BLOCK];
    halves[0] = halves[1] = 0;
    for (int half = 0; half < 2; ++half) {
        for (int i = 16 * half; i < 16 * half + 16; ++i) {
            const int32_t code = rounded(inverse == 0.0f ? 0.0f : x[i] * inverse);
            codes[i] = static_cast<int16_t>(code);
            halves[half] += code;
        }
    }
    store_codes(codes, to);
}

}  // namespace
