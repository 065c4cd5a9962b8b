// Whole steps, and the single operations they are made of.

#include <algorithm>
#include <memory>
#include <string_view>
#include <vector>

#include "attention.h"
#include "formats.h"
#include "linear.h"
#include "pack.h"

namespace hardpoint {

const FloatKernels& floats() {
    [[maybe_unused]] const std::string_view name = kernels().name;
#if defined(__x86_64__)
#if !defined(HARDPOINT_NO_AVX512)
    if (name == avx512_floats.name) return avx512_floats;
#endif
    if (name == avx2_floats.name) return avx2_floats;
#elif defined(__aarch64__)
    if (name == neon_floats.name) return neon_floats;
#endif
    return generic_floats;
}

namespace {

// Numbers a piece of an elementwise operation should touch at least, and a job for which sleepers are woken.
constexpr int64_t PIECE_NUMBERS = 1 << 13;
constexpr int64_t WAKE_NUMBERS = 1 << 17;

// One operation within a panel of a step: `op` with its pointers moved to the panel where they are the step's.
struct Part {
    HpOp op;
    Panels pieces;                // of the tokens
    const int32_t* ids;
    const int64_t* positions;
    uint8_t* rounded;             // where the result is rounded for the linear layers that follow, or null
    const HpRotary* rotary;       // of an ATTEND that turns its queries and keys first
    LinearJob linear;
    AttentionJob attention;
};

void embed(const Part& part, int64_t t) {
    const auto& table = *static_cast<const HpLinear*>(part.op.what);
    float* out = part.op.out + t * part.op.out_stride;
    int64_t row = part.ids[t];
    for (int64_t i = 0; i < table.count; ++i) {
        const HpMatrix& matrix = table.matrices[i];
        if (row < matrix.rows) {
            read_row(matrix, table.columns, row, out);
            break;
        }
        row -= matrix.rows;
    }
    if (part.op.factor != 1.0f) floats().add(out, nullptr, part.op.factor, table.columns, out);
}

void rotate(const HpRotary& rotary, const Part& part, int64_t t, int64_t q_heads, int64_t k_heads) {
    floats().rotate(rotary, part.positions[t], part.op.in + t * part.op.in_stride, q_heads);
    if (part.op.second)
        floats().rotate(rotary, part.positions[t], part.op.second + t * part.op.second_stride, k_heads);
}

void norm(const HpOp& op, const float* in, float* residual, float* out) {
    const auto& facts = *static_cast<const HpNorm*>(op.what);
    floats().rms_norm(facts, in, residual, out);
    for (int32_t head = 1; head < op.number; ++head)
        floats().rms_norm(facts, in + head * facts.size, nullptr, out + head * facts.size);
}

// What an operation does with one token, its linear and attention parts aside.
void one_token(const Part& part, int64_t t) {
    const HpOp& op = part.op;
    const float* in = op.in + t * op.in_stride;
    float* out = op.out ? op.out + t * op.out_stride : nullptr;
    float* second = op.second ? op.second + t * op.second_stride : nullptr;
    switch (op.kind) {
        case EMBED: return embed(part, t);
        case NORM: return norm(op, in, second, out);
        case LAYER_NORM: return floats().layer_norm(*static_cast<const HpNorm*>(op.what), op.bias, in, out);
        case ROTATE: return rotate(*static_cast<const HpRotary*>(op.what), part, t, op.number, op.size);
        case ACTIVATE: return floats().activate(op.number, in, op.size, out);
        case ADD: return floats().add(in, second, op.factor, op.size, out);
        case SCALE: return floats().add(in, nullptr, op.factor, op.size, out);
        case ATTEND:
            if (part.rotary) rotate(*part.rotary, part, t, part.attention.layer->heads, part.attention.layer->kv_heads);
            if (op.second && !part.attention.layer->shares) write_tokens(part.attention, t, t + 1);
            return;
        default: return;
    }
}

// Numbers in a token's result.
int64_t width(const HpOp& op) {
    switch (op.kind) {
        case EMBED: case LINEAR: return static_cast<const HpLinear*>(op.what)->columns;
        case NORM: case LAYER_NORM: return static_cast<const HpNorm*>(op.what)->size * std::max(1, op.number);
        case ATTEND: {
            const auto& layer = *static_cast<const HpAttention*>(op.what);
            return static_cast<int64_t>(layer.heads) * layer.head_size;
        }
        default: return op.size;
    }
}

void round_token(const Part& part, const float* x, int64_t stride, int64_t t) {
    if (part.rounded) round_tokens(x + t * stride, stride, width(part.op), t, 1, part.rounded);
}

void run_tokens(const void* context, int64_t piece, Lane&) {
    const Part& part = *static_cast<const Part*>(context);
    for (int64_t t = part.pieces.begin(piece); t < part.pieces.begin(piece + 1); ++t) {
        one_token(part, t);
        if (part.op.kind != ATTEND) round_token(part, part.op.out, part.op.out_stride, t);
    }
}

// Round what was there before, or what attention has left.
void round_piece(const void* context, int64_t piece, Lane&) {
    const Part& part = *static_cast<const Part*>(context);
    const bool attended = part.op.kind == ATTEND;
    const float* x = attended ? part.op.out : part.op.in;
    const int64_t stride = attended ? part.op.out_stride : part.op.in_stride;
    for (int64_t t = part.pieces.begin(piece); t < part.pieces.begin(piece + 1); ++t)
        round_token(part, x, stride, t);
}

// Room for rounded inputs: one is given away again once the last layer that reads it is computed.
class Rooms {
public:
    uint8_t* take(int64_t bytes, size_t now, size_t last_use) {
        for (auto& room : rooms_) {
            if (room.last_use < now) {
                room.last_use = last_use;
                return static_cast<uint8_t*>(room.memory->scratch(bytes));
            }
        }
        rooms_.push_back({std::make_unique<Lane>(0), last_use});
        return static_cast<uint8_t*>(rooms_.back().memory->scratch(bytes));
    }
    void free_all() {
        for (auto& room : rooms_) room.last_use = 0;
    }

private:
    struct Room {
        std::unique_ptr<Lane> memory;
        size_t last_use;
    };
    std::vector<Room> rooms_;
};

// What is kept from step to step; of the caller that holds Pool::busy.
struct Workspace {
    std::vector<Part> parts;
    std::vector<Phase> phases;
    std::vector<std::unique_ptr<AttentionPlan>> plans;
    std::vector<float> kept;
    Rooms rooms;
    std::vector<uint8_t*> rounded;
};

Workspace& workspace() {
    static Workspace* made = new Workspace;
    return *made;
}

class Panel {
public:
    Panel(const HpProgram& program, const HpStep& step, int64_t first)
        : program_(program), step_(step), first_(first), tokens_(std::min(program.panel, step.tokens - first)) {}

