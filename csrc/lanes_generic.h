// Sixteen floats at a time for the float kernels (ops.inl, attention.inl): plain C++.

#include <cmath>

namespace {

// Rows a tile of attention may have, and vectors of values a row sums at a time.
constexpr int MOST_ROWS = 4;
constexpr int VALUE_VECTORS = 1;

struct Lanes { float at[16]; };

template <class Function>
inline Lanes each_lane(Function function) {
    Lanes out;
    for (int i = 0; i < 16; ++i) out.at[i] = function(i);
    return out;
}

inline Lanes splat(float x) { return each_lane([=](int) { return x; }); }
inline Lanes load(const float* p) { return each_lane([=](int i) { return p[i]; }); }
inline Lanes load_part(const float* p, int n) { return each_lane([=](int i) { return i < n ? p[i] : 0.0f; }); }
inline void store(float* p, const Lanes& a) { std::memcpy(p, a.at, sizeof a.at); }
inline void store_part(float* p, const Lanes& a, int n) { std::memcpy(p, a.at, sizeof(float) * n); }

inline Lanes load_half(const uint16_t* p) { return each_lane([=](int i) { return float_of_half(p[i]); }); }
inline Lanes load_bfloat(const uint16_t* p) { return each_lane([=](int i) { return float_of_bfloat(p[i]); }); }
inline Lanes load_int8(const int8_t* p) { return each_lane([=](int i) { return static_cast<float>(p[i]); }); }
inline void store_half(uint16_t* p, const Lanes& a) {
    for (int i = 0; i < 16; ++i) p[i] = half_of_float(a.at[i]);
}

inline Lanes plus(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.at[i] + b.at[i]; }); }
inline Lanes minus(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.at[i] - b.at[i]; }); }
inline Lanes times(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.at[i] * b.at[i]; }); }
inline Lanes over(const Lanes& a, const Lanes& b) { return each_lane([&](int i) { return a.at[i] / b.at[i]; }); }
// a * b + c
inline Lanes fused(const Lanes& a, const Lanes& b, const Lanes& c) {
    return each_lane([&](int i) { return a.at[i] * b.at[i] + c.at[i]; });
}
// Where either is NaN, these give b.
inline Lanes larger(const Lanes& a, const Lanes& b) {
    return each_lane([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
}
inline Lanes smaller(const Lanes& a, const Lanes& b) {
    return each_lane([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
}
// The first n lanes of a, the others of b.
inline Lanes joined(const Lanes& a, int n, const Lanes& b) {
    return each_lane([&](int i) { return i < n ? a.at[i] : b.at[i]; });
}
// Bit i: whether lane i of a is at least b's.
inline uint32_t at_least(const Lanes& a, const Lanes& b) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(a.at[i] >= b.at[i]) << i;
    return bits;
}
// a where it is at least b, else 0.
inline Lanes kept_if(const Lanes& a, const Lanes& b) {
    return each_lane([&](int i) { return a.at[i] >= b.at[i] ? a.at[i] : 0.0f; });
}
// Whether a lane is NaN.
inline bool any_nan(const Lanes& a) {
    bool found = false;
    for (int i = 0; i < 16; ++i) found = found || a.at[i] != a.at[i];
    return found;
}

// The nearest whole number, and p * 2^n for a whole n from -127 (zero) to 128 (infinite).
inline Lanes nearest(const Lanes& a) { return each_lane([&](int i) { return std::nearbyintf(a.at[i]); }); }
inline Lanes scaled(const Lanes& p, const Lanes& n) {
    return each_lane([&](int i) {
        // What is not a number stays one by the product.
        const int32_t whole = n.at[i] >= -127.0f && n.at[i] <= 128.0f ? static_cast<int32_t>(n.at[i]) : 0;
        return p.at[i] * float_of_bits(static_cast<uint32_t>(whole + 127) << 23);
    });
}

}  // namespace
