// Sixteen lanes as two AVX2 registers.

#include <immintrin.h>

#include <bit>

namespace {

// Tokens computed with at once, and from how many on a group of a format is unpacked for them; 0: never, where codes
// are found quickly.
constexpr int TOKEN_TILE = 4;
template <class F>
constexpr int PANEL_FROM = F::bits == 4 || F::bits == 8 ? 0 : 9;
// Rows and tokens computed with at once where weights are plain.
constexpr int PLAIN_ROWS = 2;
constexpr int PLAIN_TOKENS = 3;

struct Bytes { __m256i low, high; };
struct Floats { __m256 low, high; };

inline Bytes load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}

inline void store_bytes(uint8_t* p, const Bytes& v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), v.high);
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
inline Floats plus(const Floats& a, const Floats& b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
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

// The first half of the lanes and the second, added up until one is left.
inline float sum_lanes(const Floats& v) {
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

// Of each quad first the even, then the odd two.
inline void store_codes(const int16_t* codes, uint8_t* to) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    for (int i = 0; i < 2; ++i) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 16 * i));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * i), _mm256_shuffle_epi8(half, order));
    }
}

// Sums of products of codes and activations: of each quad's bytes the even ones, then the odd ones, as 16 bits.
template <class F>
struct Dots {
    __m256i low, high;

    // Start with the zero point's share, given the activations' sum negated.
    inline void start(const int32_t* minus_sum) {
        if constexpr (F::zero == 0) low = _mm256_setzero_si256();
        else low = _mm256_slli_epi32(_mm256_set1_epi32(*minus_sum), std::countr_zero(unsigned{F::zero}));
        high = low;
    }
    static inline __m256i two(const uint8_t* p) {
        int32_t together;
        std::memcpy(&together, p, 4);
        return _mm256_set1_epi32(together);
    }
    static inline __m256i sum(__m256i before, __m256i codes, __m256i even, __m256i odd) {
        const __m256i first = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)), even);
        const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odd);
        __m256i after = _mm256_add_epi32(_mm256_add_epi32(before, first), second);
#if defined(__GNUC__)
        // Compilers else turn the chain of sums into a tree, for which there are not enough registers.
        asm("" : "+x"(after));
#endif
        return after;
    }
    template <int Quad>
    inline void add(const Bytes& codes, const uint8_t* x) {
        const __m256i even = two(x + 8 * Quad), odd = two(x + 8 * Quad + 4);
        low = sum(low, codes.low, even, odd);
        high = sum(high, codes.high, even, odd);
    }
    inline Floats floats() const { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }
};

}  // namespace
