// Sixteen floats at a time for the float kernels (ops.inl, attention.inl): two AVX2 registers.

#include <immintrin.h>

namespace {

// Rows a tile of attention may have, and vectors of values a row sums at a time.
constexpr int MOST_ROWS = 4;
constexpr int VALUE_VECTORS = 1;

struct Lanes { __m256 low, high; };

inline __m256i below_8(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Lanes load_part(const float* p, int n) {
    // A mask that hides all lanes must not be given a pointer past the end.
    if (n <= 8) return {_mm256_maskload_ps(p, below_8(n)), _mm256_setzero_ps()};
    return {_mm256_loadu_ps(p), _mm256_maskload_ps(p + 8, below_8(n - 8))};
}
inline void store(float* p, Lanes a) {
    _mm256_storeu_ps(p, a.low);
    _mm256_storeu_ps(p + 8, a.high);
}
inline void store_part(float* p, Lanes a, int n) {
    if (n <= 8) return _mm256_maskstore_ps(p, below_8(n), a.low);
    _mm256_storeu_ps(p, a.low);
    _mm256_maskstore_ps(p + 8, below_8(n - 8), a.high);
}

inline __m128i load_8(const uint16_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline __m256 bfloats_8(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_8(p)), 16));
}
inline Lanes load_half(const uint16_t* p) { return {_mm256_cvtph_ps(load_8(p)), _mm256_cvtph_ps(load_8(p + 8))}; }
inline Lanes load_bfloat(const uint16_t* p) { return {bfloats_8(p), bfloats_8(p + 8)}; }
inline Lanes load_int8(const int8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
inline void store_half(uint16_t* p, Lanes a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}

inline Lanes plus(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes minus(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes times(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes over(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
// a * b + c
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// Where either is NaN, these give b.
inline Lanes larger(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
// The first n lanes of a, the others of b.
inline Lanes joined(Lanes a, int n, Lanes b) {
    return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(below_8(n))),
            _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(below_8(n - 8)))};
}
// Bit i: whether lane i of a is at least b's.
inline uint32_t at_least(Lanes a, Lanes b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ))) << 8;
}
// a where it is at least b, else 0.
inline Lanes kept_if(Lanes a, Lanes b) {
    return {_mm256_and_ps(a.low, _mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ)),
            _mm256_and_ps(a.high, _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ))};
}
// Whether a lane is NaN.
inline bool any_nan(Lanes a) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q)) ||
           _mm256_movemask_ps(_mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q));
}

// The nearest whole number, and p * 2^n for a whole n from -127 (zero) to 128 (infinite).
inline Lanes nearest(Lanes a) {
    return {_mm256_round_ps(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 scaled_8(__m256 p, __m256 n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Lanes scaled(Lanes p, Lanes n) { return {scaled_8(p.low, n.low), scaled_8(p.high, n.high)}; }

}  // namespace
