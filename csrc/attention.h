// Attention of a step as phases of a job (pool.h).
//
// Work is cut into pieces of tiles (ops.h). Where there are few tiles for the threads, as for one long request that
// decodes, the spans of a tile are pieces too: each span's outcome is kept by itself and joined afterwards, in the
// order in which one piece would have joined them.

#pragma once

#include <cstdint>
#include <vector>

#include "ops.h"
#include "pool.h"

namespace hardpoint {

// How the tokens `first` to `last` of a batch are cut for layers of one shape.
struct AttentionPlan {
    struct Piece {
        int64_t request, row, rows;   // of the request's rows for one key/value head
        int64_t from, to;             // spans
        int64_t kept;                 // first of the kept outcomes, in spans; -1: nothing is kept
        int32_t kv_head;
    };
    // Rows whose spans' outcomes are kept.
    struct Split {
        int64_t request, row, rows, kept, from, to;
        int32_t kv_head;
    };
    std::vector<Piece> pieces;
    std::vector<Split> splits;
    int64_t kept = 0;                 // outcomes to keep

    void make(const HpAttention& layer, const HpBatch& batch, int64_t first, int64_t last, int threads, int most_rows);
    // Whether it serves this layer too.
    bool fits(const HpAttention& layer, const HpBatch& batch) const;

    const HpBatch* batch = nullptr;
    int64_t first = 0, last = 0;
    int32_t heads = 0, kv_heads = 0, head_size = 0, window = 0, causal = 0;
};

struct AttentionJob {
    const HpAttention* layer;
    const AttentionPlan* plan;
    // Rows of tokens from the plan's first on.
    const float *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;
    float* out;
    int64_t out_stride;
    std::vector<float>* kept;  // room shared by jobs that follow one another
};

// Floats that `kept` must have.
int64_t kept_floats(const AttentionPlan& plan, const HpAttention& layer, int most_rows);

// Write the keys and values of tokens `from` to `to`, counted from the plan's first.
void write_tokens(const AttentionJob& job, int64_t from, int64_t to);

// Attend; then, where the plan has splits, join what was kept.
Phase attend_phase(const AttentionJob& job);
Phase join_phase(const AttentionJob& job);

// The float kernels in use.
const FloatKernels& floats();

}  // namespace hardpoint
