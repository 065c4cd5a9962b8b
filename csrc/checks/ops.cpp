// Norms, rotary embeddings, activation functions.

#include "check.h"

namespace check {

namespace {

constexpr int64_t TOKENS = 7, APART = 2;
// Sizes around sixteen lanes, and one with several of them.
constexpr int64_t SIZES[] = {1, 15, 16, 17, 64, 100};

std::string named(const std::string& where, const char* what, int64_t size) {
    return where + ": " + what + " of " + std::to_string(size);
}

// Rows without what is between them.
Floats rows_of(const Floats& all, int64_t stride, int64_t size) {
    Floats out;
    for (int64_t t = 0; t < TOKENS; ++t) out.insert(out.end(), &all[t * stride], &all[t * stride] + size);
    return out;
}

void check_rms_norm(const std::string& isa, int64_t size, bool with_residual, bool with_weight) {
    const std::string where = named(isa, with_residual ? "sum and norm" : "norm", size);
    const Floats x = normals(TOKENS * (size + APART), 3.0f), weight = normals(size);
    Floats residual = normals(TOKENS * (size + APART)), out(TOKENS * (size + APART));
    const HpNorm norm{with_weight ? weight.data() : nullptr, 1.0f, 1e-5f, size};
    Doubles expected, sums;
    for (int64_t t = 0; t < TOKENS; ++t) {
        double square = 0;
        for (int64_t i = 0; i < size; ++i) {
            const int64_t at = t * (size + APART) + i;
            // A sum is rounded, to be read again by who comes later.
            sums.push_back(with_residual ? x[at] + residual[at] : x[at]);
            square += sums.back() * sums.back();
        }
        for (int64_t i = 0; i < size; ++i)
            expected.push_back(sums[t * size + i] / std::sqrt(square / static_cast<double>(size) + 1e-5) *
                               (with_weight ? weight[i] + 1.0 : 1.0));
    }
    hp_rms_norm(&norm, x.data(), size + APART, with_residual ? residual.data() : nullptr, size + APART, out.data(),
                size + APART, TOKENS);
    compare(where, rows_of(out, size + APART, size), expected, 2e-6);
    if (with_residual) compare(where, rows_of(residual, size + APART, size), sums, 0.0);
}

void check_layer_norm(const std::string& isa, int64_t size, bool with_weight) {
    const Floats x = normals(TOKENS * (size + APART), 3.0f), weight = normals(size), bias = normals(size);
    Floats out(TOKENS * (size + APART));
    const HpNorm norm{with_weight ? weight.data() : nullptr, 0.0f, 1e-3f, size};
    Doubles expected;
    for (int64_t t = 0; t < TOKENS; ++t) {
        const float* row = &x[t * (size + APART)];
        double mean = 0, square = 0;
        for (int64_t i = 0; i < size; ++i) mean += row[i] / static_cast<double>(size);
        for (int64_t i = 0; i < size; ++i) square += (row[i] - mean) * (row[i] - mean) / static_cast<double>(size);
        for (int64_t i = 0; i < size; ++i) {
            const double number = (row[i] - mean) / std::sqrt(square + 1e-3);
            expected.push_back(with_weight ? number * weight[i] + bias[i] : number);
        }
    }
    hp_layer_norm(&norm, with_weight ? bias.data() : nullptr, x.data(), size + APART, out.data(), size + APART, TOKENS);
    compare(named(isa, "layer norm", size), rows_of(out, size + APART, size), expected, 4e-6);
}

void check_rotary(const std::string& isa, int32_t head_size, int32_t rotary_dim, bool neox) {
    constexpr int64_t POSITIONS = 20, HEADS = 3, KEY_HEADS = 2;
    const int64_t half = rotary_dim / 2;
    Floats table(POSITIONS * rotary_dim);
    for (int64_t p = 0; p < POSITIONS; ++p) {
        for (int64_t i = 0; i < half; ++i) {
            const double angle = static_cast<double>(p) * std::pow(100.0, -static_cast<double>(i) / static_cast<double>(half));
            table[p * rotary_dim + i] = static_cast<float>(std::cos(angle));
            table[p * rotary_dim + half + i] = static_cast<float>(std::sin(angle));
        }
    }
    const HpRotary rotary{table.data(), rotary_dim, head_size, neox};
    const int64_t positions[TOKENS] = {0, 19, 3, 3, 7, 1, 12};
    Floats q = normals(TOKENS * HEADS * head_size), k = normals(TOKENS * KEY_HEADS * head_size);
    const auto turned = [&](const Floats& heads, int64_t count) {
        Doubles out(heads.begin(), heads.end());
        for (int64_t t = 0; t < TOKENS; ++t) {
            const float *cosines = &table[positions[t] * rotary_dim], *sines = cosines + half;
            for (int64_t h = 0; h < count; ++h) {
                for (int64_t i = 0; i < half; ++i) {
                    const int64_t at = (t * count + h) * head_size;
                    const int64_t first = at + (neox ? i : 2 * i), second = at + (neox ? i + half : 2 * i + 1);
                    const double one = heads[first], two = heads[second];
                    out[first] = one * cosines[i] - two * sines[i];
                    out[second] = two * cosines[i] + one * sines[i];
                }
            }
        }
        return out;
    };
    const Doubles queries = turned(q, HEADS), keys = turned(k, KEY_HEADS);
    const Floats before = k;
    hp_rotate(&rotary, positions, q.data(), HEADS * head_size, HEADS, nullptr, 0, 0, TOKENS);
    compare(named(isa, "turned queries", head_size), q, queries, 1e-6);
    same(named(isa, "keys that are not given", head_size), k, before);
    hp_rotate(&rotary, positions, q.data(), HEADS * head_size, 0, k.data(), KEY_HEADS * head_size, KEY_HEADS, TOKENS);
    compare(named(isa, "turned keys", head_size), k, keys, 1e-6);
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }

double activated(int kind, double gate, double factor) {
    switch (kind) {
        case 0: return silu(gate) * factor;
        case 1: return 0.5 * gate * (1.0 + std::erf(gate / std::sqrt(2.0))) * factor;
        case 2: return 0.5 * gate * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (gate + 0.044715 * gate * gate * gate))) * factor;
        default: return gate * silu(factor);
    }
}

