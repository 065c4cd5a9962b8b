// Choosing a token from a row of logits, over whatever lanes_*.h was included before. Nothing is sorted whole.

namespace {

using namespace hardpoint;

// A candidate as a number that orders by weight, then by the lower token: both in one comparison.
inline uint64_t candidate(float weight, int64_t token) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return static_cast<uint64_t>(bits) << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
inline float weight_of(uint64_t one) { return float_of_bits(static_cast<uint32_t>(one >> 32)); }
inline int64_t token_of(uint64_t one) { return 0xffffffffu - static_cast<uint32_t>(one); }

// SplitMix64 used as what it is, a mixed counter (worker/sampling/randomness.py has the same).
inline uint64_t mixed(uint64_t stream, uint64_t counter) {
    uint64_t word = stream + (counter + 1) * 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}
inline double uniform(uint64_t word) { return (static_cast<double>(word >> 11) + 0.5) * 0x1p-53; }

// Each token runs with an exponentially distributed time of its own, scaled by its weight; the first wins.
// -log(u) is at least 1 - u, which is nearly exact where it matters: most tokens are out without a logarithm.
struct Race {
    uint64_t stream;
    double best = -1.0;
    int64_t winner = 0;

    void run(double weight, int64_t token, double u) {
        if (weight <= best * (1.0 - u)) return;
        const double speed = weight / -__builtin_log(u);
        if (speed > best) {
            best = speed;
            winner = token;
        }
    }
};

int64_t race_all(const float* weights, int64_t vocab, uint64_t stream) {
    Race race{stream};
    constexpr int RUN = 64;
    for (int64_t first = 0; first < vocab; first += RUN) {
        const int count = static_cast<int>(std::min<int64_t>(RUN, vocab - first));
        double uniforms[RUN];
        for (int i = 0; i < RUN; ++i) uniforms[i] = uniform(mixed(stream, static_cast<uint64_t>(first + i)));
        for (int i = 0; i < count; ++i) race.run(weights[first + i], first + i, uniforms[i]);
    }
    return race.winner;
}

int64_t race_some(const uint64_t* kept, int64_t count, uint64_t stream) {
    Race race{stream};
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = token_of(kept[i]);
        race.run(weight_of(kept[i]), token, uniform(mixed(stream, static_cast<uint64_t>(token))));
    }
    return race.winner;
}

// Weights of at least `least`, summed in runs of 256.
constexpr int64_t MASS_RUN = 256;
double mass_of(const float* weights, int64_t first, int64_t size, float least) {
    Lanes sum = splat(0.0f);
    in_sixteens(size, [&](int64_t i, int n) {
        sum = plus(sum, kept_if(load_some(weights + first + i, n), splat(least)));
    });
    return sum_of(sum);
}
double mass_of_all(const float* weights, int64_t vocab, float least) {
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; i += MASS_RUN)
        sum += mass_of(weights, i, std::min(MASS_RUN, vocab - i), least);
    return sum;
}

// By the inverse of the cumulated weights.
int64_t draw_all(const float* weights, int64_t vocab, double number) {
    double rest = number * mass_of_all(weights, vocab, 0.0f);
    int64_t last = 0;
    for (int64_t i = 0; i < vocab; i += MASS_RUN) {
        const int64_t size = std::min(MASS_RUN, vocab - i);
        const double mass = mass_of(weights, i, size, 0.0f);
        if (rest >= mass) {
            rest -= mass;
            continue;
        }
        for (int64_t t = i; t < i + size; ++t) {
            if (weights[t] <= 0.0f) continue;
            last = t;
            if (rest < weights[t]) return t;
            rest -= weights[t];
        }
        return last;
    }
    // Rounding led past the end: the last token that can be drawn.
    for (int64_t t = vocab; t-- > 0;)
        if (weights[t] > 0.0f) return t;
    return 0;
}

int64_t draw_some(const uint64_t* kept, int64_t count, double number) {
    double total = 0.0;
    for (int64_t i = 0; i < count; ++i) total += weight_of(kept[i]);
    double rest = number * total;
    for (int64_t i = 0; i < count; ++i) {
        if (rest < weight_of(kept[i])) return token_of(kept[i]);
        rest -= weight_of(kept[i]);
    }
    return token_of(kept[0]);
}

int64_t collect(const float* weights, int64_t vocab, float least, uint64_t* out) {
    int64_t count = 0;
    const Lanes bound = splat(least);
    in_sixteens(vocab, [&](int64_t i, int n) {
        const Lanes w = joined(load_some(weights + i, n), n, splat(-1.0f));
        for (uint32_t bits = at_least(w, bound); bits; bits &= bits - 1) {
            const int64_t token = i + __builtin_ctz(bits);
            if (weights[token] > 0.0f) out[count++] = candidate(weights[token], token);
        }
    });
    return count;
}

double mass_of_some(const uint64_t* from, const uint64_t* to) {
    double sum = 0.0;
    for (; from < to; ++from) sum += weight_of(*from);
    return sum;
}

