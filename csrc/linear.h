// Linear layers as phases of a job (pool.h).
//
// For a layer whose matrices are quantised the input is rounded first, then multiplied:
//
//     uint8_t* rounded = ...;                       // rounded_bytes(columns, tokens), aligned to 64
//     phase 1: round_tokens(x + t * x_stride, x_stride, columns, count, rounded, t) for all tokens, in any pieces;
//              whoever writes x (a norm, an activation) may call it in the same piece, token by token
//     phase 2: linear_phase(job)
//
// Layers with the same input share what was rounded. A layer of float matrices only (linear_rounds is false)
// reads x itself. Results of a token do not depend on the other tokens, the pieces or the threads.

#pragma once

#include <cstdint>

#include "hardpoint.h"
#include "pool.h"

namespace hardpoint {

// Whether a layer reads rounded input.
bool linear_rounds(const HpLinear& layer);

// Bytes for the rounded input of so many tokens.
int64_t rounded_bytes(int64_t columns, int64_t tokens);

// Round tokens `first` to `first + count` of an input. `x` is the first one's. Columns are whole blocks of 32.
void round_tokens(const float* x, int64_t x_stride, int64_t columns, int64_t first, int64_t count, uint8_t* rounded);

// out[t, :] = weights * x[t, :] (+ bias) (+ what stands there already, with `add`).
struct LinearJob {
    const HpLinear* layer;
    const float* x;          // read by float matrices
    int64_t x_stride;
    const uint8_t* rounded;  // read by quantised matrices
    int64_t tokens;
    float* out;
    int64_t out_stride;
    const float* bias;       // null for none
    bool add;
};

// The phase that computes it; `job` must stay until it is done.
Phase linear_phase(const LinearJob& job);

// Multiplications of the whole job; below LINEAR_WAKE sleeping threads are better left asleep.
int64_t linear_products(const LinearJob& job);
constexpr int64_t LINEAR_WAKE = 1 << 20;

}  // namespace hardpoint