    void run() {
        Workspace& with = workspace();
        with.parts.clear();
        with.phases.clear();
        with.rounded.assign(program_.count, nullptr);
        with.rooms.free_all();
        plans_used_ = 0;
        kept_ = 0;
        // Parts must not move: phases point to them.
        with.parts.reserve(program_.count);
        widest_ = 0;
        for (int64_t i = 0; i < program_.count; ++i)
            if (program_.ops[i].kind == LINEAR) widest_ = std::max(widest_, width(program_.ops[i]));
        for (int64_t i = 0; i < program_.count; ++i) add(i);
        if (static_cast<int64_t>(with.kept.size()) < kept_) with.kept.resize(kept_);
        Pool::get().run(with.phases.data(), static_cast<int64_t>(with.phases.size()), true);
    }

private:
    Part& part_of(int64_t i, int64_t numbers) {
        const HpOp& op = program_.ops[i];
        const int64_t most = std::max<int64_t>(1, PIECE_NUMBERS / std::max<int64_t>(1, numbers));
        Part part{op, {tokens_, most, Pool::get().threads()},
                  step_.ids + first_, step_.positions + first_, nullptr, nullptr, {}, {}};
        if (!part.op.out && op.kind != ROTATE) {
            part.op.out = step_.out + first_ * step_.out_stride;
            part.op.out_stride = step_.out_stride;
        }
        return workspace().parts.emplace_back(part);
    }

    void phase(const Part& part, void (*run)(const void*, int64_t, Lane&)) {
        workspace().phases.push_back({run, &part, part.pieces.count});
    }

    void add(int64_t i) {
        const HpOp& op = program_.ops[i];
        if (op.kind == LINEAR) return add_linear(i);
        if (op.kind == ATTEND) return add_attention(i);
        if (op.kind == ROTATE && turns_for_next(i)) return;
        Part& part = part_of(i, op.kind == ACTIVATE ? 8 * op.size : 2 * width(op));
        part.rounded = room_for_result(i);
        phase(part, run_tokens);
    }

