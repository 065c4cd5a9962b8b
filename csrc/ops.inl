// Norms, rotary embeddings and activation functions, over whatever lanes_*.h was included before.
//
// Everything is in an unnamed namespace: code that is compiled for one instruction set must not be taken by the
// linker for another's.

namespace {

using namespace hardpoint;

// Sums and the largest of lanes, always paired alike.
inline float sum_of(const Lanes& a) {
    float at[16];
    store(at, a);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) at[i] += at[i + half];
    return at[0];
}
inline float largest_of(const Lanes& a) {
    float at[16];
    store(at, a);
    float most = at[0];
    for (int i = 1; i < 16; ++i) most = at[i] > most || at[i] != at[i] ? at[i] : most;
    return most;
}

// e^x to about one unit in the last place; 0 below -87.6, infinite from 88.4 on, NaN for NaN.
inline Lanes exponential(Lanes x) {
    x = larger(splat(-88.0f), smaller(splat(89.0f), x));
    const Lanes n = nearest(times(x, splat(1.44269504f)));
    Lanes r = fused(n, splat(-0.693359375f), x);
    r = fused(n, splat(2.12194440e-4f), r);
    Lanes p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(times(p, r), r, plus(r, splat(1.0f)));
    return scaled(p, n);
}
inline float exponential(float x) {
    float at[16];
    store(at, exponential(splat(x)));
    return at[0];
}

// 1 - 2 / (e^2x + 1)
inline Lanes hyperbolic(Lanes x) {
    const Lanes grown = exponential(plus(x, x));
    return minus(splat(1.0f), over(splat(2.0f), plus(grown, splat(1.0f))));
}

// Whole runs of sixteen, then what is left: body(offset, lanes).
template <class Body>
inline void in_sixteens(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + 16 <= size; i += 16) body(i, 16);
    if (i < size) body(i, static_cast<int>(size - i));
}
inline Lanes load_some(const float* p, int n) { return n == 16 ? load(p) : load_part(p, n); }
inline void store_some(float* p, const Lanes& a, int n) { n == 16 ? store(p, a) : store_part(p, a, n); }

void rms_norm(const HpNorm& norm, const float* x, float* residual, float* out) {
    Lanes squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    const float* of = residual ? residual : x;
    in_sixteens(norm.size, [&](int64_t i, int n) {
        Lanes v = load_some(x + i, n);
        if (residual) {
            v = plus(v, load_some(residual + i, n));
            store_some(residual + i, v, n);
        }
        Lanes& sum = squares[i / 16 % 4];
        sum = fused(v, v, sum);
    });
    const float square = sum_of(plus(plus(squares[0], squares[1]), plus(squares[2], squares[3])));
    const Lanes scale = splat(1.0f / __builtin_sqrtf(square / static_cast<float>(norm.size) + norm.eps));
    in_sixteens(norm.size, [&](int64_t i, int n) {
        Lanes v = times(load_some(of + i, n), scale);
        if (norm.weight) v = times(v, plus(load_some(norm.weight + i, n), splat(norm.added)));
        store_some(out + i, v, n);
    });
}

void layer_norm(const HpNorm& norm, const float* bias, const float* x, float* out) {
    const float count = static_cast<float>(norm.size);
    Lanes total = splat(0.0f);
    in_sixteens(norm.size, [&](int64_t i, int n) { total = plus(total, load_some(x + i, n)); });
    const Lanes mean = splat(sum_of(total) / count);
    Lanes squares = splat(0.0f);
    in_sixteens(norm.size, [&](int64_t i, int n) {
        const Lanes v = joined(minus(load_some(x + i, n), mean), n, splat(0.0f));
        squares = fused(v, v, squares);
    });
    const Lanes scale = splat(1.0f / __builtin_sqrtf(sum_of(squares) / count + norm.eps));
    in_sixteens(norm.size, [&](int64_t i, int n) {
        Lanes v = times(minus(load_some(x + i, n), mean), scale);
        if (norm.weight) v = times(v, load_some(norm.weight + i, n));
        if (bias) v = plus(v, load_some(bias + i, n));
        store_some(out + i, v, n);
    });
}

void rotate_halves(const float* cosines, const float* sines, int64_t half, float* head) {
    in_sixteens(half, [&](int64_t i, int n) {
        const Lanes one = load_some(head + i, n), two = load_some(head + half + i, n);
        const Lanes cosine = load_some(cosines + i, n), sine = load_some(sines + i, n);
        store_some(head + i, minus(times(one, cosine), times(two, sine)), n);
        store_some(head + half + i, plus(times(two, cosine), times(one, sine)), n);
    });
}

void rotate(const HpRotary& rotary, int64_t position, float* heads, int64_t count) {
    const int64_t half = rotary.rotary_dim / 2;
    const float *cosines = rotary.table + position * rotary.rotary_dim, *sines = cosines + half;
    for (int64_t h = 0; h < count; ++h) {
        float* head = heads + h * rotary.head_size;
        if (rotary.neox) {
            rotate_halves(cosines, sines, half, head);
            continue;
        }
        for (int64_t i = 0; i < half; ++i) {
            const float one = head[2 * i], two = head[2 * i + 1];
            head[2 * i] = one * cosines[i] - two * sines[i];
            head[2 * i + 1] = two * cosines[i] + one * sines[i];
        }
    }
}

inline Lanes silu(const Lanes& x) {
    return over(x, plus(splat(1.0f), exponential(minus(splat(0.0f), x))));
}
inline Lanes gelu_tanh(const Lanes& x) {
    const Lanes inner = times(splat(0.7978845608f), times(x, fused(times(x, x), splat(0.044715f), splat(1.0f))));
    return times(times(splat(0.5f), x), plus(splat(1.0f), hyperbolic(inner)));
}
inline Lanes gelu(const Lanes& x) {
    float at[16];
    store(at, x);
    for (float& v : at) v = 0.5f * v * (1.0f + __builtin_erff(v * 0.70710678f));
    return load(at);
}

void activate(int32_t kind, const float* x, int64_t size, float* out) {
    const auto run = [&](auto function, const float* gate, const float* factor) {
        in_sixteens(size, [&](int64_t i, int n) {
            store_some(out + i, times(function(load_some(gate + i, n)), load_some(factor + i, n)), n);
        });
    };
    if (kind == SILU_MUL) run([](const Lanes& v) { return silu(v); }, x, x + size);
    else if (kind == GELU_TANH_MUL) run([](const Lanes& v) { return gelu_tanh(v); }, x, x + size);
    else if (kind == GELU_MUL) run([](const Lanes& v) { return gelu(v); }, x, x + size);
    else run([](const Lanes& v) { return silu(v); }, x + size, x);
}

// out = a + factor * b, or factor * a where there is no b.
void add(const float* a, const float* b, float factor, int64_t size, float* out) {
    in_sixteens(size, [&](int64_t i, int n) {
        const Lanes one = load_some(a + i, n);
        store_some(out + i, b ? plus(one, times(load_some(b + i, n), splat(factor))) : times(one, splat(factor)), n);
    });
}

}  // namespace
