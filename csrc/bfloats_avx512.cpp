#include "bfloats.h"

#include <immintrin.h>

namespace {

using namespace hardpoint;

// Sums have to be in registers, which arrays are only where no index is counted.
#if defined(__clang__)
#define HP_UNROLL _Pragma("unroll")
#else
#define HP_UNROLL _Pragma("GCC unroll 8")
#endif

// Rows computed with at once.
constexpr int ROWS = 4;

// The sums over the lanes of four vectors, always paired alike.
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <int R>
inline __m128 bias_of(const uint16_t* p) {
    const __m128i bits = R == ROWS ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)) : _mm_cvtsi32_si128(*p);
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
}

// R rows for a tile of T tokens. Lane i adds up columns 2i, 2i + 1, 2i + 32, ...; in which tile a row and a token
// are computed makes no difference.
template <int R, int T>
void tile(const BfloatJob& job, int64_t row, int64_t token) {
    const uint16_t* weights = job.weights + row * job.columns;
    const uint16_t* x = job.x + job.tiles->numbers(token);
    __m512 sums[T][ROWS];
    HP_UNROLL for (int t = 0; t < T; ++t)
        HP_UNROLL for (int r = 0; r < ROWS; ++r) sums[t][r] = _mm512_setzero_ps();
    const auto add = [&](const auto& weight) {
        __m512bh of_rows[R];
        HP_UNROLL for (int r = 0; r < R; ++r) of_rows[r] = (__m512bh)weight(weights + r * job.columns);
        HP_UNROLL for (int t = 0; t < T; ++t) {
            const auto of_token = (__m512bh)_mm512_loadu_si512(x + t * BFLOAT_STEP);
            HP_UNROLL for (int r = 0; r < R; ++r) sums[t][r] = _mm512_dpbf16_ps(sums[t][r], of_rows[r], of_token);
        }
        x += T * BFLOAT_STEP;
    };
    int64_t k = 0;
    for (; k + BFLOAT_STEP <= job.columns; k += BFLOAT_STEP) add([&](const uint16_t* p) { return _mm512_loadu_si512(p + k); });
    if (k < job.columns) {
        const auto mask = static_cast<__mmask32>((1ull << (job.columns - k)) - 1);
        add([&](const uint16_t* p) { return _mm512_maskz_loadu_epi16(mask, p + k); });
    }
    HP_UNROLL for (int t = 0; t < T; ++t) {
        uint16_t* out = job.out + (token + t) * job.out_stride + row;
        __m128 four = sums_of(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
        if (job.bias) four = _mm_add_ps(four, bias_of<R>(job.bias + row));
        const auto rounded = (__m128i)_mm_cvtneps_pbh(four);
        if constexpr (R == ROWS) _mm_storel_epi64(reinterpret_cast<__m128i*>(out), rounded);
        else *out = static_cast<uint16_t>(_mm_extract_epi16(rounded, 0));
    }
}

template <int T>
void tokens(const BfloatJob& job, int64_t token) {
    int64_t row = 0;
    for (; row + ROWS <= job.rows; row += ROWS) tile<ROWS, T>(job, row, token);
    for (; row < job.rows; ++row) tile<1, T>(job, row, token);
}

template <int T>
void with_tokens(const BfloatJob& job, int64_t token, int64_t count) {
    if constexpr (T > 1) {
        if (count < T) return with_tokens<T - 1>(job, token, count);
    }
    tokens<T>(job, token);
}

}  // namespace

void hardpoint::avx512_bfloats(const BfloatJob& job) {
    for (int64_t i = job.from; i < job.to; ++i) {
        const int64_t token = job.tiles->first(i);
        with_tokens<BFLOAT_TOKENS>(job, token, job.tiles->first(i + 1) - token);
    }
}