    bool turns_for_next(int64_t i) const {
        if (i + 1 >= program_.count) return false;
        const HpOp &op = program_.ops[i], &next = program_.ops[i + 1];
        return next.kind == ATTEND && next.in == op.in && next.second == op.second;
    }

    // Where an operation's result is to be rounded: a quantised layer reads it before it is written again.
    uint8_t* room_for_result(int64_t i) {
        const HpOp& op = program_.ops[i];
        int64_t last = -1;
        for (int64_t j = i + 1; op.out && j < program_.count; ++j) {
            const HpOp& reader = program_.ops[j];
            if (reader.kind == LINEAR && reader.in == op.out && linear_rounds(*static_cast<const HpLinear*>(reader.what)) &&
                static_cast<const HpLinear*>(reader.what)->columns == width(op))
                last = j;
            if (reader.out == op.out || reader.second == op.out) break;
        }
        return last < 0 ? nullptr : give(i, last);
    }

    // All rooms are as large as any layer's input, so that none that is in use ever moves.
    uint8_t* room(int64_t i, int64_t last) {
        return workspace().rooms.take(rounded_bytes(widest_, tokens_), i + 1, last + 1);
    }

    uint8_t* give(int64_t i, int64_t last) {
        uint8_t* given = room(i, last);
        for (int64_t j = i + 1; j <= last; ++j)
            if (program_.ops[j].kind == LINEAR && program_.ops[j].in == program_.ops[i].out)
                workspace().rounded[j] = given;
        return given;
    }

    void add_linear(int64_t i) {
        Part& part = part_of(i, 2 * width(program_.ops[i]));
        const HpOp& op = part.op;
        const auto& layer = *static_cast<const HpLinear*>(op.what);
        uint8_t* rounded = workspace().rounded[i];
        if (!rounded && linear_rounds(layer)) {
            rounded = part.rounded = room(i, i);
            phase(part, round_piece);
        }
        part.linear = {&layer, op.in, op.in_stride, rounded, tokens_, op.out, op.out_stride, op.bias, false};
        workspace().phases.push_back(linear_phase(part.linear));
    }

    void add_attention(int64_t i) {
        const HpOp& op = program_.ops[i];
        const auto& layer = *static_cast<const HpAttention*>(op.what);
        Part& part = part_of(i, 2 * (layer.heads + 2 * layer.kv_heads) * layer.head_size);
        const AttentionPlan& plan = plan_for(layer, step_.batches[op.number]);
        kept_ = std::max(kept_, kept_floats(plan, layer, floats().most_rows));
        part.attention = {&layer, &plan, op.in, op.second, op.third, op.in_stride, op.second_stride, op.third_stride,
                          part.op.out, part.op.out_stride, &workspace().kept};
        if (i && program_.ops[i - 1].kind == ROTATE && turns_for_next(i - 1))
            part.rotary = static_cast<const HpRotary*>(program_.ops[i - 1].what);
        phase(part, run_tokens);
        workspace().phases.push_back(attend_phase(part.attention));
        workspace().phases.push_back(join_phase(part.attention));
        part.rounded = room_for_result(i);
        if (part.rounded) phase(part, round_piece);
    }

    const AttentionPlan& plan_for(const HpAttention& layer, const HpBatch& batch) {
        auto& plans = workspace().plans;
        for (size_t i = 0; i < plans_used_; ++i)
            if (plans[i]->fits(layer, batch)) return *plans[i];
        if (plans_used_ == plans.size()) plans.push_back(std::make_unique<AttentionPlan>());
        AttentionPlan& plan = *plans[plans_used_++];
        plan.make(layer, batch, first_, first_ + tokens_, Pool::get().threads(), floats().most_rows);
        return plan;
    }

