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

static inline uint16_t half_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits >= 0x7f800000) return static_cast<uint16_t>(sign | 0x7c00 | (bits > 0x7f800000 ? 0x200 : 0));
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (bits < 0x38800000) {
        // Below the smallest normal half: adding one half makes the processor round to its steps.
        float small;
        std::memcpy(&small, &bits, 4);
        small += 0.5f;
        std::memcpy(&bits, &small, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3f000000));
    }
    bits += 0xc8000fff + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | bits >> 13);
}

static inline uint16_t bfloat_of_float(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
