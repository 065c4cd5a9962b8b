// A small model as one program: the same to the bit as its operations called one by one, which other checks hold.

#include "check.h"

namespace check {

namespace {

constexpr int64_t VOCAB = 50, HIDDEN = 64, INNER = 96, BLOCK = 8, MOST_BLOCKS = 8, KV_HEADS = 2;
constexpr int32_t HEADS = 4, HEAD = 16;
constexpr int64_t QKV = (HEADS + 2 * KV_HEADS) * HEAD;

// Which kinds of weights, and what stands between the layers.
struct Style {
    const char *name, *weights;
    bool layer_norm, head_norms, rotary;
};
constexpr Style STYLES[] = {
    {"quantised", "Q4_1", false, false, true}, {"quantised, norms of heads", "Q8_0", false, true, true},
    {"plain", "F32", true, false, true}, {"without positions", "F16", false, false, false},
};

// A matrix as a layer.
struct Linear {
    Weights weights;
    HpLinear layer;
    Linear(const Style& style, int64_t rows, int64_t columns)
        : weights(std::string(style.weights) == "F32" ? plain(kind("F32"), rows, columns)
                                                      : packed(kind(style.weights), rows, columns)),
          layer{columns, 1, &weights.matrix} {}
    Linear(const Linear&) = delete;
};

class Model {
public:
    Model(const Style& style, int64_t panel)
        : style_(style), embeddings_(style, VOCAB, HIDDEN), qkv_(style, QKV, HIDDEN), o_(style, HIDDEN, HEADS * HEAD),
          up_(style, 2 * INNER, HIDDEN), down_(style, HIDDEN, INNER), head_(style, VOCAB, HIDDEN), panel_(panel) {}

    // Over buffers of one panel, or of as many tokens as are computed one operation at a time.
    std::vector<HpOp> operations(int64_t tokens) {
        x_.assign(tokens * HIDDEN, 0), y_ = residual_ = x_;
        qkv_out_.assign(tokens * QKV, 0), up_out_.assign(tokens * 2 * INNER, 0), inner_.assign(tokens * INNER, 0);
        std::vector<HpOp> all;
        HpOp embed{};
        embed.kind = EMBED, embed.what = &embeddings_.layer, embed.out = x_.data(), embed.out_stride = HIDDEN, embed.factor = 1.5f;
        all.push_back(embed);
        all.push_back(op(SCALE, nullptr, x_, HIDDEN, residual_, HIDDEN, HIDDEN, 1.0f));
        normed(all, x_, false);
        all.push_back(op(LINEAR, &qkv_.layer, y_, HIDDEN, qkv_out_, QKV, 0));
        all.back().bias = bias_.data();
        if (style_.head_norms) {
            all.push_back(op(NORM, &head_norm_, qkv_out_, QKV, qkv_out_, QKV, 0));
            all.back().number = HEADS + KV_HEADS;
        }
        float* keys = qkv_out_.data() + HEADS * HEAD;
        if (style_.rotary) {
            all.push_back(op(ROTATE, &rotary_, qkv_out_, QKV, x_, 0, KV_HEADS));
            all.back().number = HEADS, all.back().second = keys, all.back().second_stride = QKV, all.back().out = nullptr;
        }
        all.push_back(op(ATTEND, &attention_, qkv_out_, QKV, y_, HIDDEN, 0));
        all.back().second = keys, all.back().third = keys + KV_HEADS * HEAD;
        all.back().second_stride = all.back().third_stride = QKV;
        all.push_back(op(LINEAR, &o_.layer, y_, HIDDEN, x_, HIDDEN, 0));
        normed(all, x_, true);
        all.push_back(op(LINEAR, &up_.layer, y_, HIDDEN, up_out_, 2 * INNER, 0));
        all.push_back(op(ACTIVATE, nullptr, up_out_, 2 * INNER, inner_, INNER, INNER));
        all.push_back(op(LINEAR, &down_.layer, inner_, INNER, x_, HIDDEN, 0));
        all.push_back(op(ADD, nullptr, residual_, HIDDEN, residual_, HIDDEN, HIDDEN, 0.5f));
        all.back().second = x_.data(), all.back().second_stride = HIDDEN;
        all.push_back(op(LINEAR, &head_.layer, residual_, HIDDEN, residual_, VOCAB, 0));
        all.back().out = nullptr;
        return all;
    }

