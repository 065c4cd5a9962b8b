// Sixteen floats at a time for the float kernels (ops.inl, attention.inl): AVX-512.

#include <immintrin.h>

namespace {

// Rows a tile of attention may have, and vectors of values a row sums at a time.
constexpr int MOST_ROWS = 8;
constexpr int VALUE_VECTORS = 2;

struct Lanes { __m512 v; };

inline __mmask16 below(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load_part(const float* p, int n) { return {_mm512_maskz_loadu_ps(below(n), p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline void store_part(float* p, Lanes a, int n) { _mm512_mask_storeu_ps(p, below(n), a.v); }

inline Lanes load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Lanes load_bfloat(const uint16_t* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Lanes load_int8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline void store_half(uint16_t* p, Lanes a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

inline Lanes plus(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes minus(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes times(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes over(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where either is NaN, these give b.
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
// The first n lanes of a, the others of b.
inline Lanes joined(Lanes a, int n, Lanes b) { return {_mm512_mask_blend_ps(below(n), b.v, a.v)}; }
// Bit i: whether lane i of a is at least b's.
inline uint32_t at_least(Lanes a, Lanes b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// a where it is at least b, else 0.
inline Lanes kept_if(Lanes a, Lanes b) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), a.v)}; }
// Whether a lane is NaN.
inline bool any_nan(Lanes a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }

// The nearest whole number, and p * 2^n for a whole n from -127 (zero) to 128 (infinite).
inline Lanes nearest(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Lanes scaled(Lanes p, Lanes n) {
    const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_mul_ps(p.v, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)))};
}

}  // namespace
