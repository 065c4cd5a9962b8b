// Sixteen lanes as one AVX-512 register, with VNNI's byte products.

#include <immintrin.h>

namespace {

constexpr int TOKEN_TILE = 8;

struct Bytes { __m512i all; };
struct Floats { __m512 all; };

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }

// Each byte's bits from `Shift` on, cut to `Mask`; a negative shift goes up. What the wider shift brings in
// from the neighbour is outside of the mask.
template <int Shift, int Mask>
inline Bytes bits_of(const Bytes& v) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(Mask));
    if constexpr (Shift >= 0) return {_mm512_and_si512(_mm512_srli_epi16(v.all, Shift), mask)};
    else return {_mm512_and_si512(_mm512_slli_epi16(v.all, -Shift), mask)};
}
inline Bytes either(const Bytes& a, const Bytes& b) { return {_mm512_or_si512(a.all, b.all)}; }

inline Floats zero_floats() { return {_mm512_setzero_ps()}; }
inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
inline __m256i load_32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Floats load_halves(const uint8_t* p) { return {_mm512_cvtph_ps(load_32(p))}; }
inline Floats load_bfloats(const uint8_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32(p)), 16))};
}
inline Floats load_small(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats times(const Floats& a, const Floats& b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline Floats plus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm512_fmadd_ps(a.all, b.all, sum.all)};
}
inline Floats minus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm512_fnmadd_ps(a.all, b.all, sum.all)};
}
inline void store(float* out, const Floats& v, int lanes) {
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << lanes) - 1), v.all);
}

// Sums of products of codes and activations.
template <class F>
struct Dots {
    __m512i sum;
    // The zero point's share is taken off at the start.
    inline void start(int32_t activations) { sum = _mm512_set1_epi32(-F::zero * activations); }
    // Quad `Q` of a run.
    template <int Q>
    inline void add(const Bytes& codes, const int8_t* four) {
        int32_t together;
        std::memcpy(&together, four, 4);
        sum = _mm512_dpbusd_epi32(sum, codes.all, _mm512_set1_epi32(together));
    }
    inline void times_256() { sum = _mm512_slli_epi32(sum, 8); }
    inline void join(const Dots& other) { sum = _mm512_add_epi32(sum, other.sum); }
    inline Floats floats() const { return {_mm512_cvtepi32_ps(sum)}; }
};

}  // namespace
