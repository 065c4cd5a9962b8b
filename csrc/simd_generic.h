// Sixteen lanes in plain C++: for processors without a file of their own, and to test the others against.

#include <cmath>

namespace {

// Tokens computed with at once, and from how many on a group of a format is unpacked for them; 0: never, where codes
// are found quickly.
constexpr int TOKEN_TILE = 1;
template <class F>
constexpr int PANEL_FROM = F::bits == 8 ? 0 : 3;
// Rows and tokens computed with at once where weights are plain.
constexpr int PLAIN_ROWS = 1;
constexpr int PLAIN_TOKENS = 1;

struct Bytes { uint8_t at[64]; };
struct Ints { int32_t at[16]; };
struct Floats { float at[16]; };

inline Bytes load_bytes(const uint8_t* p) { Bytes v; std::memcpy(v.at, p, 64); return v; }

inline void store_bytes(uint8_t* p, const Bytes& v) { std::memcpy(p, v.at, 64); }

// Each byte's bits from `Shift` on, cut to `Mask`; a negative shift goes up.
template <int Shift, int Mask>
inline Bytes bits_of(const Bytes& v) {
    Bytes out;
    for (int i = 0; i < 64; ++i) {
        const int moved = Shift >= 0 ? v.at[i] >> (Shift >= 0 ? Shift : 0) : v.at[i] << (Shift < 0 ? -Shift : 0);
        out.at[i] = static_cast<uint8_t>(moved & Mask);
    }
    return out;
}
inline Bytes either(const Bytes& a, const Bytes& b) {
    Bytes out;
    for (int i = 0; i < 64; ++i) out.at[i] = a.at[i] | b.at[i];
    return out;
}

inline Floats zero_floats() { return Floats{}; }
inline Floats broadcast(float x) { Floats v; for (float& lane : v.at) lane = x; return v; }
inline Floats load_floats(const float* p) { Floats v; std::memcpy(v.at, p, 64); return v; }
inline Floats load_halves(const uint8_t* p) {
    Floats v;
    for (int i = 0; i < 16; ++i) { uint16_t h; std::memcpy(&h, p + 2 * i, 2); v.at[i] = float_of_half(h); }
    return v;
}
inline Floats load_bfloats(const uint8_t* p) {
    Floats v;
    for (int i = 0; i < 16; ++i) { uint16_t h; std::memcpy(&h, p + 2 * i, 2); v.at[i] = float_of_bfloat(h); }
    return v;
}
inline Floats load_small(const uint8_t* p) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.at[i] = static_cast<float>(static_cast<int8_t>(p[i]));
    return v;
}
inline Floats times(const Floats& a, const Floats& b) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.at[i] = a.at[i] * b.at[i];
    return v;
}
inline Floats plus(const Floats& a, const Floats& b) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.at[i] = a.at[i] + b.at[i];
    return v;
}
inline Floats plus_product(const Floats& sum, const Floats& a, const Floats& b) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.at[i] = sum.at[i] + a.at[i] * b.at[i];
    return v;
}
inline Floats minus_product(const Floats& sum, const Floats& a, const Floats& b) {
    Floats v;
    for (int i = 0; i < 16; ++i) v.at[i] = sum.at[i] - a.at[i] * b.at[i];
    return v;
}
inline void store(float* out, const Floats& v, int lanes) { std::memcpy(out, v.at, sizeof(float) * lanes); }

// The first half of the lanes and the second, added up until one is left.
inline float sum_lanes(Floats v) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) v.at[i] += v.at[i + half];
    return v.at[0];
}

inline void store_codes(const int16_t* codes, uint8_t* to) { std::memcpy(to, codes, 64); }

// Sums of products of codes and activations.
template <class F>
struct Dots {
    Ints sum;
    // Start with the zero point's share, given the activations' sum negated.
    inline void start(const int32_t* minus_sum) { for (int32_t& lane : sum.at) lane = F::zero * *minus_sum; }
    template <int Quad>
    inline void add(const Bytes& codes, const uint8_t* x) {
        int16_t four[4];
        std::memcpy(four, x + 8 * Quad, 8);
        for (int i = 0; i < 16; ++i)
            for (int c = 0; c < 4; ++c) sum.at[i] += codes.at[4 * i + c] * four[c];
    }
    inline Floats floats() const {
        Floats v;
        for (int i = 0; i < 16; ++i) v.at[i] = static_cast<float>(sum.at[i]);
        return v;
    }
};

}  // namespace