    // Tokens `from` to `to` of two requests that have the same ids, the second three tokens later.
    Floats run(int64_t from, int64_t to, bool as_program) {
        const Step at(*this, from, to);
        const std::vector<HpOp> all = operations(as_program ? panel_ : at.tokens);
        Floats out(at.tokens * VOCAB);
        const HpProgram program{all.data(), static_cast<int64_t>(all.size()), panel_};
        const HpStep step{at.tokens, at.ids.data(), at.positions.data(), &at.batch, out.data(), VOCAB};
        if (!as_program) one_by_one(all, step);
        else if (hp_run(&program, &step)) report(style_.name, "is refused");
        return out;
    }

    // Ids that are no tokens are refused before anything is computed.
    void check_ids() {
        const std::vector<HpOp> all = operations(panel_);
        Step at(*this, 0, 2);
        Floats out(at.tokens * VOCAB, 5.0f);
        const HpProgram program{all.data(), static_cast<int64_t>(all.size()), panel_};
        for (const int32_t id : {-1, static_cast<int32_t>(VOCAB)}) {
            at.ids.back() = id;
            const HpStep step{at.tokens, at.ids.data(), at.positions.data(), &at.batch, out.data(), VOCAB};
            if (hp_run(&program, &step) != -1 || out[0] != 5.0f) report(style_.name, "takes an id that is no token");
        }
    }

    void forget() { cache_.assign(cache_.size(), 0xff); }

private:
    struct Step {
        std::vector<int32_t> ids, starts{0}, lengths, blocks;
        std::vector<int64_t> positions, slots;
        int64_t tokens;
        HpBatch batch;
        Step(const Model&, int64_t from, int64_t to) {
            for (int64_t request = 0; request < 2; ++request) {
                for (int64_t i = 0; i < MOST_BLOCKS; ++i) blocks.push_back(static_cast<int32_t>(2 * i + request));
                for (int64_t t = from; t < to; ++t) {
                    ids.push_back(static_cast<int32_t>((t * 13 + request * 5) % VOCAB));
                    positions.push_back(t);
                    slots.push_back(blocks[request * MOST_BLOCKS + t / BLOCK] * BLOCK + t % BLOCK);
                }
                starts.push_back(static_cast<int32_t>(ids.size()));
                lengths.push_back(static_cast<int32_t>(to));
            }
            tokens = static_cast<int64_t>(ids.size());
            batch = {2, starts.data(), lengths.data(), blocks.data(), MOST_BLOCKS, slots.data()};
        }
        Step(const Step&) = delete;
    };

    static HpOp op(int32_t kind, const void* what, Floats& in, int64_t in_stride, Floats& out, int64_t out_stride,
                   int64_t size, float factor = 1.0f) {
        HpOp made{};
        made.kind = kind, made.what = what, made.in = in.data(), made.in_stride = in_stride;
        made.out = out.data(), made.out_stride = out_stride, made.size = size, made.factor = factor;
        return made;
    }

    // A norm into y; with the residual, which it takes in, or without.
    void normed(std::vector<HpOp>& all, Floats& from, bool with_residual) {
        all.push_back(op(style_.layer_norm ? LAYER_NORM : NORM, &norm_, from, HIDDEN, y_, HIDDEN, 0));
        if (with_residual && !style_.layer_norm) all.back().second = residual_.data(), all.back().second_stride = HIDDEN;
        if (style_.layer_norm) all.back().bias = weight_.data();
    }

