// Sixteen floats at a time for the float kernels (ops.inl, attention.inl): four NEON registers.

#include <arm_neon.h>

namespace {

// Rows a tile of attention may have, and vectors of values a row sums at a time.
constexpr int MOST_ROWS = 4;
constexpr int VALUE_VECTORS = 1;

struct Lanes { float32x4_t at[4]; };

template <class Of>
inline Lanes fours(Of of) { return {{of(0), of(1), of(2), of(3)}}; }

inline uint32x4_t below_4(int n) {
    constexpr int32_t NUMBERS[] = {0, 1, 2, 3};
    return vcltq_s32(vld1q_s32(NUMBERS), vdupq_n_s32(n));
}
inline Lanes splat(float x) { return fours([=](int) { return vdupq_n_f32(x); }); }
inline Lanes load(const float* p) { return fours([=](int i) { return vld1q_f32(p + 4 * i); }); }
inline void store(float* p, const Lanes& a) { for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.at[i]); }
inline Lanes load_part(const float* p, int n) {
    float all[16] = {};
    std::memcpy(all, p, sizeof(float) * n);
    return load(all);
}
inline void store_part(float* p, const Lanes& a, int n) {
    float all[16];
    store(all, a);
    std::memcpy(p, all, sizeof(float) * n);
}

inline Lanes load_half(const uint16_t* p) {
    return fours([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Lanes load_bfloat(const uint16_t* p) {
    return fours([=](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
inline Lanes load_int8(const int8_t* p) {
    const int8x16_t all = vld1q_s8(p);
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all))};
    return fours([&](int i) {
        const int16x8_t half = halves[i / 2];
        return vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(half) : vget_low_s16(half)));
    });
}
inline void store_half(uint16_t* p, const Lanes& a) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.at[i])));
}

inline Lanes plus(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vaddq_f32(a.at[i], b.at[i]); }); }
inline Lanes minus(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vsubq_f32(a.at[i], b.at[i]); }); }
inline Lanes times(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vmulq_f32(a.at[i], b.at[i]); }); }
inline Lanes over(const Lanes& a, const Lanes& b) { return fours([&](int i) { return vdivq_f32(a.at[i], b.at[i]); }); }
// a * b + c
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) {
    return fours([&](int i) { return vfmaq_f32(c.at[i], a.at[i], b.at[i]); });
}
// Where either is NaN, these give b.
inline Lanes larger(const Lanes& a, const Lanes& b) {
    return fours([&](int i) { return vbslq_f32(vcgtq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]); });
}
inline Lanes smaller(const Lanes& a, const Lanes& b) {
    return fours([&](int i) { return vbslq_f32(vcltq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]); });
}
// The first n lanes of a, the others of b.
inline Lanes joined(const Lanes& a, int n, const Lanes& b) {
    return fours([&](int i) { return vbslq_f32(below_4(n - 4 * i), a.at[i], b.at[i]); });
}
// Bit i: whether lane i of a is at least b's.
inline uint32_t at_least(const Lanes& a, const Lanes& b) {
    constexpr uint32_t BITS[] = {1, 2, 4, 8};
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i)
        bits |= vaddvq_u32(vandq_u32(vcgeq_f32(a.at[i], b.at[i]), vld1q_u32(BITS))) << 4 * i;
    return bits;
}
// a where it is at least b, else 0.
inline Lanes kept_if(const Lanes& a, const Lanes& b) {
    return fours([&](int i) {
        return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.at[i]), vcgeq_f32(a.at[i], b.at[i])));
    });
}
// Whether a lane is NaN.
inline bool any_nan(const Lanes& a) {
    uint32x4_t numbers = vceqq_f32(a.at[0], a.at[0]);
    for (int i = 1; i < 4; ++i) numbers = vandq_u32(numbers, vceqq_f32(a.at[i], a.at[i]));
    return vminvq_u32(numbers) == 0;
}

// The nearest whole number, and p * 2^n for a whole n from -127 (zero) to 128 (infinite).
inline Lanes nearest(const Lanes& a) { return fours([&](int i) { return vrndnq_f32(a.at[i]); }); }
inline Lanes scaled(const Lanes& p, const Lanes& n) {
    return fours([&](int i) {
        const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n.at[i]), vdupq_n_s32(127));
        return vmulq_f32(p.at[i], vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
    });
}

}  // namespace
