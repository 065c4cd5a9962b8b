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

// Scales and, where there are any, minima of one run of a block.
template <class F, int R>
HP_INLINE void scales_of(const uint8_t* group, const uint8_t* block, int64_t b, Floats& scale, Floats& minimum) {
    const uint8_t* scales = block + F::code_bytes;
    if constexpr (F::is_panel) {
        scale = load_floats(reinterpret_cast<const float*>(scales) + GROUP * R);
        if constexpr (F::minima) minimum = load_floats(reinterpret_cast<const float*>(scales + F::scale_bytes) + GROUP * R);
    } else if constexpr (F::is_k) {
        const uint8_t* header = group + F::header_at(b);
        scale = times(load_halves(header), load_small(scales + GROUP * R));
        // K-quants' minima are to be taken off.
        if constexpr (F::minima)
            minimum = minus_product(zero_floats(), load_halves(header + 2 * GROUP),
                                    load_small(scales + F::scale_bytes + GROUP * R));
    } else {
        scale = load_halves(scales);
        if constexpr (F::minima) minimum = load_halves(scales + F::scale_bytes);
    }
}

// One run of a block for T tokens.
template <class F, int T, int R>
HP_INLINE void add_run(const uint8_t* group, const uint8_t* block, int64_t b, const Rounded* (&x)[T],
                       Floats (&sums)[T]) {
    constexpr int quads = F::run / 4;
    Dots<F> dots[T];
    for (int t = 0; t < T; ++t) dots[t].start(F::runs == 1 ? &x[t]->minus_sum : &x[t]->minus_half_sums[R]);
    unrolled([&](auto q) {
        constexpr int quad = R * quads + decltype(q)::value;
        const Bytes codes = quad_of<F, quad>(block);
        for (int t = 0; t < T; ++t) dots[t].template add<quad>(codes, x[t]->codes);
    }, std::make_integer_sequence<int, quads>{});
    Floats scale, minimum;
    scales_of<F, R>(group, block, b, scale, minimum);
    for (int t = 0; t < T; ++t) {
        sums[t] = plus_product(sums[t], dots[t].floats(), times(scale, broadcast(x[t]->scale)));
        if constexpr (F::minima)
            sums[t] = plus_product(sums[t], minimum, broadcast(F::runs == 1 ? x[t]->total : x[t]->half_totals[R]));
    }
}

HP_INLINE void put(const Output& out, int64_t token, Floats sum) {
    float* to = out.to + token * out.stride;
    if (out.rows == GROUP) {
        if (out.bias) sum = plus(sum, load_floats(out.bias));
        if (out.add) sum = plus(load_floats(to), sum);
        return store(to, sum, GROUP);
    }
    float all[GROUP];
    store(all, sum, GROUP);
    for (int i = 0; i < out.rows; ++i) {
        const float result = out.bias ? all[i] + out.bias[i] : all[i];
        to[i] = out.add ? to[i] + result : result;
    }
}

// With fewer tokens than this, blocks follow each other so quickly that the processor itself asks for the next ones;
// asking once more then costs time. Bytes ahead of what is computed with, some 0.3 us.
constexpr int ASK_FROM = 4, ASK_AHEAD = 2048;

// T tokens from `token` on. Each sum is over the blocks in order: it does not depend on the other tokens.
template <class F, int T>
void quantized_tile(const uint8_t* group, int64_t blocks, const Rounded* x, int64_t token, const Output& out) {
    const Rounded* at[T];
    Floats sums[T];
    for (int t = 0; t < T; ++t) {
        at[t] = x + (token + t) * blocks;
        sums[t] = zero_floats();
    }
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = group + F::block_at(b);
        if constexpr (!F::is_panel && T >= ASK_FROM) {
            for (int i = 0; i < F::block_bytes; i += 64) __builtin_prefetch(block + ASK_AHEAD + i);
        }
        unrolled([&](auto r) { add_run<F, T, decltype(r)::value>(group, block, b, at, sums); },
                 std::make_integer_sequence<int, F::runs>{});
        for (int t = 0; t < T; ++t) ++at[t];
    }
    for (int t = 0; t < T; ++t) put(out, token + t, sums[t]);
}

