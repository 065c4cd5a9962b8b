#include "attention.h"

#include <algorithm>

namespace hardpoint {

namespace {

// About the products a piece should have: some 20 us of work.
constexpr int64_t PIECE_PRODUCTS = 1 << 19;
// Pieces for each thread below which spans are cut apart.
constexpr int64_t PIECES_PER_THREAD = 6;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The rows of a request's tokens within a panel, and where they stand.
struct Own {
    int64_t token;     // first in the panel, as a row of the step
    int64_t count;     // tokens
    int64_t position;  // of the first
};

Own own(const HpBatch& batch, int64_t request, int64_t first, int64_t last) {
    const int64_t start = std::max<int64_t>(first, batch.starts[request]);
    const int64_t end = std::min<int64_t>(last, batch.starts[request + 1]);
    return {start, end - start, batch.lengths[request] - (batch.starts[request + 1] - start)};
}

// Spans that hold a key which a query from position `from` to `to` sees.
struct Spans { int64_t from, to; };

Spans spans_of(const AttentionPlan& plan, int64_t length, int64_t from, int64_t to) {
    if (!plan.causal) return {0, ceil_div(length, SPAN)};
    const int64_t oldest = plan.window && from >= plan.window ? from - plan.window + 1 : 0;
    return {oldest / SPAN, to / SPAN + 1};
}

}  // namespace

bool AttentionPlan::fits(const HpAttention& layer, const HpBatch& of) const {
    return &of == batch && layer.heads == heads && layer.kv_heads == kv_heads && layer.head_size == head_size &&
           layer.window == window && layer.causal == causal;
}

void AttentionPlan::make(const HpAttention& layer, const HpBatch& of, int64_t from, int64_t to, int threads,
                         int most_rows) {
    batch = &of;
    first = from;
    last = to;
    heads = layer.heads, kv_heads = layer.kv_heads, head_size = layer.head_size;
    window = layer.window, causal = layer.causal;
    pieces.clear();
    splits.clear();
    kept = 0;
    const int64_t group = heads / kv_heads;
    // Requests stand in the order of their tokens.
    const int32_t* begin = std::upper_bound(of.starts, of.starts + of.requests + 1, static_cast<int32_t>(from));
    const int64_t first_request = std::max<int64_t>(0, begin - of.starts - 1);
    int64_t tiles = 0, products = 0;
    for (int64_t request = first_request; request < of.requests && of.starts[request] < to; ++request) {
        const Own here = own(of, request, from, to);
        if (here.count <= 0) continue;
        tiles += ceil_div(here.count * group, most_rows) * kv_heads;
        products += here.count * heads * head_size * of.lengths[request];
    }
    const bool few = threads > 1 && tiles < threads * PIECES_PER_THREAD && products > PIECE_PRODUCTS;
    const int64_t fair = std::max<int64_t>(PIECE_PRODUCTS / 8, products / (threads * PIECES_PER_THREAD));
    for (int64_t request = first_request; request < of.requests && of.starts[request] < to; ++request) {
        const Own here = own(of, request, from, to);
        if (here.count <= 0) continue;
        const int64_t rows = here.count * group, length = of.lengths[request];
        const int64_t tile = std::max<int64_t>(1, most_rows * head_size * std::min(length, here.position + here.count));
        const int64_t each = few ? most_rows : std::max<int64_t>(1, PIECE_PRODUCTS / tile) * most_rows;
        // All heads of a token before the next one: a thread's share is tokens.
        for (int64_t row = 0; row < rows; row += each) {
            for (int32_t head = 0; head < kv_heads; ++head) {
                const int64_t count = std::min(each, rows - row);
                const Spans spans = spans_of(*this, length, here.position + row / group,
                                             here.position + (row + count - 1) / group);
                const int64_t run = std::max<int64_t>(1, fair / (most_rows * head_size * SPAN));
                if (!few || spans.to - spans.from <= run) {
                    pieces.push_back({request, row, count, spans.from, spans.to, -1, head});
                    continue;
                }
                splits.push_back({request, row, count, kept, spans.from, spans.to, head});
                for (int64_t span = spans.from; span < spans.to; span += run)
                    pieces.push_back({request, row, count, span, std::min(spans.to, span + run),
                                      kept + span - spans.from, head});
                kept += spans.to - spans.from;
            }
        }
    }
}

int64_t kept_floats(const AttentionPlan& plan, const HpAttention& layer, int most_rows) {
    return plan.kept * most_rows * (layer.head_size + 2);
}

void write_tokens(const AttentionJob& job, int64_t from, int64_t to) {
    const int64_t* slots = job.plan->batch->slots + job.plan->first;
    for (int64_t t = from; t < to; ++t)
        if (slots[t] >= 0) floats().write(*job.layer, slots[t], job.k + t * job.k_stride, job.v + t * job.v_stride);
}

namespace {

struct Place {
    Rows rows;
    float* out;  // of the request's first row
};

Place place(const AttentionJob& job, int64_t request, int32_t kv_head) {
    const AttentionPlan& plan = *job.plan;
    const HpBatch& batch = *plan.batch;
    const Own here = own(batch, request, plan.first, plan.last);
    const int32_t group = plan.heads / plan.kv_heads;
    const int64_t token = here.token - plan.first, element = static_cast<int64_t>(kv_head) * group * plan.head_size;
    return {{job.layer, batch.blocks + request * batch.blocks_stride, job.q + token * job.q_stride + element,
             job.q_stride, here.position, batch.lengths[request], kv_head, group},
            job.out + token * job.out_stride + element};
}

// Where the outcomes of a span begin.
Partial* kept_partials(const AttentionJob& job, int64_t span) {
    return reinterpret_cast<Partial*>(job.kept->data()) + span * floats().most_rows;
}
float* kept_sums(const AttentionJob& job, int64_t span) {
    const int64_t most = floats().most_rows;
    return job.kept->data() + 2 * job.plan->kept * most + span * most * job.plan->head_size;
}

void finish_row(const AttentionJob& job, const Place& at, int64_t row, const Partial& partial, const float* sums) {
    const int64_t size = job.plan->head_size, head = row % at.rows.group;
    const float* sink = job.layer->sinks ? job.layer->sinks + at.rows.kv_head * at.rows.group + head : nullptr;
    float* out = at.out + row / at.rows.group * job.out_stride + head * size;
    floats().finish(partial, sums, sink, size, out);
}

// Outcomes of no span.
void clear(Partial* partials, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) partials[r] = {-__builtin_inff(), 0.0f};
}

constexpr int64_t MOST_TILE = 16;

void attend_piece(const void* context, int64_t number, Lane& lane) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const AttentionPlan::Piece& piece = job.plan->pieces[number];
    const Place at = place(job, piece.request, piece.kv_head);
    const int64_t size = job.plan->head_size, most = floats().most_rows;
    if (piece.kept >= 0) {
        floats().attend(at.rows, piece.row, static_cast<int>(piece.rows), piece.from, piece.to, true,
                        kept_partials(job, piece.kept), kept_sums(job, piece.kept));
        return;
    }
    auto* sums = static_cast<float*>(lane.scratch(sizeof(float) * most * size));
    Partial partials[MOST_TILE];
    for (int64_t row = piece.row; row < piece.row + piece.rows; row += most) {
        const int64_t count = std::min(most, piece.row + piece.rows - row);
        const Spans spans = spans_of(*job.plan, at.rows.length, at.rows.position + row / at.rows.group,
                                     at.rows.position + (row + count - 1) / at.rows.group);
        clear(partials, count);
        std::fill(sums, sums + count * size, 0.0f);
        floats().attend(at.rows, row, static_cast<int>(count), spans.from, spans.to, false, partials, sums);
        for (int64_t r = 0; r < count; ++r) finish_row(job, at, row + r, partials[r], sums + r * size);
    }
}

