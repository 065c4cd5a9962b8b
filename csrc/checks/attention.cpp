// Attention over a paged cache: every way of storing, of hiding keys and of cutting requests up.

#include <algorithm>

#include "check.h"

namespace check {

namespace {

struct Shape {
    const char* name;
    int32_t heads, kv_heads, size, block, store, window, causal;
    float cap;
    bool slopes, sinks;
};

enum { F32, F16, BF16, INT8 };

constexpr Shape SHAPES[] = {
    {"plain", 2, 2, 16, 16, F32, 0, 1, 0, false, false},
    {"float16, grouped", 6, 2, 64, 16, F16, 0, 1, 0, false, false},
    {"bfloat16, odd sizes", 3, 1, 20, 7, BF16, 0, 1, 0, false, false},
    {"int8, odd sizes", 4, 2, 36, 5, INT8, 0, 1, 0, false, false},
    {"int8, grouped", 9, 3, 64, 32, INT8, 0, 1, 0, false, false},
    {"window", 2, 1, 16, 16, F32, 37, 1, 0, false, false},
    {"window of one span, float16", 2, 1, 16, 16, F16, 128, 1, 0, false, false},
    {"soft cap", 2, 1, 16, 16, F32, 0, 1, 2.5f, false, false},
    {"slopes, int8", 4, 2, 16, 16, INT8, 0, 1, 0, true, false},
    {"sinks", 4, 2, 16, 16, F32, 0, 1, 0, false, true},
    {"everything", 6, 2, 24, 8, BF16, 50, 1, 5.0f, true, true},
    {"not causal", 2, 2, 16, 16, F32, 0, 0, 0, false, false},
    {"one element, one token a block", 1, 1, 1, 1, F32, 0, 1, 0, false, false},
};

// A request: what its tokens ask, are and say, of which the last `fresh` are computed.
struct Request {
    int64_t length, fresh;
    Floats q, k, v;
};

Request request(const Shape& shape, int64_t length, int64_t fresh) {
    const int64_t kv = shape.kv_heads * shape.size;
    return {length, fresh, normals(length * shape.heads * shape.size, 2.0f), normals(length * kv), normals(length * kv)};
}

// A layer with a cache of its own, in which no two blocks of a request stand side by side.
class Layer {
public:
    Layer(const Shape& shape, const std::vector<const Request*>& of) : shape_(shape), requests_(of) {
        for (const Request* one : of) widest_ = std::max(widest_, (one->length + shape.block - 1) / shape.block);
        const auto blocks = static_cast<int64_t>(of.size()) * widest_;
        const int64_t number_bytes = shape.store == F32 ? 4 : shape.store == INT8 ? 1 : 2;
        const int64_t section = shape.block * (shape.size * number_bytes + (shape.store == INT8 ? 4 : 0));
        // Bytes nobody wrote are NaN in all types of numbers that have one.
        memory_.assign(blocks * 2 * shape.kv_heads * section, 0xff);
        for (int64_t i = 0; i < blocks; ++i) table_.push_back(static_cast<int32_t>(blocks - 1 - i));
        for (int32_t head = 0; head < shape.heads; ++head) {
            slopes_.push_back(std::ldexp(1.0f, -head));
            sinks_.push_back(0.5f * static_cast<float>(head) - 1.0f);
        }
        facts_ = {shape.heads, shape.kv_heads, shape.size, shape.block, shape.store, shape.window, shape.causal, 0,
                  1.0f / std::sqrt(static_cast<float>(shape.size)), shape.cap, shape.slopes ? slopes_.data() : nullptr,
                  shape.sinks ? sinks_.data() : nullptr, memory_.data(), 2 * shape.kv_heads * section};
    }

    // The tokens `from` to `to` of each request, [request][token][heads * size].
    Floats run(const std::vector<int64_t>& from, const std::vector<int64_t>& to) { return run(facts_, from, to); }

    // Write what comes before a request's fresh tokens; with a window of one nobody waits for its attention.
    void fill() {
        HpAttention quick = facts_;
        quick.window = quick.causal = 1;
        std::vector<int64_t> from(requests_.size()), to;
        for (const Request* one : requests_) to.push_back(one->length - one->fresh);
        run(quick, from, to);
    }

