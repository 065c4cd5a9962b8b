// float16 and bfloat16 as numbers. `static`: each instruction set's file has its own copy.

#pragma once

#include <cstdint>
#include <cstring>

static inline float float_of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float float_of_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31, fraction = half & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) {
        const float small = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -small : small;
    }
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline float float_of_bfloat(uint16_t bits) { return float_of_bits(static_cast<uint32_t>(bits) << 16); }