    const HpProgram& program_;
    const HpStep& step_;
    const int64_t first_, tokens_;
    size_t plans_used_ = 0;
    int64_t kept_ = 0, widest_ = 0;
};

bool ids_are_known(const HpProgram& program, const HpStep& step) {
    for (int64_t i = 0; i < program.count; ++i) {
        if (program.ops[i].kind != EMBED) continue;
        const auto& table = *static_cast<const HpLinear*>(program.ops[i].what);
        int64_t rows = 0;
        for (int64_t m = 0; m < table.count; ++m) rows += table.matrices[m].rows;
        for (int64_t t = 0; t < step.tokens; ++t)
            if (step.ids[t] < 0 || step.ids[t] >= rows) return false;
    }
    return true;
}

// One operation by itself, over all tokens.
void run_alone(const HpOp& op, int64_t tokens, const int64_t* positions, const HpBatch* batch) {
    if (tokens <= 0) return;
    const HpProgram program{&op, 1, tokens};
    const HpStep step{tokens, nullptr, positions, batch, nullptr, 0};
    const std::lock_guard lock(Pool::get().busy);
    if (op.kind != ATTEND && tokens * width(op) < WAKE_NUMBERS) {
        const Part part{op, {tokens, tokens, 1}, nullptr, positions, nullptr, nullptr, {}, {}};
        for (int64_t t = 0; t < tokens; ++t) one_token(part, t);
        return;
    }
    Panel(program, step, 0).run();
}

float* in_place(const float* p) { return const_cast<float*>(p); }

}  // namespace

}  // namespace hardpoint

using namespace hardpoint;

void hp_rms_norm(const HpNorm* norm, const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                 float* out, int64_t out_stride, int64_t tokens) {
    run_alone({NORM, 0, norm, in_place(x), x_stride, residual, residual_stride, nullptr, 0, out, out_stride, nullptr,
               norm->size, 1.0f}, tokens, nullptr, nullptr);
}

void hp_layer_norm(const HpNorm* norm, const float* bias, const float* x, int64_t x_stride, float* out,
                   int64_t out_stride, int64_t tokens) {
    run_alone({LAYER_NORM, 0, norm, in_place(x), x_stride, nullptr, 0, nullptr, 0, out, out_stride, bias, norm->size,
               1.0f}, tokens, nullptr, nullptr);
}

void hp_rotate(const HpRotary* rotary, const int64_t* positions, float* q, int64_t q_stride, int64_t q_heads, float* k,
               int64_t k_stride, int64_t k_heads, int64_t tokens) {
    run_alone({ROTATE, static_cast<int32_t>(q_heads), rotary, q, q_stride, k, k_stride, nullptr, 0, nullptr, 0, nullptr,
               k_heads, 1.0f}, tokens, positions, nullptr);
}

void hp_activate(int32_t kind, const float* x, int64_t x_stride, int64_t size, float* out, int64_t out_stride,
                 int64_t tokens) {
    run_alone({ACTIVATE, kind, nullptr, in_place(x), x_stride, nullptr, 0, nullptr, 0, out, out_stride, nullptr, size,
               1.0f}, tokens, nullptr, nullptr);
}

void hp_attention(const HpAttention* layer, const HpBatch* batch, const float* q, int64_t q_stride, const float* k,
                  int64_t k_stride, const float* v, int64_t v_stride, float* out, int64_t out_stride) {
    const int64_t tokens = batch->requests ? batch->starts[batch->requests] : 0;
    run_alone({ATTEND, 0, layer, in_place(q), q_stride, in_place(k), k_stride, in_place(v), v_stride, out, out_stride,
               nullptr, 0, 1.0f}, tokens, nullptr, batch);
}

void hp_draw(const HpDraw* rows, const float* logits, int64_t stride, int64_t vocab, int64_t count, int64_t* tokens) {
    const auto one = [&](int64_t row, Lane& lane) {
        auto* some = static_cast<uint64_t*>(lane.scratch((sizeof(uint64_t) + sizeof(float)) * vocab));
        auto* weights = reinterpret_cast<float*>(some + vocab);
        tokens[row] = floats().draw(rows[row], logits + row * stride, vocab, weights, some);
    };
    const Phase phase = phase_of(one, count);
    const std::lock_guard lock(Pool::get().busy);
    Pool::get().run(&phase, 1, false);
}

void hp_log_sums(const float* logits, int64_t stride, int64_t vocab, int64_t count, float* sums) {
    const auto one = [&](int64_t row, Lane&) { sums[row] = floats().log_sum(logits + row * stride, vocab); };
    const Phase phase = phase_of(one, count);
    const std::lock_guard lock(Pool::get().busy);
    Pool::get().run(&phase, 1, false);
}

int32_t hp_run(const HpProgram* program, const HpStep* step) {
    if (!ids_are_known(*program, *step)) return -1;
    const std::lock_guard lock(Pool::get().busy);
    for (int64_t first = 0; first < step->tokens; first += program->panel) Panel(*program, *step, first).run();
    return 0;
}
