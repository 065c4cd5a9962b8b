// Sixteen lanes as one AVX-512 register, with VNNI's byte products.

#include <immintrin.h>

#include <bit>

namespace {

// Tokens computed with at once, and from how many on a group of a format is unpacked for them; 0: never, where codes
// are found quickly.
constexpr int TOKEN_TILE = 8;
template <class F>
constexpr int PANEL_FROM = F::bits == 3 ? 17 : 0;
// Rows and tokens computed with at once where weights are plain.
constexpr int PLAIN_ROWS = 4;
constexpr int PLAIN_TOKENS = 6;

struct Bytes { __m512i all; };
struct Floats { __m512 all; };

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }

inline void store_bytes(uint8_t* p, const Bytes& v) { _mm512_storeu_si512(p, v.all); }

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
inline Floats plus(const Floats& a, const Floats& b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Floats plus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm512_fmadd_ps(a.all, b.all, sum.all)};
}
inline Floats minus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm512_fnmadd_ps(a.all, b.all, sum.all)};
}
inline void store(float* out, const Floats& v, int lanes) {
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << lanes) - 1), v.all);
}

// The first half of the lanes and the second, added up until one is left.
inline float sum_lanes(const Floats& v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.all), _mm512_extractf32x8_ps(v.all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Each quad's four coarse bytes, then its four fine ones.
inline void store_codes(__m512i codes, uint8_t* to) {
    const __m512i coarse = _mm512_srai_epi16(_mm512_add_epi16(codes, _mm512_set1_epi16(128)), 8);
    const __m512i fine = _mm512_sub_epi16(codes, _mm512_slli_epi16(coarse, 8));
    const __m256i high = _mm512_cvtepi16_epi8(coarse), low = _mm512_cvtepi16_epi8(fine);
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu32_epi64(high),
                                            _mm512_slli_epi64(_mm512_cvtepu32_epi64(low), 32)));
}

inline uint32_t largest(const float* x) {
    const __m512i bits = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x), bits),
                                                    _mm512_and_si512(_mm512_loadu_si512(x + 16), bits)));
}

// The instruction rounds as a sum with a large number does: to the nearest, ties to even.
inline void round_block(const float* x, float inverse, uint8_t* codes, int32_t (&halves)[2]) {
    const __m512 by = _mm512_set1_ps(inverse);
    const auto rounded = [&](const float* from) {
        if (inverse == 0.0f) return _mm512_setzero_si512();
        return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from), by));
    };
    const __m512i first = rounded(x), second = rounded(x + 16);
    halves[0] = _mm512_reduce_add_epi32(first);
    halves[1] = _mm512_reduce_add_epi32(second);
    const __m512i both = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(first));
    store_codes(_mm512_inserti64x4(both, _mm512_cvtepi32_epi16(second), 1), codes);
}

// Sums of products of codes and activations.
template <class F>
struct Dots {
    __m512i coarse, fine;
    // Start with the zero point's share, given the activations' sum negated.
    inline void start(const int32_t* minus_sum) {
        coarse = _mm512_setzero_si512();
        if constexpr (F::zero == 0) fine = coarse;
        else fine = _mm512_slli_epi32(_mm512_set1_epi32(*minus_sum), std::countr_zero(unsigned{F::zero}));
    }
    static inline __m512i four(const uint8_t* p) {
        int32_t together;
        std::memcpy(&together, p, 4);
        return _mm512_set1_epi32(together);
    }
    template <int Quad>
    inline void add(const Bytes& codes, const uint8_t* x) {
        coarse = _mm512_dpbusd_epi32(coarse, codes.all, four(x + 8 * Quad));
        fine = _mm512_dpbusd_epi32(fine, codes.all, four(x + 8 * Quad + 4));
    }
    inline Floats floats() const {
        return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(coarse, 8), fine))};
    }
};

}  // namespace