// Call `body` with the number of tokens as a constant; it is 1 to T.
template <int T, class Body>
HP_INLINE void with_tokens(int64_t tokens, Body body) {
    if constexpr (T > 1) {
        if (tokens < T) return with_tokens<T - 1>(tokens, body);
    }
    body(std::integral_constant<int, T>{});
}

// Tiles of at most TOKEN_TILE tokens, as even as can be.
template <class Body>
HP_INLINE void in_tiles(int64_t tokens, Body body) {
    const int64_t tiles = (tokens + TOKEN_TILE - 1) / TOKEN_TILE;
    for (int64_t i = 0, token = 0; i < tiles; ++i) {
        const int64_t count = tokens / tiles + (i < tokens % tiles);
        with_tokens<TOKEN_TILE>(count, [&](auto tile) { body(tile, token); });
        token += count;
    }
}

template <class F, class P>
void unpack(const uint8_t* group, int64_t blocks, uint8_t* panel) {
    for (int64_t b = 0; b < blocks; ++b) {
        const uint8_t* block = group + F::block_at(b);
        uint8_t* to = panel + P::block_at(b);
        unrolled([&](auto q) { store_bytes(to + 64 * decltype(q)::value, quad_of<F, decltype(q)::value>(block)); },
                 std::make_integer_sequence<int, BLOCK / 4>{});
        unrolled([&](auto r) {
            constexpr int run = decltype(r)::value;
            Floats scale, minimum;
            scales_of<F, run>(group, block, b, scale, minimum);
            float* scales = reinterpret_cast<float*>(to + P::code_bytes) + GROUP * run;
            store(scales, scale, GROUP);
            if constexpr (F::minima) store(scales + P::scale_bytes / 4, minimum, GROUP);
        }, std::make_integer_sequence<int, F::runs>{});
    }
}