    // What the fresh tokens should get, in double precision over the numbers as they are stored.
    Doubles expected() const {
        Doubles out;
        for (const Request* one : requests_) {
            const Doubles k = stored(one->k), v = stored(one->v);
            for (int64_t t = one->length - one->fresh; t < one->length; ++t)
                for (int32_t head = 0; head < shape_.heads; ++head) attend(*one, k, v, t, head, out);
        }
        return out;
    }

private:
    Floats run(const HpAttention& layer, const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
        const int64_t width = shape_.heads * shape_.size, kv = shape_.kv_heads * shape_.size;
        std::vector<int32_t> starts{0}, lengths;
        std::vector<int64_t> slots;
        Floats q, k, v;
        for (size_t i = 0; i < requests_.size(); ++i) {
            const Request& one = *requests_[i];
            for (int64_t t = from[i]; t < to[i]; ++t)
                slots.push_back(table_[i * widest_ + t / shape_.block] * shape_.block + t % shape_.block);
            const auto add = [&](Floats& all, const Floats& mine, int64_t size) {
                all.insert(all.end(), mine.begin() + from[i] * size, mine.begin() + to[i] * size);
            };
            add(q, one.q, width), add(k, one.k, kv), add(v, one.v, kv);
            starts.push_back(starts.back() + static_cast<int32_t>(to[i] - from[i]));
            lengths.push_back(static_cast<int32_t>(to[i]));
        }
        Floats out(slots.size() * width);
        const HpBatch batch{static_cast<int64_t>(requests_.size()), starts.data(), lengths.data(), table_.data(),
                            widest_, slots.data()};
        hp_attention(&layer, &batch, q.data(), width, k.data(), kv, v.data(), kv, out.data(), width);
        return out;
    }

    Doubles stored(const Floats& numbers) const {
        Doubles out(numbers.begin(), numbers.end());
        for (size_t head = 0; head < out.size(); head += shape_.size) {
            float most = 0.0f;
            for (int32_t d = 0; d < shape_.size; ++d) most = std::max(most, std::fabs(numbers[head + d]));
            const float factor = most / 127.0f;
            for (double* x = &out[head]; x < &out[head] + shape_.size; ++x) {
                if (shape_.store == F16) *x = to_half(*x);
                if (shape_.store == BF16) *x = to_bfloat(*x);
                if (shape_.store == INT8) *x = std::nearbyint(static_cast<float>(*x) / factor) * static_cast<double>(factor);
            }
        }
        return out;
    }

    void attend(const Request& one, const Doubles& k, const Doubles& v, int64_t t, int32_t head, Doubles& out) const {
        const int64_t size = shape_.size, shared = head / (shape_.heads / shape_.kv_heads);
        const int64_t last = shape_.causal ? t : one.length - 1;
        const int64_t first = shape_.causal && shape_.window ? std::max<int64_t>(0, t - shape_.window + 1) : 0;
        Doubles scores;
        double most = shape_.sinks ? sinks_[head] : -INFINITE, total = 0.0;
        for (int64_t key = first; key <= last; ++key) {
            double score = 0.0;
            for (int64_t d = 0; d < size; ++d)
                score += one.q[(t * shape_.heads + head) * size + d] * k[(key * shape_.kv_heads + shared) * size + d];
            score *= facts_.scale;
            if (shape_.cap != 0.0f) score = shape_.cap * std::tanh(score / shape_.cap);
            if (shape_.slopes) score -= slopes_[head] * static_cast<double>(t - key);
            scores.push_back(score);
            most = std::fmax(most, score);
        }
        if (shape_.sinks) total += std::exp(sinks_[head] - most);
        Doubles sums(size);
        for (int64_t key = first; key <= last; ++key) {
            const double weight = std::exp(scores[key - first] - most);
            total += weight;
            for (int64_t d = 0; d < size; ++d) sums[d] += weight * v[(key * shape_.kv_heads + shared) * size + d];
        }
        for (const double sum : sums) out.push_back(sum / total);
    }