void join_split(const AttentionJob& job, const AttentionPlan::Split& split, Lane& lane) {
    const Place at = place(job, split.request, split.kv_head);
    const int64_t size = job.plan->head_size;
    auto* sums = static_cast<float*>(lane.scratch(sizeof(float) * size));
    for (int64_t r = 0; r < split.rows; ++r) {
        Partial joined;
        clear(&joined, 1);
        std::fill(sums, sums + size, 0.0f);
        for (int64_t span = 0; span < split.to - split.from; ++span) {
            const Partial& found = kept_partials(job, split.kept + span)[r];
            if (found.largest == -__builtin_inff()) continue;
            floats().join(joined, sums, found, kept_sums(job, split.kept + span) + r * size, size);
        }
        finish_row(job, at, split.row + r, joined, sums);
    }
}

// Splits are few: they are joined in pieces only where they are not.
constexpr int64_t SPLITS_EACH = 4;

void join_piece(const void* context, int64_t piece, Lane& lane) {
    const AttentionJob& job = *static_cast<const AttentionJob*>(context);
    const auto& splits = job.plan->splits;
    const int64_t end = std::min<int64_t>(splits.size(), (piece + 1) * SPLITS_EACH);
    for (int64_t i = piece * SPLITS_EACH; i < end; ++i) join_split(job, splits[i], lane);
}

}  // namespace

Phase attend_phase(const AttentionJob& job) {
    return {attend_piece, &job, static_cast<int64_t>(job.plan->pieces.size())};
}

Phase join_phase(const AttentionJob& job) {
    return {join_piece, &job, ceil_div(static_cast<int64_t>(job.plan->splits.size()), SPLITS_EACH)};
}

}  // namespace hardpoint
