// Sixteen lanes as two AVX2 registers.

#include <immintrin.h>

namespace {

constexpr int TOKEN_TILE = 4;

struct Bytes { __m256i low, high; };
struct Floats { __m256 low, high; };

inline Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}

// Each byte's bits from `Shift` on, cut to `Mask`; a negative shift goes up. What the wider shift brings in
// from the neighbour is outside of the mask.
template <int Shift, int Mask>
inline Bytes bits_of(const Bytes& v) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(Mask));
    if constexpr (Shift >= 0)
        return {_mm256_and_si256(_mm256_srli_epi16(v.low, Shift), mask),
                _mm256_and_si256(_mm256_srli_epi16(v.high, Shift), mask)};
    else
        return {_mm256_and_si256(_mm256_slli_epi16(v.low, -Shift), mask),
                _mm256_and_si256(_mm256_slli_epi16(v.high, -Shift), mask)};
}
inline Bytes either(const Bytes& a, const Bytes& b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}

inline Floats zero_floats() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
inline Floats load_halves(const uint8_t* p) { return {_mm256_cvtph_ps(load_16(p)), _mm256_cvtph_ps(load_16(p + 16))}; }
inline __m256 bfloats(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
inline Floats load_bfloats(const uint8_t* p) { return {bfloats(load_16(p)), bfloats(load_16(p + 16))}; }
inline Floats load_small(const uint8_t* p) {
    const __m128i v = load_16(p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)))};
}
inline Floats times(const Floats& a, const Floats& b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Floats plus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm256_fmadd_ps(a.low, b.low, sum.low), _mm256_fmadd_ps(a.high, b.high, sum.high)};
}
inline Floats minus_product(const Floats& sum, const Floats& a, const Floats& b) {
    return {_mm256_fnmadd_ps(a.low, b.low, sum.low), _mm256_fnmadd_ps(a.high, b.high, sum.high)};
}
inline void store(float* out, const Floats& v, int lanes) {
    if (lanes == 16) {
        _mm256_storeu_ps(out, v.low);
        _mm256_storeu_ps(out + 8, v.high);
        return;
    }
    alignas(32) float all[16];
    _mm256_store_ps(all, v.low);
    _mm256_store_ps(all + 8, v.high);
    for (int i = 0; i < lanes; ++i) out[i] = all[i];
}

// Sums of products of codes and activations. Pairs are summed in 16 bits, as often as they fit.
template <class F>
struct Dots {
    static constexpr bool is_signed = F::bits == 8;
    static constexpr int quads_that_fit = is_signed ? 1 : 32767 / (2 * 127 * ((1 << F::bits) - 1));
    __m256i low, high, low_pairs, high_pairs;

    inline void start(int32_t activations) {
        // Eight-bit codes are made signed instead, since unsigned ones would not fit.
        low = high = _mm256_set1_epi32(is_signed ? 0 : -F::zero * activations);
    }
    static inline __m256i pairs(__m256i codes, __m256i x) {
        if constexpr (is_signed) {
            const __m256i weights = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
            return _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
        } else {
            return _mm256_maddubs_epi16(codes, x);
        }
    }
    // Quad `Q` of a run.
    template <int Q>
    inline void add(const Bytes& codes, const int8_t* four) {
        int32_t together;
        std::memcpy(&together, four, 4);
        const __m256i x = _mm256_set1_epi32(together);
        const __m256i low_new = pairs(codes.low, x), high_new = pairs(codes.high, x);
        constexpr bool is_first = Q % quads_that_fit == 0, is_last = (Q + 1) % quads_that_fit == 0 || Q + 1 == F::run / 4;
        low_pairs = is_first ? low_new : _mm256_add_epi16(low_pairs, low_new);
        high_pairs = is_first ? high_new : _mm256_add_epi16(high_pairs, high_new);
        if constexpr (is_last) {
            const __m256i ones = _mm256_set1_epi16(1);
            low = _mm256_add_epi32(low, _mm256_madd_epi16(low_pairs, ones));
            high = _mm256_add_epi32(high, _mm256_madd_epi16(high_pairs, ones));
        }
    }
    inline void times_256() {
        low = _mm256_slli_epi32(low, 8);
        high = _mm256_slli_epi32(high, 8);
    }
    inline void join(const Dots& other) {
        low = _mm256_add_epi32(low, other.low);
        high = _mm256_add_epi32(high, other.high);
    }
    inline Floats floats() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
};

}  // namespace
