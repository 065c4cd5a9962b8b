// Sixteen lanes as four NEON registers, with the byte products of the dot product extension.

#include <arm_neon.h>

#include <bit>

namespace {

// Tokens computed with at once, and from how many on a group of a format is unpacked for them; 0: never, where codes
// are found quickly.
constexpr int TOKEN_TILE = 2;
template <class F>
constexpr int PANEL_FROM = F::bits == 4 || F::bits == 8 ? 0 : 5;
// Rows and tokens computed with at once where weights are plain.
constexpr int PLAIN_ROWS = 2;
constexpr int PLAIN_TOKENS = 2;

struct Bytes { uint8x16_t at[4]; };
struct Floats { float32x4_t at[4]; };

inline Bytes load_bytes(const uint8_t* p) { return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}}; }
inline void store_bytes(uint8_t* p, const Bytes& v) { for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, v.at[i]); }

// Each byte's bits from `Shift` on, cut to `Mask`; a negative shift goes up.
template <int Shift, int Mask>
inline Bytes bits_of(const Bytes& v) {
    Bytes out;
    for (int i = 0; i < 4; ++i) {
        uint8x16_t moved = v.at[i];
        if constexpr (Shift > 0) moved = vshrq_n_u8(moved, Shift);
        if constexpr (Shift < 0) moved = vshlq_n_u8(moved, -Shift);
        out.at[i] = vandq_u8(moved, vdupq_n_u8(Mask));
    }
    return out;
}
inline Bytes either(const Bytes& a, const Bytes& b) {
    Bytes out;
    for (int i = 0; i < 4; ++i) out.at[i] = vorrq_u8(a.at[i], b.at[i]);
    return out;
}

template <class Of>
inline Floats each(Of of) { return {{of(0), of(1), of(2), of(3)}}; }

inline Floats broadcast(float x) { return each([&](int) { return vdupq_n_f32(x); }); }
inline Floats zero_floats() { return broadcast(0.0f); }
inline Floats load_floats(const float* p) { return each([&](int i) { return vld1q_f32(p + 4 * i); }); }
inline Floats load_halves(const uint8_t* p) {
    return each([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i))); });
}
inline Floats load_bfloats(const uint8_t* p) {
    return each([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)); });
}
inline Floats load_small(const uint8_t* p) {
    const int8x16_t all = vreinterpretq_s8_u8(vld1q_u8(p));
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(all)), vmovl_s8(vget_high_s8(all))};
    return each([&](int i) {
        const int16x8_t half = halves[i / 2];
        return vcvtq_f32_s32(vmovl_s16(i % 2 ? vget_high_s16(half) : vget_low_s16(half)));
    });
}
inline Floats times(const Floats& a, const Floats& b) { return each([&](int i) { return vmulq_f32(a.at[i], b.at[i]); }); }
inline Floats plus(const Floats& a, const Floats& b) { return each([&](int i) { return vaddq_f32(a.at[i], b.at[i]); }); }
inline Floats plus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return each([&](int i) { return vfmaq_f32(sum.at[i], a.at[i], b.at[i]); });
}
inline Floats minus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return each([&](int i) { return vfmsq_f32(sum.at[i], a.at[i], b.at[i]); });
}
inline void store(float* out, const Floats& v, int lanes) {
    float all[16];
    for (int i = 0; i < 4; ++i) vst1q_f32(lanes == 16 ? out + 4 * i : all + 4 * i, v.at[i]);
    if (lanes < 16) std::memcpy(out, all, sizeof(float) * lanes);
}

// The first half of the lanes and the second, added up until one is left.
inline float sum_lanes(const Floats& v) {
    const float32x4_t four = vaddq_f32(vaddq_f32(v.at[0], v.at[2]), vaddq_f32(v.at[1], v.at[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

// Each quad's four coarse bytes, then its four fine ones.
inline void store_codes(const int16_t* codes, uint8_t* to) {
    for (int i = 0; i < 32; ++i) {
        const int coarse = (codes[i] + 128) >> 8;
        to[8 * (i / 4) + i % 4] = static_cast<uint8_t>(coarse);
        to[8 * (i / 4) + 4 + i % 4] = static_cast<uint8_t>(codes[i] - 256 * coarse);
    }
}

// Sums of products of codes and activations.
template <class F>
struct Dots {
    // There are products of signed bytes only, so eight-bit codes are made signed.
    static constexpr bool is_signed = F::zero == 128;
    int32x4_t coarse[4], fine[4];
    // Start with the zero point's share, given the activations' sum negated.
    inline void start(const int32_t* minus_sum) {
        for (int i = 0; i < 4; ++i) {
            coarse[i] = vdupq_n_s32(0);
            fine[i] = vdupq_n_s32(is_signed ? 0 : F::zero * *minus_sum);
        }
    }
    static inline int8x16_t four(const uint8_t* p) {
        int32_t together;
        std::memcpy(&together, p, 4);
        return vreinterpretq_s8_s32(vdupq_n_s32(together));
    }
    template <int Quad>
    inline void add(const Bytes& codes, const uint8_t* x) {
        const int8x16_t high = four(x + 8 * Quad), low = four(x + 8 * Quad + 4);
        for (int i = 0; i < 4; ++i) {
            const uint8x16_t plain = is_signed ? veorq_u8(codes.at[i], vdupq_n_u8(128)) : codes.at[i];
            const int8x16_t weights = vreinterpretq_s8_u8(plain);
            coarse[i] = vdotq_s32(coarse[i], weights, high);
            fine[i] = vdotq_s32(fine[i], weights, low);
        }
    }
    inline Floats floats() const {
        return each([&](int i) { return vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(coarse[i], 8), fine[i])); });
    }
};

}  // namespace
