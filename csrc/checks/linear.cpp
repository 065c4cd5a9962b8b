// Linear layers: packed weights of every type and plain ones.

#include <algorithm>

#include "../halves.h"
#include "check.h"

namespace check {

namespace {

// Where inputs and outputs stand apart from each other, what is between them stays as it is.
constexpr int64_t APART = 3;
constexpr float UNTOUCHED = 77.0f;

// A layer's input and what should come out of it.
struct Case {
    const Weights* weights;
    int64_t columns;
    const Floats* x;     // [tokens][columns + APART]
    const float* bias;

    int64_t rows() const { return weights->matrix.rows; }
    int64_t tokens() const { return static_cast<int64_t>(x->size() + APART) / (columns + APART); }

    Floats run(int64_t first, int64_t count, const HpLinear& layer) const {
        Floats out(count * (rows() + APART) - APART, UNTOUCHED);
        const int64_t stride = columns + APART;
        hp_linear(&layer, x->data() + first * stride, stride, count, out.data(), rows() + APART, bias);
        return out;
    }

    void expected(bool rounded, Doubles& numbers, Doubles& tolerance) const {
        const Doubles& w = weights->numbers;
        for (int64_t t = 0; t < tokens(); ++t) {
            for (int64_t r = 0; r < rows() + APART; ++r) {
                if (r >= rows()) {
                    if (t + 1 < tokens()) numbers.push_back(UNTOUCHED), tolerance.push_back(0.0);
                    continue;
                }
                double sum = bias ? bias[r] : 0.0, room = 1e-6 * std::fabs(sum), size = 0.0;
                for (int64_t first = 0; first < columns; first += 32) {
                    double most = 0.0, weight = 0.0, heaviest = 0.0;
                    for (int64_t k = first; k < std::min(columns, first + 32); ++k) {
                        const double number = (*x)[t * (columns + APART) + k], by = w[r * columns + k];
                        sum += number * by;
                        size += std::fabs(number * by);
                        weight += std::fabs(by);
                        heaviest = std::max(heaviest, std::fabs(by));
                        most = std::max(most, std::fabs(number));
                    }
                    // Half a step of 16 bits for each activation; scales and minima are float32.
                    room += most * (weight / 64000 + 64 * heaviest * 5e-7);
                }
                numbers.push_back(sum);
                tolerance.push_back(rounded ? room : size * 1e-7 * static_cast<double>(columns + 8));
            }
        }
    }
};

Floats spread(int64_t tokens, int64_t columns) {
    Floats x = normals(tokens * (columns + APART) - APART);
    // Some that are far larger than their neighbours, and blocks of zeros and of small numbers.
    for (size_t i = 5; i < x.size(); i += 97) x[i] *= 300.0f;
    for (int64_t k = 0; k < columns; ++k) {
        if (tokens > 1) x[columns + APART + k] = 0.0f;
        if (tokens > 2) x[2 * (columns + APART) + k] *= k % 64 < 32 ? 1e-20f : 1e15f;
    }
    return x;
}

void check_shape(const std::string& where, const Weights& weights, int64_t columns, bool rounded, bool with_bias) {
    const int64_t most = 70;  // more than are computed with before other weights are read
    const Floats x = spread(most, columns), bias = normals(weights.matrix.rows);
    const Case all{&weights, columns, &x, with_bias ? bias.data() : nullptr};
    const HpLinear layer{columns, 1, &weights.matrix};
    hp_set_threads(3, nullptr);
    const Floats together = all.run(0, most, layer);
    Doubles expected, tolerance;
    all.expected(rounded, expected, tolerance);
    compare(where, together, expected, tolerance);
    const int64_t stride = weights.matrix.rows + APART;
    for (const int threads : {1, 3}) {
        hp_set_threads(threads, nullptr);
        for (int64_t first = 0, count = 1; first + count <= most; first += count, count += count < 5 ? 1 : 4) {
            const Floats found = all.run(first, count, layer);
            if (!bits_equal(found.data(), together.data() + first * stride, found.size()))
                return report(where, "depends on the batch");
        }
    }
}

// A token with NaN or an infinity, and the others as if it were not there.
void check_faulty(const std::string& where, const Weights& weights, int64_t columns, bool rounded) {
    const HpLinear layer{columns, 1, &weights.matrix};
    const int64_t rows = weights.matrix.rows;
    Floats x = normals(5 * columns), clean(5 * rows), found(5 * rows);
    hp_linear(&layer, x.data(), columns, 5, clean.data(), rows, nullptr);
    x[columns] = NOT_A_NUMBER;
    x[3 * columns + columns - 1] = INFINITE;
    hp_linear(&layer, x.data(), columns, 5, found.data(), rows, nullptr);
    for (int64_t t = 0; t < 5; ++t) {
        for (int64_t r = 0; r < rows; ++r) {
            const float is = found[t * rows + r];
            const bool right = t == 1 || (t == 3 && (rounded || weights.numbers[r * columns + columns - 1] == 0.0)) ? std::isnan(is)
                               : t == 3 ? std::isinf(is)
                                        : is == clean[t * rows + r];
            if (!right) return report(where, "a number that is not finite reaches another token, or nobody");
        }
    }
}

// Several matrices side by side, of several types.
void check_joined(const std::string& where, const std::vector<const char*>& names) {
    constexpr int64_t columns = 256, tokens = 9;
    const Floats x = normals(tokens * columns);
    std::vector<Weights> all;
    std::vector<HpMatrix> matrices;
    int64_t rows = 0;
    for (const char* name : names) {
        all.push_back(packed(kind(name), 19 + 16 * static_cast<int64_t>(all.size()), columns));
        matrices.push_back(all.back().matrix);
        rows += matrices.back().rows;
    }
    const HpLinear layer{columns, static_cast<int64_t>(matrices.size()), matrices.data()};
    Floats found(tokens * rows), expected(tokens * rows);
    hp_linear(&layer, x.data(), columns, tokens, found.data(), rows, nullptr);
    int64_t row = 0;
    for (const HpMatrix& matrix : matrices) {
        const HpLinear one{columns, 1, &matrix};
        hp_linear(&one, x.data(), columns, tokens, expected.data() + row, rows, nullptr);
        row += matrix.rows;
    }
    same(where + " side by side", found, expected);
}

// The processor's own products of bfloat16 numbers.
void check_bfloats(const std::string& where, int64_t rows, int64_t columns) {
    const Weights weights = plain(kind("BF16"), rows, columns), bias = plain(kind("BF16"), 1, rows);
    const auto numbers = [](const Weights& of) { return reinterpret_cast<const uint16_t*>(of.bytes.data()); };
    constexpr int64_t most = 150;
    const Weights input = plain(kind("BF16"), 1, most * (columns + APART) - APART);
    const auto run = [&](int64_t first, int64_t count) {
        std::vector<uint16_t> out(count * (rows + APART) - APART, 7);
        if (hp_bfloat_linear(numbers(weights), rows, columns, numbers(input) + first * (columns + APART), columns + APART,
                             count, out.data(), rows + APART, rows > 6 ? numbers(bias) : nullptr))
            report(where, "is refused");
        return out;
    };
    hp_set_threads(3, nullptr);
    const std::vector<uint16_t> together = run(0, most);
    Floats found;
    Doubles expected, tolerance;
    for (int64_t t = 0; t < most; ++t) {
        for (int64_t r = 0; r < rows; ++r) {
            double sum = rows > 6 ? bias.numbers[r] : 0.0, size = std::fabs(sum);
            for (int64_t k = 0; k < columns; ++k) {
                const double product = input.numbers[t * (columns + APART) + k] * weights.numbers[r * columns + k];
                sum += product;
                size += std::fabs(product);
            }
            found.push_back(float_of_bfloat(together[t * (rows + APART) + r]));
            expected.push_back(sum);
            tolerance.push_back(std::fabs(sum) / 256 + size * 1e-7 * static_cast<double>(columns + 8));
        }
        for (int64_t i = rows; i < rows + APART && t + 1 < most; ++i)
            if (together[t * (rows + APART) + i] != 7) return report(where, "writes between the rows");
    }
    compare(where, found, expected, tolerance);
    for (const int threads : {1, 3}) {
        hp_set_threads(threads, nullptr);
        for (int64_t first = 0, count = 1; first + count <= most; first += count, count += count < 9 ? 1 : 30) {
            const std::vector<uint16_t> alone = run(first, count);
            if (!std::equal(alone.begin(), alone.end(), together.begin() + first * (rows + APART)))
                return report(where, "depends on the batch");
        }
    }
}

}  // namespace

void check_linear(const std::string& isa) {
    for (const Kind& of : kinds()) {
        const int64_t whole = of.columns == 256 ? 256 : 32;
        const bool rounded = of.columns > 1;
        for (const auto& [rows, columns] : {std::pair{int64_t{1}, whole}, std::pair{int64_t{35}, 2 * whole}}) {
            const std::string where = isa + " " + of.name + " " + std::to_string(rows) + " x " + std::to_string(columns);
            const Weights weights = packed(of, rows, columns);
            check_shape(where, weights, columns, rounded, rows > 1);
            check_faulty(where, weights, columns, rounded);
        }
    }
    check_joined(isa, {"Q4_1", "Q6_K", "Q8_0"});
    check_joined(isa, {"F32", "Q4_K"});
}

void check_plain(const std::string& isa) {
    for (const char* name : {"F32", "F16", "BF16"}) {
        for (const auto& [rows, columns] : {std::pair{1, 1}, {35, 77}, {17, 64}, {6, 15}}) {
            const std::string where = isa + " " + name + " " + std::to_string(rows) + " x " + std::to_string(columns);
            const Weights weights = plain(kind(name), rows, columns);
            check_shape(where, weights, columns, false, rows > 6);
            check_faulty(where, weights, columns, false);
            if (hp_bfloat_products() && std::string(name) == "BF16") check_bfloats(where + ", products", rows, columns);
        }
    }
    uint16_t none = 0;
    if (!hp_bfloat_products() && hp_bfloat_linear(&none, 1, 1, &none, 1, 1, &none, 1, nullptr) != -1)
        report(isa, "takes bfloat16 numbers it has no products of");
}

}  // namespace check