// How many of the heaviest candidates it takes to reach `wanted`; they are moved to the front.
int64_t nucleus(uint64_t* some, int64_t count, double wanted) {
    int64_t from = 0, to = count;
    constexpr int64_t FEW = 64;
    while (to - from > FEW) {
        const int64_t middle = from + (to - from) / 4;
        std::nth_element(some + from, some + middle, some + to, std::greater<>());
        const double mass = mass_of_some(some + from, some + middle);
        if (mass >= wanted) {
            to = middle;
        } else {
            wanted -= mass;
            from = middle;
        }
    }
    std::sort(some + from, some + to, std::greater<>());
    for (; from < to && (wanted > 0.0 || from == 0); ++from) wanted -= weight_of(some[from]);
    return std::max<int64_t>(from, std::min<int64_t>(1, count));
}

// What min_p, top_k and top_p leave, in this order.
int64_t filtered(const HpDraw& how, const float* weights, int64_t vocab, uint64_t* some) {
    const bool by_count = how.top_k < vocab, by_mass = how.top_p < 1.0f;
    const double mass = by_mass && !by_count ? mass_of_all(weights, vocab, how.min_p) : 0.0;
    constexpr float BOUNDS[] = {0x1p-6f, 0x1p-12f, 0x1p-20f, 0.0f};
    int64_t count = 0;
    for (const float bound : BOUNDS) {
        const float least = std::max(bound, how.min_p);
        count = collect(weights, vocab, least, some);
        if (least == how.min_p || least == 0.0f) break;
        if (by_count ? count >= how.top_k : by_mass && mass_of_some(some, some + count) >= how.top_p * mass) break;
    }
    if (by_count && count > how.top_k) {
        std::nth_element(some, some + how.top_k, some + count, std::greater<>());
        count = how.top_k;
    }
    if (!by_mass) return count;
    return nucleus(some, count, how.top_p * (by_count ? mass_of_some(some, some + count) : mass));
}

// The largest logit; NaN where there is one.
float largest_logit(const float* logits, int64_t vocab) {
    Lanes most = splat(-__builtin_inff());
    bool faulty = false;
    in_sixteens(vocab, [&](int64_t i, int n) {
        const Lanes x = n == 16 ? load(logits + i) : joined(load_part(logits + i, n), n, splat(-__builtin_inff()));
        faulty |= any_nan(x);
        most = larger(most, x);
    });
    return faulty ? __builtin_nanf("") : largest_of(most);
}

// log(sum(e^x)) over a row.
float log_sum(const float* logits, int64_t vocab) {
    const float most = largest_logit(logits, vocab);
    // Nothing but -infinity, an infinite logit or a NaN.
    if (!(most - most == 0.0f)) return most;
    double total = 0.0;
    for (int64_t first = 0; first < vocab; first += MASS_RUN) {
        Lanes sum = splat(0.0f);
        in_sixteens(std::min(MASS_RUN, vocab - first), [&](int64_t i, int n) {
            const Lanes grown = exponential(minus(load_some(logits + first + i, n), splat(most)));
            sum = plus(sum, joined(grown, n, splat(0.0f)));
        });
        total += sum_of(sum);
    }
    return static_cast<float>(static_cast<double>(most) + __builtin_log(total));
}

int64_t first_at(const float* logits, int64_t vocab, float value) {
    for (int64_t i = 0; i < vocab; i += 16) {
        const int n = static_cast<int>(std::min<int64_t>(16, vocab - i));
        const uint32_t bits = at_least(load_some(logits + i, n), splat(value)) & ((1u << n) - 1);
        if (bits) return i + __builtin_ctz(bits);
    }
    return 0;
}

int64_t draw(const HpDraw& how, const float* logits, int64_t vocab, float* weights, uint64_t* some) {
    const float most = largest_logit(logits, vocab);
    if (most != most) return DRAW_NAN;
    if (most == -__builtin_inff()) return DRAW_NOTHING;
    if (how.greedy) return first_at(logits, vocab, most);
    const Lanes top = splat(most), by = splat(1.0f / how.temperature);
    // An infinite logit says "this one": the others have no weight.
    const bool chosen = most == __builtin_inff();
    in_sixteens(vocab, [&](int64_t i, int n) {
        const Lanes x = load_some(logits + i, n);
        if (!chosen) return store_some(weights + i, exponential(times(minus(x, top), by)), n);
        for (int lane = 0; lane < n; ++lane) weights[i + lane] = logits[i + lane] == most ? 1.0f : 0.0f;
    });
    if (how.top_k >= vocab && how.top_p >= 1.0f && how.min_p <= 0.0f)
        return how.seeded ? race_all(weights, vocab, how.stream) : draw_all(weights, vocab, how.number);
    const int64_t count = filtered(how, weights, vocab, some);
    return how.seeded ? race_some(some, count, how.stream) : draw_some(some, count, how.number);
}

}  // namespace
