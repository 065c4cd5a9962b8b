// Choosing tokens, and the logarithms of sums.

#include <algorithm>

#include "check.h"

namespace check {

namespace {

struct Way {
    const char* name;
    int64_t top_k;  // 0: off
    float temperature, top_p, min_p;
};

constexpr Way WAYS[] = {
    {"plain", 0, 1.0f, 1.0f, 0.0f},      {"warm", 0, 3.0f, 1.0f, 0.0f},      {"one", 1, 1.0f, 1.0f, 0.0f},
    {"five", 5, 0.7f, 1.0f, 0.0f},       {"half", 0, 1.0f, 0.5f, 0.0f},      {"most", 0, 2.0f, 0.95f, 0.0f},
    {"five of most", 5, 1.0f, 0.8f, 0.0f}, {"likely", 0, 1.0f, 1.0f, 0.05f}, {"all", 40, 1.5f, 0.9f, 0.01f},
};

HpDraw how(const Way& way, int64_t vocab) {
    return {0.0, 0, way.top_k ? std::min(way.top_k, vocab) : vocab, way.temperature, way.top_p, way.min_p, 0, 0, 0};
}

int64_t drawn(HpDraw with, const Floats& logits) {
    int64_t token = -9;
    const auto size = static_cast<int64_t>(logits.size());
    hp_draw(&with, logits.data(), size, size, 1, &token);
    return token;
}

// Each token's weight beside the best one's, as float32 rounds them, 0 for those that are left out.
Doubles kept(const Way& way, const Floats& logits) {
    const double most = *std::max_element(logits.begin(), logits.end());
    std::vector<std::pair<double, int64_t>> order;
    for (size_t i = 0; i < logits.size(); ++i)
        order.emplace_back(-std::exp((logits[i] - most) / way.temperature), static_cast<int64_t>(i));
    std::sort(order.begin(), order.end());
    std::erase_if(order, [&](const auto& one) { return -one.first < way.min_p || one.first == 0.0; });
    if (way.top_k && static_cast<int64_t>(order.size()) > way.top_k) order.resize(way.top_k);
    double total = 0.0, sum = 0.0;
    for (const auto& one : order) total -= one.first;
    Doubles out(logits.size());
    for (const auto& [weight, token] : order) {
        if (sum >= way.top_p * total && way.top_p < 1.0f) break;
        sum -= weight;
        out[token] = -weight;
    }
    return out;
}

// Numbers all over [0, 1): each token is drawn as often as it weighs.
void check_shares(const std::string& where, const Way& way, const Floats& logits) {
    const Doubles weights = kept(way, logits);
    double total = 0.0;
    for (const double weight : weights) total += weight;
    constexpr int DRAWS = 1000;
    std::vector<int> count(logits.size());
    HpDraw with = how(way, static_cast<int64_t>(logits.size()));
    for (int i = 0; i < DRAWS; ++i) {
        with.number = (i + 0.5) / DRAWS;
        const int64_t token = drawn(with, logits);
        if (token < 0 || token >= static_cast<int64_t>(logits.size())) return report(where, "no token is drawn");
        ++count[token];
    }
    for (size_t i = 0; i < logits.size(); ++i) {
        if (weights[i] == 0.0 && count[i]) return report(where, "a token is drawn that was left out");
        if (std::fabs(count[i] - DRAWS * weights[i] / total) > 1.01) return report(where, "a token is drawn too often");
    }
}

uint64_t mixed(uint64_t stream, uint64_t counter) {
    uint64_t word = stream + (counter + 1) * 0x9E3779B97F4A7C15u;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
}

// With a seed every token runs with a time of its own; the first wins.
void check_race(const std::string& where, const Way& way, const Floats& logits) {
    const Doubles weights = kept(way, logits);
    HpDraw with = how(way, static_cast<int64_t>(logits.size()));
    with.seeded = 1;
    for (uint64_t stream = 1; stream < 40; ++stream) {
        with.stream = stream * 0x12345;
        double best = -1.0, second = -1.0;
        int64_t winner = 0;
        for (size_t i = 0; i < logits.size(); ++i) {
            const double u = (static_cast<double>(mixed(with.stream, i) >> 11) + 0.5) * 0x1p-53;
            const double speed = weights[i] / -std::log(u);
            if (speed > best) second = best, best = speed, winner = static_cast<int64_t>(i);
            else second = std::max(second, speed);
        }
        if (drawn(with, logits) != winner && second < best * 0.99999) return report(where, "another token wins");
    }
}

void check_rows(const std::string& isa, int64_t vocab) {
    const std::string where = isa + " of " + std::to_string(vocab);
    Floats logits = normals(vocab, 2.0f);
    HpDraw greedy = how(WAYS[0], vocab);
    greedy.greedy = 1;
    const auto best = [&] { return std::max_element(logits.begin(), logits.end()) - logits.begin(); };
    if (drawn(greedy, logits) != best()) report(where, "the best token is another");
    for (const Way& way : WAYS) {
        if (way.top_k <= vocab) check_race(where + ", seeded, " + way.name, way, logits);
        if (way.top_k <= vocab) check_shares(where + ", " + way.name, way, logits);
    }
    if (vocab < 3) return;
    // Of equals the first; what is excluded is never drawn.
    logits[vocab - 1] = logits[vocab / 2] = 50.0f;
    if (drawn(greedy, logits) != best()) report(where, "of equal tokens not the first is best");
    for (int64_t i = 0; i < vocab; ++i)
        if (i != 1) logits[i] = -INFINITE;
    HpDraw any = how(WAYS[1], vocab);
    for (const double number : {0.0, 0.5, 0.9999999999999999}) {
        any.number = number;
        if (drawn(any, logits) != 1) report(where, "an excluded token is drawn");
    }
    logits = normals(vocab);
    logits[2] = INFINITE;
    if (drawn(any, logits) != 2) report(where, "an infinite logit is not drawn");
    logits[vocab - 1] = NOT_A_NUMBER;
    if (drawn(any, logits) != -1 || drawn(greedy, logits) != -1) report(where, "a NaN is not told of");
    std::fill(logits.begin(), logits.end(), -INFINITE);
    if (drawn(any, logits) != -2 || drawn(greedy, logits) != -2) report(where, "a row without tokens is not told of");
}

void check_sums(const std::string& isa, int64_t vocab) {
    constexpr int64_t ROWS = 4;
    Floats logits = normals(ROWS * vocab, 5.0f), found(ROWS);
    logits[vocab] = 3e4f;
    for (int64_t i = 0; i < vocab; ++i) logits[2 * vocab + i] = -INFINITE;
    logits[3 * vocab + vocab - 1] = NOT_A_NUMBER;
    Doubles expected;
    for (int64_t row = 0; row < ROWS; ++row) {
        const float* from = &logits[row * vocab];
        const double most = *std::max_element(from, from + vocab);
        double sum = 0.0;
        for (int64_t i = 0; i < vocab; ++i) sum += std::exp(from[i] - most);
        expected.push_back(row == 3 ? NOT_A_NUMBER : row == 2 ? -INFINITE : most + std::log(sum));
    }
    hp_log_sums(logits.data(), vocab, vocab, ROWS, found.data());
    compare(isa + ": logarithms of sums", found, expected, 1e-6);
}

// All rows at once are what each is alone.
void check_together(const std::string& isa) {
    constexpr int64_t ROWS = 9, VOCAB = 300;
    const Floats logits = normals(ROWS * VOCAB, 3.0f);
    std::vector<HpDraw> all;
    std::vector<int64_t> found(ROWS);
    for (int64_t row = 0; row < ROWS; ++row) {
        all.push_back(how(WAYS[row % std::size(WAYS)], VOCAB));
        all.back().seeded = row % 2;
        all.back().stream = static_cast<uint64_t>(row);
        all.back().number = 0.1 * static_cast<double>(row);
    }
    hp_draw(all.data(), logits.data(), VOCAB, VOCAB, ROWS, found.data());
    for (int64_t row = 0; row < ROWS; ++row)
        if (found[row] != drawn(all[row], Floats(&logits[row * VOCAB], &logits[row * VOCAB] + VOCAB)))
            report(isa, "a token depends on other rows");
}

}  // namespace

void check_draw(const std::string& isa) {
    hp_set_threads(2, nullptr);
    for (const int64_t vocab : {1, 15, 17, 300}) {
        check_rows(isa, vocab);
        check_sums(isa, vocab);
    }
    check_together(isa);
}

}  // namespace check
