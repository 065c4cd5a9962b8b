// The kernels, over the sixteen lanes of whatever simd_*.h was included before.
//
// Everything is in an unnamed namespace: code that is compiled for one instruction set must not be taken by the
// linker for another's.

#include <utility>

namespace {

using namespace hardpoint;

#if defined(__GNUC__)
#define HP_INLINE inline __attribute__((always_inline))
#else
#define HP_INLINE inline
#endif

// The codes of quad Q of a block.
template <class F, int Q>
HP_INLINE Bytes quad_of(const uint8_t* codes) {
    constexpr int in_four = Q % 4, half = Q / 4;
    if constexpr (F::bits == 8) {
        return load_bytes(codes + 64 * Q);
    } else if constexpr (F::bits == 2) {
        return bits_of<2 * in_four, 3>(load_bytes(codes + 64 * half));
    } else if constexpr (F::bits == 3) {
        return either(bits_of<2 * in_four, 3>(load_bytes(codes + 64 * half)), bits_of<Q - 2, 4>(load_bytes(codes + 128)));
    } else {
        const Bytes low = bits_of<4 * half, 15>(load_bytes(codes + 64 * in_four));
        if constexpr (F::bits == 5) return either(low, bits_of<Q - 4, 16>(load_bytes(codes + 256)));
        else if constexpr (F::bits == 6)
            return either(low, bits_of<2 * in_four - 4, 48>(load_bytes(codes + 256 + 64 * half)));
        else return low;
    }
}

template <class Body, int... I>
HP_INLINE void unrolled(Body body, std::integer_sequence<int, I...>) {
    (body(std::integral_constant<int, I>{}), ...);
}

// Scales and, where there are any, minima of one run of a block. K-quants' minima are to be taken off.
template <class F, int R>
HP_INLINE void scales_of(const uint8_t* group, const uint8_t* block, int64_t b, Floats& scale, Floats& minimum) {
    const uint8_t* scales = block + F::code_bytes;
    if constexpr (F::is_k) {
        const uint8_t* header = group + F::header_at(b);
        scale = times(load_halves(header), load_small(scales + GROUP * R));
        if constexpr (F::minima)
            minimum = times(load_halves(header + 2 * GROUP), load_small(scales + F::scale_bytes + GROUP * R));
    } else {
        scale = load_halves(scales);
        if constexpr (F::minima) minimum = load_halves(scales + F::scale_bytes);
    }
}

// Sums of codes that the zero point is taken off by; not needed where it is 0.
template <class F, int R>
HP_INLINE int32_t sum_of(const int32_t* half_sums, int32_t sum) {
    return F::zero == 0 ? 0 : F::runs == 1 ? sum : half_sums[R];
}

// One run of a block for T tokens. Fine codes of a token that is not refined add exactly nothing, so a token's
// result does not depend on who shares its tile.
template <class F, int T, int R, bool Fine>
HP_INLINE void add_run(const uint8_t* group, const uint8_t* block, int64_t b, const Activations* x, int64_t x_stride,
                       Floats (&sums)[T]) {
    constexpr int quads = F::run / 4;
    Dots<F> coarse[T], fine[T];
    for (int t = 0; t < T; ++t) {
        const Activations& of = x[t * x_stride];
        coarse[t].start(sum_of<F, R>(of.half_sums, of.sum));
        if constexpr (Fine) fine[t].start(sum_of<F, R>(of.fine_half_sums, of.fine_sum));
    }
    unrolled([&](auto q) {
        constexpr int quad = R * quads + decltype(q)::value;
        const Bytes codes = quad_of<F, quad>(block);
        for (int t = 0; t < T; ++t) {
            coarse[t].template add<decltype(q)::value>(codes, x[t * x_stride].codes + 4 * quad);
            if constexpr (Fine) fine[t].template add<decltype(q)::value>(codes, x[t * x_stride].fine + 4 * quad);
        }
    }, std::make_integer_sequence<int, quads>{});
    Floats scale, minimum;
    scales_of<F, R>(group, block, b, scale, minimum);
    for (int t = 0; t < T; ++t) {
        const Activations& of = x[t * x_stride];
        coarse[t].times_256();
        if constexpr (Fine) coarse[t].join(fine[t]);
        sums[t] = plus_product(sums[t], times(coarse[t].floats(), scale), broadcast(of.scale));
        if constexpr (F::minima) {
            const Floats total = broadcast(F::runs == 1 ? of.total : of.half_totals[R]);
            sums[t] = F::is_k ? minus_product(sums[t], minimum, total) : plus_product(sums[t], minimum, total);
        }
    }
}

template <class F, int T, bool Fine>
HP_INLINE void add_block(const uint8_t* group, int64_t b, const Activations* x, int64_t x_stride, Floats (&sums)[T]) {
    const uint8_t* block = group + F::block_at(b);
    unrolled([&](auto r) { add_run<F, T, decltype(r)::value, Fine>(group, block, b, x, x_stride, sums); },
             std::make_integer_sequence<int, F::runs>{});
}

HP_INLINE void put(const Output& out, int64_t token, const Floats& sum) {
    float* to = out.to + token * out.stride;
    if (!out.bias && !out.add) return store(to, sum, out.rows);
    float all[GROUP];
    store(all, sum, GROUP);
    for (int i = 0; i < out.rows; ++i) {
        const float result = out.bias ? all[i] + out.bias[i] : all[i];
        to[i] = out.add ? to[i] + result : result;
    }
}

template <class F, int T>
void quantized_tile(const uint8_t* group, int64_t blocks, const Activations* x, int64_t token, const Output& out) {
    Floats sums[T];
    for (int t = 0; t < T; ++t) sums[t] = zero_floats();
    for (int64_t b = 0; b < blocks; ++b) {
        int32_t refined = 0;
        for (int t = 0; t < T; ++t) refined |= x[t * blocks + b].refined;
        if (refined) add_block<F, T, true>(group, b, x + b, blocks, sums);
        else add_block<F, T, false>(group, b, x + b, blocks, sums);
    }
    for (int t = 0; t < T; ++t) put(out, token + t, sums[t]);
}

// Whole tiles of tokens, then smaller and smaller ones.
template <int T, class Tile>
void in_tiles(int64_t tokens, int64_t from, Tile tile) {
    for (; from + T <= tokens; from += T) tile(std::integral_constant<int, T>{}, from);
    if constexpr (T > 1) in_tiles<T / 2>(tokens, from, tile);
}

void quantized(int32_t type, const uint8_t* group, int64_t blocks, const Activations* x, int64_t tokens,
               const Output& out) {
    with_format(type, [&](auto format) {
        in_tiles<TOKEN_TILE>(tokens, 0, [&](auto tile, int64_t t) {
            quantized_tile<decltype(format), decltype(tile)::value>(group, blocks, x + t * blocks, t, out);
        });
    });
}

template <int32_t TYPE>
HP_INLINE Floats numbers_at(const uint8_t* p) {
    if constexpr (TYPE == F32) return load_floats(reinterpret_cast<const float*>(p));
    else if constexpr (TYPE == F16) return load_halves(p);
    else return load_bfloats(p);
}

template <int32_t TYPE, int T>
void floating_tile(const uint8_t* group, int64_t columns, const float* x, int64_t x_stride, int64_t token,
                   const Output& out) {
    Floats sums[T];
    for (int t = 0; t < T; ++t) sums[t] = zero_floats();
    constexpr int step = GROUP * (TYPE == F32 ? 4 : 2);
    for (int64_t k = 0; k < columns; ++k) {
        const Floats weights = numbers_at<TYPE>(group + k * step);
        for (int t = 0; t < T; ++t) sums[t] = plus_product(sums[t], weights, broadcast(x[t * x_stride + k]));
    }
    for (int t = 0; t < T; ++t) put(out, token + t, sums[t]);
}

void floating(int32_t type, const uint8_t* group, int64_t columns, const float* x, int64_t x_stride, int64_t tokens,
              const Output& out) {
    in_tiles<TOKEN_TILE>(tokens, 0, [&](auto tile, int64_t t) {
        const auto run = [&](auto kind) {
            floating_tile<decltype(kind)::value, decltype(tile)::value>(group, columns, x + t * x_stride,
                                                                                     x_stride, t, out);
        };
        if (type == F32) run(std::integral_constant<int32_t, F32>{});
        else if (type == F16) run(std::integral_constant<int32_t, F16>{});
        else run(std::integral_constant<int32_t, BF16>{});
    });
}

// Round to the nearest, ties to even: adding this leaves the integer in the lowest bits.
constexpr float ROUNDER = 12582912.0f;
constexpr int32_t ROUNDER_BITS = 0x4B400000;
constexpr uint32_t INFINITE = 0x7f800000;
constexpr float SMALLEST_SCALE = 0x1p-118f;

// Blocks whose largest number is more than this many times the token's root mean square are refined: eight bits
// lose too much of the others there.
constexpr float REFINE_FROM = 1.5f;

HP_INLINE int32_t rounded(float x) {
    const float moved = x + ROUNDER;
    int32_t bits;
    std::memcpy(&bits, &moved, 4);
    return bits - ROUNDER_BITS;
}

// The largest of 32 numbers without their signs, as bits: these order as the numbers do, and infinities and NaN
// come last.
HP_INLINE uint32_t largest(const float* x) {
    uint32_t most = 0;
    for (int i = 0; i < BLOCK; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

// A block with the same scale for all its numbers. `refine`: keep what rounding takes off as fine codes.
void quantize_block(const float* x, float scale, bool refine, Activations& out) {
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t coarse[2] = {0, 0}, fine[2] = {0, 0};
    for (int half = 0; half < 2; ++half) {
        for (int i = 16 * half; i < 16 * half + 16; ++i) {
            const float steps = inverse == 0.0f ? 0.0f : x[i] * inverse;
            const int32_t code = rounded(steps);
            int32_t rest = refine ? rounded((steps - static_cast<float>(code)) * 256.0f) : 0;
            rest = rest > 127 ? 127 : rest < -127 ? -127 : rest;
            out.codes[i] = static_cast<int8_t>(code);
            out.fine[i] = static_cast<int8_t>(rest);
            coarse[half] += code;
            fine[half] += rest;
        }
    }
    out.scale = scale / 256.0f;
    out.refined = refine;
    out.sum = coarse[0] + coarse[1];
    out.fine_sum = fine[0] + fine[1];
    for (int half = 0; half < 2; ++half) {
        out.half_sums[half] = coarse[half];
        out.fine_half_sums[half] = fine[half];
        out.half_totals[half] = out.scale * static_cast<float>(256 * coarse[half] + fine[half]);
    }
    out.total = out.scale * static_cast<float>(256 * out.sum + out.fine_sum);
}

// Mean square of a token's numbers.
float mean_square(const float* x, int64_t columns) {
    float lanes[16] = {};
    for (int64_t i = 0; i < columns; i += 16)
        for (int lane = 0; lane < 16; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
    float sum = 0.0f;
    for (const float lane : lanes) sum += lane;
    return sum / static_cast<float>(columns);
}

void quantize(const float* x, int64_t blocks, Activations* out) {
    const float limit = REFINE_FROM * REFINE_FROM * mean_square(x, blocks * BLOCK);
    for (int64_t b = 0; b < blocks; ++b) {
        const uint32_t most = largest(x + b * BLOCK);
        const float magnitude = float_of_bits(most);
        float scale = magnitude / 127.0f;
        // What is not finite makes the token's results NaN; what has no normal number as its scale is zero.
        if (most >= INFINITE) scale = float_of_bits(0x7fc00000);
        else if (scale < SMALLEST_SCALE) scale = 0.0f;
        quantize_block(x + b * BLOCK, scale, magnitude * magnitude > limit, out[b]);
    }
}

}  // namespace