    Shape shape_;
    std::vector<const Request*> requests_;
    int64_t widest_ = 1;
    std::vector<uint8_t> memory_;
    std::vector<int32_t> table_;
    Floats slopes_, sinks_;
    HpAttention facts_;
};

// All requests at once, then each alone, whole and in chunks.
void check_shape(const std::string& where, const Shape& shape, const std::vector<Request>& requests) {
    std::vector<const Request*> all;
    std::vector<int64_t> from, to;
    for (const Request& one : requests) {
        all.push_back(&one);
        from.push_back(one.length - one.fresh);
        to.push_back(one.length);
    }
    hp_set_threads(3, nullptr);
    Layer layer(shape, all);
    layer.fill();
    const Floats together = layer.run(from, to);
    compare(where, together, layer.expected(), 4e-6);
    hp_set_threads(1, nullptr);
    int64_t row = 0;
    const int64_t width = shape.heads * shape.size;
    for (size_t i = 0; i < all.size(); ++i) {
        for (const int64_t chunk : {all[i]->length, int64_t{9}}) {
            // Who does not hide later keys has to see all at once.
            if (chunk == 9 && (!shape.causal || all[i]->fresh <= chunk)) continue;
            Layer alone(shape, {all[i]});
            alone.fill();
            Floats found;
            for (int64_t t = from[i]; t < to[i]; t += chunk) {
                const Floats part = alone.run({t}, {std::min(to[i], t + chunk)});
                found.insert(found.end(), part.begin(), part.end());
            }
            if (!bits_equal(found.data(), &together[row * width], found.size()))
                return report(where, "depends on company, chunks or threads");
        }
        row += all[i]->fresh;
    }
}

// One long request, for whose keys threads share the work.
void check_split(const std::string& where, const Shape& shape, int64_t length) {
    check_shape(where + ", long", shape, {request(shape, length, 2), request(shape, 3, 1)});
}

// A token's NaN reaches who sees it and nobody else; the largest numbers overflow nothing.
void check_extremes(const std::string& isa) {
    for (const int32_t store : {F32, F16, BF16, INT8}) {
        Shape shape{"extremes", 2, 1, 16, 16, store, 8, 1, 0, false, false};
        const std::string where = isa + ", extremes " + std::to_string(store);
        std::vector<Request> both{request(shape, 40, 40), request(shape, 20, 20)};
        for (float& x : both[1].q) x *= 1e3f;
        for (float& x : both[1].k) x *= 30.0f;
        check_shape(where, shape, both);
        for (const float bad : {NOT_A_NUMBER, INFINITE}) {
            both[0].k[20 * 16 + 3] = both[0].v[20 * 16 + 5] = bad;
            Layer layer(shape, {&both[0], &both[1]});
            const Floats found = layer.run({0, 0}, {40, 20});
            for (size_t i = 0; i < found.size(); ++i) {
                const auto row = static_cast<int64_t>(i / 32);
                const bool sees = row >= 20 && row < 28;
                if (!sees && !std::isfinite(found[i])) return report(where, "what is not finite reaches others");
                if (sees && i % 16 == 5 && std::isfinite(found[i])) return report(where, "what is not finite is lost");
            }
        }
    }
}

}  // namespace

void check_attention(const std::string& isa) {
    for (const Shape& shape : SHAPES) {
        std::vector<Request> requests;
        // Decoding and prompts, with lengths at the edges of blocks and of what is summed together.
        for (const auto& [length, fresh] : std::vector<std::pair<int64_t, int64_t>>{
                 {1, 1}, {shape.block, 1}, {shape.block + 1, 1}, {128, 1}, {129, 2}, {290, 1}, {21, 21}, {139, 13}}) {
            const bool whole = !shape.causal;
            requests.push_back(request(shape, length, whole ? std::min<int64_t>(length, 40) : fresh));
            if (whole) requests.back().length = requests.back().fresh;
        }
        check_shape(isa + ", " + shape.name, shape, requests);
    }
    for (const int store : {F32, INT8})
        check_split(isa + ", store " + std::to_string(store), {"", 8, 2, 64, 16, store, 0, 1, 0, false, false}, 1100);
    check_split(isa + ", window", {"", 8, 2, 64, 16, F16, 950, 1, 0, false, true}, 1100);
    check_extremes(isa);
}

}  // namespace check