void quantized(int32_t type, const uint8_t* group, int64_t blocks, const Rounded* x, int64_t tokens, void* panel,
               const Output& out) {
    with_format(type, [&](auto format) {
        using F = decltype(format);
        if constexpr (PANEL_FROM<F> > 0) {
            if (tokens >= PANEL_FROM<F>) {
                using P = Expanded<F::run, F::zero, F::minima>;
                auto* unpacked = static_cast<uint8_t*>(panel);
                unpack<F, P>(group, blocks, unpacked);
                return in_tiles(tokens, [&](auto tile, int64_t t) {
                    quantized_tile<P, decltype(tile)::value>(unpacked, blocks, x, t, out);
                });
            }
        }
        in_tiles(tokens, [&](auto tile, int64_t t) { quantized_tile<F, decltype(tile)::value>(group, blocks, x, t, out); });
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
    in_tiles(tokens, [&](auto tile, int64_t t) {
        const auto run = [&](auto kind) {
            floating_tile<decltype(kind)::value, decltype(tile)::value>(group, columns, x + t * x_stride,
                                                                                     x_stride, t, out);
        };
        if (type == F32) run(std::integral_constant<int32_t, F32>{});
        else if (type == F16) run(std::integral_constant<int32_t, F16>{});
        else run(std::integral_constant<int32_t, BF16>{});
    });
}

// Up to sixteen lanes' worth of a row, filled up with zeros.
template <int32_t TYPE>
HP_INLINE Floats last_numbers(const uint8_t* p, int64_t count) {
    constexpr int bytes = TYPE == F32 ? 4 : 2;
    alignas(64) uint8_t all[GROUP * bytes] = {};
    std::memcpy(all, p, count * bytes);
    return numbers_at<TYPE>(all);
}

// R rows for T tokens, both from one place on. Lane i adds up columns i, i + 16, ...; then the lanes are added up.
// In which tile a row and a token are computed makes no difference.
template <int32_t TYPE, int R, int T>
void plain_tile(const uint8_t* rows, int64_t columns, const float* x, int64_t x_stride, int64_t token, int row,
                const Output& out) {
    constexpr int bytes = TYPE == F32 ? 4 : 2;
    Floats sums[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) sums[r][t] = zero_floats();
    const auto add = [&](const Floats (&weights)[R], const auto& number) {
        for (int t = 0; t < T; ++t) {
            const Floats values = number(t);
            for (int r = 0; r < R; ++r) sums[r][t] = plus_product(sums[r][t], weights[r], values);
        }
    };
    const int64_t whole = columns / GROUP * GROUP;
    Floats weights[R];
    for (int64_t k = 0; k < whole; k += GROUP) {
        for (int r = 0; r < R; ++r) weights[r] = numbers_at<TYPE>(rows + (r * columns + k) * bytes);
        add(weights, [&](int t) { return load_floats(x + t * x_stride + k); });
    }
    if (const int64_t rest = columns - whole) {
        for (int r = 0; r < R; ++r) weights[r] = last_numbers<TYPE>(rows + (r * columns + whole) * bytes, rest);
        add(weights, [&](int t) {
            return last_numbers<F32>(reinterpret_cast<const uint8_t*>(x + t * x_stride + whole), rest);
        });
    }
    for (int t = 0; t < T; ++t) {
        float* to = out.to + (token + t) * out.stride + row;
        for (int r = 0; r < R; ++r) {
            const float sum = sum_lanes(sums[r][t]), result = out.bias ? sum + out.bias[row + r] : sum;
            to[r] = out.add ? to[r] + result : result;
        }
    }
}

template <int32_t TYPE>
void plain_rows(const uint8_t* rows, int64_t columns, const float* x, int64_t x_stride, int64_t tokens,
                const Output& out) {
    const int64_t row_bytes = columns * (TYPE == F32 ? 4 : 2), tiles = (tokens + PLAIN_TOKENS - 1) / PLAIN_TOKENS;
    for (int64_t i = 0, token = 0; i < tiles; ++i) {
        const int64_t count = tokens / tiles + (i < tokens % tiles);
        with_tokens<PLAIN_TOKENS>(count, [&](auto tile) {
            constexpr int T = decltype(tile)::value;
            const float* from = x + token * x_stride;
            int row = 0;
            for (; row + PLAIN_ROWS <= out.rows; row += PLAIN_ROWS)
                plain_tile<TYPE, PLAIN_ROWS, T>(rows + row * row_bytes, columns, from, x_stride, token, row, out);
            for (; row < out.rows; ++row)
                plain_tile<TYPE, 1, T>(rows + row * row_bytes, columns, from, x_stride, token, row, out);
        });
        token += count;
    }
}

void plain(int32_t type, const uint8_t* rows, int64_t columns, const float* x, int64_t x_stride, int64_t tokens,
           const Output& out) {
    if (type == F32) plain_rows<F32>(rows, columns, x, x_stride, tokens, out);
    else if (type == F16) plain_rows<F16>(rows, columns, x, x_stride, tokens, out);
    else plain_rows<BF16>(rows, columns, x, x_stride, tokens, out);
}

constexpr uint32_t INFINITE = 0x7f800000;
constexpr float SMALLEST_SCALE = 0x1p-118f;

// A block with the same scale for all its numbers.
HP_INLINE void quantize_block(const float* x, float scale, Rounded& out) {
    int32_t halves[2];
    round_block(x, scale > 0.0f ? 1.0f / scale : 0.0f, out.codes, halves);
    out.scale = scale;
    out.minus_sum = -(halves[0] + halves[1]);
    out.total = scale * static_cast<float>(halves[0] + halves[1]);
    for (int half = 0; half < 2; ++half) {
        out.minus_half_sums[half] = -halves[half];
        out.half_totals[half] = scale * static_cast<float>(halves[half]);
    }
}

void quantize(const float* x, int64_t blocks, Rounded* out) {
    for (int64_t b = 0; b < blocks; ++b) {
        const uint32_t most = largest(x + b * BLOCK);
        float scale = float_of_bits(most) / LARGEST_CODE;
        // What is not finite makes the token's results NaN; what has no normal number as its scale is zero.
        if (most >= INFINITE) scale = float_of_bits(0x7fc00000);
        else if (scale < SMALLEST_SCALE) scale = 0.0f;
        quantize_block(x + b * BLOCK, scale, out[b]);
    }
}

}  // namespace