void check_activations(const std::string& isa, int64_t size) {
    for (int kind = 0; kind < 4; ++kind) {
        Floats x = normals(TOKENS * (2 * size + APART), 4.0f), out(TOKENS * (size + APART));
        const float extremes[] = {0.0f, -0.0f, 90.0f, -90.0f, 1e-30f, -1e-40f, 1e10f, -1e10f, NOT_A_NUMBER};
        int64_t next = 0;
        for (int64_t i = 0; i < size && i < 9; ++i) x[2 * (2 * size + APART) + (kind == 3 ? size : 0) + i] = extremes[next++];
        Doubles expected, tolerance;
        for (int64_t t = 0; t < TOKENS; ++t) {
            for (int64_t i = 0; i < size; ++i) {
                const double gate = x[t * (2 * size + APART) + i], factor = x[t * (2 * size + APART) + size + i];
                expected.push_back(activated(kind, gate, factor));
                // Where a function is nearly zero, what is left of 1 - 1 has an error of its own.
                tolerance.push_back(std::isnan(gate * factor) ? 0.0 : 5e-7 * std::fabs(gate * factor) + 1e-37);
            }
        }
        hp_activate(kind, x.data(), 2 * size + APART, size, out.data(), size + APART, TOKENS);
        compare(named(isa, ("activation " + std::to_string(kind)).c_str(), size), rows_of(out, size + APART, size),
                expected, tolerance);
    }
}

// Rows with NaN stay alone with it.
void check_faulty(const std::string& isa) {
    constexpr int64_t SIZE = 20;
    Floats x = normals(TOKENS * SIZE), clean(TOKENS * SIZE), found(TOKENS * SIZE);
    const HpNorm norm{nullptr, 0.0f, 1e-5f, SIZE};
    const auto run = [&](Floats& out, bool layer) {
        if (layer) hp_layer_norm(&norm, nullptr, x.data(), SIZE, out.data(), SIZE, TOKENS);
        else hp_rms_norm(&norm, x.data(), SIZE, nullptr, 0, out.data(), SIZE, TOKENS);
    };
    for (const bool layer : {false, true}) {
        x[3 * SIZE + 17] = 1.0f;
        run(clean, layer);
        x[3 * SIZE + 17] = NOT_A_NUMBER;
        run(found, layer);
        for (int64_t i = 0; i < TOKENS * SIZE; ++i)
            if (i / SIZE == 3 ? !std::isnan(found[i]) : found[i] != clean[i])
                return report(isa, "a NaN reaches another token, or nobody");
    }
}

}  // namespace

void check_ops(const std::string& isa) {
    for (const int threads : {1, 3}) {
        hp_set_threads(threads, nullptr);
        for (const int64_t size : SIZES) {
            for (const bool with_weight : {false, true}) {
                check_rms_norm(isa, size, false, with_weight);
                check_rms_norm(isa, size, true, with_weight);
                check_layer_norm(isa, size, with_weight);
            }
            check_activations(isa, size);
        }
        for (const bool neox : {false, true}) {
            check_rotary(isa, 64, 64, neox);
            check_rotary(isa, 40, 24, neox);
            check_rotary(isa, 6, 2, neox);
        }
        check_faulty(isa);
    }
}

}  // namespace check