    void one_by_one(const std::vector<HpOp>& all, const HpStep& step) {
        const int64_t n = step.tokens;
        for (const HpOp& of : all) {
            float* out = of.out ? of.out : step.out;
            const int64_t stride = of.out ? of.out_stride : step.out_stride;
            switch (of.kind) {
                case EMBED: {
                    const std::vector<int64_t> ids(step.ids, step.ids + n);
                    hp_lookup(&embeddings_.weights.matrix, HIDDEN, ids.data(), n, out);
                    for (float& x : x_) x *= of.factor;
                    break;
                }
                case LINEAR:
                    hp_linear(static_cast<const HpLinear*>(of.what), of.in, of.in_stride, n, out, stride, of.bias);
                    break;
                case NORM:
                    for (int32_t head = 0; head < std::max(1, of.number); ++head)
                        hp_rms_norm(static_cast<const HpNorm*>(of.what), of.in + head * HEAD, of.in_stride, of.second,
                                    of.second_stride, out + head * HEAD, stride, n);
                    break;
                case LAYER_NORM:
                    hp_layer_norm(&norm_, of.bias, of.in, of.in_stride, out, stride, n);
                    break;
                case ROTATE:
                    hp_rotate(&rotary_, step.positions, of.in, of.in_stride, HEADS, of.second, of.second_stride, KV_HEADS, n);
                    break;
                case ATTEND:
                    hp_attention(&attention_, step.batches, of.in, of.in_stride, of.second, of.second_stride, of.third,
                                 of.third_stride, out, stride);
                    break;
                case ACTIVATE: hp_activate(of.number, of.in, of.in_stride, of.size, out, stride, n); break;
                default:
                    for (int64_t i = 0; i < n * of.size; ++i)
                        out[i] = of.second ? of.in[i] + of.second[i] * of.factor : of.in[i] * of.factor;
            }
        }
    }

    Style style_;
    Linear embeddings_, qkv_, o_, up_, down_, head_;
    Floats weight_ = normals(HIDDEN), bias_ = normals(QKV), table_ = normals(BLOCK * MOST_BLOCKS * HEAD);
    Floats x_, y_, residual_, qkv_out_, up_out_, inner_;
    HpNorm norm_{weight_.data(), 0.0f, 1e-5f, HIDDEN}, head_norm_{nullptr, 0.0f, 1e-5f, HEAD};
    HpRotary rotary_{table_.data(), HEAD, HEAD, 1};
    // float16, [blocks][kv_heads][keys and values]
    std::vector<uint8_t> cache_ = std::vector<uint8_t>(2 * MOST_BLOCKS * KV_HEADS * 2 * BLOCK * HEAD * 2, 0xff);
    HpAttention attention_{HEADS, KV_HEADS, HEAD, BLOCK, 1, 0, 1, 0, 0.25f, 0.0f, nullptr, nullptr, cache_.data(),
                           KV_HEADS * 2 * BLOCK * HEAD * 2};
    int64_t panel_;
};

}  // namespace

void check_program(const std::string& isa) {
    constexpr int64_t LENGTH = 27;
    for (const Style& style : STYLES) {
        const std::string where = isa + ", " + style.name;
        for (const int64_t panel : {2 * LENGTH, int64_t{5}}) {
            Model model(style, panel);
            hp_set_threads(1, nullptr);
            const Floats expected = model.run(0, LENGTH, false);
            for (const float x : expected)
                if (!std::isfinite(x)) return report(where, "not finite");
            for (const int threads : {1, 3}) {
                hp_set_threads(threads, nullptr);
                model.forget();
                same(where, model.run(0, LENGTH, true), expected);
                // A prompt but for its last token, then this one alone.
                model.forget();
                model.run(0, LENGTH - 1, true);
                const Floats last = model.run(LENGTH - 1, LENGTH, true);
                for (int64_t request = 0; request < 2; ++request)
                    if (!bits_equal(&last[request * VOCAB], &expected[(request * LENGTH + LENGTH - 1) * VOCAB], VOCAB))
                        report(where, "decoding differs from a prompt");
            }
            model.check_ids();
        }
    }
}

}  // namespace check
